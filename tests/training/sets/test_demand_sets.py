"""Tables of demand as panels, known by their columns."""

import numpy as np
import pandas as pd

from fleetcast.training.sets.demand_sets import read_panels, set_known_capacity
from tests.training.demand_folders import flows, nodes, times, write, write_split


def by_target(sets):
    return {one.panel.target: one for one in sets}


def test_flows_become_five_targets_and_the_queue_is_what_was_not_started(tmp_path):
    train, test = write_split(flows(40), tmp_path, "demand/mycluster", 30)
    sets = by_target(read_panels(train, test))
    assert list(sets) == ["arriving_jobs", "arriving", "running", "queued", "wanted"]
    assert {one.dataset for one in sets.values()} == {"demand/mycluster"}
    assert {one.train_bins for one in sets.values()} == {30}
    table = flows(40)
    assert sets["queued"].panel.values[0].tolist() == (2 * table["submit_gpu_job"]).tolist()
    assert np.array_equal(sets["wanted"].panel.values, sets["running"].panel.values + sets["queued"].panel.values)
    assert sets["running"].panel.first_ms == 1_577_836_800_000
    assert "arriving" in sets["running"].panel.covariates


def test_a_queue_that_began_unseen_is_never_negative(tmp_path):
    table = flows(6).assign(submit_gpu_num=[0, 0, 0, 5, 0, 0], start_gpu_num=[2, 3, 0, 0, 4, 0])
    write(table, tmp_path, "demand/a")
    assert by_target(read_panels(tmp_path, None))["queued"].panel.values[0].tolist() == [0, 0, 0, 5, 1, 1]


def test_states_of_virtual_clusters_are_series_as_of_the_end_of_ten_minutes(tmp_path):
    rows = [
        pd.DataFrame(
            {
                "vc": name,
                "time": times(40, minutes=1),
                "running_gpu_num": np.arange(40) + first,
                "pending_gpu_num": 1,
                "total_gpu_num": 64,
            }
        )
        for name, first in (("b", 100), ("a", 0))
    ]
    write(pd.concat(rows), tmp_path, "demand/states")
    running = by_target(read_panels(tmp_path, None))["running"].panel
    assert running.names == ("a", "b")
    assert running.values.tolist() == [[9, 19, 29, 39], [109, 119, 129, 139]]
    assert running.capacity.tolist() == [64, 64]


def test_zeros_and_holes_of_node_counts_are_unknown(tmp_path):
    table = nodes(np.array([5.0, 0, 7, 8, 9, 10])).drop(index=[3])
    write(table, tmp_path, "demand/any")
    (one,) = read_panels(tmp_path, None)
    assert np.array_equal(one.panel.values[0], [5, np.nan, 7, np.nan, 9, 10], equal_nan=True)


def test_request_rates_of_clients_add_up_to_those_of_their_model(tmp_path):
    table = pd.DataFrame(
        {
            "model": ["m", "m", "m", "n"],
            "client": [0, 1, 0, 0],
            "t_s": [0, 0, 600, 600],
            "rate_rps": [1.0, 2.0, 4.0, 8.0],
        }
    )
    write(table, tmp_path, "serving/gen")
    (one,) = read_panels(tmp_path, None)
    assert one.panel.names == ("m", "n")
    assert np.array_equal(one.panel.values, [[3, 4], [np.nan, 8]], equal_nan=True)


def test_rows_in_any_order_twice_or_bad_are_the_same_panel(tmp_path):
    table = nodes(np.arange(1.0, 31.0))
    write(table, tmp_path / "clean", "demand/a")
    bad = pd.DataFrame({"time": [pd.NaT, times(30)[3]], "active": [4.0, -1.0], "total": [1, 1]})
    dirty = pd.concat([table[10:], table[:20], bad]).sample(frac=1, random_state=0)
    (tmp_path / "dirty/demand/a").mkdir(parents=True)
    dirty.to_csv(tmp_path / "dirty/demand/a/t.csv", index=False)
    lines = []
    clean, same = (read_panels(tmp_path / name, None, lines.append)[0].panel for name in ("clean", "dirty"))
    assert np.array_equal(clean.values, same.values)
    assert lines == ["demand/a: 2 of 42 rows have no time, no number or a negative one: skipped"]


def test_a_set_of_the_test_folder_alone_has_no_train_part(tmp_path):
    write(nodes(np.arange(1.0, 31.0)), tmp_path / "train", "demand/a")
    write(flows(30), tmp_path / "test", "demand/b")
    sets = read_panels(tmp_path / "train", tmp_path / "test")
    assert {one.dataset: one.train_bins for one in sets} == {"demand/a": 30, "demand/b": 0}


def test_a_folder_without_a_known_layout_is_named(tmp_path):
    write(pd.DataFrame({"colour": ["blue"]}), tmp_path, "demand/odd")
    lines = []
    assert read_panels(tmp_path, None, lines.append) == []
    assert lines == ["skipped demand/odd: no table of it has the columns of a demand series"]


def test_a_set_that_was_never_seen_is_judged_after_its_own_week_and_after_the_train_folder(tmp_path):
    write(nodes(np.arange(1.0, 1.0 + 10 * 144)), tmp_path / "train", "demand/a")  # ten days
    for name, table in (
        ("same", nodes(np.arange(1.0, 1.0 + 12 * 144))),  # begins with a: from its end on
        ("later", nodes(np.arange(1.0, 1.0 + 20 * 144))[12 * 144 :]),  # eight days: after half of them
        ("before", nodes(np.arange(1.0, 1.0 + 20 * 144)).assign(time=times(20 * 144) - pd.Timedelta(400, "D"))),
    ):
        write(table, tmp_path / "test", f"demand/{name}")
    sets = read_panels(tmp_path / "train", tmp_path / "test")
    assert {one.dataset: (one.train_bins, one.bins_before_judging) for one in sets} == {
        "demand/a": (1440, 1440),
        "demand/before": (0, 7 * 144 + 1),
        "demand/later": (0, 4 * 144),
        "demand/same": (0, 10 * 144),
    }


def test_a_ceiling_is_that_of_the_first_judged_origin(tmp_path):
    table = pd.DataFrame({"time": times(48), "running_gpu_num": 1, "pending_gpu_num": 1, "total_gpu_num": 64})
    table.loc[24:, "total_gpu_num"] = 128
    write(table, tmp_path / "test", "demand/alone")
    (tmp_path / "train").mkdir()
    running = by_target(read_panels(tmp_path / "train", tmp_path / "test"))["running"]
    assert (running.bins_before_judging, running.panel.capacity.tolist()) == (24, [64])
    assert set_known_capacity(running.panel, 40).capacity.tolist() == [128]
    assert np.isnan(by_target(read_panels(tmp_path / "test", None))["queued"].panel.capacity[0])


def test_times_are_read_in_any_unit_and_a_bad_clock_is_a_bad_record(tmp_path):
    seconds = 1_577_836_800 + 600.0 * np.arange(300)
    for unit, factor in (("s", 1), ("ms", 1000), ("us", 10**6), ("ns", 10**9)):
        time = seconds * factor
        table = pd.DataFrame({"time": [np.inf, *time, 0.0], "active": np.arange(302.0) + 1})
        write(table, tmp_path / unit, "demand/a")
        lines = []
        (one,) = read_panels(tmp_path / unit, None, lines.append)
        assert (one.panel.first_ms, one.panel.bins) == (1_577_836_800_000, 300)
        assert lines == ["demand/a: 2 of 302 rows have no time, no number or a negative one: skipped"]


def test_rows_that_come_a_little_early_or_late_are_of_their_bin(tmp_path):
    late = pd.to_timedelta(np.random.default_rng(0).integers(-40, 41, 300), "s")
    write(nodes(np.arange(1.0, 301.0)).assign(time=times(300) + late), tmp_path, "demand/a")
    (one,) = read_panels(tmp_path, None)
    assert one.panel.bin_s == 600
    assert one.panel.values[0, -300:].tolist() == list(range(1, 301))


def test_series_are_named_by_cluster_and_virtual_cluster_and_what_has_no_name_is_unknown(tmp_path):
    table = pd.concat(
        [flows(20).assign(cluster=cluster, vc=vc) for cluster, vc in (("x", "1"), ("y", "1"), ("x", None))]
    )
    write(table.drop(columns=["submit_gpu_job", "running_gpu_num"]), tmp_path, "demand/a")
    sets = by_target(read_panels(tmp_path, None))
    assert list(sets) == ["arriving", "running", "queued", "wanted"]
    assert sets["running"].panel.names == ("x/1", "x/unknown", "y/1")
