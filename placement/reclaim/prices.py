"""The prices of places for a gang's members: the cost of stopping the jobs that hold these places.

A *slot* is one whole GPU, or a part of a GPU that has the size of a member. If each job's cost is spread over
all GPUs that it holds, no set of victims is cheaper than the slots that it frees. So these prices give a lower
bound.
"""

import numpy as np

from fleetcast.fleet.requests import PlacementRequest
from fleetcast.placement.columns import find_run_begins
from fleetcast.placement.machines.slots import WHOLE
from fleetcast.placement.reclaim.held import Floats, Ints, JobParts, Mask

MOST_SLOTS = 1 << 22  # of all nodes: beyond it a GPU counts for fewer tiny parts than fit


class NodePrices:
    """The parts of GPUs that jobs hold on some nodes, and the prices of the slots there.

    job, milli, gpu: (p,) the held parts. gpu: index into the flat (rows, g). room: (rows,) members that fit
    once all stoppable jobs have stopped. spans: (j,) whether a job holds GPUs on several of the nodes.
    """

    def __init__(self, request: PlacementRequest, parts: JobParts, rows: Ints, room: Ints, g: int) -> None:
        nodes = len(parts.usable) // g
        local = np.full(nodes, -1)
        local[rows] = np.arange(len(rows))
        mine = local[parts.row] >= 0
        row = local[parts.row[mine]]
        self.rows, self.room, self.total = rows, room, parts.total
        self.job: Ints = parts.job[mine]
        self.milli: Ints = parts.milli[mine]
        self.gpu: Ints = parts.gpu[mine] + (row - parts.row[mine]) * g
        self._usable: Ints = parts.usable.reshape(nodes, g)[rows].ravel()
        self._share = request.milli
        self.each = request.gpus_per_node if request.milli == WHOLE else 1  # slots of a member
        self.member_milli = self.each * request.milli
        most = max(1, MOST_SLOTS // max(1, len(self._usable)))
        self.slots = min(WHOLE // request.milli, request.members.min, most) if request.milli < WHOLE else 1
        begins = find_run_begins(self.job, row) if len(row) else np.zeros(0, bool)
        self._on_node: Ints = np.cumsum(begins) - 1  # (p,) the pair of job and node of each part
        self.spans: Mask = np.bincount(self.job[begins], minlength=len(self.total)) > 1

    def sum_by_node(self) -> Floats:
        """Return (p,) the thousandths of GPUs that the job of each part holds on the part's node."""
        return np.asarray(np.bincount(self._on_node, self.milli, len(self.job))[self._on_node])

    def sum_by_rows(self) -> Floats:
        """Return (p,) the thousandths of GPUs that the job of each part holds on all of these nodes together."""
        return np.asarray(np.bincount(self.job, self.milli, len(self.total))[self.job])

    def price_slots(self, cost: Floats, spread: Floats) -> Floats:
        """Return (rows, g * slots) the price of each slot: 0 if it is free, inf if it cannot be freed.

        cost: (j,) 0 for stopped jobs, inf for jobs that may not be stopped. spread: (p,) the thousandths over
        which the cost of a part's job is spread.
        """
        price = cost[self.job] * (self.milli / spread)
        if self._share == WHOLE:
            found = np.bincount(self.gpu, price, len(self._usable)).astype(np.float64)
            found[self._usable < WHOLE] = np.inf
            return np.asarray(found.reshape(len(self.rows), -1), np.float64)
        stays = np.isinf(price)
        held = np.bincount(self.gpu, np.where(stays, 0.0, price), len(self._usable))
        now, later = self._count_parts(price > 0)[:, None], self._count_parts(stays)[:, None]
        slot = np.arange(self.slots)[None, :]
        each = held[:, None] / np.maximum(later - now, 1)
        return np.where(slot < now, 0.0, np.where(slot < later, each, np.inf)).reshape(len(self.rows), -1)

    def bound_slots(self, cost: Floats) -> Floats:
        """Return (rows, g * slots) lower bounds of the prices of slots.

        On a shared GPU, each thousandth is priced like the cheapest one.
        """
        fleet = self.total[self.job]
        if self._share == WHOLE:
            return self.price_slots(cost, fleet)
        least = np.full(len(self._usable), np.inf)
        np.minimum.at(least, self.gpu, cost[self.job] / fleet)
        held = np.bincount(self.gpu, self.milli, len(self._usable))
        free = np.maximum(self._usable - held, 0)[:, None]
        short = np.diff(np.maximum(np.arange(self.slots + 1)[None, :] * self._share - free, 0), axis=1)
        found = np.where(short > 0, least[:, None] * np.maximum(short, 1), 0.0)
        return np.asarray(found.reshape(len(self.rows), -1))

    def _count_parts(self, held: Mask) -> Ints:
        """Return (rows * g,) the number of slots that would be free if jobs held only the parts `held`.

        held: (p,) bool.
        """
        in_use = np.bincount(self.gpu[held], self.milli[held], len(self._usable)).astype(np.int64)
        return np.asarray(np.maximum(self._usable - in_use, 0) // self._share)

    def price_members(self, slots: Floats) -> tuple[Floats, Ints]:
        """Return (rows, members) the price of each further member of a node, and (rows, slots) the order of its slots.

        Both are in ascending order of price. Members beyond the room of a node have the price inf.
        """
        most = slots.shape[1] // self.each
        order = np.argsort(slots, axis=1, kind="stable")
        ascending = np.take_along_axis(slots, order, axis=1)[:, : most * self.each]
        members = ascending.reshape(len(slots), most, self.each).sum(axis=2)
        members[np.arange(most)[None, :] >= self.room[:, None]] = np.inf
        return members, order

    def share_by_members(self, members: Floats, order: Ints, cost: Floats, needed: int) -> Floats:
        """Return (rows, members) prices in which the members that need the stop of a job share its cost evenly.

        At most `needed` members share it. members, order: the result of `price_members`, for whole GPUs. cost: (j,).
        """
        rows, most = members.shape
        g = order.shape[1]
        place = np.empty_like(order)
        np.put_along_axis(place, order, np.broadcast_to(np.arange(g)[None, :], order.shape), axis=1)
        member = place.ravel()[self.gpu] // self.each
        at = np.minimum(member, most - 1) + most * (self.gpu // g)
        counts = (member < most) & np.isfinite(members).ravel()[at] & (cost[self.job] > 0)
        pairs = np.sort(self.job[counts] * (rows * most) + at[counts])
        job, own = np.divmod(pairs[find_run_begins(pairs)], rows * most)
        payers = np.minimum(np.bincount(job, minlength=len(cost)), needed)
        found = np.bincount(own, cost[job] / payers[job], rows * most).astype(np.float64).reshape(rows, most)
        found[np.isinf(members)] = np.inf
        return np.asarray(np.maximum.accumulate(found, axis=1))


def bound_domains(members: Floats, domain: Ints, domains: int, needed: int) -> Floats:
    """Return (domains,) the sum of the `needed` lowest prices of members in each domain.

    The sum is inf for a domain with fewer members. members: (rows, m) prices. domain: (rows,) the domain of each
    node, 0 or more.

    >>> bound_domains(np.array([[1.0, 2.0], [5.0, np.inf], [3.0, 4.0]]), np.array([0, 0, 1]), 2, 3).tolist()
    [8.0, inf]
    """
    finite = np.isfinite(members)
    price, own = members[finite], np.broadcast_to(domain[:, None], members.shape)[finite]
    found = np.full(domains, np.inf)
    if domains == 1:
        if len(price) >= needed:
            found[0] = np.partition(price, needed - 1)[:needed].sum()
        return found
    order = np.argsort(price)
    order = order[np.argsort(own[order].astype(np.min_scalar_type(domains)), kind="stable")]
    sums = np.append(0.0, np.cumsum(price[order]))
    count = np.bincount(own, minlength=domains)
    first = np.cumsum(count) - count
    enough = np.flatnonzero(count >= needed)
    found[enough] = sums[first[enough] + needed] - sums[first[enough]]
    return found
