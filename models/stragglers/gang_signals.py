"""Signals by comparison within a gang: clocks below the others', ports that move less than their siblings."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from models.peers import Array, Rows, group_median, robust_z, spread
from models.risk.detectors import reports
from models.risk.rules import BY_NAME, COMPUTE, ROW, RULES
from models.risk.signals import Mask, Signal, Signals
from models.stragglers.gang import GangColumns, GangMembers
from models.stragglers.power_caps import capped_nodes

OUTLIER_Z = -6.0
OUTLIER_RATIO = 0.88
SLOW_PORT_RATIO, SLOWISH_PORT_RATIO, WAITING_RATIO = 0.7, 0.88, 1.5
MEAN_SHARE = 0.3  # the two-minute mean shows a new fault only in part
UNUSED_PORT_RATIO = 0.05
BUSY_PORT_BYTES_PER_S = 1e8
STALLED_BYTES_PER_S = 1e6  # what the others of a gang still move while one of its links is down
ALIKE = 0.03  # healthy ports of a node carry equal rates: their largest over their mean is 1.007 (p90, H100 hosts)
FEWEST_SIBLINGS, FEWEST_IN_GANG = 3, 4
SUSTAINED_MS = 30_000  # three scrapes in a row
FORGET_MS = 60_000
COMPUTE_RULES = np.array([rule.blames is COMPUTE for rule in RULES])


class GangStreaks:
    """Signals of comparisons, since when and until when each was seen without a pause; by rule and entity."""

    def __init__(self) -> None:
        self._seen: dict[tuple[str, str], tuple[int, int, Signal]] = {}  # first, last, the last one

    def __len__(self) -> int:
        return len(self._seen)

    def sustained(self, found: list[Signal], now_ms: int) -> list[Signal]:
        """Those seen for SUSTAINED_MS without a pause, what is intended at once: it accuses nobody. They stay for their
        rule's `clears_s` after the last time."""
        for signal in found:
            first_ms, last_ms, _ = self._seen.get((signal.rule, signal.entity), (now_ms, now_ms, signal))
            if now_ms - last_ms > FORGET_MS:
                first_ms = now_ms
            self._seen[signal.rule, signal.entity] = (first_ms, now_ms, signal)
        kept = []
        for key, (first_ms, last_ms, signal) in list(self._seen.items()):
            firm = last_ms - first_ms >= SUSTAINED_MS or BY_NAME[signal.rule].intended
            if now_ms - last_ms > (BY_NAME[signal.rule].clears_s * 1000 if firm else FORGET_MS):
                del self._seen[key]
            elif firm:
                kept.append(replace(signal, since_ms=first_ms))
        return kept

    def forget(self, node: str) -> None:
        """Drop all that was seen on a node."""
        self._seen = {key: seen for key, seen in self._seen.items() if key[1].split("/")[0] != node}

    def dump(self) -> tuple[dict[str, Any], dict[str, NDArray[Any]]]:
        """What a snapshot keeps."""
        return {"seen": [[*times, msgspec.to_builtins(seen)] for *times, seen in self._seen.values()]}, {}

    def load(self, about: Mapping[str, Any], arrays: Mapping[str, NDArray[Any]]) -> None:
        """The inverse of `dump`; signals of rules that are gone are left out."""
        rows = [(first, last, msgspec.convert(seen, Signal)) for first, last, seen in about["seen"]]
        self._seen = {(seen.rule, seen.entity): (first, last, seen) for first, last, seen in rows if seen.rule in ROW}

    def move(self, by_ms: int) -> None:
        """Move all times."""
        self._seen = {key: (first + by_ms, last + by_ms, seen) for key, (first, last, seen) in self._seen.items()}


def gang_signals(
    gangs: GangMembers, signals: Signals, gpu: GangColumns, port: GangColumns, streaks: GangStreaks, now_ms: int
) -> Signals:
    """Evidence that only the gang shows: slow clocks without a stated reason, slow ports. Writes `streaks`."""
    caps = capped_nodes(gangs, gpu)
    explained = dict.fromkeys(signals.node[COMPUTE_RULES[signals.rule]].tolist(), 0.0)
    explained |= {cap.node: OUTLIER_RATIO * cap.value for cap in caps if cap.node not in explained}
    clocks = [one for one in _slow_clocks(gangs, gpu) if one.value < explained.get(one.node, np.inf)]
    found = caps + clocks + _slow_ports(gangs, port)
    return Signals.of(streaks.sustained(found, now_ms))


@reports("gang_outlier")
def _slow_clocks(gangs: GangMembers, gpu: GangColumns) -> list[Signal]:
    """Nodes whose working GPUs are clocked far below their gang's, in the last sample and over two minutes."""
    if not len(gangs.attempts):
        return []
    group = np.where(gangs.together[gangs.of_gpu], gangs.of_gpu, -1)
    slow = np.ones(len(gpu.names), bool)
    median = np.ones(len(gpu.names))
    for values in (gpu.last["sm_clock_mhz"], gpu.mean["sm_clock_mhz"]):
        z, median = robust_z(values, group, len(gangs.attempts))
        slow &= (z <= OUTLIER_Z) & (values <= OUTLIER_RATIO * median)
    worst: dict[int, Signal] = {}
    for row in np.flatnonzero(slow).tolist():
        node = int(gpu.node[row])
        clock, usual = float(gpu.mean["sm_clock_mhz"][row]), float(median[row])
        if node not in worst or clock < worst[node].value:
            worst[node] = Signal("gang_outlier", node, gangs.nodes[node], clock, usual, min(1.0, usual / clock - 1))
    return list(worst.values())


@reports("slow_nic")
def _slow_ports(gangs: GangMembers, port: GangColumns) -> list[Signal]:
    """Ports that move less than their node's others in the same gang (healthy ones differ by 3 %). Far less is enough.
    Somewhat less needs longer waits than the others' too, or, where nobody tells of waiting, others that are alike."""
    if not len(port.names) or not len(gangs.attempts):
        return []
    together = (gangs.of_port >= 0) & gangs.together[gangs.of_port]
    by_node = _numbered(np.where(together, port.node.astype(np.int64) * len(gangs.attempts) + gangs.of_port, -1))
    by_gang = np.where(together, gangs.of_port, -1).astype(np.int64)
    slow = together.copy()
    usual = np.zeros(len(port.names))
    for window, depth in ((port.mean, MEAN_SHARE), (port.last, 1.0)):
        moved = window["bytes_per_s"]
        moved = np.where(moved > UNUSED_PORT_RATIO * _greatest(moved, by_node), moved, np.nan)
        usual, siblings = _sibling_median(moved, by_node, by_gang)
        waits, _ = _sibling_median(np.where(np.isfinite(moved), window["tx_wait_per_s"], np.nan), by_node, by_gang)
        untold = np.isnan(window["tx_wait_per_s"])
        waiting = window["tx_wait_per_s"] > WAITING_RATIO * waits
        if untold.any():
            waiting |= untold & _alike(moved, by_node)
        slow &= siblings & (usual > BUSY_PORT_BYTES_PER_S)
        far, somewhat = 1 - depth * (1 - SLOW_PORT_RATIO), 1 - depth * (1 - SLOWISH_PORT_RATIO)
        slow &= (moved < far * usual) | ((moved < somewhat * usual) & (waiting | (depth < 1)))
    value = port.last["bytes_per_s"]
    dead, others = _dead_ports(port, together, by_node)
    slow, usual = slow | dead, np.where(dead, others, usual)
    return [
        Signal(
            "slow_nic",
            int(port.node[row]),
            port.names[row],
            float(value[row]),
            float(usual[row]),
            min(1.0, 0.3 + 1.4 * (1 - float(value[row] / usual[row]))),
        )
        for row in np.flatnonzero(slow).tolist()
    ]


def _alike(moved: Array, by_node: Rows) -> Mask:
    """(port,) whether the used ports of its node carry equal rates, but for one or two."""
    groups = int(by_node.max(initial=-1)) + 1
    median, count = group_median(moved, by_node, groups)
    off = group_median(np.abs(moved - spread(median, by_node)), by_node, groups)[0]
    return (spread(off, by_node) <= ALIKE * spread(median, by_node)) & (
        spread(count.astype(np.float64), by_node) >= FEWEST_SIBLINGS
    )


def _dead_ports(port: GangColumns, together: Mask, by_node: Rows) -> tuple[Mask, Array]:
    """(port,) which move nothing now though their siblings do, and moved as much as them before; the siblings' median.
    A gang with a link down stalls as a whole, but the other ports still retry."""
    groups = int(by_node.max(initial=-1)) + 1
    last, mean = port.last["bytes_per_s"], port.mean["bytes_per_s"]
    now, count = group_median(np.where(last > 0, last, np.nan), by_node, groups)
    before = spread(group_median(np.where(mean > 0, mean, np.nan), by_node, groups)[0], by_node)
    others = spread(now, by_node)
    known = together & (spread(count.astype(np.float64), by_node) >= FEWEST_SIBLINGS) & (others > STALLED_BYTES_PER_S)
    used = (mean > 0.5 * before) & (before > BUSY_PORT_BYTES_PER_S)
    return known & used & (last < UNUSED_PORT_RATIO * others), others


def _sibling_median(values: Array, by_node: Rows, by_gang: Rows) -> tuple[Array, Mask]:
    """(port,) median of the siblings on the node, of the gang where the node has too few; and whether there are any."""
    near, near_count = group_median(values, by_node, int(by_node.max(initial=-1)) + 1)
    far, far_count = group_median(values, by_gang, int(by_gang.max(initial=-1)) + 1)
    enough = spread(near_count.astype(np.float64), by_node) >= FEWEST_SIBLINGS
    known = enough | (spread(far_count.astype(np.float64), by_gang) >= FEWEST_IN_GANG)
    return np.where(enough, spread(near, by_node), spread(far, by_gang)), known


def _greatest(values: Array, group: Rows) -> Array:
    greatest = np.zeros(int(group.max(initial=-1)) + 1)
    inside = group >= 0
    np.maximum.at(greatest, group[inside], np.nan_to_num(values[inside]))
    return spread(greatest, group)


def _numbered(keys: NDArray[np.int64]) -> NDArray[np.int64]:
    """The same groups numbered 0, 1, ...; -1 stays."""
    known = keys >= 0
    numbers = np.full(len(keys), -1, np.int64)
    numbers[known] = np.unique(keys[known], return_inverse=True)[1]
    return numbers
