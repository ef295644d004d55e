"""The pipeline: what is on disk comes first, signals are not lost, a full disk ends nothing."""

import asyncio
import errno
import functools
import math
import re
import resource
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import pytest

from fleetcast.fleet.clock import Clock, ManualClock, SystemClock
from fleetcast.fleet.entities import Entities
from fleetcast.fleet.errors import ConfigError, SourceError
from fleetcast.fleet.events import Finished, NodeEvent, Started, Submitted
from fleetcast.fleet.samples import EntityKind, SampleBatch
from fleetcast.fleet.topology import NodeSpec, Topology
from fleetcast.ingest.inbox.inbox import InboxSource, InboxWriter
from fleetcast.ingest.pages.recorded import PageReplay, ReplaySpeed
from fleetcast.ingest.source import Batch, MemorySource, Source
from fleetcast.models.risk.node_risk import RiskFit
from fleetcast.service.board.board import BoardReader
from fleetcast.service.board.urgent import XID
from fleetcast.service.config import Config, PipelineConfig, PluginConfig, ScrapeConfig
from fleetcast.service.pipeline.demand.forecasts import DemandForecasts
from fleetcast.service.pipeline.pipeline import Pipeline
from fleetcast.service.pipeline.role import open_sources, raise_open_file_limit
from fleetcast.service.pipeline.state import FleetState
from tests.ingest.amd_pages import amd_page

NOW_MS = 1_789_000_000_000
JOBS = 8


class Trickle(InboxSource):
    """An inbox on a slow disk: nothing comes before `LATE_S`."""

    LATE_S = 0.3

    async def next(self) -> Batch:
        await asyncio.sleep(self.LATE_S)
        return await super().next()


def started(number: int) -> bytes:
    event = {"job": f"j{number}", "sequence": 1, "time_ms": NOW_MS - 1000, "type": "started"}
    ranks = [{"rank": 0, "node": "n1", "gpus": [number % 8]}]
    return msgspec.json.encode(event | {"ranks": ranks, "attempt": 1})


async def first_board(folder: Path, torn: bytes = b"") -> tuple[int, int]:
    """How many jobs run on the first board that a starting pipeline publishes, and when demand is first forecast."""
    config = Config(state=str(folder))
    writer = InboxWriter(config.inbox, "api")
    await writer.append([started(number) for number in range(JOBS)], NOW_MS)
    await writer.close()
    with next(config.inbox.glob("*-*")).open("ab") as segment:
        segment.write(torn)
    topology = Topology.build([NodeSpec("n1", 8)])
    pipeline = Pipeline(config, ManualClock(NOW_MS), topology, lambda _: [Trickle(config.inbox)])
    reader, forecast = BoardReader(config.board), asyncio.Event()
    known: list[int] = []

    async def look(state: FleetState) -> None:
        known.append(len(state.jobs.list_running()))
        forecast.set()

    pipeline.capabilities[DemandForecasts].forecast = look  # type: ignore[method-assign]
    work = asyncio.create_task(pipeline.run())
    try:
        while (board := reader.latest()) is None:
            await asyncio.sleep(0.005)
        await forecast.wait()
        return len(board.json("occupancy")["running"]), known[0]
    finally:
        work.cancel()
        with suppress(asyncio.CancelledError):
            await work
        await pipeline.close()


@pytest.mark.parametrize("torn", [b"", b"\x07"], ids=["whole", "torn tail"])
def test_the_first_board_and_the_first_forecast_know_every_job_on_disk(tmp_path: Path, torn: bytes) -> None:
    assert asyncio.run(asyncio.wait_for(first_board(tmp_path, torn), 20)) == (JOBS, JOBS)


def test_the_fitted_models_of_the_configuration_serve(tmp_path: Path) -> None:
    (tmp_path / "node_risk.json").write_bytes(msgspec.json.encode(RiskFit(version=7, kinds={})))
    config = Config(state=str(tmp_path / "state"), pipeline=PipelineConfig(models=str(tmp_path)))
    pipeline = Pipeline(config, ManualClock(NOW_MS), Topology.build([NodeSpec("n1", 8)]), lambda _: [])
    asyncio.run(pipeline.tick())
    board = BoardReader(config.board).latest()
    assert board is not None
    assert board.json("meta")["models"]["risk"] == board.meta("node.risk")["model"] == "rules+logistic-7"


def small(folder: Path, source: MemorySource | None = None) -> Pipeline:
    topology = Topology.build([NodeSpec("n1", 8)])
    return Pipeline(Config(state=str(folder)), ManualClock(NOW_MS), topology, lambda _: [source or MemorySource()])


def life(job: str, *, end_ms: int = NOW_MS) -> Batch:
    return Batch(
        events=(
            Submitted(job=job, sequence=0, time_ms=end_ms),
            Started(job=job, sequence=1, time_ms=end_ms, nodes=("n1",)),
            Finished(job=job, sequence=2, time_ms=end_ms),
        )
    )


def document(folder: Path, name: str) -> Any:
    board = BoardReader(Config(state=str(folder)).board).latest()
    assert board is not None
    return board.json(name)


def test_an_ended_job_is_listed_once_however_often_it_is_told(tmp_path: Path) -> None:
    pipeline = small(tmp_path)
    for _ in range(3):
        pipeline.apply_batch(life("j"))
    pipeline.apply_batch(life("old", end_ms=NOW_MS - 4_000_000))
    asyncio.run(pipeline.tick())
    assert [row["job"] for row in document(tmp_path, "doc.jobs")] == ["j"]
    assert document(tmp_path, "occupancy")["ended"] == [["j", 1, NOW_MS]]


def test_a_hard_signal_that_comes_while_a_tick_scores_wakes_the_next_one(tmp_path: Path) -> None:
    config = Config(state=str(tmp_path), pipeline=PipelineConfig(tick_s=3600))

    async def drain_during_a_tick() -> int:
        pipeline = small(tmp_path)
        pipeline.clock, pipeline.config = SystemClock(), config
        event = NodeEvent(node="n1", source="admin", sequence=1, time_ms=NOW_MS, type="drain")
        scored = pipeline.tick

        async def tick_and_take() -> None:
            await scored()
            if pipeline.metrics.ticks == 1:
                pipeline.apply_batch(Batch(node_events=(event,)))

        pipeline.tick = tick_and_take  # type: ignore[method-assign]
        work = asyncio.create_task(pipeline.run())
        while pipeline.metrics.ticks < 2:
            await asyncio.sleep(0.01)
        work.cancel()
        with suppress(asyncio.CancelledError):
            await work
        return pipeline.metrics.ticks

    assert asyncio.run(drain_during_a_tick()) == 2
    assert document(tmp_path, "doc.fleet")["nodes"][0]["state"] == "drained"


def test_what_is_told_while_a_tick_scores_is_published_at_once_and_scored_by_the_next_one(tmp_path: Path) -> None:
    drain = NodeEvent(node="n1", source="admin", sequence=1, time_ms=NOW_MS, type="drain")
    start = Started(job="j", sequence=1, time_ms=NOW_MS, nodes=("n1",))

    async def tell_during_a_tick() -> None:
        pipeline = small(tmp_path)
        pipeline.apply_batch(Batch(events=(Submitted(job="j", sequence=0, time_ms=NOW_MS),)))
        work = asyncio.create_task(pipeline.tick())
        await asyncio.sleep(0)  # now a thread scores
        pipeline.apply_batch(Batch(events=(start,), node_events=(drain,)))
        assert b'"type":"drain"' in (tmp_path / "board" / "urgent").read_bytes()
        assert not work.done()
        await work
        board = document(tmp_path, "doc.fleet"), document(tmp_path, "doc.jobs"), document(tmp_path, "occupancy")
        assert (board[0]["nodes"][0]["state"], board[1][0]["state"], board[2]["position"]) == ("unknown", "queued", 1)
        await pipeline.tick()

    asyncio.run(tell_during_a_tick())
    assert document(tmp_path, "doc.fleet")["nodes"][0]["state"] == "drained"
    assert document(tmp_path, "doc.jobs")[0]["state"] == "running"
    assert document(tmp_path, "occupancy")["position"] == 3


def test_a_fleet_without_a_node_ticks_and_so_does_a_node_without_a_gpu(tmp_path: Path) -> None:
    for nodes in ([], [NodeSpec("n1"), NodeSpec("n2", 2)]):
        pipeline = Pipeline(Config(state=str(tmp_path)), ManualClock(NOW_MS), Topology.build(nodes), lambda _: [])
        asyncio.run(pipeline.tick())
        fleet = document(tmp_path, "doc.fleet")
        assert [len(node["gpus"]) for node in fleet["nodes"]] == [node.gpus for node in nodes]


def test_the_model_of_a_gpu_that_only_its_exporter_names_is_on_the_board(tmp_path: Path) -> None:
    moment = tmp_path / "pages" / str(NOW_MS)
    moment.mkdir(parents=True)
    (moment / "m001.prom").write_bytes(amd_page())
    clock = ManualClock(NOW_MS)

    def sources(entities: Entities) -> list[Source]:
        return [PageReplay(entities, tmp_path / "pages", clock, ReplaySpeed(speed=None))]

    pipeline = Pipeline(Config(state=str(tmp_path)), clock, Topology.build([]), sources)

    async def scenario() -> None:
        pipeline.apply_batch(await pipeline.sources[0].next())
        await pipeline.tick()

    asyncio.run(scenario())
    (node,) = document(tmp_path, "doc.fleet")["nodes"]
    assert (node["node"], len(node["gpus"])) == ("m001", 4)
    assert pipeline.state.topology.nodes[0].gpu_model == "MI300X"


def test_an_xid_that_is_no_number_is_no_signal(tmp_path: Path) -> None:
    pipeline = small(tmp_path)
    gpu = pipeline.state.entities.add_to_node(EntityKind.GPU, "n1", 0)
    for step, code in enumerate((0.0, math.inf, math.nan, 79.0)):
        time_ms = NOW_MS - 60_000 + step
        pipeline.apply_batch(Batch(samples=(SampleBatch.from_rows(EntityKind.GPU, [(XID, gpu, time_ms, code)]),)))
    assert [row.code for row in pipeline.urgent] == [79]


def test_a_full_disk_is_said_and_ends_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    pipeline = small(tmp_path)
    monkeypatch.setattr("os.replace", full)
    pipeline.apply_batch(
        Batch(node_events=(NodeEvent(node="n1", source="s", sequence=1, time_ms=NOW_MS, type="lost"),))
    )
    asyncio.run(pipeline.tick())
    assert "No space left" in caplog.text
    assert [path.name for path in Config(state=str(tmp_path)).board.iterdir()] == []
    monkeypatch.undo()
    asyncio.run(pipeline.tick())
    assert document(tmp_path, "doc.fleet")["nodes"][0]["state"] == "lost"


def test_what_a_killed_writer_left_goes_at_the_next_start(tmp_path: Path) -> None:
    board = Config(state=str(tmp_path)).board
    board.mkdir(parents=True)
    (board / ".board.123.tmp").write_bytes(b"half a board")
    small(tmp_path)
    assert list(board.iterdir()) == []


def test_a_save_and_a_forecast_wait_for_each_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pipeline = small(tmp_path)
    order: list[str] = []
    update, dump = pipeline.forecaster.forecast_all, pipeline.forecaster.dump

    def slow_update(*args: Any) -> Any:
        order.append("update")
        time.sleep(0.1)
        order.append("updated")
        return update(*args)

    monkeypatch.setattr(pipeline.forecaster, "forecast_all", slow_update)
    monkeypatch.setattr(pipeline.forecaster, "dump", lambda: order.append("dump") or dump())

    async def both() -> None:
        forecast = asyncio.create_task(pipeline.capabilities[DemandForecasts].forecast(pipeline.state))
        while not order:
            await asyncio.sleep(0.001)
        await asyncio.gather(forecast, pipeline.save())

    asyncio.run(both())
    assert order == ["update", "updated", "dump"]


class Told(MemorySource):
    """A source of somebody's own."""

    def __init__(self, entities: Entities, clock: Clock, options: Mapping[str, Any]) -> None:
        super().__init__(name=f"told by {options['whom']}")


def test_the_sources_of_the_configuration_are_opened(tmp_path: Path) -> None:
    plugin = PluginConfig(use=f"{__name__}:Told", options={"whom": "us"})
    scrape = ScrapeConfig(targets=("http://127.0.0.1:1/metrics",))
    config = Config(state=str(tmp_path), scrape=scrape, pipeline=PipelineConfig(sources=(plugin,)))
    names = [source.name for source in open_sources(config, ManualClock(NOW_MS), Entities())]
    assert names == ["inbox", "scrape", "told by us"]


@pytest.mark.parametrize("names", [("a", "a"), ("inbox",), ("archive",)])
def test_sources_have_names_of_their_own_or_one_would_go_on_where_another_was(
    tmp_path: Path, names: tuple[str, ...]
) -> None:
    rows = tuple(PluginConfig(use="kernel_log", options={"paths": ["/x"], "name": name}) for name in names)
    config = Config(state=str(tmp_path), pipeline=PipelineConfig(sources=rows))
    with pytest.raises(ConfigError, match=f"name = {names[0]!r} is used already"):
        open_sources(config, ManualClock(NOW_MS), Entities())


def test_a_pipeline_may_hold_more_files_open_than_the_usual_soft_limit() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (512, hard))
        raise_open_file_limit()
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] > 512
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.parametrize("use", ["os:path", "json:loads", "asyncio:sleep"])
def test_what_is_no_class_of_sources_is_refused(tmp_path: Path, use: str) -> None:
    config = Config(state=str(tmp_path), pipeline=PipelineConfig(sources=(PluginConfig(use=use),)))
    with pytest.raises(ConfigError, match="expected a class"):
        open_sources(config, ManualClock(NOW_MS), Entities())


class Unnamed(MemorySource):
    def __init__(self, entities: Entities, clock: Clock, options: Mapping[str, Any]) -> None:
        super().__init__(name="")


class Numbered(MemorySource):
    def __init__(self, entities: Entities, clock: Clock, options: Mapping[str, Any]) -> None:
        super().__init__(name=7)  # type: ignore[arg-type]


class OnlyNext(Source):
    async def next(self) -> Batch:
        raise AssertionError


class Misspelt(Told):
    def backlog(self) -> int:
        return 7


class Prunes(Told):
    def prunes(self, position: dict[str, Any]) -> None:
        raise AssertionError


class Quacks:
    """The methods of a source, without its base class."""

    name = "quacks"

    def __init__(self, entities: Entities, clock: Clock, options: Mapping[str, Any]) -> None:
        pass

    async def next(self) -> Batch:
        raise AssertionError

    seek = position = close = next


quacking = "neither a class nor a function"


def made_source(entities: Entities, clock: Clock, options: Mapping[str, Any]) -> MemorySource:
    return MemorySource(name="made")


@pytest.mark.parametrize(("kind", "name"), [("Quacks", "quacks"), ("made_source", "made")])
def test_a_plugin_may_be_a_function_or_a_class_that_has_the_methods_alone(tmp_path: Path, kind: str, name: str) -> None:
    config = Config(state=str(tmp_path), pipeline=PipelineConfig(sources=(PluginConfig(use=f"{__name__}:{kind}"),)))
    _, source = open_sources(config, ManualClock(NOW_MS), Entities())
    assert (source.name, source.health(), source.backlog_bytes()) == (name, [], 0)


@pytest.mark.parametrize(
    ("kind", "lacks"),
    [
        ("quacking", "expected a class or a function made with (entities, clock, options)"),
        ("OnlyNext", "lacks close, position, seek"),
        ("Unnamed", "its name is ''"),
        ("Numbered", "its name is 7"),
        ("Misspelt", "backlog is no method of a source, did you mean backlog_bytes?"),
        ("Prunes", "prunes is no method of a source, did you mean prune?"),
    ],
)
def test_a_class_of_another_shape_than_a_source_is_refused(tmp_path: Path, kind: str, lacks: str) -> None:
    plugin = PluginConfig(use=f"{__name__}:{kind}")
    config = Config(state=str(tmp_path), pipeline=PipelineConfig(sources=(plugin,)))
    with pytest.raises(ConfigError, match=re.escape(lacks)):
        open_sources(config, ManualClock(NOW_MS), Entities())


@pytest.mark.parametrize("key", ["sources", "forecasters"])
def test_a_plugin_that_is_not_there_is_refused_with_its_key(tmp_path: Path, key: str) -> None:
    missing = {"sources": (PluginConfig(use="nowhere:X"),), "forecasters": ("nowhere:X",)}[key]
    config = Config(state=str(tmp_path), pipeline=PipelineConfig(**{key: missing}))
    clock = ManualClock(NOW_MS)
    with pytest.raises(ConfigError, match=rf"pipeline\.{key}"):
        Pipeline(config, clock, Topology.build([]), functools.partial(open_sources, config, clock))


def test_a_source_that_is_away_is_told_once_and_when_it_is_back(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Away(MemorySource):
        tries = 3

        async def next(self) -> Batch:
            self.tries -= 1
            if self.tries >= 0:
                raise SourceError("nobody answers", 0.001)
            return await super().next()

    pipeline = small(tmp_path)
    with caplog.at_level("INFO", "fleetcast.service.pipeline.guarded_source"):
        asyncio.run(pipeline._fold_source_batches(Away([Batch()], ends=True)))
    assert [record.getMessage() for record in caplog.records] == [
        "memory: nobody answers, trying again every 0 s",
        "memory: answers again",
        "memory: at its end",
    ]
