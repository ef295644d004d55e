"""A guard around each source of a pipeline. It counts and logs errors, and restarts the source.

    next() raises a forbidden error ── counted, logged once ── wait 1 s, 2 s, … 60 s ── make it again ── seek ── next()

The new source continues at the last recorded position. Batches after this position arrive twice, which
changes nothing.
"""

import asyncio
import functools
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from typing import Any, TypeVar

import msgspec

from fleetcast.fleet.entities import Entities
from fleetcast.fleet.errors import SourceError
from fleetcast.fleet.redaction import redact_secrets
from fleetcast.fleet.topology import NodeSpec
from fleetcast.ingest.inbox.inbox import InboxSource
from fleetcast.ingest.source import Batch, Source
from fleetcast.ingest.tally import RecordTally, RunningTally
from fleetcast.service.answers.fleet import SourceHealth
from fleetcast.service.pipeline.inventory import merge_node_specs

logger = logging.getLogger(__name__)

FIRST_S, LONGEST_S = 1.0, 60.0  # wall, of waiting between two starts
POSITION_INTERVAL_S = 1.0  # wall; how often the position is noted
SETTLES_S = 5.0  # wall; a source that was started again and has not failed for so long is up
CLOSE_S = 10.0  # wall; how long one that failed may take to give back what it holds
ERROR_CHARACTERS = 300
CATCH_UP_POLL_S, CATCH_UP_POLLS = 0.02, 50  # wall

Answer = TypeVar("Answer")
Makers = Callable[[Entities], Sequence[Source]]


def guard_sources(make_all: Makers, entities: Entities) -> "list[GuardedSource]":
    """Make all sources, and return them guarded. A source that fails later is made again.

    An error while they are first made is a configuration error, so this function raises it.
    """

    def remake_source(number: int) -> Source:
        return make_all(entities)[number]

    return [GuardedSource(one, functools.partial(remake_source, at)) for at, one in enumerate(make_all(entities))]


async def read_batches(source: "GuardedSource", room: Callable[[], Awaitable[None]]) -> AsyncIterator[Batch]:
    """Yield all batches of a source until its end. Await `room` before each batch.

    While the source is unreachable, retry, and log each new reason once.
    """
    trouble = ""
    while True:
        await room()
        try:
            batch = await source.next()
        except SourceError as error:
            if str(error) != trouble:
                trouble = str(error)
                logger.warning("%s: %s, trying again every %.0f s", source.name, trouble, error.retry_after_s)
            await asyncio.sleep(error.retry_after_s)
            continue
        except StopAsyncIteration:
            logger.info("%s: at its end", source.name)
            return
        if trouble:
            trouble = ""
            logger.info("%s: answers again", source.name)
        yield batch


def merge_gpu_models(sources: "Sequence[GuardedSource]") -> dict[str, str]:
    """Return node → the GPU model that the sources report."""
    return {node: model for source in sources for node, model in source.models().items()}


def merge_source_nodes(sources: "Sequence[GuardedSource]") -> dict[str, NodeSpec]:
    """Return node → the NodeSpec that the sources report.

    If several sources report a fact, the first one wins.
    """
    found: dict[str, NodeSpec] = {}
    for source in sources:
        for name, spec in source.nodes().items():
            found[name] = merge_node_specs(found[name], spec) if name in found else spec
    return found


def merge_bound_gpus(sources: "Sequence[GuardedSource]") -> dict[str, Mapping[str, int]]:
    """Return job → node → number of GPUs that the job holds before it starts.

    If several sources know the job, the first one wins.
    """
    return {job: on_nodes for source in reversed(sources) for job, on_nodes in source.bound().items()}


async def wait_for_backlog(sources: "Sequence[GuardedSource]", held_up: Callable[[], bool]) -> None:
    """Wait until the records on disk are applied. Otherwise, GPUs of their jobs would look free at first.

    Stop waiting if the backlog no longer shrinks, for example because of a torn tail or fast senders. While
    the archive delays the sources, continue to wait.
    held_up: returns whether the archive delays the sources.
    """
    left, polls = _sum_backlog_bytes(sources), 0  # not seconds: a process that was stopped has read nothing meanwhile
    while left and polls < CATCH_UP_POLLS:
        await asyncio.sleep(CATCH_UP_POLL_S)
        now = _sum_backlog_bytes(sources)
        polls = 0 if now < left or held_up() else polls + 1
        left = min(left, now)


def _sum_backlog_bytes(sources: "Sequence[GuardedSource]") -> int:
    """Return how many bytes on disk the sources have not read yet."""
    return sum(source.backlog_bytes() for source in sources)


def describe_unreadable_inbox(sources: "Sequence[GuardedSource]") -> str:
    """Describe why the inbox is unreadable. Returns "" if it is readable.

    While it is unreadable, unknown jobs may run.
    """
    troubles = (source.describe_trouble() for source in sources if source.name == InboxSource.name)
    return next((f"what runs where is not known: {trouble}" for trouble in troubles if trouble), "")


class GuardedSource:
    """A source that raises only SourceError. After this error, the pipeline waits and retries."""

    def __init__(self, source: Source, make: Callable[[], Source], now_s: Callable[[], float] = time.monotonic) -> None:
        """Wrap a source.

        `make` makes the source again, as it was before its first `next`. `now_s` is a monotonic wall clock.
        """
        self.name = source.name
        self.errors = 0
        self.last_error = ""
        self._source = source
        self._make = make
        self._now_s = now_s
        self._broken = False
        self._back_off_s = FIRST_S
        self._failed_s = self._started_s = float("-inf")
        self._noted_s = now_s()  # where it begins is no news
        self._position = b"{}"  # JSON; everything before it is folded
        self._health: list[SourceHealth] = []
        self._models: dict[str, str] = {}
        self._tally = RunningTally()
        self._nodes: Mapping[str, NodeSpec] = {}
        self._bound: Mapping[str, Mapping[str, int]] = {}

    @property
    def misses(self) -> bool:
        return self._source.misses

    @property
    def reports_jobs(self) -> bool:
        return self._source.reports_jobs

    async def next(self) -> Batch:
        """Return the next batch.

        Raises SourceError while the source is unreachable or broken. Raises StopAsyncIteration at its end.
        """
        try:
            if self._broken:
                await self._restart_source()
            elif self._now_s() >= self._noted_s + POSITION_INTERVAL_S:
                self.position()  # what `next` gave before is folded by now
            batch = await self._source.next()  # no await from here on: a position covers what was returned
            if not isinstance(batch, Batch):
                raise TypeError(f"next() gave {type(batch).__name__}, expected a Batch")
        except (SourceError, StopAsyncIteration):
            raise
        except asyncio.CancelledError as error:
            if _is_task_cancelled():
                raise
            raise self._mark_broken(error) from None
        except Exception as error:
            raise self._mark_broken(error) from None
        self._tally.add_tally(batch.get_tally())
        return batch

    def describe_trouble(self) -> str:
        """Describe what is wrong while the source is broken, and shortly afterwards. Returns "" otherwise."""
        if not self._broken and self._now_s() >= self._started_s + SETTLES_S:
            return ""
        return f"the source {self.name} fails ({self.last_error}), {self.errors} errors so far; it is started again"

    def position(self) -> dict[str, Any]:
        """Return the source's position. While it is broken, return the position at which it will restart."""
        noted = (
            None if self._broken else self._call_source("position()", lambda: _encode_position(self._source.position()))
        )
        if noted is not None:
            self._position, self._noted_s = noted, self._now_s()
        return dict(msgspec.json.decode(self._position))

    def seek(self, position: Mapping[str, Any]) -> None:
        self._position = msgspec.json.encode(position)
        try:
            self._source.seek(dict(position))
        except Exception as error:
            self._mark_broken(error)

    def health(self) -> list[SourceHealth]:
        """Return the source's rows for the ingestion document.

        The first row also has `errors` and `records` since the start, `last_error` and `failing`.
        """
        self._health = (
            self._call_source("health()", lambda: _convert_health_rows(self.name, self._source.health()))
            or self._health
        )
        rows: list[SourceHealth] = self._health or [{"name": self.name}]
        failing = bool(self.describe_trouble())
        if failing:
            rows = [{**row, "up": False} for row in rows]
        reply = {"errors": self.errors, "last_error": self.last_error, "failing": failing}
        reply["records"] = self._tally.make_document(
            self._call_source("pending", lambda: _check_tally(self._source.pending))
        )
        return [{**rows[0], **reply}, *rows[1:]]

    def models(self) -> dict[str, str]:
        """Return node → GPU model. While the source fails, return its last answer."""
        reply = self._call_source("models()", lambda: msgspec.convert(self._source.models(), dict[str, str]))
        self._models = self._models if reply is None else reply
        return self._models

    def nodes(self) -> Mapping[str, NodeSpec]:
        """Return node → the NodeSpec that the source reports. While the source fails, return its last answer."""
        stated = self._call_source("nodes()", lambda: _check_nodes(self._source.nodes()))
        self._nodes = self._nodes if stated is None else stated
        return self._nodes

    def bound(self) -> Mapping[str, Mapping[str, int]]:
        """Return job → node → GPUs that the job holds before its start.

        While the source fails, return its last answer.
        """
        stated = self._call_source("bound()", lambda: msgspec.convert(self._source.bound(), dict[str, dict[str, int]]))
        self._bound = self._bound if stated is None else stated
        return self._bound

    def backlog_bytes(self) -> int:
        return self._call_source("backlog_bytes()", lambda: int(self._source.backlog_bytes())) or 0

    def begins(self) -> bool:
        return self._call_source("begins()", lambda: bool(self._source.begins())) or False

    def prune(self, position: Mapping[str, Any]) -> None:
        self._call_source("prune()", lambda: self._source.prune(dict(position)))

    async def close(self) -> None:
        await self._close_source(self._source)

    def _call_source(self, where: str, ask: Callable[[], Answer]) -> Answer | None:
        """Return the source's answer. If the call fails, count the error and return None."""
        try:
            return ask()
        except Exception as error:
            self._record_error(where, error)
            return None

    async def _restart_source(self) -> None:
        old, self._source = self._source, self._make()
        if old is not self._source:
            await self._close_source(old)
        self._source.seek(msgspec.json.decode(self._position))
        self._broken, self._started_s = False, self._now_s()
        self._noted_s = self._started_s
        logger.info("%s: started again, going on at its last position", self.name)

    async def _close_source(self, source: Source) -> None:
        try:
            await asyncio.wait_for(source.close(), CLOSE_S)
        except Exception as error:
            self._record_error("close()", error)

    def _mark_broken(self, error: BaseException) -> SourceError:
        """Mark the source as broken, and return the SourceError to raise.

        After a minute without an error, the back-off starts again at its shortest wait.
        """
        self._record_error("next()", error)
        now_s = self._now_s()
        rested = now_s > self._failed_s + self._back_off_s + LONGEST_S
        self._back_off_s = FIRST_S if rested else min(LONGEST_S, 2 * self._back_off_s)
        self._broken, self._failed_s = True, now_s
        return SourceError(f"fails ({self.last_error})", self._back_off_s)

    def _record_error(self, where: str, error: BaseException) -> None:
        """Count an error. If it differs from the last one, log its traceback.

        Every client may read `last_error` at `/readyz`, so secrets are redacted.
        """
        self.errors += 1
        said = redact_secrets(f"{where}: {type(error).__name__}: {error}")[:ERROR_CHARACTERS]
        if said != self.last_error:
            logger.error("%s: %s, a bug of this source: the others go on", self.name, said, exc_info=error)
        self.last_error = said


def _is_task_cancelled() -> bool:
    """Return whether this task is being cancelled, and not only a task that the source awaits."""
    task = asyncio.current_task()
    return task is None or task.cancelling() > 0


def _check_tally(pending: Any) -> RecordTally:
    if not isinstance(pending, RecordTally):
        raise TypeError(f"pending is {type(pending).__name__}, expected a RecordTally")
    return pending


def _encode_position(position: Any) -> bytes:
    if not isinstance(position, dict):
        raise TypeError(f"position() gave {type(position).__name__}, expected a dict")
    return msgspec.json.encode(position)


def _check_nodes(answer: Any) -> Mapping[str, NodeSpec]:
    """Check that a source's answer maps names to NodeSpec, and return it. Raises TypeError if it does not."""
    if not isinstance(answer, Mapping) or not all(isinstance(spec, NodeSpec) for spec in answer.values()):
        raise TypeError(f"nodes() gave {type(answer).__name__}, expected a mapping of names to NodeSpec")
    return answer


def _convert_health_rows(name: str, answer: Any) -> list[SourceHealth]:
    """Convert a source's health answer into rows of the ingestion document. Raises TypeError or ValueError."""
    rows = [{"name": name, **row} for row in (answer if isinstance(answer, list) else [answer])]
    return list(msgspec.json.decode(msgspec.json.encode(rows)))
