"""An exception of one source never ends the pipeline: it is counted and told, and the source starts again."""

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from fleetcast.fleet.clock import ManualClock
from fleetcast.fleet.errors import SourceError
from fleetcast.fleet.events import Finished, Started, Submitted
from fleetcast.fleet.topology import NodeSpec, Topology
from fleetcast.ingest.inbox.inbox import InboxSource, InboxWriter
from fleetcast.ingest.source import Batch, MemorySource
from fleetcast.ingest.tally import RunningTally
from fleetcast.service.board.board import BoardReader
from fleetcast.service.config import Config
from fleetcast.service.pipeline.guarded_source import LONGEST_S, SETTLES_S, GuardedSource
from fleetcast.service.pipeline.pipeline import Pipeline

NOW_MS = 1_789_000_000_000
BATCHES = tuple(Batch(events=(Finished(job="j", sequence=number, time_ms=NOW_MS),)) for number in range(5))


class Wall:
    """Seconds that a test moves."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


class Faulty(MemorySource):
    """Its cursor moves on before it raises, as that of a decoder with a bug would; `ends` after its batches."""

    def __init__(self, fails_at: Sequence[int], error: Callable[[], BaseException]) -> None:
        super().__init__(BATCHES, ends=True)
        self.fails_at, self.error, self.closed = list(fails_at), error, False

    async def next(self) -> Batch:
        assert not self.closed, "a source that was closed was asked again"
        if self._next in self.fails_at:
            self.fails_at.remove(self._next)
            self._next += 1
            raise self.error()
        return await super().next()

    async def close(self) -> None:
        self.closed = True


def sequences(batch: Batch) -> list[int]:
    return [event.sequence for event in batch.events]


async def drained(source: GuardedSource, wall: Wall | None = None) -> tuple[list[int], list[float]]:
    """Sequences of what it gave, and the waits that it asked for."""
    got: list[int] = []
    waits: list[float] = []
    while True:
        try:
            got += sequences(await source.next())
        except SourceError as error:
            waits.append(error.retry_after_s)
        except StopAsyncIteration:
            return got, waits
        if wall is not None:
            wall.now_s += 0.4


def faulty(fails_at: list[int], error: Callable[[], BaseException], wall: Wall) -> GuardedSource:
    return GuardedSource(Faulty(fails_at, error), lambda: Faulty(fails_at[1:], error), wall)


@pytest.mark.parametrize("fails_at", range(5))
@pytest.mark.parametrize(
    "error", [lambda: KeyError("x"), lambda: UnicodeDecodeError("utf-8", b"\xff", 0, 1, "?"), asyncio.CancelledError]
)
def test_nothing_is_missed_when_a_source_raises_what_it_may_not(
    fails_at: int, error: Callable[[], BaseException]
) -> None:
    wall = Wall()
    source = faulty([fails_at], error, wall)
    got, waits = asyncio.run(drained(source, wall))
    assert set(got) == set(range(5))
    assert waits == [1.0]
    assert source.errors == 1


def test_the_back_off_doubles_up_to_a_minute_and_begins_anew_after_a_minute_without_an_error() -> None:
    wall = Wall()
    hopeless = [[0] for _ in range(9)]
    source = GuardedSource(
        Faulty([0], ValueError), lambda: Faulty(hopeless.pop() if hopeless else [], ValueError), wall
    )
    got, waits = asyncio.run(drained(source))
    assert waits == [1, 2, 4, 8, 16, 32, 60, 60, 60, 60]
    assert got == [0, 1, 2, 3, 4]
    wall.now_s += 2 * LONGEST_S + 1
    again = source._mark_broken(ValueError())
    assert again.retry_after_s == 1.0


def test_a_snapshot_of_a_broken_source_holds_the_position_of_what_was_folded() -> None:
    async def scenario() -> None:
        wall = Wall()
        source = faulty([2], TypeError, wall)
        for _ in range(2):
            await source.next()
            wall.now_s += 2
        with pytest.raises(SourceError):
            await source.next()
        assert source.position() == {"next": 2}

    asyncio.run(scenario())


def test_somebody_who_cancels_the_pipeline_is_obeyed() -> None:
    async def scenario() -> None:
        source = GuardedSource(MemorySource(), MemorySource)
        work = asyncio.create_task(source.next())
        await asyncio.sleep(0)
        work.cancel()
        with pytest.raises(asyncio.CancelledError):
            await work
        assert source.errors == 0

    asyncio.run(scenario())


class Broken(MemorySource):
    """Every method but `next` raises."""

    def __getattribute__(self, name: str) -> Any:
        if name in ("health", "models", "backlog_bytes", "begins", "prune", "position", "close", "seek"):
            raise RuntimeError(f"no {name}")
        return super().__getattribute__(name)


def test_no_method_of_a_source_raises_into_the_pipeline() -> None:
    source = GuardedSource(Broken(BATCHES), lambda: Broken(BATCHES))
    assert source.position() == {}
    assert source.models() == {}
    assert source.backlog_bytes() == 0
    assert source.begins() is False
    source.prune({})
    (row,) = source.health()
    assert (row["name"], row["errors"], row["last_error"]) == ("memory", 6, "health(): RuntimeError: no health")
    source.seek({"next": 1})
    assert source.errors == 7
    asyncio.run(source.close())
    assert source.errors == 8


@pytest.mark.parametrize(
    ("method", "nonsense"),
    [("position", [1]), ("position", {"x": object()}), ("health", {"x": object()}), ("health", 7), ("models", {1: 2})],
)
def test_answers_that_are_nonsense_are_errors_of_the_source(
    method: str, nonsense: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    inner = MemorySource()
    monkeypatch.setattr(inner, method, lambda: nonsense, raising=False)
    source = GuardedSource(inner, MemorySource)
    getattr(source, method)()
    assert source.errors == 1


def test_a_source_that_gives_what_is_no_batch_is_started_again() -> None:
    class Wrong(MemorySource):
        async def next(self) -> Any:
            return None

    source = GuardedSource(Wrong(), lambda: MemorySource(BATCHES, ends=True))
    got, waits = asyncio.run(drained(source))
    assert (got, waits) == ([0, 1, 2, 3, 4], [1.0])
    assert "expected a Batch" in source.last_error


def test_a_source_that_cannot_be_made_again_is_tried_on() -> None:
    makes = iter([OSError("no certificate"), None])

    def make() -> MemorySource:
        if error := next(makes):
            raise error
        return MemorySource(BATCHES, ends=True)

    source = GuardedSource(Faulty([0], ValueError), make)
    assert asyncio.run(drained(source)) == ([0, 1, 2, 3, 4], [1.0, 2.0])


def test_its_row_says_what_is_wrong_until_it_has_run_for_some_seconds() -> None:
    async def scenario() -> None:
        wall = Wall()
        source = faulty([0], lambda: ValueError("a bug"), wall)
        none = RunningTally().make_document()
        fine = {"errors": 0, "last_error": "", "failing": False, "records": none}
        assert source.health() == [{"name": "memory", **fine}]
        with pytest.raises(SourceError, match="ValueError: a bug"):
            await source.next()
        wrong = {"errors": 1, "last_error": "next(): ValueError: a bug", "failing": True, "up": False}
        assert source.health() == [{"name": "memory", **wrong, "records": none}]
        await source.next()
        assert source.health()[0]["failing"]
        wall.now_s += SETTLES_S
        row = source.health()[0]
        assert (row["failing"], row["errors"], row.get("up")) == (False, 1, None)

    asyncio.run(scenario())


def test_what_a_source_raises_is_told_without_its_secrets() -> None:
    async def scenario() -> None:
        source = faulty([0], lambda: OSError("https://me:hunter2@host/x?token=abcdefgh is away"), Wall())
        with pytest.raises(SourceError) as raised:
            await source.next()
        told = f"{raised.value} {source.describe_trouble()} {source.health()}"
        assert "https://***@host/x?token=*** is away" in told
        assert "hunter2" not in told
        assert "abcdefgh" not in told

    asyncio.run(scenario())


def submitted(job: str) -> Batch:
    return Batch(events=(Submitted(job=job, sequence=0, time_ms=NOW_MS),))


def test_the_pipeline_goes_on_and_takes_from_the_others_while_one_source_fails(tmp_path: Path) -> None:
    """The one that fails is named on the board, and what it holds is taken when it works again."""

    bugs = [0, 0]

    class Moody(MemorySource):
        async def next(self) -> Batch:
            if bugs:
                bugs.pop()
                raise ZeroDivisionError("a bug")
            return await super().next()

    async def scenario() -> tuple[set[str], list[dict[str, Any]]]:
        config, topology = Config(state=str(tmp_path)), Topology.build([NodeSpec("n1", 8)])
        sources = lambda _: [Moody([submitted("late")], name="moody"), MemorySource([submitted("at once")])]  # noqa: E731
        pipeline = Pipeline(config, ManualClock(NOW_MS), topology, sources)
        work = asyncio.create_task(pipeline.run())
        reader = BoardReader(config.board)
        rows: list[dict[str, Any]] = []
        try:
            while len(list(pipeline.state.jobs)) < 2:
                assert not work.done(), work
                board = reader.latest()
                rows = rows or ([] if board is None else board.json("doc.ingestion")["sources"])
                await asyncio.sleep(0.01)
        finally:
            work.cancel()
            with suppress(asyncio.CancelledError):
                await work
            await pipeline.close()
        return {attempt.job for attempt in pipeline.state.jobs}, rows

    jobs, rows = asyncio.run(asyncio.wait_for(scenario(), 30))
    assert jobs == {"late", "at once"}
    assert [(row["name"], row["failing"]) for row in rows] == [("moody", True), ("memory", False)]
    assert rows[0]["last_error"] == "next(): ZeroDivisionError: a bug"


def test_while_the_inbox_cannot_be_read_nothing_is_placed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Jobs may run of which it tells; the placer refuses with the sentence of the board."""

    async def scenario() -> dict[str, Any]:
        config = Config(state=str(tmp_path))
        writer = InboxWriter(config.inbox, "api")
        await writer.append([b"{}"], NOW_MS)
        await writer.close()
        monkeypatch.setattr("fleetcast.ingest.inbox.inbox.decode_records", lambda *_: 1 / 0)
        pipeline = Pipeline(
            config, ManualClock(NOW_MS), Topology.build([NodeSpec("n1", 8)]), lambda _: [InboxSource(config.inbox)]
        )
        with pytest.raises(SourceError):
            await pipeline.sources[0].next()
        assert pipeline.sources[0].position() == {}, "what was not folded is read again"
        await pipeline.tick()
        board = BoardReader(config.board).latest()
        assert board is not None
        meta: dict[str, Any] = board.json("meta")
        return meta

    meta = asyncio.run(scenario())
    assert not meta["occupancy_known"]
    assert "the source inbox fails (next(): ZeroDivisionError" in meta["occupancy_unknown"]


def test_a_bug_of_the_fold_still_ends_the_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pipeline = Pipeline(
        Config(state=str(tmp_path)),
        ManualClock(NOW_MS),
        Topology.build([NodeSpec("n1", 8)]),
        lambda _: [MemorySource([Batch(events=(Started(job="j", sequence=1, time_ms=NOW_MS, nodes=("n1",)),))])],
    )
    monkeypatch.setattr(pipeline.state, "apply", lambda *_: 1 / 0)
    with pytest.raises(ExceptionGroup) as raised:
        asyncio.run(asyncio.wait_for(pipeline.run(), 30))
    assert raised.group_contains(ZeroDivisionError)
