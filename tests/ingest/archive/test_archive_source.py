"""What an archive holds comes out of its source as it went in."""

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fleetcast.checks import check_source
from fleetcast.fleet.clock import SystemClock
from fleetcast.fleet.entities import Entities
from fleetcast.fleet.errors import ConfigError
from fleetcast.fleet.events import Finished, NodeEvent
from fleetcast.fleet.metrics import find_metric_row
from fleetcast.fleet.samples import EntityKind, SampleBatch
from fleetcast.fleet.topology import Topology
from fleetcast.ingest.archive.archive import Archive
from fleetcast.ingest.archive.files import ArchiveFiles
from fleetcast.ingest.archive.source import ArchiveSource
from fleetcast.ingest.source import Batch

T0 = 1_795_276_800_000
STEPS = 100  # of 15 s: 25 minutes
POWER, UP = find_metric_row(EntityKind.GPU, "power_w"), find_metric_row(EntityKind.NODE, "scrape_up")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    entities = Entities()
    gpus = [entities.add_to_node(EntityKind.GPU, node, 0) for node in ("n2", "n1")]
    archive = Archive(ArchiveFiles(str(tmp_path)), entities)
    for step in range(STEPS):
        time_ms = T0 + step * 15_000 + 3_000
        power = SampleBatch.from_rows(EntityKind.GPU, [(POWER, gpu, time_ms, step + gpu / 2) for gpu in gpus])
        up = SampleBatch.from_rows(EntityKind.NODE, [(UP, entities.find_or_add_node("n1"), time_ms, 1.0)])
        for batch in (power, up):
            archive.add(batch, np.ones(len(batch), np.bool_))
    archive.add_event(Finished(job="a", sequence=1, time_ms=T0 + 100_000))
    archive.add_event(NodeEvent(node="n1", source="s", sequence=1, time_ms=T0 + 1_450_000, type="drain"))
    archive.prepare_flush(Topology.build([]), T0)()
    return tmp_path


def source_of(folder: Path, entities: Entities | None = None, **options: Any) -> ArchiveSource:
    given = {"url": str(folder), "from_ms": T0, "to_ms": T0 + 7_200_000, **options}
    return ArchiveSource(entities or Entities(), SystemClock(), given)


async def drained(source: ArchiveSource) -> list[Batch]:
    batches = []
    while True:
        try:
            batches.append(await source.next())
        except StopAsyncIteration:
            return batches


def test_it_tells_every_step_in_order(folder: Path) -> None:
    entities = Entities()
    entities.add_to_node(EntityKind.GPU, "n9", 0)  # other rows than in the archive's process
    batches = asyncio.run(drained(source_of(folder, entities)))
    assert len(batches) == STEPS
    merged = Batch.merge(batches)
    power = next(batch for batch in merged.samples if batch.kind is EntityKind.GPU)
    names = entities[EntityKind.GPU].names
    told = [
        (ms, names[row], value)
        for ms, row, value in zip(power.time_ms.tolist(), power.entity.tolist(), power.value.tolist(), strict=True)
    ]
    assert set(told) == {
        (T0 + step * 15_000 + 3_000, name, step + half)
        for step in range(STEPS)
        for name, half in (("n2/0", 0), ("n1/0", 0.5))
    }
    assert [ms for ms, _, _ in told] == sorted(ms for ms, _, _ in told)
    assert merged.events == (Finished(job="a", sequence=1, time_ms=T0 + 100_000),)
    assert [event.node for event in merged.node_events] == ["n1"]
    assert power.metric.dtype == np.int16
    assert set(power.metric.tolist()) == {POWER}


def test_names_that_there_is_no_room_for_are_counted_and_the_others_are_told(folder: Path) -> None:
    entities = Entities()
    entities.find_or_add_node("n1")
    entities.set_limits({"n1": 8}, 0, 0)
    merged = Batch.merge(asyncio.run(drained(source_of(folder, entities))))
    assert {error.reason for error in merged.bad} == {"unknown_nodes"}
    assert sorted((batch.kind, len(batch)) for batch in merged.samples) == [("gpu", STEPS), ("node", STEPS)]
    assert entities[EntityKind.NODE].names == ["n1"]


def test_it_goes_on_where_it_was(folder: Path) -> None:
    check_source(lambda: source_of(folder), batches=50)


def test_a_part_of_the_span_and_a_block_that_is_not_there(folder: Path) -> None:
    part = asyncio.run(drained(source_of(folder, from_ms=T0 + 60_000, to_ms=T0 + 120_000)))
    assert len(part) == 4
    assert asyncio.run(drained(source_of(folder, block="b7"))) == []
    assert len(asyncio.run(drained(source_of(folder, from_ms=T0 - 10**11, to_ms=T0 + 10**11)))) == STEPS
    assert asyncio.run(drained(source_of(folder / "nothing"))) == []


@pytest.mark.parametrize(
    ("options", "says"),
    [({"to_ms": T0}, "from_ms must be before"), ({"step_ms": 0}, "step_ms"), ({"untill": 5}, "untill")],
)
def test_bad_options_are_refused(folder: Path, options: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        source_of(folder, **options)
