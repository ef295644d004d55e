"""A clock that is set back, and times in which nobody listened."""

from itertools import groupby
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from fleetcast.features.extract import extract_frames
from fleetcast.features.ring import Ring
from fleetcast.features.store import WindowStore
from fleetcast.fleet.samples import EntityKind
from tests.features.oracle import GPU, T0, Row, batch, fleet, whole
from tests.fuzz.bounds import examples

SECOND = 1000
HOUR = 3600 * SECOND


def scrapes(first_ms: int, count: int, watts: float = 400.0) -> list[Row]:
    """Every 15 s: power of three GPUs, and a counter of energy at 400 W."""
    rows: list[Row] = []
    for number in range(count):
        time_ms = first_ms + number * 15 * SECOND
        for gpu in range(3):
            rows += [("power_w", gpu, time_ms, watts + number % 2), ("energy_j", gpu, time_ms, 6000.0 * number)]
    return rows


def run(store: WindowStore, rows: list[Row], off_ms: int = 0) -> WindowStore:
    for time_ms, scrape in groupby(rows, key=lambda row: row[2]):
        store.write(batch(GPU, list(scrape)), time_ms)
    return store


@pytest.mark.parametrize("by_ms", [HOUR, 20 * SECOND, 3 * HOUR + 7 * SECOND, 40 * HOUR], ids=str)
def test_a_store_that_moved_with_the_clock_is_one_that_was_always_right(by_ms: int) -> None:
    # the clock is `by_ms` ahead for 40 minutes, then right for 20 more
    ahead, right = scrapes(T0 + by_ms, 160), scrapes(T0, 160)
    after = [
        (name, gpu, time_ms + 2400 * SECOND, value + (960_000 if name == "energy_j" else 0))
        for name, gpu, time_ms, value in scrapes(T0, 80)
    ]
    moved, straight = run(WindowStore(fleet()), ahead), run(WindowStore(fleet()), right)
    assert moved.move_times_back(T0 + 2385 * SECOND + 1000, by_ms)
    for store in (moved, straight):
        run(store, after)
    end = T0 + 3600 * SECOND
    ours, theirs = extract_frames(moved, end).gpu, extract_frames(straight, end).gpu
    if by_ms % (15 * SECOND) == 0:
        np.testing.assert_allclose(ours.values, theirs.values, rtol=1e-5)
    for name in ("age_s", "first_seen_s", "power_w", "energy_w", "power_w_mean_30m"):
        np.testing.assert_allclose(ours.column(name), theirs.column(name), rtol=1e-2, err_msg=name)


def test_what_another_clock_said_is_not_moved() -> None:
    store = run(WindowStore(fleet()), scrapes(T0, 10))
    assert not store.move_times_back(T0 + 200 * SECOND, HOUR)
    assert store.ring(GPU).time_ms.max() == T0 + 135 * SECOND


def test_a_step_in_the_middle_of_a_save_ends_it_and_the_next_holds_everything(tmp_path: Path) -> None:
    store = run(WindowStore(fleet()), scrapes(T0 + HOUR, 10))
    store.save(tmp_path / "1")
    works = store.iterate_save_steps(tmp_path / "2")
    next(works)()
    store.move_times_back(T0 + 150 * SECOND, HOUR)
    with pytest.raises(OSError, match="clock was set back"):
        next(works)
    store.save(tmp_path / "3")
    assert len(list((tmp_path / "3").glob("*.slots"))) == 1
    loaded = WindowStore.load(tmp_path / "3")
    np.testing.assert_array_equal(whole(loaded.ring(GPU), "fine"), whole(store.ring(GPU), "fine"))
    np.testing.assert_array_equal(loaded.ring(GPU).time_ms, store.ring(GPU).time_ms)


def ages(store: WindowStore, now_ms: int) -> list[float]:
    return [round(age) for age in extract_frames(store, now_ms).gpu.column("age_s").tolist()]


def test_silence_counts_only_while_somebody_listens() -> None:
    # gpu 0 and 1 until T0 + 135 s, gpu 2 only until T0;  deaf |----1 h----|  then gpu 0 again
    rows = [row for row in scrapes(T0, 10) if row[1] < 2 or row[2] == T0]
    store = run(WindowStore(fleet()), rows)
    deaf_until = T0 + 135 * SECOND + HOUR
    store.record_downtime(deaf_until, HOUR)
    assert ages(store, deaf_until + 10 * SECOND) == [10, 10, 145]
    store.write(batch(GPU, [("power_w", 0, deaf_until + 12 * SECOND, 400.0)]), deaf_until + 12 * SECOND)
    assert ages(store, deaf_until + 20 * SECOND) == [8, 20, 155]


def test_several_gaps_add_up_and_a_late_sample_ends_none() -> None:
    store = run(WindowStore(fleet()), scrapes(T0, 1))
    store.record_downtime(T0 + 2 * HOUR, 2 * HOUR)
    store.record_downtime(T0 + 4 * HOUR, HOUR)
    assert ages(store, T0 + 4 * HOUR) == [3600, 3600, 3600]


def test_a_gpu_is_not_missing_because_nobody_listened() -> None:
    store = run(WindowStore(fleet()), scrapes(T0, 10))
    back = T0 + 135 * SECOND + HOUR
    store.record_downtime(back, HOUR)
    rows: list[Row] = [("power_w", gpu, back + 5 * SECOND, 400.0) for gpu in (0, 1)]
    for row in rows:
        store.write(batch(EntityKind.GPU, [row]), back + 5 * SECOND)
    silent = extract_frames(store, back + 6 * SECOND).gpu.column("silent_s")
    assert silent.max() <= 6.0


@given(st.integers(1, 200), st.integers(-3, 300))
@examples(40)
def test_a_step_moves_each_open_slot_and_touches_no_other(scrape_count: int, slots: int) -> None:
    """The system hands out the memory of a slot at its first write: a young fleet has little."""
    store = run(WindowStore(fleet(), fine_slots=60), scrapes(T0 + 2 * HOUR, scrape_count))
    ring, by_ms = store.ring(GPU), slots * 15 * SECOND
    before = {name: whole(ring, name) for name in ("fine", "events", "coarse")}
    unopened = {name: closed_cells(ring, name) for name in before}
    for name, cells in unopened.items():
        getattr(ring, name)[:, cells] = np.arange(1, 1 + len(cells))[:, None]
    was_bucket = ring.newest_bucket
    assert store.move_times_back(T0, by_ms)
    steps = {"fine": slots, "events": slots, "coarse": was_bucket - ring.newest_bucket}
    for name, array in before.items():
        np.testing.assert_array_equal(whole(ring, name), np.roll(array, -steps[name], axis=1), err_msg=name)
        left_alone = np.intersect1d(unopened[name], closed_cells(ring, name))
        expected = 1 + np.searchsorted(unopened[name], left_alone)
        assert (getattr(ring, name)[:, left_alone] == expected[:, None]).all(), name


def closed_cells(ring: Ring, name: str) -> NDArray[np.intp]:
    """Return where the slots of an array lie that were never opened."""
    first, newest = (ring.first_bucket, ring.newest_bucket) if name == "coarse" else (ring.first_slot, ring.head)
    length = getattr(ring, name).shape[1]
    opened = np.arange(max(first, newest - length + 1), newest + 1) % length
    return np.setdiff1d(np.arange(length), opened)
