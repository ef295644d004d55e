"""The source "slurm": polls a Slurm cluster, and delivers new job and node events.

    every interval_s    the queue (jobs that wait, run or ended lately) and the nodes
    every accounting_s  the accounts since the last poll, for jobs that came and went between two polls
    if jobs are missing the accounts of jobs that ran and are gone, or were requeued, to learn how they ended

A record always gives the same events (`fleetcast.ingest.slurm.jobs`), so reading it again is safe.
"""

import asyncio
import logging
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar, get_args

import msgspec

from fleetcast.clients.slurm import NoAccounting, SlurmClient, SlurmCommands, SlurmFolder, SlurmRest
from fleetcast.fleet.clock import Clock
from fleetcast.fleet.entities import Entities
from fleetcast.fleet.errors import ConfigError, RecordError, SourceError
from fleetcast.fleet.events import JobClass, JobEvent, NodeEvent
from fleetcast.fleet.topology import NodeSpec
from fleetcast.ingest.slurm import json as slurm_json
from fleetcast.ingest.slurm import text as slurm_text
from fleetcast.ingest.slurm.issued import IssuedJob
from fleetcast.ingest.slurm.job_numbers import JobNumbers, NumberedJob, parse_slurm_id
from fleetcast.ingest.slurm.jobs import REST, Site, SlurmJob, make_rest_finished_event, make_unexplained_end
from fleetcast.ingest.slurm.nodes import (
    Conditions,
    SlurmNode,
    count_numbered_gpus,
    find_changes,
    find_shares_per_gpu,
    make_node_specs,
)
from fleetcast.ingest.slurm.records import ReadRecords
from fleetcast.ingest.slurm.scan import Identity, JobScan, assign_attempt_numbers, identify_event
from fleetcast.ingest.source import Batch, Source, read_options
from fleetcast.ingest.tally import MAX_UNREAD_NAMES, RecordTally

logger = logging.getLogger(__name__)

OVERLAP_S = 120
GIVEN_UP_MS = 600_000  # how long the accounts may be silent about a job that is gone
RATE_WINDOW_MS = 60_000
LONGEST_S = 31_536_000.0  # of any period among the options
Parsed = TypeVar("Parsed")


class SlurmOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The options of the source `slurm`. docs/sources/slurm.md explains them."""

    name: str = "slurm"
    url: str = ""
    api_version: str = ""
    user: str = ""
    folder: str = ""
    shell: list[str] = []
    form: str = "auto"  # auto | json | text
    interval_s: float = 10.0
    accounting_s: float = 300.0  # 0: never
    lookback_s: float = 86_400.0
    timeout_s: float = 30.0
    prefix: str = ""
    cluster: str = ""
    classes: list[str] = []
    preemptible: list[str] = []
    cpu_jobs: bool = False


def read_site_options(options: SlurmOptions) -> Site:
    """Return the site that the options describe. Raises ConfigError that names the key and the value."""
    if options.url and options.folder:
        raise ConfigError("pipeline.sources slurm: url and folder exclude each other")
    if options.url and not options.url.startswith(("http://", "https://", "unix:/")):
        raise ConfigError(f"pipeline.sources slurm: url {options.url!r}, expected http://…, https://… or unix:/…")
    if options.form not in ("auto", "json", "text"):
        raise ConfigError(f"pipeline.sources slurm: form {options.form!r}, expected auto, json or text")
    for key in ("interval_s", "timeout_s"):
        if not 0 < getattr(options, key) <= LONGEST_S:
            expected = f"expected more than 0, at most {LONGEST_S:g}"
            raise ConfigError(f"pipeline.sources slurm: {key} {getattr(options, key)}, {expected}")
    for key in ("accounting_s", "lookback_s"):
        if not 0 <= getattr(options, key) <= LONGEST_S:
            expected = f"expected 0 or more, at most {LONGEST_S:g}"
            raise ConfigError(f"pipeline.sources slurm: {key} {getattr(options, key)}, {expected}")
    if not options.name:
        raise ConfigError("pipeline.sources slurm: name '', expected a name that no other source has")
    classes: dict[str, JobClass] = {}
    known: tuple[JobClass, ...] = get_args(JobClass)
    for text in options.classes:
        place, _, named = text.partition("=")
        class_ = next((class_ for class_ in known if class_ == named), None)
        if not place or class_ is None:
            wanted = f"PARTITION=CLASS, of the classes {', '.join(known)}"
            raise ConfigError(f"pipeline.sources slurm: classes {text!r}, expected {wanted}")
        classes[place] = class_
    return Site(options.prefix, options.cluster, classes, frozenset(options.preemptible), options.cpu_jobs)


def open_slurm_client(options: SlurmOptions) -> SlurmClient:
    if options.folder:
        return SlurmFolder(Path(options.folder))
    if options.url:
        return SlurmRest(options.url, options.api_version, options.user, options.timeout_s)
    return SlurmCommands(options.shell, options.timeout_s, {"json": True, "text": False}.get(options.form))


def decode_jobs(body: bytes, accounting: bool = False) -> ReadRecords[SlurmJob]:
    """Decode jobs from JSON or text. The first byte of the body shows which format it has.

    accounting: whether the body comes from the accounts.
    """
    if body.lstrip()[:1] == b"{":
        return slurm_json.decode_accounted_jobs(body) if accounting else slurm_json.decode_queued_jobs(body)
    return slurm_text.read_jobs(body)


def decode_nodes(body: bytes) -> ReadRecords[SlurmNode]:
    return slurm_json.read_nodes(body) if body.lstrip()[:1] == b"{" else slurm_text.read_nodes(body)


@dataclass(slots=True)
class PollState:
    """The state of the source between polls. The position omits `gone` and the last two fields.

    live: job that waits or runs → its attempt. nodes: node → its conditions, if it has any. gone: missing job →
    (attempt, time since which it is missing in Unix ms). prints: checksums of the facts issued about live jobs.
    numbers: Slurm number → the jobs that had it. queued, accounted: the identities of the events of the last polls.
    """

    since_ms: int = 0
    live: dict[str, int] = field(default_factory=dict)
    nodes: dict[str, Conditions] = field(default_factory=dict)
    gone: dict[str, tuple[int, int]] = field(default_factory=dict)
    prints: dict[str, IssuedJob] = field(default_factory=dict)
    numbers: dict[str, list[NumberedJob]] = field(default_factory=dict)
    queued: set[Identity] = field(default_factory=set)
    accounted: set[Identity] = field(default_factory=set)

    def copy(self) -> "PollState":
        """Return a copy that may be changed. The copies share their sets, because a set is only ever replaced."""
        return PollState(
            self.since_ms,
            dict(self.live),
            dict(self.nodes),
            dict(self.gone),
            dict(self.prints),
            dict(self.numbers),
            self.queued,
            self.accounted,
        )


class SlurmSource(Source):
    """The source `slurm` for one cluster."""

    reports_jobs = True

    def __init__(
        self, entities: Entities, clock: Clock, options: Mapping[str, Any], *, client: SlurmClient | None = None
    ) -> None:
        self.options = read_options("slurm", options, SlurmOptions)
        self.name = self.options.name
        self._site = read_site_options(self.options)
        self._clock = clock
        self._client = client or open_slurm_client(self.options)
        self._state = PollState()
        self._due_ms = self._accounts_due_ms = -(2**62)  # of the steady clock
        self._without_accounts = False
        self._up: bool | None = None
        self._bad = 0
        self._specs: Mapping[str, NodeSpec] = {}
        self._noted: Counter[str] = Counter()
        self.pending = RecordTally()  # of polls since the last batch
        self._took_ms = 0
        self._polled_ms: int | None = None
        self._rates: deque[tuple[int, int]] = deque(maxlen=1000)

    async def next(self) -> Batch:
        while True:
            wait_s = (self._due_ms - self._clock.steady_ms()) / 1000
            if wait_s > 0:
                await self._clock.sleep(wait_s)
            self._due_ms = self._clock.steady_ms() + round(self.options.interval_s * 1000)
            state = self._state.copy()
            try:
                batch = await self._poll(state)
            except SourceError:
                self._up = False
                raise
            self._up = True
            self._bad += len(batch.bad)
            self._rates.append((self._clock.now_ms(), len(batch)))
            self._state = state  # no await until the batch is taken: a snapshot holds both or neither
            self.pending = RecordTally.sum((self.pending, batch.get_tally()))
            if len(batch) or batch.bad:
                batch, self.pending = replace(batch, tally=self.pending), RecordTally()
                return batch

    def nodes(self) -> Mapping[str, NodeSpec]:
        """Return node → its hardware as Slurm knows it, for nodes with GPUs.

        The result is the same object until a node changes.
        """
        return self._specs

    def position(self) -> dict[str, Any]:
        state = self._state
        live = {**{job: attempt for job, (attempt, _) in state.gone.items()}, **state.live}
        return {
            "since_ms": state.since_ms,
            "live": live,
            "nodes": {name: dict(row) for name, row in state.nodes.items()},
            "prints": msgspec.to_builtins(state.prints),
            "numbers": msgspec.to_builtins(state.numbers),
        }

    def seek(self, position: dict[str, Any]) -> None:
        self._state = msgspec.convert(position, PollState)
        self._due_ms = self._accounts_due_ms = -(2**62)

    async def close(self) -> None:
        await self._client.close()

    def health(self) -> dict[str, Any]:
        """Return the source's row of the ingestion document.

        Rates are events per second of fleet time, over the last minute.
        """
        now_ms = self._clock.now_ms()
        recent = [count for at_ms, count in self._rates if at_ms > now_ms - RATE_WINDOW_MS]
        return {
            "name": self.name,
            "kind": "slurm",
            "rate_per_s": round(sum(recent) * 1000 / RATE_WINDOW_MS, 2),
            "lag_s": None if self._polled_ms is None else round(max(0, now_ms - self._polled_ms) / 1000, 3),
            "bad": self._bad,
            "up": self._up is not False,
            "jobs": len(self._state.live),
            "nodes_out": len(self._state.nodes),
            "accounting": not self._without_accounts,
            "poll_ms": self._took_ms,
            "noted": dict(self._noted),
        }

    async def _poll(self, state: PollState) -> Batch:
        """Poll everything that is due, update `state`, and return the new records.

        Raises SourceError. The caller must then discard `state`.
        """
        began_ms, now_ms = self._clock.steady_ms(), self._clock.now_ms()
        queue_body, nodes_body = await self._client.read_queue(), await self._client.read_nodes()
        queue = _check_answer(await asyncio.to_thread(decode_jobs, queue_body), "the queue")
        nodes = (
            _check_answer(await asyncio.to_thread(decode_nodes, nodes_body), "the nodes")
            if nodes_body
            else ReadRecords()
        )
        site = replace(
            self._site, shares_of_gpu=find_shares_per_gpu(nodes.rows), numbered_gpus=count_numbered_gpus(nodes.rows)
        )
        scan = JobScan(site, now_ms, state.prints)
        numbers = JobNumbers(state.numbers)
        await asyncio.to_thread(scan.add_jobs, numbers.name_all_jobs(queue.rows), state.queued)
        queue_unclear = {self._site.prefix + numbers.find_newest_name(job) for job in queue.doubled}
        scan.keep_unclear_attempts(queue_unclear, state.live)
        self._noted["jobs_without_gpus"] = scan.without_gpus
        _record_missing_attempts(state, scan)
        bad = [*queue.bad, *scan.bad]
        events = [*scan.fresh, *_end_unlisted_array_rests(state, scan)] + await self._poll_accounts(state, scan, bad)
        if nodes_body and (specs := make_node_specs(nodes.rows)) != self._specs:
            self._specs = specs
        node_events = _update_nodes(state, nodes.rows, self.name, now_ms)
        bad += nodes.bad
        state.queued, state.live = scan.issued, scan.live
        missing = {job: row for job, row in state.prints.items() if job in state.gone or job in queue_unclear}
        state.prints = {**missing, **scan.prints}
        self._polled_ms = now_ms
        self._took_ms = self._clock.steady_ms() - began_ms
        self._noted["text_replaced"] = queue.replaced + nodes.replaced
        tally = scan.make_tally(len(nodes.rows), len(bad))
        bad += scan.unread
        names = tuple(f"state {state}" for state in sorted(scan.unknown_states))
        unknown_fields = queue.unknown_fields + nodes.unknown_fields + len(names)
        tally = replace(tally, names=names[:MAX_UNREAD_NAMES], unknown_fields=unknown_fields)
        return Batch(events=tuple(events), node_events=tuple(node_events), bad=tuple(bad), tally=tally)

    async def _poll_accounts(self, state: PollState, scan: JobScan, bad: list[RecordError]) -> list[JobEvent]:
        """Poll the accounts for all jobs if that is due, and for missing jobs. Returns the new events."""
        events: list[JobEvent] = []
        try:
            if self.options.accounting_s and not self._without_accounts:
                events += await self._poll_recent_accounts(state, scan, bad)
            if state.gone and not self._without_accounts:
                names = [parse_slurm_id(job.removeprefix(self._site.prefix)) for job in state.gone]
                found = await self._query_accounts((0, names), state, scan, bad)
                events += found.fresh
        except NoAccounting as error:
            self._without_accounts = True
            logger.warning("%s: %s; how jobs ended is known while slurmctld remembers them", self.name, error)
        except SourceError as error:
            self._noted["accounting_away"] += 1
            logger.warning("%s: accounts: %s, asking again with the next poll", self.name, error)
        return events + self._end_missing_jobs(state, scan)

    async def _poll_recent_accounts(self, state: PollState, scan: JobScan, bad: list[RecordError]) -> list[JobEvent]:
        if self._clock.steady_ms() < self._accounts_due_ms:
            return []
        since_ms = state.since_ms or scan.now_ms - round(self.options.lookback_s * 1000)
        found = await self._query_accounts((max(0, scan.now_ms - since_ms) // 1000 + OVERLAP_S, ()), state, scan, bad)
        events = [event for event in found.fresh if identify_event(event) not in state.accounted]
        state.accounted, state.since_ms = found.issued, scan.now_ms
        self._accounts_due_ms = self._clock.steady_ms() + round(self.options.accounting_s * 1000)
        return events

    async def _query_accounts(
        self, which: tuple[int, Sequence[str]], state: PollState, scan: JobScan, bad: list[RecordError]
    ) -> JobScan:
        """Query the accounts, and return the evaluation of the answer. Jobs that ended are no longer missing.

        which: (how many seconds back, or 0; ids of Slurm jobs, or none for all).
        """
        found = JobScan(scan.site, scan.now_ms, state.prints)
        known = {**state.live, **{job: attempt for job, (attempt, _) in state.gone.items()}}
        issued = scan.issued | state.queued
        for answer in await self._client.read_accounting(*which):
            read = _check_answer(await asyncio.to_thread(decode_jobs, answer, True), "an answer")
            bad += read.bad
            placed = JobNumbers(state.numbers).name_all_jobs(sorted(read.rows, key=_get_submit_ms))
            asked = [row for row in placed if not which[1] or self._site.prefix + row.id in known]
            rows = assign_attempt_numbers(asked, self._site.prefix, scan, known)
            found.repeated += len(read.rows) - len(rows)
            await asyncio.to_thread(found.add_jobs, rows, issued, is_queue=False)
        bad += found.bad
        scan.add_counts(found)
        state.gone = {job: row for job, row in state.gone.items() if (job, row[0]) not in found.ended}
        return found

    def _end_missing_jobs(self, state: PollState, scan: JobScan) -> list[JobEvent]:
        """Return an end for each job that has been missing for too long to expect a record.

        These jobs are no longer missing.
        """
        patience_ms = GIVEN_UP_MS if self.options.accounting_s and not self._without_accounts else 0
        lost = {job: row for job, row in state.gone.items() if scan.now_ms - row[1] >= patience_ms}
        self._noted["ends_not_told"] += len(lost)
        for job in lost:
            del state.gone[job]
        return [
            make_unexplained_end(job, attempt, scan.submitted.get(job, since_ms))
            for job, (attempt, since_ms) in lost.items()
        ]


def _check_answer(read: ReadRecords[Parsed], what: str) -> ReadRecords[Parsed]:
    """Return the answer unchanged. Raises SourceError if it has bad records and no good one.

    Such an answer is ignored, so it ends no job.
    """
    if read.bad and not read.rows:
        raise SourceError(f"{what} cannot be read: {read.bad[0]}", retry_after_s=10.0)
    return read


def _end_unlisted_array_rests(state: PollState, scan: JobScan) -> list[JobEvent]:
    """Return a `finished` event for each array whose remaining tasks Slurm no longer lists as one record."""
    rests = (job for job in state.live if parse_slurm_id(job).endswith(REST))
    return [make_rest_finished_event(job, scan.now_ms) for job in rests if job not in scan.attempts]


def _record_missing_attempts(state: PollState, scan: JobScan) -> None:
    """Record the attempts whose end is unknown: their job is gone, or has a later attempt."""
    for job, attempt in state.live.items():
        if parse_slurm_id(job).endswith(REST):
            continue
        if scan.attempts.get(job, 0) != attempt and (job, attempt) not in scan.ended:
            state.gone.setdefault(job, (attempt, scan.now_ms))
    for job, (attempt, _) in list(state.gone.items()):
        if (job, attempt) in scan.ended or scan.live.get(job) == attempt:
            del state.gone[job]


def _update_nodes(state: PollState, nodes: Sequence[SlurmNode], source: str, now_ms: int) -> list[NodeEvent]:
    """Return the events of the nodes since the last poll, and update their conditions in `state`."""
    events: list[NodeEvent] = []
    for node in nodes:
        fields, now = find_changes(node, state.nodes.get(node.name, {}), source, now_ms)
        events += fields
        state.nodes[node.name] = now
        if not now:
            del state.nodes[node.name]
    return events


def _get_submit_ms(job: SlurmJob) -> int:
    return job.submit_ms or 0
