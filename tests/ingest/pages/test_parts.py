import numpy as np

from fleetcast.ingest.pages.parts import PartRows, PartSums

CPU, DISK = 1, 2


def rows(*given: tuple[int, int, int, float], mean: bool = False) -> PartRows:
    """(identity, part, time_ms, value)"""
    identity, part, time_ms, value = zip(*given, strict=True) if given else ((), (), (), ())
    return PartRows(
        np.array(identity, np.int64),
        np.array(part, np.int64),
        np.array(time_ms, np.int64),
        np.array(value, np.float64),
        np.full(len(given), mean),
    )


def taken(sums: PartSums, *given: tuple[int, int, int, float], mean: bool = False) -> list[tuple[int, int, float]]:
    identity, time_ms, value = sums.add_parts(rows(*given, mean=mean))
    return list(zip(identity.tolist(), time_ms.tolist(), value.tolist(), strict=True))


def test_a_moment_is_complete_when_the_next_one_begins() -> None:
    sums = PartSums()
    assert taken(sums, (CPU, 0, 100, 1.0), (CPU, 1, 100, 2.0)) == []
    assert taken(sums, (CPU, 0, 200, 3.0)) == [], "nobody knows yet how many parts there are"
    assert taken(sums, (CPU, 1, 200, 4.0)) == []
    assert taken(sums, (CPU, 0, 300, 5.0)) == [(CPU, 200, 7.0)]


def test_means_and_sums_do_not_mix() -> None:
    sums = PartSums()
    for time_ms in (100, 200):
        taken(sums, (DISK, 7, time_ms, 1.0), (DISK, 8, time_ms, 5.0))
        taken(sums, (CPU, 0, time_ms, 1.0), (CPU, 1, time_ms, 3.0), mean=True)
    assert taken(sums, (CPU, 0, 300, 0.0), mean=True) == [(CPU, 200, 2.0)]
    assert taken(sums, (DISK, 7, 300, 0.0)) == [(DISK, 200, 6.0)]


def test_a_moment_with_fewer_parts_than_the_last_is_dropped_once() -> None:
    sums = PartSums()
    for time_ms in (100, 200):
        taken(sums, (CPU, 0, time_ms, 1.0), (CPU, 1, time_ms, 1.0))
    assert taken(sums, (CPU, 0, 300, 1.0)) == [(CPU, 200, 2.0)]
    assert taken(sums, (CPU, 0, 400, 1.0)) == []
    assert taken(sums, (CPU, 0, 500, 1.0)) == [(CPU, 400, 1.0)]
    assert sums.dropped == 2, "the first of all, and the one in which a part was missing"


def test_a_part_told_twice_counts_once_and_the_later_word_holds() -> None:
    sums = PartSums()
    taken(sums, (CPU, 0, 100, 1.0))
    taken(sums, (CPU, 0, 200, 1.0))
    taken(sums, (CPU, 0, 200, 5.0))
    assert taken(sums, (CPU, 0, 300, 0.0)) == [(CPU, 200, 5.0)]


def test_what_is_held_back_is_bounded() -> None:
    sums = PartSums(max_rows=2)
    taken(sums, (CPU, 0, 100, 1.0), (CPU, 1, 100, 1.0), (CPU, 2, 100, 1.0))
    assert len(sums._pending) == 0
    assert taken(sums) == []
