"""DemandSeries: requested and used GPUs as regular series, computed from job attempts in event time.

A change of an attempt replaces its earlier contribution, so order and repetition of events do not
matter.

    submitted ──────────── started ───────────── ended         first attempts only: arriving + gpus, arriving_jobs + 1
    queued  + gpus         queued - gpus                       an attempt that ends unstarted leaves the queue
                           running + gpus        running - gpus

An attempt that is blocked (held, dependent, gated) is no demand until it is released. A request of
our own queue counts as an attempt that waits, and as one that runs once its GPUs are promised. An
attempt without a submission arrives when it starts. An attempt without GPUs is no demand. A resized
attempt counts as if it always had its current size. Amounts are thousandths of GPUs, so that parts
of GPUs add up. `read_series` converts them to GPUs.

The scopes are all queues together, each queue, and in each queue its job classes and user groups. A
scope needs 130 kB, so their number is limited (MOST). A queue beyond the limit counts in "all"
only, and a class or group beyond it counts in its queue only. The group "other" is the queue's
remainder, so that groups add up. There is also a scope for each pool of machines
(features/pool_inventory.py). Pools add up to "all".
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Set
from heapq import nsmallest
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from fleetcast.features.contribution import (
    OTHER,
    Contribution,
    DemandScope,
    Edge,
    Key,
    find_changed_edges,
    make_contribution,
)
from fleetcast.features.delta_bins import ARRIVING, ARRIVING_JOBS, QUEUED, RUNNING, DeltaBins
from fleetcast.features.finished_runs import FinishedRuns
from fleetcast.features.gpu_residency import GpuResidency
from fleetcast.features.job_records import JobRecords
from fleetcast.features.open_demand import OpenDemand
from fleetcast.features.pool_inventory import EVERYTHING, PoolInventory
from fleetcast.features.request_series import RequestSeries
from fleetcast.features.shown_sizes import NO_KEYS, AttemptOf, OccupiedSizes
from fleetcast.features.whole_gpu_dumps import UNIT, convert_to_milli_gpus
from fleetcast.fleet.jobs import JobAttempt
from fleetcast.fleet.requests import WHOLE_GPU
from fleetcast.fleet.stateful import Dump, Stateful

Target = Literal["arriving", "arriving_jobs", "running", "queued", "wanted"]
TARGETS: tuple[Target, ...] = ("arriving", "arriving_jobs", "running", "queued", "wanted")
BINS = {60: 24 * 60, 600: 35 * 24 * 6}  # seconds of a bin -> full bins kept: a day, and 35 days
MOST = dict.fromkeys(("queue", "pool", "class", "group"), 200)  # scopes of each kind
CLEARLY = 2.0  # a group takes another one's place when it has so many times its GPUs
MOST_SWAPS = 20  # of groups at once
UNKNOWN = "unknown"  # queue and class of the GPUs in use that no job event tells of
UNKNOWN_SCOPES = (DemandScope(), DemandScope(UNKNOWN), DemandScope(EVERYTHING, UNKNOWN), DemandScope(UNKNOWN, UNKNOWN))


class DemandSeries(Stateful):
    """The demand of each scope by minutes for a day, and by ten minutes for 35 days.

    It also has the contribution and the record of each attempt. Only one task may change it.
    """

    def __init__(self) -> None:
        self.requests = RequestSeries()  # rates of served models
        self.records = JobRecords()  # waits, runs and cold starts
        self.residency = GpuResidency()  # how jobs use their GPUs
        self.open = OpenDemand()  # what the placer's ledger adds to job events
        self.shown = OccupiedSizes()  # what attempts hold by the occupancy
        self.inventory = PoolInventory()  # the pools of machines
        self._known: dict[Key, Contribution] = {}  # of attempts that are awake
        self._left_out: dict[Key, frozenset[DemandScope]] = {}  # scopes that had no room for it
        self._sizes: Counter[DemandScope] = Counter()  # thousandths of GPUs of awake attempts, by user group
        self._bins: dict[tuple[DemandScope, int], DeltaBins] = {
            (DemandScope(), bin_s): _make_empty_bins(bin_s) for bin_s in BINS
        }
        self._attempts: dict[DemandScope, int] = {}  # attempts that count in a scope; all but `DemandScope()`
        self._listed: Counter[str] = Counter()  # how many of these there are, by kind
        self._since: dict[DemandScope, int] = {}  # when a group took another one's place: nothing is known before
        self._unknown_use: Counter[DemandScope] = Counter()  # GPUs
        self._runs = FinishedRuns()

    def update(self, attempt: JobAttempt, received_ms: int | None = None) -> None:
        """Count an attempt in its current state. An unchanged attempt costs nothing.

        received_ms: as in `JobRecords.update`.
        """
        self._runs.update(attempt)
        self.records.update(attempt, received_ms)
        key = (attempt.job, attempt.attempt)
        self._replace_contribution(
            key, self.open.apply_promise(key, self.shown.make_contribution(attempt, self.inventory))
        )

    def set_sizes(self, sizes: Mapping[Key, int], attempt_of: AttemptOf, displaced: Set[Key] = NO_KEYS) -> None:
        """Set the sizes of running attempts that hold more or fewer GPUs than their events state.

        sizes: attempt → thousandths of GPUs by occupancy. An attempt that `sizes` no longer contains gets the
        size in its events. displaced: as in `OccupiedSizes`.
        """
        for key in self.shown.find_outdated_attempts(sizes, self._known):
            if (attempt := attempt_of(*key)) is not None:
                self.shown.drop_size(key)
                self._replace_contribution(
                    key, self.open.apply_promise(key, self.shown.make_contribution(attempt, self.inventory))
                )
        for key, change in self.shown.record(sizes, displaced, self._known):
            self._replace_contribution(key, change)

    def count_requests(self, requests: Iterable[JobAttempt], promised: Mapping[Key, int], now_ms: int) -> None:
        """Count each open request of the placer's ledger once.

        requests: the waiting requests, and those whose GPUs are promised although no event has reported their start or
        end. promised: attempt → when its GPUs were promised, in Unix ms.
        """
        found = {(row.job, row.attempt): make_contribution(row, self.inventory) for row in requests}
        known = {key: change for key, change in found.items() if change is not None}
        for key, change in self.open.apply_requests(self._known, known, promised, now_ms):
            self._replace_contribution(key, change)
        for key in self.open.pop_departed(now_ms):
            self._drop_contribution(key)

    def _replace_contribution(self, key: Key, new: Contribution | None) -> None:
        old = self._known.get(key)
        if new == old:
            return
        held: list[DemandScope] = []
        if old is not None:
            left_out = self._left_out.get(key, frozenset())
            held = [scope for scope in old.list_scopes() if scope in self and scope not in left_out]
        if old is not None and new is not None and list(new.list_scopes()) == held:
            self._add_edges(find_changed_edges(old, new), held)
            self._update_pool_contributions(old, new)
            self._drop_contribution(key)
            self._add_contribution(key, new, frozenset())
            return
        if old is not None:
            self._add_change(old, -1, held)
            self._add_to_pools(old, -1)
            self._drop_contribution(key)
        if new is not None:
            scopes = new.list_scopes()
            admitted = [scope for scope in scopes if self._ensure_bins(scope)]
            self._add_change(new, 1, admitted)
            self._add_to_pools(new, 1)
            self._add_contribution(key, new, frozenset(scopes) - frozenset(admitted))

    def _update_pool_contributions(self, old: Contribution, new: Contribution) -> None:
        """Replace an attempt's contribution to its pools: undo `old`, and add `new`."""
        if (old.weights, old.milli, old.jobs) != (new.weights, new.milli, new.jobs):
            self._add_to_pools(old, -1)
            self._add_to_pools(new, 1)
            return
        for (scope, before), (_, after) in zip(old.split_by_pool(), new.split_by_pool(), strict=True):
            if self._ensure_bins(scope):
                self._add_edges(find_changed_edges(before, after), [scope])

    def _add_to_pools(self, change: Contribution, sign: int) -> None:
        for scope, part in change.split_by_pool():
            self._add_change(part, sign, [scope] if self._ensure_bins(scope) else [])

    def apply_inventory(self, inventory: PoolInventory, attempts: Iterable[JobAttempt], now_ms: int = 0) -> None:
        """Divide the demand among the pools of a new inventory.

        attempts: those that may still change. now_ms: the first pools have no known demand before this
        time.
        """
        if now_ms and not self.inventory.models:
            self._since.update({DemandScope(pool=pool): now_ms for pool in inventory.models})
        if inventory != self.inventory:
            self.inventory = inventory
            for attempt in attempts:
                if (key := (attempt.job, attempt.attempt)) in self._known:
                    self._replace_contribution(
                        key, self.open.apply_promise(key, self.shown.make_contribution(attempt, self.inventory))
                    )
        for pool in inventory.models:
            self._ensure_bins(DemandScope(pool=pool))

    def count_unknown_use(self, time_ms: int, gpus: int, by_pool: Mapping[str, int] | None = None) -> None:
        """Count GPUs that are busy from `time_ms` on although no known job holds them.

        They count as running in the queue UNKNOWN, and in their pools.
        """
        parts = {DemandScope(pool=pool): part for pool, part in (by_pool or {}).items()}
        before = [scope for scope in self._unknown_use if scope.kind == "pool"]
        for scope in (*UNKNOWN_SCOPES, *dict.fromkeys((*before, *parts))):
            more = (parts.get(scope, 0) if scope.kind == "pool" else gpus) - self._unknown_use[scope]
            if not more or not self._ensure_bins(scope):
                continue
            self._unknown_use[scope] += more
            if scope in self._attempts:
                self._attempts[scope] = max(1, self._attempts[scope])
            for bin_s in BINS:
                self._bins[scope, bin_s].add(time_ms, (0, 0, more * WHOLE_GPU, 0, 1))

    def __contains__(self, scope: DemandScope) -> bool:
        return (scope, 60) in self._bins

    def _add_contribution(self, key: Key, change: Contribution, left_out: frozenset[DemandScope]) -> None:
        self._known[key] = change
        if left_out:
            self._left_out[key] = left_out
        self._sizes.update({scope: change.milli for scope in change.list_scopes() if scope.kind == "group"})

    def _drop_contribution(self, key: Key) -> None:
        change = self._known.pop(key, None)
        self._left_out.pop(key, None)
        if change is None:
            return
        for scope in change.list_scopes():
            if scope.kind == "group":
                self._sizes[scope] -= change.milli
                if not self._sizes[scope]:
                    del self._sizes[scope]

    def list_contributions(self) -> Collection[Contribution]:
        """Return the contribution of each attempt that may still change."""
        return self._known.values()

    def _add_change(self, change: Contribution, sign: int, scopes: Iterable[DemandScope]) -> None:
        """Add a change to the scopes that have bins. sign: 1 to add it, -1 to undo it."""
        admitted = list(scopes)
        self._add_edges(((sign, edge) for edge in change.list_edges()), admitted)
        for scope in admitted:
            if scope in self._attempts:
                self._attempts[scope] += sign

    def _add_edges(self, edges: Iterable[tuple[int, Edge]], scopes: Iterable[DemandScope]) -> None:
        """Add (sign, edge) pairs to the bins of the scopes. Each edge is multiplied by its sign."""
        holders = [self._bins[scope, bin_s] for scope in scopes for bin_s in BINS]
        for sign, (time_ms, arriving, jobs, running, queued) in edges:
            amounts = (sign * arriving, sign * jobs, sign * running, sign * queued, sign)
            for bins in holders:
                bins.add(time_ms, amounts)

    def _ensure_bins(self, scope: DemandScope) -> bool:
        """Return whether a scope has bins after this call.

        A new scope gets bins, unless there are enough scopes of its kind or its queue has none.
        """
        if scope in self:
            return True
        if not self._has_bins_for_queue(scope) or self._listed[scope.kind] >= MOST[scope.kind]:
            return False
        self._attempts[scope] = 0
        self._listed[scope.kind] += 1
        for bin_s in BINS:
            self._bins[scope, bin_s] = _make_empty_bins(bin_s)
        return True

    def _has_bins_for_queue(self, scope: DemandScope) -> bool:
        return scope.kind in ("queue", "pool") or DemandScope(scope.queue) in self

    def list_queues(self) -> tuple[str, ...]:
        """Return the names of the queues with demand, sorted, with "all" at the end."""
        return (*sorted(scope.queue for scope in self.list_scopes("queue")), EVERYTHING)

    def list_pools(self) -> tuple[str, ...]:
        """Return the pools of the inventory and all other pools with demand, sorted."""
        found = {scope.pool for scope in self.list_scopes("pool")}
        return tuple(sorted(found | {pool for pool in self.inventory.models if DemandScope(pool=pool) in self}))

    @property
    def is_queue_list_full(self) -> bool:
        """Return whether there are so many queues that another queue would count in "all" only."""
        return self._listed["queue"] >= MOST["queue"]

    def list_scopes(self, kind: str) -> list[DemandScope]:
        """Return the scopes of a kind in which attempts count, sorted.

        `DemandScope()` and the remainder of the groups are not among them.
        """
        return sorted(scope for scope, attempts in self._attempts.items() if attempts > 0 and scope.kind == kind)

    def read_series(
        self,
        queue: str,
        target: Target,
        now_ms: int,
        bin_s: int,
        bins: int,
        class_: str = EVERYTHING,
        group: str = EVERYTHING,
        pool: str = EVERYTHING,
    ) -> NDArray[np.float64]:
        """Return (bin,) float64: a target's values in one scope, oldest first.

        The values are NaN before the first event of any queue, and for an unknown scope. bin_s: 60 or 600.
        A level is the value at its bin's end, and the last bin contains `now_ms`. Arrivals are sums, and the last
        bin is the last complete one. GPUs may have a fraction, since parts of GPUs add up.
        """
        if group == OTHER:
            amounts = self._subtract_listed_groups(queue, target, now_ms, bin_s, bins)
        else:
            amounts = self._read_milli_series(DemandScope(queue, class_, group, pool), target, now_ms, bin_s, bins)
        return amounts if target == "arriving_jobs" else amounts / WHOLE_GPU

    def _read_milli_series(
        self, scope: DemandScope, target: Target, now_ms: int, bin_s: int, bins: int
    ) -> NDArray[np.float64]:
        """Return (bin,) a scope's series as `read_series` does, but in thousandths of GPUs."""
        everything = self._bins[DemandScope(), bin_s]
        chosen = self._bins.get((scope, bin_s))
        last = now_ms // (bin_s * 1000)
        if chosen is None:
            return np.full(bins, np.nan)
        everything.advance(last)
        chosen.advance(last)
        values = _READ[target](chosen, last, bins)
        first = last - bins + 1 if target not in ("arriving", "arriving_jobs") else last - bins
        since = self._since.get(scope, 0) // (bin_s * 1000)
        values[
            np.arange(first, first + bins)
            < max(everything.find_first_changed_bin(), chosen.compute_first_stored_bin(), since)
        ] = np.nan
        return values

    def _subtract_listed_groups(
        self, queue: str, target: Target, now_ms: int, bin_s: int, bins: int
    ) -> NDArray[np.float64]:
        """Return (bin,) a queue's demand minus the demand of its groups with a scope, in thousandths of GPUs."""
        rest = self._read_milli_series(DemandScope(queue), target, now_ms, bin_s, bins)
        for scope in self.list_scopes("group"):
            if scope.queue == queue:
                rest -= np.nan_to_num(
                    self._read_milli_series(DemandScope(queue, group=scope.group), target, now_ms, bin_s, bins)
                )
        return np.maximum(rest, 0.0)

    def replace_small_groups(self, now_ms: int) -> None:
        """Give the scopes of the smallest groups to groups without a scope that use clearly more GPUs.

        The new scopes start with only the attempts that may still change.
        """
        if self._listed["group"] < MOST["group"]:
            return
        sizes = self._sizes
        listed = sorted((sizes[scope], scope) for scope in self._attempts if scope.kind == "group")
        waiting = nsmallest(
            MOST_SWAPS,
            ((-sizes[scope], scope) for scope in sizes if scope not in self and self._has_bins_for_queue(scope)),
        )
        pairs = zip(listed, waiting, strict=False)
        swaps = {large: small for (less, small), (more, large) in pairs if -more > CLEARLY * less}
        if swaps:
            self._swap_scopes(frozenset(swaps.values()), frozenset(swaps), now_ms)

    def _swap_scopes(self, gone: frozenset[DemandScope], come: frozenset[DemandScope], now_ms: int) -> None:
        """Drop the scopes `gone`, and add the scopes `come` in their place."""
        for scope in gone:
            self._drop_scope(scope)
        for scope in come:
            assert self._ensure_bins(scope), "there is room for as many as went"
            self._since[scope] = now_ms
        names = {scope.group for scope in gone | come}
        for key, change in self._known.items():
            if change.group not in names:
                continue
            scopes = frozenset(change.list_scopes())
            self._add_change(change, 1, scopes & come)
            left_out = (self._left_out.pop(key, frozenset()) - come) | (scopes & gone)
            if left_out:
                self._left_out[key] = left_out

    def _drop_scope(self, scope: DemandScope) -> None:
        del self._attempts[scope]
        self._listed[scope.kind] -= 1
        self._since.pop(scope, None)
        for bin_s in BINS:
            del self._bins[scope, bin_s]

    def compute_duration_quantiles(self) -> dict[str, Any]:
        """Return quantiles of finished jobs' run times in seconds, and their number, by GPU count and for all.

        {"by_gpus": {"8": {"p50", "p90", "n"}}, "all": {…} | None}
        """
        return self._runs.compute_quantiles()

    def drop_attempt(self, attempt: JobAttempt) -> None:
        """Drop the contribution of an attempt that will not change any more. Its demand stays in the series."""
        key = (attempt.job, attempt.attempt)
        self._drop_contribution(key)
        self.shown.move_to_newest(key, self._known)

    def restore_attempt(self, attempt: JobAttempt) -> None:
        """Restore the contribution of an attempt that `drop_attempt` dropped, because the attempt changes again.

        A group that was added after the attempt had arrived does not count this attempt.
        """
        added = self.shown.make_contribution(attempt, self.inventory)
        if added is not None:
            arrived_ms = added.list_edges()[0][0]
            scopes = added.list_scopes()
            admitted = (scope for scope in scopes if scope in self and self._since.get(scope, 0) <= arrived_ms)
            self._add_contribution((attempt.job, attempt.attempt), added, frozenset(scopes) - frozenset(admitted))

    def dump(self) -> Dump:
        """Return a copy for a snapshot: JSON-able parts, and arrays by name."""
        requests, arrays = self.requests.dump()
        about: dict[str, Any] = {
            "known": [(*key, *added.to_row()) for key, added in self._known.items()],
            "left_out": [(*key, [*map(list, scopes)]) for key, scopes in self._left_out.items()],
            "attempts": [(*scope, attempts) for scope, attempts in self._attempts.items()],
            "since": [(*scope, since_ms) for scope, since_ms in self._since.items()],
            "unknown_use": [(*scope, gpus) for scope, gpus in self._unknown_use.items()],
            "runs": self._runs.dump(),
            "open": self.open.dump()[0],
            "inventory": self.inventory.to_rows(),
            **self.shown.dump()[0],
            UNIT: WHOLE_GPU,
            "requests": requests,
            "records": self.records.dump(),
            "residency": self.residency.dump(),
            "bins": [],
        }
        for number, ((scope, seconds), bins) in enumerate(self._bins.items()):
            row, arrays[f"bins {number}"] = bins.dump()
            about["bins"].append({**scope._asdict(), "seconds": seconds, **row})
        return about, arrays

    def load(self, about: Mapping[str, Any], arrays: Mapping[str, NDArray[Any]]) -> None:
        """Restore the result of `dump` into an empty object.

        Skips scopes that are unused in all of their bins.
        """
        about, arrays = convert_to_milli_gpus(about, arrays)
        for number, row in enumerate(about["bins"]):
            scope = DemandScope.from_row(row)
            bins = _make_empty_bins(row["seconds"])
            bins.load(row, arrays[f"bins {number}"])
            self._bins[scope, row["seconds"]] = bins
        attempts = {DemandScope(*scope): count for *scope, count in about["attempts"]}
        longest = max(BINS)
        idle = {scope for scope in attempts if self._bins[scope, longest].is_idle()}
        self._attempts = {scope: count for scope, count in attempts.items() if scope not in idle}
        self._listed = Counter(scope.kind for scope in self._attempts)
        self._bins = {key: bins for key, bins in self._bins.items() if key[0] not in idle}
        self._since = {scope: ms for *row, ms in about["since"] if (scope := DemandScope(*row)) not in idle}
        left_out = {(job, at): frozenset(DemandScope(*row) for row in rows) for job, at, rows in about["left_out"]}
        for job, at, *added in about["known"]:
            self._add_contribution((job, at), Contribution.from_row(added), left_out.get((job, at), frozenset()))
        self._unknown_use.update({DemandScope(*scope): gpus for *scope, gpus in about.get("unknown_use", ())})
        self.inventory = PoolInventory(*about.get("inventory", ()))
        self._runs.load(about["runs"])
        self.open.load(about.get("open", {"requested": [], "promised": [], "left": []}), {})
        self.shown.load(about, {})
        self.requests.load(about["requests"], arrays)
        self.records.load(about["records"])
        self.residency.load(about["residency"])


def _make_empty_bins(bin_s: int) -> DeltaBins:
    return DeltaBins(bin_s * 1000, BINS[bin_s] + 1)


_READ: dict[str, Callable[[DeltaBins, int, int], NDArray[np.float64]]] = {
    "arriving": lambda rows, last, bins: rows.read_sums(ARRIVING, last - 1, bins),
    "arriving_jobs": lambda rows, last, bins: rows.read_sums(ARRIVING_JOBS, last - 1, bins),
    "running": lambda rows, last, bins: rows.compute_levels(RUNNING, last, bins),
    "queued": lambda rows, last, bins: rows.compute_levels(QUEUED, last, bins),
    "wanted": lambda rows, last, bins: (
        rows.compute_levels(RUNNING, last, bins) + rows.compute_levels(QUEUED, last, bins)
    ),
}
