from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleetcast.features.arrays_file import read_parts
from fleetcast.features.extract import extract_frames
from fleetcast.features.store import StoreError, WindowStore
from tests.features.oracle import GPU, T0, Row, batch, fleet
from tests.fuzz.bounds import examples

METRICS = ("power_w", "xid", "energy_j", "ecc_sbe_volatile")
minutes = st.lists(
    st.tuples(
        st.sampled_from(METRICS),
        st.integers(0, 2),
        st.integers(0, 45 * 60).map(lambda second: T0 + second * 1000),
        st.integers(0, 6).map(float),
    ),
    max_size=40,
).map(lambda rows: sorted(rows, key=lambda row: row[2]))


def run(store: WindowStore, rows: list[Row]) -> WindowStore:
    for row in rows:
        store.write(batch(GPU, [row]), row[2])
    return store


def assert_same(left: WindowStore, right: WindowStore) -> None:
    end = T0 + 46 * 60_000
    ours, theirs = extract_frames(left, end).gpu, extract_frames(right, end).gpu
    np.testing.assert_allclose(ours.values, theirs.values, rtol=1e-6)
    np.testing.assert_array_equal(ours.since_ms, theirs.since_ms)
    one, other = left.ring(GPU), right.ring(GPU)
    for name in one.layout.values:
        np.testing.assert_array_equal(one.read_slots(name, 120), other.read_slots(name, 120))
    for name in one.layout.days:
        np.testing.assert_array_equal(one.read_day_means(name), other.read_day_means(name))


@examples(75)
@given(minutes, st.lists(st.integers(0, 40), max_size=5).map(sorted), st.integers(0, 10))
def test_snapshots_and_an_overlapping_replay_equal_a_straight_run(
    tmp_path_factory: pytest.TempPathFactory, rows: list[Row], cuts: list[int], overlap: int
) -> None:
    folder = tmp_path_factory.mktemp("snapshots")
    store, done = WindowStore(fleet()), 0
    for number, cut in enumerate(cuts):
        run(store, rows[done:cut])
        done = max(done, cut)
        store.save(folder / str(number))
    if cuts:
        store = WindowStore.load(folder / str(len(cuts) - 1))
    run(store, rows[max(0, done - overlap) :])
    assert_same(store, run(WindowStore(fleet()), rows))


def rows_at(minute: int) -> list[Row]:
    return [
        ("power_w", gpu, T0 + minute * 60_000 + s, 400.0 + minute) for gpu in range(3) for s in range(0, 60_000, 15_000)
    ]


def saved_minutes(folder: Path, minutes_run: int) -> WindowStore:
    store = WindowStore(fleet())
    for minute in range(minutes_run):
        run(store, rows_at(minute))
        store.save(folder / str(minute))
    return store


def test_a_later_save_writes_only_what_is_new(tmp_path: Path) -> None:
    store = saved_minutes(tmp_path, 25)
    files = sorted((tmp_path / "24").glob("*.slots"))
    slots = [max(len(rows["slot_numbers"]) for _, rows in read_parts(path) if rows) for path in files]
    assert len(slots) == 25
    assert len(store.ring(GPU).list_open_slots(0, store.ring(GPU).head)) == 100
    assert max(slots) <= 8  # those of a minute, and what is still being written


def test_a_saved_ring_of_steady_values_takes_an_eighth_of_its_memory(tmp_path: Path) -> None:
    saved_minutes(tmp_path, 70)
    rings = sum(ring.nbytes for ring in WindowStore.load(tmp_path / "69").rings.values())
    on_disk = {path.stat().st_ino: path.stat().st_size for path in tmp_path.glob("6[89]/*")}
    assert sum(on_disk.values()) < rings / 8


def test_a_loaded_store_has_the_slots_open_that_the_saved_one_had(tmp_path: Path) -> None:
    store = saved_minutes(tmp_path, 3)
    loaded = WindowStore.load(tmp_path / "2")
    for kind, ring in store.rings.items():
        there = loaded.rings[kind]
        assert (there.first_slot, there.first_bucket) == (ring.first_slot, ring.first_bucket)


def test_after_many_saves_one_file_holds_everything_again(tmp_path: Path) -> None:
    store = saved_minutes(tmp_path, 65)
    assert len(list((tmp_path / "64").glob("*.slots"))) == 5
    assert_same(WindowStore.load(tmp_path / "64"), store)


def test_older_folders_may_go(tmp_path: Path) -> None:
    store = saved_minutes(tmp_path, 3)
    for minute in (0, 1):
        for path in (tmp_path / str(minute)).iterdir():
            path.unlink()
    assert_same(WindowStore.load(tmp_path / "2"), store)


def test_a_folder_may_be_saved_into_again(tmp_path: Path) -> None:
    store = WindowStore(fleet())
    for minute in range(5):
        run(store, rows_at(minute))
        store.save(tmp_path / "here")
    assert_same(WindowStore.load(tmp_path / "here"), store)


def test_after_a_save_that_failed_the_next_one_holds_everything(tmp_path: Path) -> None:
    store = saved_minutes(tmp_path, 2)
    (tmp_path / "blocked").write_text("not a folder")
    run(store, rows_at(2))
    with pytest.raises(OSError, match="blocked"):
        store.save(tmp_path / "blocked")
    run(store, rows_at(3))
    store.save(tmp_path / "next")
    assert len(list((tmp_path / "next").glob("*.slots"))) == 1
    assert_same(WindowStore.load(tmp_path / "next"), store)


@pytest.mark.parametrize("told", [True, False])
def test_a_folder_may_be_moved_after_the_save(tmp_path: Path, told: bool) -> None:
    store = WindowStore(fleet())
    for minute in range(3):
        run(store, rows_at(minute))
        for work in store.iterate_save_steps(tmp_path / "beside", becomes=tmp_path / str(minute) if told else None):
            work()
        (tmp_path / "beside").rename(tmp_path / str(minute))
    assert len(list((tmp_path / "2").glob("*.slots"))) == (3 if told else 1)
    assert_same(WindowStore.load(tmp_path / "2"), store)


def test_a_save_that_was_overtaken_is_not_built_upon(tmp_path: Path) -> None:
    store = saved_minutes(tmp_path, 2)
    slow = store.iterate_save_steps(tmp_path / "slow")
    next(slow)()
    run(store, rows_at(2))
    store.save(tmp_path / "newer")
    for work in slow:
        work()
    run(store, rows_at(3))
    store.save(tmp_path / "last")
    assert_same(WindowStore.load(tmp_path / "last"), store)


def test_a_save_that_was_given_up_leaves_nothing_out_of_the_next(tmp_path: Path) -> None:
    store = saved_minutes(tmp_path, 2)
    run(store, rows_at(2))
    given_up = store.iterate_save_steps(tmp_path / "given up")
    next(given_up)()
    given_up.close()
    run(store, rows_at(3))
    store.save(tmp_path / "last")
    assert_same(WindowStore.load(tmp_path / "last"), store)


@examples(75)
@given(minutes, st.integers(0, 40), st.lists(st.integers(0, 40), min_size=3, max_size=3).map(sorted), st.booleans())
def test_a_store_that_is_written_while_it_is_saved_comes_back_whole(
    tmp_path_factory: pytest.TempPathFactory, rows: list[Row], first: int, cuts: list[int], again: bool
) -> None:
    """A slice holds its series as of its own moment; a replay from where the save began changes nothing."""
    folder = tmp_path_factory.mktemp("sliced")
    store = run(WindowStore(fleet()), rows[: cuts[0]])
    if again:
        store.save(folder / "before")
    done = min(cuts[0], len(rows))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fleetcast.features.store_files._compute_slice_length", lambda ring, since: 1)
        for number, work in enumerate(store.iterate_save_steps(folder / "sliced")):
            work()
            upto = max(done, cuts[min(number + 1, 2)])
            run(store, rows[done:upto])
            done = upto
    loaded = WindowStore.load(folder / "sliced")
    run(loaded, rows[min(first, cuts[0]) :])
    assert_same(loaded, run(WindowStore(fleet()), rows))


def test_a_slice_holds_what_was_written_while_the_save_was_under_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # GPU 0 is in the first slice, GPU 2 in the last; the slot that it writes in between was on disk already
    store = run(WindowStore(fleet()), rows_at(40))
    store.save(tmp_path / "before")
    monkeypatch.setattr("fleetcast.features.store_files._compute_slice_length", lambda ring, since: 1)
    late = ("power_w", 2, T0 + 40 * 60_000 + 50_000, 999.0)  # in the slot of the last minute's last sample
    for number, work in enumerate(store.iterate_save_steps(tmp_path / "sliced")):
        work()
        if number == 0:
            run(store, [late])
    loaded = WindowStore.load(tmp_path / "sliced")
    run(loaded, [late])  # what came after the save began is delivered again, and known already
    assert_same(loaded, store)


def test_entities_come_back_in_their_rows(tmp_path: Path) -> None:
    store = WindowStore(fleet())
    store.save(tmp_path)
    assert WindowStore.load(tmp_path).entities.dump() == store.entities.dump()


def test_a_missing_folder_is_an_error_that_says_so(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match=r"cannot load the store in .*state\.arrays"):
        WindowStore.load(tmp_path)


def test_another_interval_is_refused(tmp_path: Path) -> None:
    WindowStore(fleet(), interval_s=15).save(tmp_path)
    with pytest.raises(StoreError, match=r"15000 ms, wanted 30\.0 s"):
        WindowStore.load(tmp_path, interval_s=30.0)


@pytest.mark.parametrize("name", ["state.arrays", "000001.slots"])
@pytest.mark.parametrize("keep", [0.0, 0.001, 0.3, 0.999])
def test_a_torn_file_is_an_error_that_says_so(tmp_path: Path, name: str, keep: float) -> None:
    saved_minutes(tmp_path, 1)
    path = tmp_path / "0" / name
    data = path.read_bytes()
    path.write_bytes(data[: int(len(data) * keep)])
    with pytest.raises(StoreError, match=name.replace(".", r"\.")):
        WindowStore.load(tmp_path / "0")


@examples(62)
@given(st.floats(0, 1, exclude_max=True), st.integers(1, 255))
def test_a_flipped_byte_is_found(tmp_path_factory: pytest.TempPathFactory, where: float, flip: int) -> None:
    folder = tmp_path_factory.mktemp("flip")
    saved_minutes(folder, 1)
    path = folder / "0" / "state.arrays"
    data = bytearray(path.read_bytes())
    data[int(where * len(data))] ^= flip
    path.write_bytes(data)
    with pytest.raises(StoreError):
        WindowStore.load(folder / "0")


@pytest.mark.parametrize("limit_s", [0.0, 60.0, 600.0])
def test_another_limit_of_times_ahead_keeps_what_was_saved(tmp_path: Path, limit_s: float) -> None:
    store = saved_minutes(tmp_path, 40)
    loaded = WindowStore.load(tmp_path / "39", future_limit_s=limit_s)
    assert_same(loaded, store)
    ahead = batch(GPU, [("power_w", 0, T0 + 50 * 60_000, 1.0)])
    assert loaded.write(ahead, T0 + 45 * 60_000).future == (0 if limit_s == 600.0 else 1)
