"""New names at the door: how many unknown jobs and nodes one api process lets in.

A new name is a job's attempt or a node that neither the newest board nor this process knows. It passes where

    live_jobs, unknown_nodes   what the board counts and this process took since leave room for it
    names_per_minute           its caller has a token left: `names_at_once` of them, refilled so many a minute

Known names always pass. Other api processes and the board's age make this an estimate; the pipeline holds the hard
bound (service.pipeline.state).
"""

from collections import Counter, OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from math import ceil

from fleet.clock import Clock
from fleet.events import Failed, Finished, JobEvent, NodeEvent, Preempted
from ingest.inbox.job_events import Identity, identity
from service.api.recent import RecentIdentities
from service.board.board import Board
from service.board.cache import BoardCache
from service.config import LimitsConfig

LIVE_JOBS, UNKNOWN_NODES, NAMES = "live_jobs", "unknown_nodes", "names_per_minute"
OVERDUE_MS = 60_000  # a name that no board shows by then was refused by the pipeline, or is over
CALLERS_KEPT = 4096
LONGEST_WAIT_S = 60.0
SECTION = "names.live"

Stream = tuple[str, str, str | int]


@dataclass(slots=True)
class _Purse:
    """What a caller has left. at_ms: as of when, steady fleet time."""

    tokens: float
    at_ms: int


@dataclass
class _Known:
    """What one board tells. live: a line an attempt, "ATTEMPT JOB"; hosts: the first parts of the names of nodes."""

    live: bytes = b""
    nodes: frozenset[bytes] = frozenset()
    hosts: frozenset[bytes] = frozenset()
    used: dict[str, int] = field(default_factory=dict)

    @cached_property
    def attempts(self) -> frozenset[bytes]:
        """Made when the first new name asks: most boards are asked for none."""
        return frozenset(self.live.split(b"\n"))

    @cached_property
    def jobs(self) -> frozenset[bytes]:
        return frozenset(line.partition(b" ")[2] for line in self.attempts)

    def has_node(self, name: str) -> bool:
        """As `ingest.node_names.known_name` has it: exporters and launchers print short names or full ones."""
        short, dot, _ = name.encode().partition(b".")
        return name.encode() in self.nodes or (short in self.nodes if dot else short in self.hosts)


class NewNames:
    """Use from one event loop."""

    def __init__(self, limits: LimitsConfig, cache: BoardCache, recent: RecentIdentities, clock: Clock) -> None:
        self.limits = limits
        self._feed = cache
        self._recent = recent
        self._clock = clock
        self._known = _Known()
        self._sequence: tuple[int, int] | None = None
        self._node_names = b""
        self._since: dict[str, OrderedDict[str, int]] = {LIVE_JOBS: OrderedDict(), UNKNOWN_NODES: OrderedDict()}
        self._purses: OrderedDict[str, _Purse] = OrderedDict()

    def body(self, caller: str) -> "NamesOfBody":
        """What judges the records of one body."""
        self._look()
        return NamesOfBody(self, caller)

    def used(self, bound: str) -> int:
        """How much of `live_jobs` or `unknown_nodes` is taken, as far as this process knows."""
        return self._known.used.get(bound, 0) + len(self._since[bound])

    def judge(self, event: JobEvent | NodeEvent, caller: str) -> str:
        """Take the name of an event; the bound that forbids it, "" where none does."""
        bound = self._bound_of(event)
        if bound is None:
            return ""
        most = getattr(self.limits, bound) if bound else 0
        if bound and self.used(bound) >= most:
            return bound
        purse = self._purse(caller)
        if purse.tokens < 1:
            return NAMES
        purse.tokens -= 1
        if bound:
            self._since[bound][event.node if isinstance(event, NodeEvent) else event.job] = self._clock.now_ms()
        return ""

    def wait_s(self, caller: str, names: int) -> float:
        """Fleet seconds until the caller may tell of so many new names; a minute at most."""
        missing = min(names, self.limits.names_at_once) - self._purse(caller).tokens
        return min(LONGEST_WAIT_S, max(0.0, missing) * 60 / self.limits.names_per_minute)

    def _bound_of(self, event: JobEvent | NodeEvent) -> str | None:
        """The bound that a name adds to, "" where it costs a token alone, None where it is known."""
        if identity(event)[:3] in self._recent.streams:
            return None
        if isinstance(event, NodeEvent):
            known = event.node in self._since[UNKNOWN_NODES] or self._known.has_node(event.node)
            return None if known else UNKNOWN_NODES
        if f"{event.attempt} {event.job}".encode() in self._known.attempts:
            return None
        is_known = event.job in self._since[LIVE_JOBS] or event.job.encode() in self._known.jobs
        return "" if is_known or isinstance(event, Finished | Failed | Preempted) else LIVE_JOBS

    def _purse(self, caller: str) -> _Purse:
        most, now_ms = self.limits.names_at_once, self._clock.steady_ms()
        purse = self._purses.setdefault(caller, _Purse(most, now_ms))
        purse.tokens = min(most, purse.tokens + max(0, now_ms - purse.at_ms) * self.limits.names_per_minute / 60_000)
        purse.at_ms = now_ms
        self._purses.move_to_end(caller)
        if len(self._purses) > CALLERS_KEPT:
            self._purses.popitem(last=False)
        return purse

    def _look(self) -> None:
        """At the newest board: what it knows is no new name any more."""
        board = self._feed.latest()
        key = None if board is None else (board.as_of_ms, board.sequence)
        if board is None or key == self._sequence:
            return
        self._sequence = key
        self._known = self._read(board)
        for bound, names in self._since.items():
            if not names:
                continue
            known = self._known.jobs if bound == LIVE_JOBS else self._known.nodes
            late_ms = board.as_of_ms - OVERDUE_MS
            for name in [name for name, at_ms in names.items() if at_ms < late_ms or name.encode() in known]:
                del names[name]

    def _read(self, board: Board) -> _Known:
        names = bytes(board.raw("names.node")) if "names.node" in board else b""
        nodes, hosts = self._known.nodes, self._known.hosts
        if names != self._node_names:
            self._node_names, nodes = names, frozenset(names.split(b"\n"))
            hosts = frozenset(name.partition(b".")[0] for name in nodes)
        limits = board.json("doc.ingestion").get("limits", {}) if "doc.ingestion" in board else {}
        return _Known(
            live=bytes(board.raw(SECTION)) if SECTION in board else b"",
            nodes=nodes,
            hosts=hosts,
            used={bound: int(row["used"]) for bound, row in limits.items()},
        )


class NamesOfBody:
    """The verdicts on one body. All records of a name share one: a refused name leaves none."""

    def __init__(self, names: NewNames, caller: str) -> None:
        self._names = names
        self._caller = caller
        self._verdicts: dict[Stream, str] = {}
        self.refused: Counter[str] = Counter()  # names by the bound that forbids them
        self.records = 0

    def passes(self, event: JobEvent | NodeEvent, key: Identity) -> bool:
        stream = key[:3]
        verdict = self._verdicts.get(stream)
        if verdict is None:
            verdict = self._verdicts[stream] = self._names.judge(event, self._caller)
            if verdict:
                self.refused[verdict] += 1
        self.records += bool(verdict)
        return not verdict

    def bounds(self) -> Iterator[tuple[str, int, int, int]]:
        """(key, configured, used, names refused) of each bound that was met; of a rate nothing is used."""
        limits = self._names.limits
        for bound, names in self.refused.items():
            used = 0 if bound == NAMES else self._names.used(bound)
            yield bound, getattr(limits, bound), used, names

    def retry_after_s(self) -> int:
        """Fleet seconds, at least one; a minute where there is no room, since that comes with a job's end."""
        if self.refused.keys() - {NAMES}:
            return round(LONGEST_WAIT_S)
        return max(1, ceil(self._names.wait_s(self._caller, self.refused[NAMES])))
