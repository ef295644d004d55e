"""What was acknowledged, and the laws that follow. A breach raises `Broken` at the step that shows it.

given once       no GPU is promised or given to a job while another holds it: one whose start was acknowledged in time
                 and that has not ended, or one whose promise has not run out
passes           no limit refuses the start of a job that holds a promise
waits            no promise expires whose start was refused in time, nor one whose start reached no api, or one that
                 could not write, before its client had the whole time again; the latter for at most PAUSE_S
found once       what was acknowledged is folded, exactly once, whatever ended in between
archived once    no event stands twice in the live files of the archive, and none of them is damaged; at the end
                 all that was acknowledged stands there
same bytes       a request has one reply; one that waits has a second, once it is decided
never back       a reader never sees an older board than it saw, nor one that has forgotten what an older one knew
no end           no process ends by itself
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import msgspec

from fleetcast.fleet.job_table import JobTable
from fleetcast.fleet.requests import Decision
from fleetcast.placement.ledger.ledger import Intent

if TYPE_CHECKING:
    from fleetcast.service.board.board import Board
    from tests.simulation.clients import Job
    from tests.simulation.processes import Process

Gpu = tuple[str, int]
SLACK_MS = 3000  # clocks are set by parts of a second, which nobody makes up for
EventKey = tuple[str, int, int]


class Broken(Exception):
    """A law does not hold. `law`: its name."""

    def __init__(self, law: str, what: str) -> None:
        super().__init__(f"{law}: {what}")
        self.law = law


@dataclass(slots=True)
class Promise:
    """What the placer gave. until: when it runs out, by the clock and by the steady one."""

    job: tuple[str, int]
    gpus: frozenset[Gpu]
    until_ms: int
    until_steady_ms: int
    over: bool = False  # ended, cancelled, or given up
    in_time: bool = False  # its start was acknowledged before it ran out
    was_refused: bool = False  # its start was, in time, and the client may not have sent it again
    away_steady_ms: int | None = None  # when its start last found no api in time

    def lasts(self, now_ms: int, steady_ms: int) -> bool:
        return not self.over and now_ms < self.until_ms and steady_ms < self.until_steady_ms


@dataclass(slots=True)
class Seen:
    """What one life of a reader has seen: of the newest board, its number and how much it knew."""

    sequence: int = -1
    position: int = -1


@dataclass(slots=True)
class Oracle:
    promises: dict[str, Promise] = field(default_factory=dict)
    acknowledged: dict[EventKey, None] = field(default_factory=dict)  # in order
    replies: dict[str, bytes] = field(default_factory=dict)
    boards: dict["Process", Seen] = field(default_factory=dict)
    in_archive: set[EventKey] = field(default_factory=set)
    checks: int = 0
    power_lost_at: int = -1  # the number of the board that was there

    # -- given once

    def promised(self, intents: Iterable[Intent], now_ms: int, steady_ms: int) -> None:
        """The active intents of the ledger, whenever that has changed."""
        held: dict[Gpu, str] = {}
        for intent in intents:
            promise = self.promises.get(intent.request_id) or self._new(intent, now_ms, steady_ms)
            for gpu in promise.gpus:
                if gpu in held:
                    raise Broken("given once", f"{gpu} is promised to {held[gpu]} and to {intent.request_id}")
                held[gpu] = intent.request_id

    def _new(self, intent: Intent, now_ms: int, steady_ms: int) -> Promise:
        gpus = frozenset((rank.node, gpu) for rank in intent.ranks for gpu in rank.gpus)
        until_steady_ms = steady_ms + intent.expires_ms - now_ms
        promise = Promise((intent.job, intent.attempt), gpus, intent.expires_ms, until_steady_ms)
        self._is_free(promise, intent.request_id, now_ms, steady_ms)
        self.promises[intent.request_id] = promise
        return promise

    def _is_free(self, promise: Promise, request_id: str, now_ms: int, steady_ms: int) -> None:
        self.checks += 1
        for other_id, other in self.promises.items():
            if other is promise or other.over or not other.gpus & promise.gpus:
                continue
            if other.in_time or other.lasts(now_ms, steady_ms):
                why = "started in time and runs" if other.in_time else f"was promised it until {other.until_ms}"
                gpu = min(other.gpus & promise.gpus)
                raise Broken("given once", f"{gpu} is given to {request_id} at {now_ms}, but {other_id} {why}")

    def started(self, request_id: str, now_ms: int, steady_ms: int) -> None:
        """A start was acknowledged, in time or not."""
        promise = self.promises.get(request_id)
        if promise is not None:
            promise.was_refused = False
        if promise is not None and not promise.in_time and promise.lasts(now_ms, steady_ms):
            promise.in_time = True
            self._is_free(promise, request_id, now_ms, steady_ms)

    def refused(self, request_id: str, why: str, now_ms: int, steady_ms: int) -> None:
        """A start was answered by a limit (`why` says so), or as a bad record (`why` is empty)."""
        promise = self.promises.get(request_id)
        if promise is None or not promise.lasts(now_ms, steady_ms):
            return
        if why:
            raise Broken("passes", f"the start of {request_id} is refused, which has a promise: {why}")
        promise.was_refused = True

    def turned_away(self, request_id: str, now_ms: int, steady_ms: int) -> None:
        """A start found no api, or one that could not write."""
        promise = self.promises.get(request_id)
        if promise is not None and promise.lasts(now_ms, steady_ms):
            promise.away_steady_ms = steady_ms

    def expired(self, request_id: str, now_ms: int, steady_ms: int, whole_ms: int, pause_ms: int) -> None:
        """The placer let a promise expire. whole_ms: the time that each promise has; pause_ms: the longest pause."""
        self.checks += 1
        promise = self.promises[request_id]
        if promise.was_refused:
            raise Broken("waits", f"{request_id} expired, and its start was refused in time")
        away_ms = promise.away_steady_ms
        if away_ms is None or now_ms >= promise.until_ms + pause_ms:
            return
        if steady_ms < away_ms + whole_ms - SLACK_MS:
            raise Broken("waits", f"{request_id} expired {steady_ms - away_ms} ms after its start found no api")

    def released(self, job: "Job") -> None:
        """The client has ended the job, or will never start it: it holds nothing from now on."""
        promise = self.promises.get(job.request.request_id)
        if promise is not None:
            promise.over = True

    # -- found once

    def found(self, jobs: JobTable, keys: Iterable[EventKey], when: str) -> None:
        """Every event of `keys`, which were acknowledged, is in the pipeline's table, once."""
        self.checks += 1
        attempts = {(row.job, row.attempt): row for row in jobs}
        for job, attempt, sequence in keys:
            row = attempts.get((job, attempt))
            if row is None or sequence not in _numbers(row):
                raise Broken("found once", f"event {sequence} of {job}/{attempt} was acknowledged; it is lost {when}")
        for key, row in attempts.items():
            kept = [event.sequence for event in row.events]
            if len(kept) != len(set(kept)):
                raise Broken("found once", f"events of {key} were folded twice {when}: {kept}")

    def counted(self, jobs: JobTable) -> None:
        """As many events were applied as there are different ones, those of jobs at rest included."""
        known = sum(last - first + 1 for row in jobs for first, last in row.seen.runs)
        if known != jobs.position:
            raise Broken("found once", f"{jobs.position} events were applied, {known} different ones are known")

    # -- archived once

    def archived(self, keys: Sequence[EventKey]) -> None:
        """The events of all live files of the archive, whenever those have changed."""
        self.checks += 1
        self.in_archive = set(keys)
        if len(self.in_archive) != len(keys):
            job, attempt, sequence = Counter(keys).most_common(1)[0][0]
            raise Broken("archived once", f"event {sequence} of {job}/{attempt} stands in two files, or twice in one")

    def all_archived(self) -> None:
        """What was acknowledged has come into the archive."""
        for job, attempt, sequence in self.acknowledged:
            if (job, attempt, sequence) not in self.in_archive:
                raise Broken("archived once", f"event {sequence} of {job}/{attempt} was acknowledged; it is in no file")

    # -- same bytes

    def replied(self, request_id: str, reply: bytes) -> None:
        self.checks += 1
        before = self.replies.get(request_id)
        if before is not None and before != reply and _outcome(before) != "queued":
            raise Broken("same bytes", f"{request_id} was answered {before!r}, and now {reply!r}")
        self.replies[request_id] = reply

    # -- never back

    def looked(self, reader: "Process", board: "Board") -> None:
        """A reader has the newest board in hand."""
        seen = self.boards.setdefault(reader, Seen())
        if board.sequence == seen.sequence:
            return
        self.checks += 1
        if board.sequence < seen.sequence:
            raise Broken("never back", f"{reader.role} saw board {seen.sequence}, and now {board.sequence}")
        if "occupancy" not in board:
            return
        position = board.json("occupancy")["position"]
        if position < seen.position:
            why = f"{position} events folded, {seen.position} before it"
            raise Broken("never back", f"{reader.role} sees board {board.sequence}: {why}")
        before_loss = board.sequence <= self.power_lost_at  # it may know of what was never acknowledged, and is gone
        seen.sequence, seen.position = board.sequence, -1 if before_loss else position


def _numbers(row: Any) -> set[int]:
    return {number for first, last in row.seen.runs for number in range(first, last + 1)}


def _outcome(reply: bytes) -> str:
    return msgspec.json.decode(reply, type=Decision).outcome
