"""Checkpoints of large gangs stay few records, whatever the order of arrival."""

import msgspec
import numpy as np
import pytest

from fleetcast.features.episodes import Episode, find_episodes
from fleetcast.fleet.checkpoint_edges import MAX_EDGES, CheckpointEdges, fold_edge
from fleetcast.fleet.events import Checkpoint
from fleetcast.fleet.job_table import JobTable, decode_job, encode_job
from fleetcast.fleet.jobs import JobAttempt


def gang_told(ranks: int, checkpoints: int) -> list[Checkpoint]:
    """Every ten minutes; a rank begins up to 0.9 s late and writes a byte in 30 s and up to 4 s more."""
    return [
        Checkpoint(
            job="a",
            sequence=((rank + 1) << 32) + 2 * number + (edge == "end"),
            time_ms=600_000 * number + (900 * rank // ranks if edge == "begin" else 30_000 + 4000 * rank // ranks),
            edge=edge,
            bytes=1,
        )
        for rank in range(ranks)
        for number in range(checkpoints)
        for edge in ("begin", "end")
    ]


@pytest.mark.parametrize("ranks", [1, 64, 512])
def test_a_gang_whose_ranks_each_tell_keeps_its_newest_checkpoints(ranks: int) -> None:
    row, events = JobAttempt("a", 1), gang_told(ranks, 8)
    for event in events:
        row.fold(event)
        row.fold(event)
    last = 30_000 + 4000 * (ranks - 1) // ranks
    assert find_episodes(row.checkpoints) == [Episode(600_000 * n, 600_000 * n + last, ranks) for n in range(8)]
    assert len(row.checkpoints) < 64


def test_what_is_kept_is_the_newest_by_time_in_any_order_of_arrival() -> None:
    events, rng = gang_told(3, 2 * MAX_EDGES), np.random.default_rng(3)
    found = []
    for _ in range(3):
        kept: list[CheckpointEdges] = []
        for at in rng.permutation(len(events)).tolist():
            fold_edge(kept, events[at])
        found.append(kept)
    assert found[0] == found[1] == found[2]
    assert len(found[0]) == MAX_EDGES
    begins = [edge.time_ms for edge in found[0] if edge.edge == "begin"]
    assert begins == [600_000 * n for n in range(2 * MAX_EDGES - len(begins), 2 * MAX_EDGES)]


def test_within_a_second_they_lie_by_time_and_what_was_dropped_does_not_come_back_in_part() -> None:
    events = [
        Checkpoint(job="a", sequence=4 * second + at, time_ms=1000 * second + ms, edge=edge, bytes=1)
        for second in range(MAX_EDGES // 2 + 1)
        for at, (ms, edge) in enumerate(((100, "end"), (200, "end"), (900, "begin"), (950, "begin")))
        if second or (ms, edge) != (200, "end")
    ]
    rng, found = np.random.default_rng(5), []
    for most in (len(events), len(events) - 2):  # a second is too many, then half of one
        for _ in range(4):
            kept: list[CheckpointEdges] = []
            for at in rng.permutation(most).tolist():
                fold_edge(kept, events[at])
            found.append(kept)
    assert all(kept == found[0] for kept in found[:4])
    assert all(kept == found[4] for kept in found[4:])
    assert found[4][0] == CheckpointEdges("end", 100, 1)
    assert [edge.time_ms for edge in found[0]] == sorted(edge.time_ms for edge in found[0])
    assert {(edge.edge, edge.time_ms % 1000, edge.count) for edge in found[0]} == {("end", 200, 2), ("begin", 900, 2)}


def test_a_snapshot_that_kept_single_events_by_sequence_is_read() -> None:
    told = gang_told(4, 3)
    [old] = msgspec.msgpack.decode(encode_job([JobAttempt("a", 1)]))
    old["checkpoints"] = msgspec.to_builtins(told)
    [row] = decode_job(msgspec.msgpack.encode([old]))
    table = JobTable()
    table.add_attempt(row)
    late = [Checkpoint(job="a", sequence=9, time_ms=1_800_000, edge="begin"),
            Checkpoint(job="a", sequence=10, time_ms=1_831_000, edge="end")]  # fmt: skip
    for event in late:
        table.apply(event)
    spans = [(one.begin_ms, one.end_ms, one.bytes) for one in find_episodes(row.checkpoints)]
    assert spans == [*((600_000 * n, 600_000 * n + 33_000, 4) for n in range(3)), (1_800_000, 1_831_000, None)]
