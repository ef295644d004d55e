"""Power caps: nodes whose clocks are low because an operator limited the power.

A cap slows a gang down, and is no fault. For each GPU
`fleetcast.models.risk.gpu_signals.compute_cap_evidence` states how certain a cap is:

    STATED   by a reason bit, or by power at its stated limit
    LIKELY   neither is exported, but its power is as far below that of its node's GPUs as its clock is
    WAITS    the bit is set, but it draws far less than its limit. Then its gang must draw less too
    OPEN     its power is no evidence either, and it is not hot. Then all working GPUs of the node must be
             low alike, and not by half, because a power brake divides clocks by at least two
    DENIED   none of these

A clock is low if it is lower than its gang's. It is also low if it is lower than its own usual clock, while
the rest of the fleet runs nearer to the usual clocks. If all GPUs run at their power limit, all are clocked
down for the same reason, which is no cap.
"""

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from fleetcast.models.peers import Groups, compute_median
from fleetcast.models.risk.detectors import register_reporter
from fleetcast.models.risk.gpu_signals import DENIED, LIKELY, LOW_CLOCK, OPEN, STATED, WAITS
from fleetcast.models.risk.signals import Array, Mask, Signal
from fleetcast.models.stragglers.gang import GangColumns, GangMembers
from fleetcast.models.words import format_number

BELOW_OTHERS = 0.96  # of what the gang, or the fleet, has
ALIKE = 0.06  # between the fastest and the slowest of a node's working GPUs
BRAKED = 0.55  # of the usual clock
AS_MUCH = 0.97  # of its gang's power: who draws that is not held down by a cap


@register_reporter("power_cap")
def find_capped_nodes(gangs: GangMembers, gpu: GangColumns) -> list[Signal]:
    """Return a signal for each node with capped GPUs, with the lowest clock, the usual one and the cost."""
    if not len(gpu.names):
        return []
    usual, low, power = _find_low_clocks(gangs, gpu)
    evidence, clock = gpu.last["cap"], gpu.last["sm_clock_mhz"]
    waits = (evidence == WAITS) & (power < gpu.last["power_limit_w"])
    capped = low & ((evidence >= LIKELY) | waits | ((evidence == OPEN) & _has_evenly_low_clocks(gpu, low, usual)))
    found = []
    for node, rows in _split_by_node(np.flatnonzero(capped), gpu.node):
        worst = rows[(clock[rows] / usual[rows]).argmin()]
        slowest, beside = float(clock[worst]), float(usual[worst])
        lost = beside / slowest - 1
        words = _describe_cap(gpu, gangs, rows, node, lost)
        found.append(Signal("power_cap", node, gangs.nodes[node], slowest, beside, min(1.0, lost), words=words))
    return found


def _split_by_node(rows: NDArray[np.intp], node: NDArray[np.int32]) -> Iterator[tuple[int, NDArray[np.intp]]]:
    """Yield each node row with the entities in `rows` that belong to the node, in their order.

    node: (entity,) row of the entity's node.
    """
    ordered = rows[np.argsort(node[rows], kind="stable")]
    nodes, starts = np.unique(node[ordered], return_index=True)
    ends = [*starts[1:].tolist(), len(ordered)]
    for row, start, end in zip(nodes.tolist(), starts.tolist(), ends[: len(nodes)], strict=True):
        yield row, ordered[start:end]


def _find_low_clocks(gangs: GangMembers, gpu: GangColumns) -> tuple[Array, Mask, Array]:
    """Return (gpu,) the usual clock, whether the present clock is lower, and the gang's power.

    The usual clock is that of the gang or that of the GPU itself. The power is the median in W.
    """
    clock, own = gpu.last["sm_clock_mhz"], gpu.last["usual_clock_mhz"]
    gang = np.where(gangs.together[gangs.of_gpu], gangs.of_gpu, -1) if len(gangs.attempts) else gangs.of_gpu
    of_gang = Groups(gang, len(gangs.attempts))
    others, power = of_gang.compute_member_medians(clock), of_gang.compute_member_medians(gpu.last["power_w"])
    fastest = np.zeros(len(gangs.attempts))
    inside = (gang >= 0) & np.isfinite(clock)
    np.maximum.at(fastest, gang[inside], clock[inside])
    by_gang = (clock < BELOW_OTHERS * others) & ~(gpu.last["power_w"] >= AS_MUCH * power)
    usual = np.where(by_gang, of_gang.copy_to_members(fastest), own)
    ratio = (clock / own)[np.isfinite(clock / own)]
    fleet = compute_median(ratio) if len(np.unique(gpu.node[np.isfinite(clock)])) > 1 else 1.0
    alone = ~(clock < BELOW_OTHERS * others) & (clock < BELOW_OTHERS * fleet * own)
    return usual, (clock < LOW_CLOCK * usual) & (by_gang | alone), power


def _has_evenly_low_clocks(gpu: GangColumns, low: Mask, usual: Array) -> Mask:
    """Return (gpu,) whether all working GPUs of its node have similarly low clocks, but not halved ones.

    At least two of its GPUs must work.
    """
    clock = gpu.last["sm_clock_mhz"]
    works = np.isfinite(clock) & (gpu.node >= 0)
    nodes = int(gpu.node.max(initial=0)) + 1
    least, most = np.full(nodes, np.inf), np.zeros(nodes)
    np.minimum.at(least, gpu.node[works], clock[works])
    np.maximum.at(most, gpu.node[works], clock[works])
    other = works & (~low | (gpu.last["cap"] == DENIED) | (clock < BRAKED * usual))
    spoilt = np.bincount(gpu.node[other], minlength=nodes) > 0
    several = np.bincount(gpu.node[works], minlength=nodes) > 1
    return works & (several & ~spoilt & (least >= (1 - ALIKE) * most))[gpu.node]


def _describe_cap(gpu: GangColumns, gangs: GangMembers, rows: NDArray[np.intp], node: int, lost: float) -> str:
    """Describe a power cap: its limit, whether its reason is exported, and what it costs.

    For example: at 450 W, 11 % slower; the gang of 16 nodes waits for it.
    """
    limit, power = gpu.last["power_limit_w"][rows], gpu.last["power_w"][rows]
    watts = limit if np.isfinite(limit).any() else power
    at = f"at {format_number(float(np.nanmedian(watts)))} W, " if np.isfinite(watts).any() else ""
    hosts = max(map(gangs.count_hosts, gangs.find_jobs_on(gangs.nodes[node])), default=1)
    untold = (
        ""
        if np.isin(gpu.last["cap"][rows], (STATED, WAITS)).any()
        else "; neither its limit nor the reason is exported"
    )
    return f"{at}{100 * lost:.0f} % slower{untold}" + (f"; the gang of {hosts} nodes waits for it" if hosts > 1 else "")
