"""The limits on how many unknown jobs and nodes one api process admits.

A name is new if neither the newest board nor this process knows it. A new name is an attempt of a job or
a node. It must fit three bounds:

    live_jobs, unknown_nodes   the names on the board, and those that this process has admitted since then
    share of a caller          the part of such a bound that one caller may use: a tenth, or an equal part
                               among the callers of the last hour
    names_per_minute           the caller's tokens: at most `names_at_once`, refilled at this rate

Known names always pass. An attempt that the placer has placed also passes, because the placer must
receive its start. It counts against no bound. Other api processes and the board's age make this an
estimate. The pipeline enforces the exact bound (fleetcast.service.pipeline.state).
"""

from collections import Counter, OrderedDict
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from math import ceil

from fleetcast.fleet.clock import Clock
from fleetcast.fleet.events import Failed, Finished, JobEvent, NodeEvent, Preempted
from fleetcast.ingest.inbox.job_events import Identity, identify_event
from fleetcast.placement.ledger.promised import PromiseReader
from fleetcast.service.api.recent import RecentIdentities
from fleetcast.service.board.board import Board
from fleetcast.service.board.cache import BoardCache
from fleetcast.service.config import LimitsConfig

LIVE_JOBS, UNKNOWN_NODES, NAMES = "live_jobs", "unknown_nodes", "names_per_minute"
OVERDUE_MS = 60_000  # a name that no board shows by then was refused by the pipeline, or is over
MAX_CALLERS = 4096
CALLER_MS = 3_600_000  # since a caller sent its last new name; then it has no share any more
LEAST_SHARE = 10  # every caller may fill so many parts of a bound
LONGEST_WAIT_S = 60.0
SECTION, ENDED_SECTION = "names.live", "names.ended"

Stream = tuple[str, str, str | int]


@dataclass(slots=True)
class _CallerTokens:
    """The number of new names that a caller may still send.

    at_ms: when the tokens were last refilled, in ms of the steady fleet clock.
    """

    tokens: float
    at_ms: int


@dataclass
class _BoardNames:
    """The names of jobs and nodes on one board.

    live, ended: one line "ATTEMPT JOB" for each attempt. hosts: the node names up to their first dot.
    """

    live: bytes = b""
    ended: bytes = b""
    nodes: frozenset[bytes] = frozenset()
    hosts: frozenset[bytes] = frozenset()
    used: dict[str, int] = field(default_factory=dict)

    @cached_property
    def attempts(self) -> frozenset[bytes]:
        """The attempts on the board, as lines "ATTEMPT JOB". They are computed for the first new name."""
        return frozenset((*self.live.split(b"\n"), *self.ended.split(b"\n")))

    @cached_property
    def jobs(self) -> frozenset[bytes]:
        return frozenset(line.partition(b" ")[2] for line in self.attempts)

    @cached_property
    def live_jobs(self) -> frozenset[bytes]:
        return frozenset(line.partition(b" ")[2] for line in self.live.split(b"\n"))

    def get_bound_names(self, bound: str) -> frozenset[bytes]:
        """Return the names on the board that count against a bound. bound: the name of the bound."""
        return self.live_jobs if bound == LIVE_JOBS else self.nodes

    def has_node(self, name: str) -> bool:
        """Return whether the board has a node, by its short or its full name.

        Exporters print either form. `fleetcast.ingest.node_names.find_known_name` has the same rule.
        """
        short, dot, _ = name.encode().partition(b".")
        return name.encode() in self.nodes or (short in self.nodes if dot else short in self.hosts)


class _NamesByCaller:
    """The live names that count against one bound, each with the caller that sent it.

    `callers`: the callers that sent a new name in the last hour, with the time of the newest one.
    """

    def __init__(self) -> None:
        self.callers: OrderedDict[str, int] = OrderedDict()  # -> when its last new name came, steady fleet time
        self._caller_of: dict[str, str] = {}
        self.count: Counter[str] = Counter()
        self._as_of: _BoardNames | None = None

    def record_naming_caller(self, caller: str, now_ms: int) -> None:
        """Record that a caller sent a new name. Drop callers that sent none for an hour."""
        self.callers[caller] = now_ms
        self.callers.move_to_end(caller)
        while len(self.callers) > MAX_CALLERS or next(iter(self.callers.values())) < now_ms - CALLER_MS:
            self.callers.popitem(last=False)

    def add_name(self, name: str, caller: str) -> None:
        self._remove_name(name)
        self._caller_of[name] = caller
        self.count[caller] += 1

    def drop_outdated_names(self, board: _BoardNames, names: Collection[bytes], since: Collection[str]) -> None:
        """Drop names that are not on this board. Names in `since` stay: they are newer than the board."""
        if board is self._as_of:
            return
        self._as_of = board
        for name in [name for name in self._caller_of if name not in since and name.encode() not in names]:
            self._remove_name(name)

    def _remove_name(self, name: str) -> None:
        caller = self._caller_of.pop(name, None)
        if caller is not None:
            self.count[caller] -= 1
            if not self.count[caller]:
                del self.count[caller]


class NewNames:
    """The admission of new names. Use it within one event loop."""

    def __init__(
        self,
        limits: LimitsConfig,
        cache: BoardCache,
        recent: RecentIdentities,
        clock: Clock,
        promises: PromiseReader,
    ) -> None:
        self.limits = limits
        self._promises = promises
        self._feed = cache
        self._recent = recent
        self._clock = clock
        self._known = _BoardNames()
        self._sequence: tuple[int, int] | None = None
        self._node_names = b""
        self._since: dict[str, OrderedDict[str, int]] = {LIVE_JOBS: OrderedDict(), UNKNOWN_NODES: OrderedDict()}
        self._purses: OrderedDict[str, _CallerTokens] = OrderedDict()
        self._owned: dict[str, _NamesByCaller] = {LIVE_JOBS: _NamesByCaller(), UNKNOWN_NODES: _NamesByCaller()}

    def make_body_names(self, caller: str) -> "NamesOfBody":
        """Return an object that admits or refuses the names in one request body of `caller`."""
        self._read_new_board()
        return NamesOfBody(self, caller)

    def count_used_names(self, bound: str) -> int:
        """Count the names that use a bound (`live_jobs` or `unknown_nodes`).

        Names that only other processes have admitted do not count.
        """
        return self._known.used.get(bound, 0) + len(self._since[bound])

    def compute_caller_share(self, bound: str) -> int:
        """Return how many names of a bound (`live_jobs` or `unknown_nodes`) one caller may use now."""
        most: int = getattr(self.limits, bound)
        return ceil(most / min(LEAST_SHARE, max(1, len(self._owned[bound].callers))))

    def admit_name(self, event: JobEvent | NodeEvent, caller: str) -> str:
        """Admit the name of an event. Returns "" if it is admitted, or else the bound that forbids it."""
        bound = self._find_bound(event)
        if bound is None:
            return ""
        if bound:
            self._owned[bound].record_naming_caller(caller, self._clock.steady_ms())
            if self.count_used_names(bound) >= getattr(self.limits, bound) or self.has_exhausted_share(caller, bound):
                return bound
        purse = self._refill_tokens(caller)
        if purse.tokens < 1:
            return NAMES
        purse.tokens -= 1
        if bound:
            name = event.node if isinstance(event, NodeEvent) else event.job
            self._since[bound][name] = self._clock.now_ms()
            self._owned[bound].add_name(name, caller)
        return ""

    def has_exhausted_share(self, caller: str, bound: str) -> bool:
        """Return whether the caller has used up its share of a bound."""
        owned, share = self._owned[bound], self.compute_caller_share(bound)
        if owned.count[caller] < share:
            return False
        owned.drop_outdated_names(self._known, self._known.get_bound_names(bound), self._since[bound])
        return owned.count[caller] >= share

    def compute_wait_s(self, caller: str, names: int) -> float:
        """Return in how many fleet seconds the caller may send this many new names. The result is at most 60."""
        missing = min(names, self.limits.names_at_once) - self._refill_tokens(caller).tokens
        return min(LONGEST_WAIT_S, max(0.0, missing) * 60 / self.limits.names_per_minute)

    def _find_bound(self, event: JobEvent | NodeEvent) -> str | None:
        """Return the bound that the event's name counts against, or None if the name is known or placed.

        Returns "" if the name needs a token of the caller but counts against no bound. Such a name is a new
        attempt of a known job, or an unknown job that ends.
        """
        if identify_event(event)[:3] in self._recent.streams:
            return None
        if isinstance(event, NodeEvent):
            known = event.node in self._since[UNKNOWN_NODES] or self._known.has_node(event.node)
            return None if known else UNKNOWN_NODES
        if f"{event.attempt} {event.job}".encode() in self._known.attempts:
            return None
        if self._promises.admits(event.job, event.attempt):
            return None
        is_known = event.job in self._since[LIVE_JOBS] or event.job.encode() in self._known.jobs
        return "" if is_known or isinstance(event, Finished | Failed | Preempted) else LIVE_JOBS

    def _refill_tokens(self, caller: str) -> _CallerTokens:
        most, now_ms = self.limits.names_at_once, self._clock.steady_ms()
        purse = self._purses.setdefault(caller, _CallerTokens(most, now_ms))
        purse.tokens = min(most, purse.tokens + max(0, now_ms - purse.at_ms) * self.limits.names_per_minute / 60_000)
        purse.at_ms = now_ms
        self._purses.move_to_end(caller)
        if len(self._purses) > MAX_CALLERS:
            self._purses.popitem(last=False)
        return purse

    def _read_new_board(self) -> None:
        """Read the newest board. Its names no longer count as new."""
        board = self._feed.latest()
        key = None if board is None else (board.as_of_ms, board.sequence)
        if board is None or key == self._sequence:
            return
        self._sequence = key
        self._known = self._read_known_names(board)
        for bound, names in self._since.items():
            if not names:
                continue
            known = self._known.jobs if bound == LIVE_JOBS else self._known.nodes
            late_ms = board.as_of_ms - OVERDUE_MS
            for name in [name for name, at_ms in names.items() if at_ms < late_ms or name.encode() in known]:
                del names[name]

    def _read_known_names(self, board: Board) -> _BoardNames:
        names = bytes(board.raw("names.node")) if "names.node" in board else b""
        nodes, hosts = self._known.nodes, self._known.hosts
        if names != self._node_names:
            self._node_names, nodes = names, frozenset(names.split(b"\n"))
            hosts = frozenset(name.partition(b".")[0] for name in nodes)
        limits = board.json("doc.ingestion").get("limits", {}) if "doc.ingestion" in board else {}
        live, ended = (bytes(board.raw(name)) if name in board else b"" for name in (SECTION, ENDED_SECTION))
        return _BoardNames(
            live=live,
            ended=ended,
            nodes=nodes,
            hosts=hosts,
            used={bound: int(row["used"]) for bound, row in limits.items()},
        )


class NamesOfBody:
    """The verdicts on the new names in one request body.

    All records with the same name have the same verdict. No record with a refused name is stored.
    """

    def __init__(self, names: NewNames, caller: str) -> None:
        self._names = names
        self._caller = caller
        self._verdicts: dict[Stream, str] = {}
        self.refused: Counter[str] = Counter()  # names by the bound that forbids them
        self.records = 0

    def is_admitted(self, event: JobEvent | NodeEvent, key: Identity) -> bool:
        stream = key[:3]
        verdict = self._verdicts.get(stream)
        if verdict is None:
            verdict = self._verdicts[stream] = self._names.admit_name(event, self._caller)
            if verdict:
                self.refused[verdict] += 1
        self.records += bool(verdict)
        return not verdict

    def list_reached_bounds(self) -> Iterator[tuple[str, int, str]]:
        """Yield (bound, number of refused names, reason) for each bound that was reached."""
        for bound, names in self.refused.items():
            most: int = getattr(self._names.limits, bound)
            why = f"limits.{bound} = {most:,}"
            if bound != NAMES:
                used, share = self._names.count_used_names(bound), self._names.compute_caller_share(bound)
                why += f", {used:,} are used" if used else ""
                why += f", one caller may have {share:,}" if share < most and used < most else ""
            yield bound, names, why

    def compute_retry_s(self) -> int:
        """Return after how many fleet seconds the caller should retry, at least one.

        If a bound is full, return a minute, because names become free when jobs end.
        """
        if self.refused.keys() - {NAMES}:
            return round(LONGEST_WAIT_S)
        return max(1, ceil(self._names.compute_wait_s(self._caller, self.refused[NAMES])))
