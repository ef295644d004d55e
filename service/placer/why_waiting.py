"""The reasons why a request waits. They form a ladder of steps: first the requests before it, last its start."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence

from fleetcast.fleet.errors import UnknownEntity
from fleetcast.fleet.requests import PlacementRequest
from fleetcast.placement.ahead.start_time import Blocker, format_time_until
from fleetcast.placement.machines.words import format_count
from fleetcast.placement.plan.queue import Wait, WaitingEntry
from fleetcast.placement.plan.turns import QueueTurns, TreeTurns
from fleetcast.placement.queues.closed import format_date
from fleetcast.placement.queues.standing import LENDERS
from fleetcast.placement.queues.tree import ANY, LeafOrder, Window, format_some_names
from fleetcast.service.answers.queues import WhyCode, WhyStep, WhyWaiting
from fleetcast.service.placer.queue_rows import NOT_LOOKED_AT, StartNotes

NO_NOTES = StartNotes()
NAMED = 5  # requests of a step
FEW = 3  # queues and jobs in a sentence
FIRST: dict[LeafOrder, str] = {
    "shortest": "of fewer GPU-seconds by their limits",
    "fifo": "longer there",
    "attained": "longer there",
}
LACKS: dict[str, WhyCode] = {"window": "window", "kept": "kept", "untried": "untried", "gone": "gone"}


def explain_wait(
    request_id: str, order: Sequence[WaitingEntry], ordered_by: QueueTurns, wait: Wait | None, turns: QueueTurns,
    start_ms: dict[str, int] | None, blockers: Callable[[PlacementRequest], Sequence[Blocker]], stalled: str,
    now_ms: int, notes: StartNotes = NO_NOTES, reclaim: str = "",
) -> WhyWaiting:  # fmt: skip
    """Make the steps that explain why a request waits. Raises UnknownEntity if it does not wait.

    order: all waiting entries, in the order of `ordered_by`. turns: the present queues. blockers: returns
    the jobs that a request waits for. reclaim: what the last pass found about jobs to stop for it, "" if it did not
    look.
    """
    position = next((at for at, entry in enumerate(order) if entry.request.request_id == request_id), None)
    if position is None:
        raise UnknownEntity(f"no request {request_id!r} waits")
    request = order[position].request
    ladder = [WhyStep("stale", stalled)] if stalled else []
    if isinstance(turns, TreeTurns):
        leaf = turns.tree.find_known_leaf(request)
        mine = [entry for entry in order[:position] if turns.tree.find_known_leaf(entry.request) == leaf]
        ladder += _describe_requests_before_in_queue(mine, leaf, turns)
        if isinstance(ordered_by, TreeTurns):
            ladder += _describe_other_queues(order[:position], order[position], leaf, ordered_by)
        ladder += _describe_limits(request, leaf, turns)
        share = round(turns.standing.compute_share(turns.standing.find_or_add_leaf(leaf)), 4) if leaf else None
    else:
        leaf, mine, share = request.queue, list(order[:position]), None
        ladder += _make_before_step(mine, "before it: of higher priority, or longer there")
    if wait is not None and wait.why not in [step.sentence for step in ladder]:
        ladder.append(WhyStep(LACKS.get(wait.reason.code, "room"), wait.why))
    if reclaim:
        ladder.append(WhyStep("reclaim", reclaim))
    ladder += _describe_ends(blockers(request), now_ms)
    start = notes.describe_start(request_id, start_ms, now_ms)
    if start:
        ladder.append(WhyStep("start", start))
    sentence = ladder[-1].sentence if ladder else NOT_LOOKED_AT
    places = position + 1, len(mine) + 1
    return WhyWaiting(now_ms, request_id, leaf, *places, share, sentence, ladder, start_ms, notes.as_of_ms)


def _make_before_step(entries: Sequence[WaitingEntry], why: str) -> list[WhyStep]:
    names = [entry.request.request_id for entry in entries[-NAMED:]][::-1]
    return [WhyStep("before", f"{format_count(len(entries), 'request')} {why}", names)] if entries else []


def _describe_requests_before_in_queue(mine: Sequence[WaitingEntry], leaf: str, turns: TreeTurns) -> list[WhyStep]:
    if not leaf:
        return _make_before_step(mine, "before it of no queue of the file")
    first = FIRST[turns.tree.list_path(leaf)[0].order]
    return _make_before_step(mine, f"before it in queue {leaf!r}: overdue, of higher priority, or {first}")


def _describe_other_queues(
    before: Sequence[WaitingEntry], mine: WaitingEntry, leaf: str, turns: TreeTurns
) -> Iterator[WhyStep]:
    """Yield the steps about requests from other queues that come before this request.

    There is one step for all queues of a higher class. There is another step for each tree level at which
    the shares decided the order.
    """
    others = [entry for entry in before if turns.tree.find_known_leaf(entry.request) != leaf]
    if not leaf:
        yield from _make_before_step(others, "before it: those of the file's queues come first")
        return
    own_class = _find_class_priority(mine, turns)
    higher = [entry for entry in others if _find_class_priority(entry, turns) != own_class]
    if higher:
        names = Counter(turns.tree.find_known_leaf(entry.request) for entry in higher).most_common(FEW)
        yield from _make_before_step(
            higher, f"before it from queues of a higher class: {format_some_names([name for name, _ in names])}"
        )
    levels: dict[str, list[tuple[WaitingEntry, str]]] = {}
    shares = turns.compute_deciding_shares([*before, mine]) if len(others) > len(higher) else {}
    own = shares.get(mine.request.request_id, {})
    for entry in others:
        theirs = shares.get(entry.request.request_id, {}) if _find_class_priority(entry, turns) == own_class else {}
        apart = next((pair for pair in zip(theirs, own, strict=False) if pair[0] != pair[1]), None)
        if apart is not None:
            levels.setdefault(apart[1], []).append((entry, apart[0]))
    for name, found in levels.items():
        yield from _describe_queue_shares(found, name, own[name], shares)


def _describe_queue_shares(
    found: Sequence[tuple[WaitingEntry, str]], own: str, own_share: float, shares: Mapping[str, Mapping[str, float]]
) -> list[WhyStep]:
    """Return the step about queues that come first because of their shares, at one level of the tree.

    For example: `2 requests before it from queues with no larger share: 'a' (share 0.06), 'b' (share 0.12);
    its own, 'c', has 0.31 with it`. Each share includes the request itself, as in the order of the queue.
    """
    theirs: dict[str, float] = {}
    for entry, name in found:
        theirs[name] = max(theirs.get(name, 0.0), shares[entry.request.request_id][name])
    names = [name for name, _ in Counter(name for _, name in found).most_common(FEW)]
    words = ", ".join(f"{name!r} (share {theirs[name]:.2g})" for name in names)
    with_it = f"its own, {own!r}, has {own_share:.2g} with it"
    return _make_before_step(
        [entry for entry, _ in found], f"before it from queues with no larger share: {words}; {with_it}"
    )


def _find_class_priority(entry: WaitingEntry, turns: TreeTurns) -> int | None:
    """Return the priority of the class that the entry's queue has, or None if the entry has no queue."""
    leaf = turns.tree.find_known_leaf(entry.request)
    return turns.tree.list_path(leaf)[0].priority if leaf else None


def _describe_limits(request: PlacementRequest, leaf: str, turns: TreeTurns) -> list[WhyStep]:
    """Return the steps about limits of the request's queue, and about nodes that are closed to it now."""
    found = [
        WhyStep("window", _describe_window(window, nodes)) for window, nodes in turns.list_barring_windows(request)
    ]
    allowed = turns.limit_to_quota(request)
    if isinstance(allowed, str):
        amounts = turns.standing.compute_amounts(request, request.members.min)
        gpus, of_queues = amounts.get(ANY, 0.0), turns.standing.capacity.get(ANY, 0.0)
        if gpus > of_queues:
            found.append(WhyStep("room", f"needs {gpus:g} GPUs, and all queues share {of_queues:g} now"))
        lent_out = turns.standing.find_refusing_queue(leaf, amounts) == LENDERS
        found.insert(0, WhyStep("lent_out" if lent_out else "limit", allowed))
    return found


def _describe_window(window: Window, nodes: int) -> str:
    """Describe a maintenance window or a reservation. nodes: the number of nodes in it.

    For example: `'mlperf' keeps 4 nodes for queue 'production' from 2026-12-01 08:00 until 2026-12-03 08:00 UTC`.
    """
    whose = f"for queue {window.queue!r}" if window.queue else "free"
    times = f"from {format_date(window.from_ms)} until {format_date(window.to_ms)} UTC"
    return f"{window.name!r} keeps {format_count(nodes, 'node')} {whose} {times}"


def _describe_ends(blockers: Sequence[Blocker], now_ms: int) -> list[WhyStep]:
    """Return the step about the jobs that the request waits for. Returns no step if there are none.

    For example: `starts once 'train-7' on n014 has ended: in 40 min (p90 65 min)`.
    """
    if not blockers:
        return []
    jobs = ", ".join(f"{one.job!r} on {one.node}" for one in blockers[:FEW])
    more = f" and {len(blockers) - FEW:,} more" if len(blockers) > FEW else ""
    last_ms = max((one.ends_ms for one in blockers), key=lambda ends_ms: ends_ms["p50"])
    has = "has" if len(blockers) == 1 else "have"
    return [WhyStep("ends", f"starts once {jobs}{more} {has} ended: {format_time_until(last_ms, now_ms)}")]
