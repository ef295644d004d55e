from collections.abc import Iterable

from fleetcast.features.episodes import Episode, find_episodes
from fleetcast.fleet.checkpoint_edges import CheckpointEdges


def told(*edges: tuple[int, str, int | None]) -> list[CheckpointEdges]:
    """Edges (s, begin or end, bytes)."""
    return [CheckpointEdges("begin" if edge == "begin" else "end", second * 1000, size) for second, edge, size in edges]


def spans(found: Iterable[Episode]) -> list[tuple[int, float | None]]:
    return [(one.begin_ms // 1000, one.duration_s) for one in found]


def test_a_checkpoint_lasts_until_the_last_rank_has_written_its_part() -> None:
    edges = told((0, "begin", 10), (1, "begin", 20), (20, "end", None), (45, "end", None), (600, "begin", 30))
    assert find_episodes(edges) == [Episode(0, 45_000, 30), Episode(600_000, None, 30)]


def test_ranks_that_write_one_after_the_other_write_one_checkpoint() -> None:
    edges = told((0, "begin", None), (2, "end", 5), (4, "begin", None), (9, "end", 6))
    assert find_episodes(edges) == [Episode(0, 9000, 11)]


def test_bytes_told_at_both_edges_are_written_once() -> None:
    assert find_episodes(told((0, "begin", 7), (9, "end", 7)))[0].bytes == 7


def test_a_lost_end_is_waited_for_no_longer_than_to_the_next_checkpoint() -> None:
    edges = told((0, "begin", None), (1, "begin", None), (30, "end", None))
    assert spans(find_episodes(edges)) == [(0, None)]
    assert spans(find_episodes([*edges, *told((600, "begin", None))])) == [(0, 30.0), (600, None)]


def test_a_lost_beginning_prolongs_nothing() -> None:
    edges = told((0, "begin", None), (30, "end", None), (630, "end", None), (1200, "begin", None), (1231, "end", None))
    assert spans(find_episodes(edges)) == [(0, 30.0), (1200, 31.0)]


def test_a_job_that_tells_beginnings_alone_has_them_all() -> None:
    edges = told(*((at, "begin", None) for at in (0, 90, 180)))
    assert spans(find_episodes(edges)) == [(0, None), (90, None), (180, None)]


def test_an_end_hours_later_ends_nothing() -> None:
    assert spans(find_episodes(told((0, "begin", None), (9000, "end", None)))) == [(0, None)]
