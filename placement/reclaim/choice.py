"""The choice of jobs to stop in one domain.

Nodes are chosen by price. Once a job is chosen, all its other GPUs are free of charge.
"""

import numpy as np

from fleetcast.placement.reclaim.held import Floats, Ints, Mask
from fleetcast.placement.reclaim.prices import NodePrices

ROUNDS = 256  # members of a gang up to which nodes are chosen one after the other
BATCH = 16  # of what is missing, the part that is chosen together where jobs span nodes


def choose_victims(
    prices: NodePrices, live: Floats, spread: Floats, needed: int, by_members: bool = False
) -> tuple[Mask, Ints] | None:
    """Return (j,) whether each job is stopped so that `needed` members fit, and (rows,) members on each node.

    live: (j,) the cost of each job. It is 0 for jobs that are stopped already, above 0 for others, and inf for
    jobs that may not be stopped. spread: (p,) the thousandths of GPUs over which a job's cost is spread while
    nodes are compared. At most the thousandths that are still needed count. Prices are computed again after each
    chosen job with GPUs on several nodes. Returns None if fewer members fit.
    """
    live, chosen = live.copy(), np.zeros(len(prices.rows), np.int64)
    step = needed if needed > ROUNDS else 1
    while needed > 0:
        slots = prices.price_slots(live, np.minimum(spread, needed * prices.member_milli))
        members, order = prices.price_members(slots)
        if by_members and prices.each > 1:
            members = prices.share_by_members(members, order, live, needed)
        members[np.arange(members.shape[1])[None, :] < chosen[:, None]] = np.inf
        row, number = _find_cheapest(members, needed)
        if len(row) < needed:
            return None
        slot = np.take_along_axis(order[row], number[:, None] * prices.each + np.arange(prices.each)[None, :], axis=1)
        pays = slots[row[:, None], slot] > 0
        g = slots.shape[1] // prices.slots
        gpu = np.where(pays, row[:, None] * g + slot // prices.slots, -1)
        count = max(step, -(-needed // BATCH) if needed > 4 * BATCH else 1, _count_alone(prices, live, gpu))
        row, gpu = row[:count], gpu[:count]
        np.add.at(chosen, row, 1)
        needed -= len(row)
        live[_list_holders(prices, live, gpu)] = 0.0
    return np.equal(live, 0.0), chosen


def _find_cheapest(members: Floats, count: int) -> tuple[Ints, Ints]:
    """Return the rows and the columns of at most `count` lowest finite prices, in ascending order.

    Among equal prices the first comes first.
    """
    flat = members.ravel()
    edge = np.partition(flat, count - 1)[count - 1] if count < len(flat) else np.inf
    among = np.flatnonzero((flat <= edge) & (flat < np.inf))
    best = among[np.argsort(flat[among], kind="stable")][:count]
    row, number = np.divmod(best, members.shape[1])
    return row, number


def _count_alone(prices: NodePrices, live: Floats, gpu: Ints) -> int:
    """Return how many members can be chosen before the prices of other nodes change.

    A member changes them if it frees GPUs of a job on several nodes. The count includes the first such member.
    gpu: (members, each), -1 for none.
    """
    spans = np.zeros(int(prices.gpu.max(initial=0)) + 2, bool)
    spans[prices.gpu[(prices.spans & (live > 0))[prices.job]]] = True
    changes = np.flatnonzero(spans[np.minimum(gpu, len(spans) - 1)].any(axis=1))
    return int(changes[0]) + 1 if len(changes) else len(gpu)


def _list_holders(prices: NodePrices, live: Floats, gpu: Ints) -> Ints:
    """Return the jobs that may be stopped and hold parts of these GPUs. gpu: -1 for none."""
    wanted = np.zeros(int(max(prices.gpu.max(initial=0), gpu.max(initial=0))) + 1, bool)
    wanted[gpu[gpu >= 0]] = True
    jobs = np.unique(prices.job[wanted[prices.gpu]])
    return jobs[np.isfinite(live[jobs])]
