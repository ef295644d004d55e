import asyncio

import pytest

from fleetcast.fleet.errors import RecordError
from fleetcast.fleet.events import Finished
from fleetcast.fleet.samples import EntityKind, SampleBatch
from fleetcast.ingest.source import Batch, MemorySource


def gpu_samples(*rows: tuple[int, int, int, float]) -> SampleBatch:
    return SampleBatch.from_rows(EntityKind.GPU, rows)


def test_merging_keeps_order_and_makes_one_sample_batch_a_kind() -> None:
    node = SampleBatch.from_rows(EntityKind.NODE, [(1, 0, 10, 1.0)])
    merged = Batch.merge(
        [
            Batch(samples=(gpu_samples((0, 0, 10, 1.0)), node)),
            Batch(samples=(gpu_samples((0, 0, 20, 2.0)),), bad=(RecordError("bad_line"),)),
        ]
    )
    assert [batch.kind for batch in merged.samples] == [EntityKind.GPU, EntityKind.NODE]
    assert merged.samples[0].value.tolist() == [1.0, 2.0]
    assert [error.reason for error in merged.bad] == ["bad_line"]
    assert len(merged) == 3


def test_merging_one_batch_copies_nothing() -> None:
    batch = Batch(samples=(gpu_samples((0, 0, 10, 1.0)),))
    assert Batch.merge([batch]) is batch


def test_a_memory_source_ends_when_told_so() -> None:
    async def drain() -> list[Batch]:
        source = MemorySource([Batch(events=(Finished(job="a", sequence=1, time_ms=1),))], ends=True)
        first = await source.next()
        with pytest.raises(StopAsyncIteration):
            await source.next()
        return [first]

    assert len(asyncio.run(drain())[0]) == 1


def test_a_memory_source_waits_for_what_is_pushed() -> None:
    async def push_later() -> Batch:
        source = MemorySource()
        waiting = asyncio.create_task(source.next())
        await asyncio.sleep(0)
        assert not waiting.done()
        source.push(Batch(bad=(RecordError("x"),)))
        return await waiting

    assert asyncio.run(push_later()).bad[0].reason == "x"


def test_seeking_to_a_position_repeats_nothing_before_it() -> None:
    async def restart() -> float:
        batches = [Batch(samples=(gpu_samples((0, 0, time, float(time))),)) for time in (10, 20, 30)]
        source = MemorySource(batches)
        await source.next()
        await source.next()
        again = MemorySource(batches)
        again.seek(source.position())
        return float((await again.next()).samples[0].value[0])

    assert asyncio.run(restart()) == 30.0
