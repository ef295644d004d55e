"""Detection of ports or GPUs that move less data than their siblings.

Siblings are the ports of a node. If ports have no counters, siblings are the GPUs of a node.
"""

import numpy as np
from numpy.typing import NDArray

from fleetcast.features.sums import divide
from fleetcast.models.peers import Array, Groups, encode_values, number_groups
from fleetcast.models.risk.signals import Mask
from fleetcast.models.stragglers.gang import BEFORE, GangColumns

SLOW_PORT_RATIO, SLOWISH_PORT_RATIO, WAITING_RATIO = 0.7, 0.88, 1.5
MEAN_SHARE = 0.3  # the two-minute mean shows a new fault only in part
STUCK_RATIO = 3.0  # times the siblings' waits
LEAST_WAIT_PER_S = 5e7  # ticks: a tenth of the time
UNUSED_PORT_RATIO = 0.05
BUSY_PORT_BYTES_PER_S = 1e8
STALLED_BYTES_PER_S = 1e6  # what the others of a gang still move while one of its links is down
ALIKE = 0.03  # healthy ports of a node carry equal rates: their largest over their mean is 1.007 (p90, H100 hosts)
FEWEST_SIBLINGS, FEWEST_IN_GANG = 3, 4


def find_slow_siblings(
    port: GangColumns, together: Mask, gang: NDArray[np.int32], gangs: int, settled: Mask
) -> tuple[Mask, Array, Array]:
    """Return which ports are slow, the siblings' traffic (bytes/s), and the siblings' waits (ticks/s).

    All three are (port,). The waits are NaN except for ports whose data waits for far longer.

    Members of a synchronous gang move the same bytes however slow one link is, and a healthy job may
    spread its traffic unevenly. So a port is slow if its data waits for far longer than the siblings'
    data. It is also slow if its share of the siblings' traffic fell below its own share of the last half hour.
    A large fall is enough. A smaller fall needs longer waits too. Without counters of waiting, it needs
    siblings with even rates. Only ports of one speed are siblings.

    gang: (port,) number of its gang, below `gangs`. together: (port,) whether it works with other ports
    of the gang. settled: (port,) whether its job has run for half an hour.
    """
    speeds, speed = encode_values(port.last.get("best_bytes_per_s", np.zeros(len(port.names))))
    of_speed = gang.astype(np.int64) * len(speeds) + speed
    key = port.node.astype(np.int64) * gangs * len(speeds) + of_speed
    by_node, by_gang = (Groups(*number_groups(np.where(together, keys, -1))) for keys in (key, of_speed))
    before = port.mean[BEFORE]
    before = np.where(before > UNUSED_PORT_RATIO * _find_group_maximum(before, by_node), before, np.nan)
    share_before = divide(before, _compute_sibling_median(before, by_node, by_gang)[0], np.nan)
    fell, stuck = together & settled, together.copy()
    usual = waits = np.zeros(len(port.names))
    for window, depth in ((port.mean, MEAN_SHARE), (port.last, 1.0)):
        moved = window["bytes_per_s"]
        moved = np.where(moved > UNUSED_PORT_RATIO * _find_group_maximum(moved, by_node), moved, np.nan)
        usual, siblings = _compute_sibling_median(moved, by_node, by_gang)
        waited = window["tx_wait_per_s"]
        waits, _ = _compute_sibling_median(np.where(np.isfinite(moved), waited, np.nan), by_node, by_gang)
        waiting = waited > WAITING_RATIO * waits
        untold = np.isnan(waited)
        if untold.any():
            waiting |= untold & _has_even_rates(moved, by_node, by_gang)
        busy = siblings & (usual > BUSY_PORT_BYTES_PER_S)
        far, somewhat = 1 - depth * (1 - SLOW_PORT_RATIO), 1 - depth * (1 - SLOWISH_PORT_RATIO)
        share = divide(moved, usual * share_before, np.nan)
        fell &= busy & ((share < far) | ((share < somewhat) & (waiting | (depth < 1))))
        stuck &= busy & (waited > depth * LEAST_WAIT_PER_S) & (waited > (1 + depth * (STUCK_RATIO - 1)) * waits)
    dead, others = _find_dead_ports(port, together, by_node)
    return fell | dead, np.where(dead, others, usual), np.where(stuck, waits, np.nan)


def _has_even_rates(moved: Array, by_node: Groups, by_gang: Groups) -> Mask:
    """Return (port,) whether most of the used ports of its node carry similar rates.

    If a node uses too few ports, the ports of the gang are compared.
    """
    even, enough = _is_group_even(moved, by_node, FEWEST_SIBLINGS)
    even_gang, enough_gang = _is_group_even(moved, by_gang, FEWEST_IN_GANG)
    return np.where(enough, even, even_gang & enough_gang)


def _is_group_even(moved: Array, groups: Groups, fewest: int) -> tuple[Mask, Mask]:
    """Return (port,) whether half of its group is near the median, and whether the group is large enough.

    A value is near if it is within ALIKE of the median. A group is large enough if it has at least `fewest` known
    members.
    """
    median, count = groups.compute_medians(moved)
    at_member = groups.copy_to_members(median)
    even = groups.compute_member_medians(np.abs(moved - at_member)) <= ALIKE * at_member
    return even, groups.copy_to_members(count.astype(np.float64)) >= fewest


def _find_dead_ports(port: GangColumns, together: Mask, by_node: Groups) -> tuple[Mask, Array]:
    """Return (port,) whether the port moves nothing although its siblings do, and (port,) the siblings' median.

    Until then, the port must have moved as much as its siblings. A gang with a link down stalls as a whole, but the
    other ports still retry.
    """
    last, mean = port.last["bytes_per_s"], port.mean["bytes_per_s"]
    now, count = by_node.compute_medians(np.where(last > 0, last, np.nan))
    before = by_node.compute_member_medians(np.where(mean > 0, mean, np.nan))
    others = by_node.copy_to_members(now)
    known = (
        together
        & (by_node.copy_to_members(count.astype(np.float64)) >= FEWEST_SIBLINGS)
        & (others > STALLED_BYTES_PER_S)
    )
    used = (mean > 0.5 * before) & (before > BUSY_PORT_BYTES_PER_S)
    return known & used & (last < UNUSED_PORT_RATIO * others), others


def _compute_sibling_median(values: Array, by_node: Groups, by_gang: Groups) -> tuple[Array, Mask]:
    """Return (port,) the median of the siblings, and (port,) whether there are enough of them.

    Siblings are the ports of the node, or those of the gang if the node has too few.
    """
    near, near_count = by_node.compute_medians(values)
    far, far_count = by_gang.compute_medians(values)
    enough = by_node.copy_to_members(near_count.astype(np.float64)) >= FEWEST_SIBLINGS
    known = enough | (by_gang.copy_to_members(far_count.astype(np.float64)) >= FEWEST_IN_GANG)
    return np.where(enough, by_node.copy_to_members(near), by_gang.copy_to_members(far)), known


def _find_group_maximum(values: Array, groups: Groups) -> Array:
    """Return (port,) the largest known value in its group, at least 0, NaN for ports without a group."""
    greatest = np.zeros(groups.count)
    inside = groups.of >= 0
    np.maximum.at(greatest, groups.of[inside], np.nan_to_num(values[inside]))
    return groups.copy_to_members(greatest)
