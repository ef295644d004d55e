"""Detection of slow links without exported counters, from the PCIe traffic of a gang's GPUs.

A GPU's traffic reaches its network adapter over PCIe (GPUDirect RDMA). Normally a GPU's share of
its node's traffic stays the same. The GPU has a slow link if its share falls below that of the last half
hour. The share of the same GPU index on another node must not fall. Which part of the link (PCIe, adapter,
cable) is slow is unknown. A synchronous gang shows no such fall: it is slow, and no member stands out.

While a link is down the whole gang waits. If the others still retry, the GPU behind the link sends next
to nothing. This state lasts only a moment, so it must be observed twice.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fleetcast.features.sums import divide
from fleetcast.models.peers import Array, Groups, number_groups
from fleetcast.models.risk.detectors import register_reporter
from fleetcast.models.risk.signals import Mask, Signal
from fleetcast.models.stragglers.gang import BEFORE, GangColumns, GangMembers, parse_places
from fleetcast.models.stragglers.siblings import (
    BUSY_PORT_BYTES_PER_S,
    FEWEST_SIBLINGS,
    SLOWISH_PORT_RATIO,
    STALLED_BYTES_PER_S,
    find_slow_siblings,
)

SENT = "sent_bytes_per_s"
AS_OTHERS = 0.94  # of its node's others: the same place on another node is not low by design
SILENT_RATIO = 0.3  # of what the others still send in a stall
STALL_RATIO = 0.5  # of what they sent before
DROPS_WINDOW_MS = 1_800_000
FEWEST_DROPS = 2
CAUTION = 0.6  # times the strength of what a counter would tell


@dataclass(frozen=True, slots=True)
class SendingGpus:
    """The GPUs of gangs over several nodes whose nodes have no port counters.

    of: (gpu,) the index of its gang, or -1. by_node: groups of the GPUs of one gang on one node.
    """

    names: tuple[str, ...]
    columns: GangColumns
    of: NDArray[np.int32]
    by_node: Groups
    gangs: int

    @classmethod
    def from_gangs(cls, gangs: GangMembers, gpu: GangColumns, port: GangColumns) -> "SendingGpus":
        moves_bytes = np.isin(gpu.node, port.node[(port.last["bytes_per_s"] > 0) | (port.mean["bytes_per_s"] > 0)])
        spans = gangs.spans_nodes
        of = np.where((gangs.of_gpu >= 0) & spans[gangs.of_gpu] & ~moves_bytes, gangs.of_gpu, -1).astype(np.int32)
        by_node = Groups(*number_groups(np.where(of >= 0, gpu.node.astype(np.int64) * len(spans) + of, -1)))
        unknown = np.full(len(gpu.names), np.nan)
        last, mean = (
            {"bytes_per_s": np.nan_to_num(window[SENT]), "tx_wait_per_s": unknown} for window in (gpu.last, gpu.mean)
        )
        mean[BEFORE] = gpu.mean[BEFORE]
        return cls(gpu.names, GangColumns(gpu.names, gpu.node, last, mean), of, by_node, len(spans))


def find_unexported_links(
    gangs: GangMembers, gpu: GangColumns, port: GangColumns, drops: dict[str, list[int]], now_ms: int
) -> tuple[list[Signal], list[Signal]]:
    """Return the signals of slow links, and those of links that drop repeatedly.

    Updates `drops`: GPU -> the times at which its link was observed to be down.
    """
    if not len(gpu.names) or not len(gangs.attempts):
        return [], []
    sending = SendingGpus.from_gangs(gangs, gpu, port)
    if not (sending.of >= 0).any():
        return [], _find_repeated_drops({}, drops, now_ms)
    return _find_slow_links(sending, gangs.has_run_half_hour(sending.of, now_ms)), _find_repeated_drops(
        _find_dropped_links(sending), drops, now_ms
    )


@register_reporter("slow_link")
def _find_slow_links(sending: SendingGpus, settled: Mask) -> list[Signal]:
    columns = sending.columns
    slow, usual, _ = find_slow_siblings(columns, sending.of >= 0, sending.of, sending.gangs, settled)
    value = columns.last["bytes_per_s"]
    slow &= ~_is_low_by_design(sending, divide(value, usual))
    found = []
    for row in np.flatnonzero(slow & (value < SLOWISH_PORT_RATIO * usual)).tolist():
        sends, others = float(value[row]), float(usual[row])
        strength = CAUTION * min(1.0, 0.3 + 1.4 * (1 - sends / others))
        found.append(Signal("slow_link", int(columns.node[row]), columns.names[row], sends, others, strength))
    return found


def _is_low_by_design(sending: SendingGpus, ratio: Array) -> Mask:
    """Return (gpu,) whether the GPU of the same index is as low on every node of its gang.

    Some jobs send unevenly on purpose. ratio: (gpu,) the GPU's traffic divided by that of its siblings.
    """
    place = parse_places(sending.names)
    key, keys = number_groups(
        np.where(sending.of >= 0, sending.of.astype(np.int64) * (place.max(initial=0) + 1) + place, -1)
    )
    most = np.zeros(max(keys, 1))
    known = (key >= 0) & np.isfinite(ratio)
    np.maximum.at(most, key[known], ratio[known])
    return most[np.maximum(key, 0)] < AS_OTHERS


def _find_dropped_links(sending: SendingGpus) -> Mapping[str, int]:
    """Return GPU -> node row, for each GPU that alone sends next to nothing while its gang stalls.

    Before the stall it sent as much as the others.
    """
    columns = sending.columns
    last, mean = columns.last["bytes_per_s"], columns.mean["bytes_per_s"]
    by_node = sending.by_node
    now, count = by_node.compute_medians(np.where(last > 0, last, np.nan))
    before, others = by_node.compute_member_medians(mean), by_node.copy_to_members(now)
    siblings = by_node.copy_to_members(count.astype(np.float64)) >= FEWEST_SIBLINGS
    stalled = (others > STALLED_BYTES_PER_S) & (others < STALL_RATIO * before) & (before > BUSY_PORT_BYTES_PER_S)
    silent = siblings & stalled & (last < SILENT_RATIO * others) & (mean > STALL_RATIO * before)
    silent_of = np.bincount(by_node.of[silent], minlength=by_node.count)
    alone = by_node.copy_to_members(silent_of.astype(np.float64)) == 1
    rows = np.flatnonzero(silent & alone).tolist()
    return {columns.names[row]: int(columns.node[row]) for row in rows}


@register_reporter("link_drops")
def _find_repeated_drops(dropped: Mapping[str, int], drops: dict[str, list[int]], now_ms: int) -> list[Signal]:
    """Return a signal for each GPU whose link is down now and dropped repeatedly in the last half hour.

    dropped: GPU -> node row, for links that are down now. Updates `drops`: adds these links, and removes
    drops older than half an hour.
    """
    for name in dropped:
        drops.setdefault(name, []).append(now_ms)
    for name, times in list(drops.items()):
        drops[name] = [time_ms for time_ms in times if time_ms > now_ms - DROPS_WINDOW_MS]
        if not drops[name]:
            del drops[name]
    found = []
    for name, node in dropped.items():
        many = len(drops[name])
        if many >= FEWEST_DROPS:
            strength = CAUTION * min(1.0, 0.4 + 0.1 * many)
            found.append(Signal("link_drops", node, name, float(many), strength=strength, since_ms=drops[name][0]))
    return found
