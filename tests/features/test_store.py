import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleetcast.features.extract import MAXIMA
from fleetcast.features.job_window import GPU_METRICS
from fleetcast.features.layout import SUMMED, RingSpan, make_layout
from fleetcast.features.ring import Ring
from fleetcast.features.serving import EDGES, RATES
from fleetcast.features.store import WindowStore, WrittenSamples
from fleetcast.fleet.samples import EntityKind
from tests.features.oracle import GPU, INTERVAL_MS, PORT, T0, NaiveStore, Row, batch, fleet, whole
from tests.fuzz.bounds import examples

METRICS = ("power_w", "xid", "energy_j", "ecc_sbe_volatile")
NOW = T0 + 40 * 60_000
SOON = T0 + 60_000

rows_of = st.lists(
    st.tuples(
        st.sampled_from(METRICS),
        st.integers(0, 2),
        st.integers(0, 35 * 60).map(lambda second: T0 + second * 1000),
        st.integers(0, 6).map(lambda tens: 10.0 * tens),
    ),
    max_size=60,
)


def store_of(*parts: list[Row], now_ms: int = NOW, gpus: int = 3) -> WindowStore:
    store = WindowStore(fleet(gpus))
    for part in parts:
        store.write(batch(GPU, part), now_ms)
    return store


def state(store: WindowStore) -> dict[str, np.ndarray]:
    """Everything that the laws speak of; bucket sums as the means they stand for."""
    ring = store.ring(GPU)
    arrays = {name: getattr(ring, name) for name in ("time_ms", "raw", "changed_ms", "rate", "first_seen_ms")}
    arrays |= {name: whole(ring, name) for name in ("fine", "events")}
    arrays = {name: array[..., : ring.size] for name, array in arrays.items()}
    return arrays | {f"day {name}": ring.read_day_means(name) for name in ring.layout.days}


def assert_same(left: WindowStore, right: WindowStore) -> None:
    for name, array in state(left).items():
        np.testing.assert_array_equal(array, state(right)[name], err_msg=name)


def test_a_gauge_is_kept_with_its_time() -> None:
    store = store_of([("power_w", 1, T0, 400.0), ("power_w", 1, T0 + 15_000, 410.0)])
    ring = store.ring(GPU)
    row = ring.layout.metrics.index("power_w")
    assert ring.raw[row, 1] == 410.0
    assert ring.time_ms[row, 1] == T0 + 15_000


def test_an_older_sample_is_late_and_not_applied() -> None:
    store = store_of([("power_w", 0, T0 + 15_000, 410.0)])
    written = store.write(batch(GPU, [("power_w", 0, T0, 11.0), ("power_w", 0, T0 + 15_000, 12.0)]), NOW)
    assert written == WrittenSamples(applied=0, late=2)


def test_a_time_too_far_ahead_is_a_bad_record() -> None:
    store = WindowStore(fleet())
    written = store.write(batch(GPU, [("power_w", 0, T0 + 60_000, 11.0), ("power_w", 0, T0 + 60_001, 11.0)]), T0)
    assert written == WrittenSamples(applied=1, future=1)


def test_what_is_no_number_is_a_bad_record() -> None:
    store = WindowStore(fleet())
    values = (float("nan"), float("inf"), -1e40, 5.0)
    rows = [("power_w", 0, T0 + i, value) for i, value in enumerate(values)]
    assert store.write(batch(GPU, rows), T0) == WrittenSamples(applied=1, not_finite=3)


@pytest.mark.parametrize(
    ("metric", "value", "looks_like"),
    [
        ("gpu_temp_c", 131.0, "131 looks like °F: 55 °C"),
        ("gpu_temp_c", 328.15, "328.15 looks like K: 55 °C"),
        ("sm_clock_mhz", 1.98e9, "1.98e+09 looks like Hz: 1980 MHz"),
        ("power_w", 1.2, "1.2 looks like kW: 1200 W"),
        ("power_w", 700_000.0, "700000 looks like mW: 700 W"),
        ("gpu_util", 98.0, "98 looks like %: 0.98 ratio"),
        ("fb_used_bytes", 8e10 * 2**20, "looks like B where MiB are expected: 8e+10 B"),
        ("pcie_link_width", 400.0, "expected 0 to 32"),
    ],
)
def test_what_cannot_be_is_a_bad_record_that_names_the_unit(metric: str, value: float, looks_like: str) -> None:
    store = WindowStore(fleet())
    written = store.write(batch(GPU, [(metric, 1, T0, value), ("xid", 1, T0, 79.0)]), T0)
    assert (written.applied, [error.reason for error in written.implausible]) == (1, ["implausible"])
    assert written.implausible[0].detail.startswith(f"n0/1: {metric} = {value:g} ")
    assert written.implausible[0].detail.endswith(looks_like)
    ring = store.ring(GPU)
    assert np.isnan(ring.find_newest_values(ring.layout.metrics.index(metric))[1]), "never stored, so never scored"


@pytest.mark.parametrize(
    ("metric", "value"),
    [
        ("power_w", 0.0),  # a missing sensor
        ("power_w", 5.1),  # an A2 in idle
        ("power_w", 67.0),  # an H100 in idle, whatever its use is said to be
        ("power_w", 1400.0),
        ("gpu_temp_c", 105.0),
        ("mem_clock_mhz", 14_001.0),
        ("sm_clock_mhz", 345.0),
        ("gpu_util", 1.0),
        ("energy_j", 3e12),  # counters have no limits
    ],
)
def test_what_hardware_can_show_is_stored(metric: str, value: float) -> None:
    written = WindowStore(fleet()).write(batch(GPU, [(metric, 0, T0, value)]), T0)
    assert (written.applied, written.implausible) == (1, ())


def test_many_implausible_samples_of_a_metric_share_one_error() -> None:
    rows = [(metric, gpu, T0, 131.0) for metric in ("gpu_temp_c", "memory_temp_c") for gpu in range(3)]
    written = WindowStore(fleet()).write(batch(GPU, rows), T0)
    assert [error.detail.split(" ")[0] for error in written.implausible] == ["n0/0:"] * 6
    assert len({id(error) for error in written.implausible}) == 2


def test_an_empty_batch_changes_nothing() -> None:
    assert WindowStore(fleet()).write(batch(GPU, []), T0) == WrittenSamples()


def test_a_counter_becomes_a_rate_and_its_first_sample_gives_none() -> None:
    store = store_of([("energy_j", 0, T0, 1000.0)])
    ring = store.ring(GPU)
    row = ring.layout.counters.index("energy_j")
    assert np.isnan(ring.rate[row, 0])
    store.write(batch(GPU, [("energy_j", 0, T0 + 10_000, 5000.0)]), NOW)
    assert ring.rate[row, 0] == 400.0


def test_counter_reset_counts_from_zero() -> None:
    store = store_of([("ecc_sbe_volatile", 0, T0, 100.0), ("ecc_sbe_volatile", 0, T0 + 15_000, 7.0)], now_ms=SOON)
    assert store.ring(GPU).events.sum() == 7


def test_increments_within_a_slot_add_up_exactly() -> None:
    # slot 0: 10 13 14, slot 1: 20
    counts = (10.0, 13.0, 14.0, 20.0)
    store = store_of([("ecc_sbe_volatile", 0, T0 + 6_000 * i, count) for i, count in enumerate(counts)], now_ms=SOON)
    ring = store.ring(GPU)
    row, slot = ring.layout.events.index("ecc_sbe_volatile"), T0 // INTERVAL_MS
    assert ring.events[row, [slot % ring.span.slots, (slot + 1) % ring.span.slots], 0].tolist() == [4, 6]


def test_a_saturated_counter_has_no_rate() -> None:
    store = WindowStore(fleet())
    rows = [("link_downed", 0, T0 + i * 15_000, value) for i, value in enumerate((250.0, 255.0, 255.0))]
    store.write(batch(PORT, rows), SOON)
    ring = store.ring(PORT)
    assert np.isnan(ring.rate[ring.layout.counters.index("link_downed"), 0])
    assert ring.events.sum() == 5


def test_a_wrapped_counter_goes_on() -> None:
    store = WindowStore(fleet())
    store.write(batch(PORT, [("rx_packets", 0, T0, 2.0**32 - 100), ("rx_packets", 0, T0 + 10_000, 900.0)]), NOW)
    ring = store.ring(PORT)
    assert ring.rate[ring.layout.counters.index("rx_packets"), 0] == 100.0


def test_room_grows_with_the_entities() -> None:
    store = store_of([("power_w", 2, T0, 300.0)])
    for gpu in range(3, 500):
        store.entities.add_to_node(GPU, "n9", gpu)
        store.write(batch(GPU, [("power_w", gpu, T0, float(gpu))]), NOW)
    ring = store.ring(GPU)
    power = ring.raw[ring.layout.metrics.index("power_w"), : ring.size]
    assert power[2:].tolist() == [300.0, *map(float, range(3, 500))]


def test_a_ring_hands_out_memory_only_for_slots_that_it_has_opened() -> None:
    """The cells of other slots hold what the system hands out at first, zeros: nobody has written them."""
    store = WindowStore(fleet(4))
    for minutes in (0, 1, 3):
        store.write(batch(GPU, [("power_w", 0, T0 + minutes * 60_000, 500.0)]), T0 + minutes * 60_000)
    ring = store.ring(GPU)
    opened = ring.list_open_slots(0, ring.head)
    assert opened.tolist() == list(range(T0 // INTERVAL_MS, T0 // INTERVAL_MS + 13))
    untouched = np.delete(ring.fine, opened % ring.span.slots, axis=1)
    assert not untouched.any()
    assert np.isnan(ring.fine[:, opened % ring.span.slots, 1:4]).all()


def test_a_late_sample_opens_the_slots_between() -> None:
    first, late = ("power_w", 0, NOW, 500.0), ("power_w", 1, NOW - 20 * 60_000, 400.0)
    in_turn, late_last = store_of([late], [first]), store_of([first], [late])
    assert_same(in_turn, late_last)
    ring = late_last.ring(GPU)
    assert ring.first_slot == (NOW - 20 * 60_000) // INTERVAL_MS
    power = ring.read_slots("power_w", 120)
    assert np.isfinite(power).sum() == 2
    assert np.nanmin(ring.compute_peak("power_w")) == 400.0


def test_a_sample_older_than_the_ring_opens_nothing() -> None:
    ring = store_of([("power_w", 0, NOW, 500.0)], [("power_w", 1, T0, 400.0)]).ring(GPU)
    assert (ring.first_slot, ring.head) == (NOW // INTERVAL_MS, NOW // INTERVAL_MS)


@examples(40)
@given(rows_of, rows_of)
def test_a_ring_that_grows_equals_one_that_had_room_for_all(early: list[Row], later: list[Row]) -> None:
    growing = store_of(early)
    for gpu in range(3, 40):
        growing.entities.add_to_node(GPU, f"m{gpu}", 0)
    growing.write(batch(GPU, later), NOW)
    roomy = WindowStore(fleet(3))
    for gpu in range(3, 40):
        roomy.entities.add_to_node(GPU, f"m{gpu}", 0)
    roomy.write(batch(GPU, early), NOW)
    roomy.write(batch(GPU, later), NOW)
    assert_same(growing, roomy)


def test_memory_stays_below_64_kib_a_gpu_its_port_included() -> None:
    store = WindowStore(fleet(1000))
    assert (store.ring(GPU).nbytes + store.ring(PORT).nbytes) / 1000 < 64 * 1024


def test_a_sample_older_than_the_ring_updates_the_series_only() -> None:
    store = store_of([("power_w", 1, NOW, 11.0)], [("power_w", 0, T0, 500.0)])
    ring = store.ring(GPU)
    assert ring.raw[ring.layout.metrics.index("power_w"), 0] == 500.0
    assert np.isnan(whole(ring, "fine")[..., 0]).all()


@examples(62)
@given(rows_of)
def test_the_store_equals_a_naive_one(rows: list[Row]) -> None:
    store, naive = WindowStore(fleet()), NaiveStore(GPU)
    written = store.write(batch(GPU, rows), NOW)
    naive.write(rows)
    ring = store.ring(GPU)
    assert written.applied == naive.applied
    assert written.late == len(rows) - naive.applied
    for (name, entity), series in naive.series.items():
        metric = ring.layout.metrics.index(name)
        assert ring.time_ms[metric, entity] == series.time_ms
        assert ring.changed_ms[metric, entity] == series.changed_ms
        np.testing.assert_equal(np.float32(ring.find_newest_values(metric)[entity]), np.float32(series.current))
        slots = range(ring.end_slot - 119, ring.end_slot + 1)
        if ring.layout.value[metric] >= 0:
            fine = np.array([series.fine.get(slot, np.nan) for slot in slots], np.float32)
            np.testing.assert_array_equal(ring.read_slots(name, 120)[:, entity], fine)
        elif ring.layout.event[metric] >= 0:
            row = ring.layout.event[metric]
            counts = ring.events[row, np.array(slots) % ring.span.slots, entity]
            assert counts.tolist() == [series.events.get(slot, 0) for slot in slots]


@examples(62)
@given(rows_of)
def test_bucket_means_equal_naive_ones(rows: list[Row]) -> None:
    store, naive = store_of(rows), NaiveStore(GPU)
    naive.write(rows)
    newest = store.ring(GPU).head * INTERVAL_MS // 600_000
    for (name, entity), series in naive.series.items():
        if name not in store.ring(GPU).layout.days:
            continue
        buckets = range(newest - 143, newest + 1)
        means = [np.mean(series.buckets[b]) if series.buckets.get(b) else np.nan for b in buckets]
        np.testing.assert_allclose(store.ring(GPU).read_day_means(name)[:, entity], means, rtol=1e-6)


@examples(62)
@given(rows_of)
def test_twice_is_once(rows: list[Row]) -> None:
    assert_same(store_of(rows, rows), store_of(rows))


@examples(62)
@given(rows_of, st.randoms(use_true_random=False))
def test_any_rebatching_that_keeps_each_series_order_ends_in_the_same_state(rows: list[Row], random) -> None:
    queues: dict[tuple[str, int], list[Row]] = {}
    for row in rows:
        queues.setdefault(row[:2], []).append(row)
    shuffled: list[list[Row]] = [[]]
    while queues:
        key = random.choice(sorted(queues))
        shuffled[-1].append(queues[key].pop(0))
        if not queues[key]:
            del queues[key]
        if random.random() < 0.3:
            shuffled.append([])
    assert_same(store_of(*shuffled), store_of(rows))


@examples(62)
@given(rows_of)
def test_moving_the_clock_between_batches_changes_nothing(rows: list[Row]) -> None:
    rows = sorted(rows, key=lambda row: row[2])
    store = WindowStore(fleet())
    for row in rows:
        store.write(batch(GPU, [row]), row[2])
    store.ring(GPU)
    store.advance(NOW)
    straight = store_of(rows)
    straight.ring(GPU)
    straight.advance(NOW)
    assert_same(store, straight)


@pytest.mark.parametrize("samples", [1, 7, 300])
def test_a_batch_may_hold_many_samples_of_a_series(samples: int) -> None:
    store = store_of([("power_w", 0, T0 + i * 1000, float(i)) for i in range(samples)])
    ring = store.ring(GPU)
    assert ring.raw[ring.layout.metrics.index("power_w"), 0] == samples - 1


def test_rings_hold_the_slots_that_are_read_and_no_others() -> None:
    gpu, port, node = (make_layout(kind).values for kind in (GPU, PORT, EntityKind.NODE))
    assert set(gpu) == {*GPU_METRICS, *SUMMED[GPU]} | set(MAXIMA[GPU])
    assert set(port) == {"tx_bytes", *SUMMED[PORT], *MAXIMA[PORT]}
    assert set(node) == {*SUMMED[EntityKind.NODE], *MAXIMA[EntityKind.NODE]}
    assert {*RATES, *EDGES} <= set(make_layout(EntityKind.SERVED_MODEL).values)
    assert not make_layout(EntityKind.GPU_INSTANCE).values


@pytest.mark.parametrize(("kind", "most"), [(GPU, 17.5), (PORT, 14.5), (EntityKind.NODE, 6.0)])
def test_memory_of_an_entity_is_bounded(kind: EntityKind, most: float) -> None:
    ring = Ring(make_layout(kind), RingSpan())
    ring.reserve(1024)
    assert ring.nbytes / ring.capacity / 1024 <= most


def test_slots_of_a_metric_without_any_are_refused() -> None:
    ring = store_of([("xid", 0, T0, 79.0)]).ring(GPU)
    with pytest.raises(AssertionError, match="xid is none of"):
        ring.read_slots("xid", 8)
