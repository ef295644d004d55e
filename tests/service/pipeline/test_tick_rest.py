"""A node that is heard for the first time has its score at once, not at the next tick."""

import asyncio
from contextlib import suppress
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from fleetcast.fleet.clock import SystemClock
from fleetcast.fleet.entities import Entities
from fleetcast.fleet.metrics import find_metric_row
from fleetcast.fleet.samples import EntityKind, SampleBatch
from fleetcast.fleet.topology import NodeSpec, Topology
from fleetcast.ingest.source import Batch, MemorySource
from fleetcast.service.config import Config, PipelineConfig
from fleetcast.service.pipeline.pipeline import Pipeline
from fleetcast.service.pipeline.tick_rest import TickRest
from tests.fuzz.bounds import examples

UP = find_metric_row(EntityKind.NODE, "scrape_up")


def heard(entities: Entities, *nodes: str, time_ms: int = 1) -> SampleBatch:
    return SampleBatch.from_rows(
        EntityKind.NODE, [(UP, entities.find_or_add_node(node), time_ms, 1.0) for node in nodes]
    )


def power(entities: Entities, node: str) -> SampleBatch:
    row = find_metric_row(EntityKind.GPU, "power_w")
    return SampleBatch.from_rows(EntityKind.GPU, [(row, entities.add_to_node(EntityKind.GPU, node, 0), 1, 400.0)])


def test_the_first_samples_of_a_node_wake_the_tick_and_later_ones_do_not(tmp_path: Path) -> None:
    config = Config(state=str(tmp_path), pipeline=PipelineConfig(tick_s=3600))

    async def scenario() -> list[int]:
        source = MemorySource()
        topology = Topology.build([NodeSpec("n1", 8)])
        pipeline = Pipeline(config, SystemClock(), topology, lambda _: [source])
        work = asyncio.create_task(pipeline.run())
        now_ms, ticks = pipeline.clock.now_ms(), []
        try:
            async with asyncio.timeout(30):
                for number, nodes in enumerate((["n1"], ["n1", "n2"]), 1):
                    while not pipeline._rest._may_wake:
                        await asyncio.sleep(0.01)
                    source.push(Batch(samples=(heard(pipeline.state.entities, *nodes, time_ms=now_ms + number),)))
                    while pipeline.metrics.ticks < number + 1:
                        await asyncio.sleep(0.01)
                while not pipeline._rest._may_wake:
                    await asyncio.sleep(0.01)
            pipeline.apply_batch(Batch(samples=(heard(pipeline.state.entities, "n1", "n2", time_ms=now_ms + 9),)))
            ticks = [pipeline.metrics.ticks, int(pipeline._wake.is_set())]
        finally:
            work.cancel()
            with suppress(asyncio.CancelledError):
                await work
            await pipeline.close()
        return ticks

    assert asyncio.run(scenario()) == [3, 0]


def test_samples_of_devices_are_those_of_their_nodes() -> None:
    entities, wake = Entities(), asyncio.Event()
    nodes = TickRest(entities, wake)
    nodes.enable_new_node_wake()
    nodes.record_samples([power(entities, "n1")])
    assert wake.is_set()
    wake.clear()
    nodes.record_samples([heard(entities, "n1")])
    assert not wake.is_set()


@examples(200)
@given(
    st.lists(
        st.one_of(st.sampled_from(["begin", "rested"]), st.lists(st.sampled_from("abcd"), min_size=1)), max_size=20
    )
)
def test_the_tick_wakes_for_a_node_that_is_new_since_it_began_once_it_has_rested(steps: list[str | list[str]]) -> None:
    entities, wake = Entities(), asyncio.Event()
    nodes = TickRest(entities, wake)
    known, waiting, rested = set[str](), set[str](), False
    for step in steps:
        wake.clear()
        if step == "begin":
            nodes.begin_tick()
            waiting, rested = set(), False
        elif step == "rested":
            nodes.enable_new_node_wake()
            rested = True
            assert wake.is_set() == bool(waiting)
        else:
            new = set(step) - known
            known |= new
            waiting |= new
            nodes.record_samples([heard(entities, *step)])
            assert wake.is_set() <= (rested and bool(waiting))
            assert wake.is_set() or not (rested and new)
