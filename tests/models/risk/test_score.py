"""score_local and score_fleet: what is said of which node, when, and what is not."""

import numpy as np

from fleetcast.models.risk.scores import RISK_HORIZONS_S


def test_a_healthy_fleet_has_no_reasons_and_base_rates(small_fleet):
    fleet = small_fleet()
    answer = fleet.tick(4)
    assert answer.risk.reasons == {}
    assert answer.risk.actions == {}
    assert np.isclose(answer.risk.values[0, 2], 3.4e-3, rtol=0.01).all()  # a day, of nodes that never had a fault


def test_a_throttling_gpu_changes_its_node_and_no_other(small_fleet):
    fleet = small_fleet()
    before = fleet.tick(3)
    fleet.throttle("n002", 3)
    answer = fleet.tick(2)
    assert fleet.flagged(answer) == ["n002"]
    assert list(answer.risk.reasons) == [1]
    assert fleet.sentences(answer, "n002")[0].startswith(
        "GPU 3: SM clock 990 MHz, usual 1,980; thermal slowdown since "
    )
    others = [0, 2, 3]
    assert np.array_equal(answer.risk.values[:, :, others], before.risk.values[:, :, others])
    assert answer.risk.values[2, 0, 1] > 0.5  # slow within the hour


def test_a_reason_shows_at_the_first_sample_and_flags_at_the_second(small_fleet):
    fleet = small_fleet()
    fleet.tick(2)
    fleet.throttle("n001", 0)
    first = fleet.tick()
    assert fleet.sentences(first, "n001")
    assert fleet.flagged(first) == []
    assert fleet.flagged(fleet.tick()) == ["n001"]


def test_ticks_between_two_scrapes_are_no_further_evidence(small_fleet):
    fleet = small_fleet()
    fleet.tick(2)
    fleet.throttle("n001", 0)
    fleet.tick()
    for _ in range(4):  # the same sample, ageing
        fleet.gpu["age_s"] += 2.0
        answer = fleet.tick(every_s=2.0)
    assert fleet.flagged(answer) == []


def test_a_throttle_clears_after_quiet_minutes_and_not_before(small_fleet):
    fleet = small_fleet()
    fleet.tick(2)
    fleet.throttle("n001", 0)
    fleet.tick(3)
    row = fleet.row("n001", 0)
    fleet.gpu["sm_clock_mhz"][row] = fleet.gpu["sm_clock_mhz_mean_2m"][row] = 1980.0
    fleet.gpu["clock_event_reasons"][row] = 4.0
    assert fleet.flagged(fleet.tick(6)) == ["n001"]
    assert fleet.flagged(fleet.tick(10)) == []


def test_a_software_power_cap_is_no_reason(small_fleet):
    fleet = small_fleet()
    fleet.tick(2)
    fleet.gpu["sm_clock_mhz"][:] = 1500.0  # capped, bit 4
    assert fleet.tick(8).risk.reasons == {}


def test_idle_gpus_in_the_middle_of_a_job_are_no_reason(small_fleet):
    fleet = small_fleet()
    fleet.start("train-1", fleet.names)
    fleet.tick(3)
    rows = [fleet.row("n001", index) for index in range(8)]  # the node that writes the checkpoint works on
    idle = np.setdiff1d(np.arange(32), rows)
    fleet.gpu["gpu_util"][idle] = fleet.gpu["sm_active"][idle] = 0.0
    fleet.gpu["sm_clock_mhz"][idle] = 345.0
    fleet.gpu["clock_event_reasons"][idle] = 1.0
    fleet.gpu["pcie_link_gen"][idle] = 1.0
    assert fleet.tick(8).risk.reasons == {}


def test_a_vanished_gpu_says_so_and_no_longer_throttles(small_fleet):
    fleet = small_fleet()
    fleet.tick(2)
    fleet.throttle("n003", 3)
    fleet.tick(3)
    row = fleet.row("n003", 3)
    fleet.gpu["xid"][row], fleet.gpu_since["xid"][row] = 79.0, fleet.now_ms
    fleet.tick()
    fleet.gpu["silent_s"][row] = fleet.gpu["age_s"][row] = 45.0
    answer = fleet.tick()
    assert fleet.flagged(answer) == ["n003"]
    assert [text[:17] for text in fleet.sentences(answer, "n003")][:2] == ["GPU 3: series van", "GPU 3: XID 79: GP"]
    assert answer.risk.hard.tolist() == [False, False, True, False]
    assert answer.risk.actions[2].code == "drain_now"


def test_an_empty_page_of_a_restarted_exporter_loses_no_gpu(small_fleet):
    fleet = small_fleet()
    fleet.tick(2)
    rows = [fleet.row("n001", index) for index in range(8)]
    fleet.gpu["silent_s"][rows] = fleet.gpu["age_s"][rows] = 45.0
    assert fleet.flagged(fleet.tick()) == []


def test_a_new_xid_flags_at_once_and_an_old_one_only_watches(small_fleet):
    fleet = small_fleet()
    fleet.gpu["xid"][fleet.row("n004", 1)] = 79.0  # there when we first came
    fleet.tick(2)
    row = fleet.row("n002", 5)
    fleet.gpu["xid"][row] = 79.0
    fleet.gpu_since["xid"][row] = fleet.now_ms + 15_000
    answer = fleet.tick()
    assert fleet.flagged(answer) == ["n002"]
    assert fleet.sentences(answer, "n002")[0].startswith("GPU 5: XID 79: GPU has fallen off the bus at ")
    assert answer.risk.actions[3].code == "watch"


def test_an_application_xid_is_no_reason(small_fleet):
    fleet = small_fleet()
    fleet.tick()
    row = fleet.row("n002", 5)
    fleet.gpu["xid"][row] = 43.0
    fleet.gpu_since["xid"][row] = fleet.now_ms
    assert fleet.tick(3).risk.reasons == {}


def test_a_narrow_link_counts_only_under_load(small_fleet):
    fleet = small_fleet()
    fleet.tick(2)
    fleet.gpu["pcie_link_width"][fleet.row("n001", 2)] = 4.0
    idle = fleet.row("n002", 2)
    fleet.gpu["pcie_link_width"][idle] = 4.0
    fleet.gpu["gpu_util"][idle] = fleet.gpu["sm_active"][idle] = 0.0
    answer = fleet.tick(3)
    assert fleet.flagged(answer) == ["n001"]
    assert fleet.sentences(answer, "n001")[0].startswith("GPU 2: PCIe link x4 under load, usual x16")


def test_a_port_that_was_never_up_is_not_down(small_fleet):
    fleet = small_fleet()
    fleet.port["state"][3] = 1.0
    fleet.tick(3)
    fleet.port["state"][8] = 1.0
    answer = fleet.tick(3)
    assert fleet.flagged(answer) == ["n002"]
    assert fleet.sentences(answer, "n002")[0].startswith("port mlx5_0: InfiniBand link down")


def test_a_flapped_link_is_named(small_fleet):
    fleet = small_fleet()
    fleet.tick()
    fleet.port["link_downed_count_30m"][9] = 3.0
    answer = fleet.tick(2)
    assert fleet.sentences(answer, "n002") == ["port mlx5_1: InfiniBand link went down 3 times in 30 min"]
    assert fleet.flagged(answer) == ["n002"]


def test_a_silent_node_is_flagged_and_a_silent_fleet_is_our_own_trouble(small_fleet):
    fleet = small_fleet()
    fleet.tick(2)
    fleet.gpu["age_s"][:8] = fleet.port["age_s"][:8] = 96.0
    assert fleet.flagged(fleet.tick()) == []  # the exporter answered, with an empty page
    fleet.node["scrape_up"][0] = 0.0
    answer = fleet.tick()
    assert fleet.sentences(answer, "n001") == ["node has not answered for 95 s"]
    assert fleet.flagged(answer) == ["n001"]
    fleet.gpu["age_s"][:] = fleet.port["age_s"][:] = 95.0
    fleet.node["scrape_up"][:] = 0.0
    assert fleet.flagged(fleet.tick(3)) == []


def test_a_node_that_nobody_looked_at_is_not_silent(small_fleet):
    fleet = small_fleet()
    fleet.tick(2)
    fleet.gpu["age_s"][:8] = fleet.port["age_s"][:8] = fleet.node["age_s"][:1] = 95.0
    assert fleet.flagged(fleet.tick(3)) == []


def test_a_page_that_stops_moving_is_watched_and_one_that_never_moved_is_not(small_fleet):
    fleet = small_fleet()
    fleet.gpu["frozen_s"][:8] = 400.0
    fleet.gpu["frozen_s"][8:16] = fleet.gpu["first_seen_s"][8:16] = 400.0  # a file served by hand
    answer = fleet.tick(3)
    assert fleet.sentences(answer, "n001") == ["exporter frozen: no value has changed for 7 min"]
    assert answer.risk.actions[0].code == "watch"
    assert list(answer.risk.reasons) == [0]


def test_a_node_that_was_never_heard_has_no_score(small_fleet):
    fleet = small_fleet()
    fleet.gpu["age_s"][:8] = fleet.port["age_s"][:8] = np.nan
    fleet.node["gpus_reported"][0] = np.nan
    answer = fleet.tick()
    assert np.isnan(answer.risk.values[:, :, 0]).all()
    assert np.isfinite(answer.risk.values[:, :, 1:]).all()


def test_probabilities_lie_in_their_range_and_grow_with_the_horizon(small_fleet):
    fleet = small_fleet()
    fleet.throttle("n001", 0)
    fleet.gpu["ecc_dbe_volatile_count_30m"][fleet.row("n002", 0)] = 2.0
    fleet.port["state"][20] = 1.0
    values = fleet.tick(3).risk.values
    assert values.shape == (3, len(RISK_HORIZONS_S), 4)
    assert ((values >= 0) & (values <= 1)).all()
    assert (np.diff(values, axis=1) >= 0).all()


def test_shares_of_a_node_sum_to_at_most_one(small_fleet):
    fleet = small_fleet()
    for gpu in range(4):
        fleet.throttle("n001", gpu)
    fleet.gpu["ecc_dbe_volatile_count_30m"][0] = 2.0
    answer = fleet.tick(3)
    assert 0 < sum(reason.share for reason in answer.risk.reasons[0]) <= 1.001


def test_a_frame_with_nothing_but_a_clock_and_a_bit_is_enough(small_fleet):
    fleet = small_fleet(2)
    fleet.gpu = {name: fleet.gpu[name] for name in ("sm_clock_mhz", "clock_event_reasons", "age_s")}
    fleet.port = {"age_s": fleet.port["age_s"]}
    fleet.tick(2)
    row = fleet.row("n002", 0)
    fleet.gpu["sm_clock_mhz"][row] = 990.0
    fleet.gpu["clock_event_reasons"][row] = 64.0
    assert fleet.flagged(fleet.tick(2)) == ["n002"]


def test_a_power_brake_is_not_called_thermal(small_fleet):
    fleet = small_fleet()
    fleet.tick(2)
    for gpu in range(8):
        fleet.throttle("n001", gpu)
    fleet.gpu["clock_event_reasons"][:8] = 128 + 8 + 4
    answer = fleet.tick(2)
    assert fleet.flagged(answer) == ["n001"]
    assert all("power brake since" in sentence for sentence in fleet.sentences(answer, "n001"))
