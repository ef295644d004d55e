"""What the models see. Times are seconds after T0; a scrape comes every 15 s."""

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleetcast.features.extract import GPU_FEATURES, NODE_FEATURES, PORT_FEATURES, Frames, extract_frames
from fleetcast.features.store import WindowStore
from fleetcast.fleet.entities import Entities
from fleetcast.fleet.metrics import METRICS
from tests.features.oracle import GPU, INTERVAL_MS, NODE, PORT, T0, Row, batch, fleet
from tests.fuzz.bounds import examples


def gpu_rows(name: str, values: list[float], gpu: int = 0, every_s: int = 15) -> list[Row]:
    return [(name, gpu, T0 + i * every_s * 1000, value) for i, value in enumerate(values)]


def at(second: float) -> int:
    return T0 + round(second * 1000)


def frames_of(rows: list[Row], second: float, gpus: int = 3) -> Frames:
    store = WindowStore(fleet(gpus))
    store.write(batch(GPU, rows), at(second))
    return extract_frames(store, at(second))


def scrape(store: WindowStore, second: float, gpus: dict[int, float], node: int = 0, up: bool = True) -> None:
    """One page of a node: its GPUs' power, and what the scraper says of itself."""
    now = at(second)
    store.write(batch(GPU, [("power_w", gpu, now, value) for gpu, value in gpus.items()]), now)
    rows = [("scrape_up", node, now, float(up)), ("scrape_duration_s", node, now, 0.02)]
    if up:
        rows.append(("gpus_reported", node, now, float(len(gpus))))
    store.write(batch(NODE, rows), now)


def test_the_promised_features_are_there() -> None:
    assert {"power_w", "ecc_sbe_volatile_per_s", "thermal_violation_share", "power_w_mean_2m"} <= set(GPU_FEATURES)
    assert {"nvlink_tx_bytes_per_s_std_30m", "pcie_replays_count_10m", "ecc_dbe_volatile_count_30m"} <= set(
        GPU_FEATURES
    )
    assert {"max_sm_clock_mhz", "age_s", "silent_s", "frozen_s", "first_seen_s"} <= set(GPU_FEATURES)
    assert {"rx_bytes_per_s_mean_2m", "symbol_errors_count_30m", "state", "max_speed_bytes_per_s"} <= set(PORT_FEATURES)
    assert {"scrape_duration_s_std_30m", "max_gpus_reported", "gaps_30m", "age_s"} <= set(NODE_FEATURES)


def test_no_counter_stands_in_a_frame_under_its_own_name() -> None:
    for kind, names in ((GPU, GPU_FEATURES), (PORT, PORT_FEATURES), (NODE, NODE_FEATURES)):
        assert len(set(names)) == len(names), "two features of one name"
        assert not {metric.name for metric in METRICS[kind] if metric.is_counter} & set(names)


def test_an_empty_store_gives_empty_frames() -> None:
    frames = extract_frames(WindowStore(Entities()), T0)
    assert frames.gpu.values.shape == (0, len(GPU_FEATURES))


def test_an_entity_without_samples_is_unknown_not_zero() -> None:
    frame = frames_of(gpu_rows("power_w", [400.0]), 1).gpu
    assert np.isnan(frame.column("power_w")).tolist() == [False, True, True]
    assert np.isnan(frame.column("age_s")).tolist() == [False, True, True]
    assert np.isnan(frame.column("ecc_sbe_volatile_count_10m")).all()


def test_rows_know_their_node() -> None:
    assert frames_of([], 0).gpu.node.tolist() == [0, 0, 1]


def test_a_counter_shows_as_a_rate() -> None:
    frame = frames_of(gpu_rows("energy_j", [1000.0, 7000.0]), 20).gpu
    assert frame.column("energy_w")[0] == 400.0


def test_the_value_goes_when_it_is_too_old_and_the_code_stays() -> None:
    rows: list[Row] = [("power_w", 0, T0, 400.0), ("xid", 0, T0, 79.0)]
    frame = frames_of(rows, 121).gpu
    assert np.isnan(frame.column("power_w")[0])
    assert frame.column("xid")[0] == 79.0
    assert frame.column("age_s")[0] == 121.0


def test_since_says_when_the_value_last_changed() -> None:
    frame = frames_of(gpu_rows("xid", [0.0, 0.0, 74.0, 74.0]) + gpu_rows("power_w", [11.0, 11.0], gpu=1), 50).gpu
    assert frame.changed_ms("xid")[0] == at(30)
    assert frame.changed_ms("power_w")[1] == 0  # it has been so since we first saw the GPU


def test_since_is_the_first_sample_of_a_series_that_appeared_later() -> None:
    frame = frames_of([("power_w", 0, T0, 400.0), ("xid", 0, at(30), 79.0)], 50).gpu
    assert frame.changed_ms("xid")[0] == at(30)


def test_counts_are_exact_and_end_with_their_window() -> None:
    # 3 errors between 0 and 15 s, none afterwards
    rows = gpu_rows("ecc_sbe_volatile", [0.0, 3.0, *([3.0] * 110)])
    for second, ten, thirty in ((100, 3, 3), (600, 3, 3), (640, 0, 3), (1780, 0, 3)):
        frame = frames_of([row for row in rows if row[2] <= at(second)], second).gpu
        assert frame.column("ecc_sbe_volatile_count_10m")[0] == ten, second
        assert frame.column("ecc_sbe_volatile_count_30m")[0] == thirty, second


def test_max_clock_remembers_a_day() -> None:
    store = WindowStore(fleet())
    for second in range(0, 300 * 60, 600):
        store.write(batch(GPU, [("sm_clock_mhz", 0, at(second), 1980.0 if second < 3600 else 990.0)]), at(second))
    assert extract_frames(store, at(60 * 300)).gpu.column("max_sm_clock_mhz")[0] == 1980.0


def test_frozen_s_grows_while_samples_bring_nothing_new() -> None:
    frame = frames_of(gpu_rows("power_w", [11.0, 12.0, 12.0, 12.0]) + gpu_rows("power_w", [11.0, 12.0], gpu=1), 46).gpu
    assert frame.column("frozen_s")[:2].tolist() == [30.0, 0.0]


def test_a_gpu_missing_from_its_page_is_silent() -> None:
    store = WindowStore(fleet(2))
    for second in (0, 15):
        scrape(store, second, {0: 400.0, 1: 400.0})
    for second in (30, 45):
        scrape(store, second, {0: 400.0 + second})
        frame = extract_frames(store, at(second + 1)).gpu
        assert frame.column("silent_s").tolist() == [0.0, second + 1 - 15 if second == 45 else 0.0]


def test_a_node_whose_page_lost_all_its_gpus_is_silent() -> None:
    store = WindowStore(fleet(2))
    for second in (0, 15):
        scrape(store, second, {0: 400.0, 1: 400.0})
    for second in (30, 45):
        scrape(store, second, {})
    frames = extract_frames(store, at(46))
    assert frames.gpu.column("silent_s").tolist() == [31.0, 31.0]
    assert frames.node.column("gpus_reported").tolist() == [0.0]
    assert frames.node.column("max_gpus_reported").tolist() == [2.0]


def test_a_node_that_does_not_answer_accuses_no_gpu() -> None:
    store = WindowStore(fleet(2))
    for second in (0, 15):
        scrape(store, second, {0: 400.0, 1: 400.0})
    for second in (30, 45, 60):
        scrape(store, second, {}, up=False)
    frames = extract_frames(store, at(61))
    assert frames.gpu.column("silent_s").tolist() == [0.0, 0.0]
    assert frames.node.column("scrape_up").tolist() == [0.0]
    assert frames.node.column("gaps_30m").tolist() == [3.0]


def test_scrapes_that_never_came_are_gaps() -> None:
    store = WindowStore(fleet(2))
    for second in (0, 15, 75, 90):  # 30, 45 and 60 are missing
        scrape(store, second, {0: 1.0 + second, 1: 1.0})
    assert extract_frames(store, at(91)).node.column("gaps_30m").tolist() == [3.0]


def test_port_errors_are_counted_and_bytes_become_rates() -> None:
    store = WindowStore(fleet(1))
    rows: list[Row] = []
    for i in range(4):
        rows += [("rx_bytes", 0, at(15 * i), 1.5e10 * i), ("link_downed", 0, at(15 * i), float(i))]
        rows += [("speed_bytes_per_s", 0, at(15 * i), 5e10 if i < 2 else 2.5e10)]
    store.write(batch(PORT, rows), at(46))
    frame = extract_frames(store, at(46)).port
    assert frame.column("rx_bytes_per_s")[0] == 1e9
    assert frame.column("rx_bytes_per_s_mean_2m")[0] == 1e9
    assert frame.column("link_downed_count_10m")[0] == 3
    assert (frame.column("speed_bytes_per_s")[0], frame.column("max_speed_bytes_per_s")[0]) == (2.5e10, 5e10)


@pytest.mark.parametrize("interval_s", [1, 30, 300])
def test_windows_follow_the_interval_as_far_as_the_ring_reaches(interval_s: int) -> None:
    store = WindowStore(fleet(1), interval_s=interval_s)
    for i in range(500):
        now = at(i * interval_s)
        store.write(batch(GPU, [("power_w", 0, now, 100.0 + i)]), now)
    frame = extract_frames(store, at(499 * interval_s)).gpu
    for suffix, seconds in (("2m", 120), ("30m", 1800)):
        slots = min(120, max(2, round(seconds / interval_s)))
        assert frame.column(f"power_w_mean_{suffix}")[0] == 100 + np.mean(range(500 - slots, 500))


def test_the_frames_do_not_change_with_the_store() -> None:
    store = WindowStore(fleet(1))
    store.write(batch(GPU, gpu_rows("power_w", [400.0])), T0)
    frame = extract_frames(store, T0).gpu
    store.write(batch(GPU, [("power_w", 0, at(15), 100.0)]), at(15))
    assert frame.column("power_w")[0] == 400.0


samples = st.lists(st.tuples(st.integers(0, 2400), st.floats(2, 700, width=32)), min_size=1, max_size=80)


@examples(75)
@given(samples, st.integers(2400, 2500))
def test_window_statistics_equal_those_of_pandas(rows: list[tuple[int, float]], now_s: int) -> None:
    store = WindowStore(fleet(1))
    rows = sorted({row[0]: row for row in rows}.values())
    for second, value in rows:  # as they come, so that slots close on the way
        store.write(batch(GPU, [("power_w", 0, at(second), value)]), at(second))
        extract_frames(store, at(second))
    frame = extract_frames(store, at(now_s)).gpu
    known = pd.Series({at(second) // INTERVAL_MS: value for second, value in rows})
    end = at(now_s) // INTERVAL_MS
    tolerance = {"rtol": 1e-5, "atol": 2e-2}
    for seconds, suffix in ((120, "2m"), (1800, "30m")):
        window = known[(known.index > end - seconds // 15) & (known.index <= end)]
        np.testing.assert_allclose(frame.column(f"power_w_mean_{suffix}")[0], window.mean(), **tolerance)
    np.testing.assert_allclose(frame.column("power_w_std_30m")[0], window.std(ddof=0), **tolerance)


@examples(100)
@given(st.lists(st.tuples(st.integers(0, 2400), st.integers(0, 9)), min_size=1, max_size=60), st.booleans())
def test_counts_equal_sums_of_increments(moves: list[tuple[int, int]], late_clock: bool) -> None:
    store, total = WindowStore(fleet(1)), 0.0
    store.write(batch(GPU, [("pcie_replays", 0, at(-15), 0.0)]), at(2400) if late_clock else at(-15))
    increments = pd.Series(dtype=float)
    for second, step in sorted({move[0]: move for move in moves}.values()):
        total += step
        now = at(2400) if late_clock else at(second)
        store.write(batch(GPU, [("pcie_replays", 0, at(second), total)]), now)
        increments.loc[second] = step
    frame = extract_frames(store, at(2400)).gpu
    slot = pd.Series(increments.index, index=increments.index) * 1000 + T0
    recent = increments[slot // INTERVAL_MS > at(2400) // INTERVAL_MS - 120]
    assert frame.column("pcie_replays_count_30m")[0] == recent.sum()
