"""Slow and dropping links, brakes and replays where the counters that tell of them are not exported."""

from collections.abc import Callable

import numpy as np
import pytest

from tests.models.conftest import SmallFleet

Small = Callable[..., SmallFleet]
SENT, MEAN, BEFORE = "pcie_tx_bytes_per_s", "pcie_tx_bytes_per_s_mean_2m", "pcie_tx_bytes_per_s_mean_30m"


def sending(small_fleet: Small, nodes: int = 4, ports: bool = False) -> SmallFleet:
    """One gang whose GPUs all send alike; without `ports` nobody tells of InfiniBand."""
    fleet = small_fleet(nodes, ports=ports)
    for name in (SENT, MEAN, BEFORE):
        fleet.gpu[name] = np.full(8 * nodes, 2e9)
    fleet.start("train-1", fleet.names)
    fleet.tick(2)
    return fleet


def slow(fleet: SmallFleet, row: int, ratio: float, others: float = 1.0) -> None:
    """GPU `row` sends `ratio` of what the others do, and all send `others` of what they did."""
    for name, share in ((SENT, 1.0), (MEAN, 0.6)):
        fleet.gpu[name][:] = 2e9 * others
        fleet.gpu[name][row] = 2e9 * others * (1 - share * (1 - ratio))


def stall(fleet: SmallFleet, row: int) -> None:
    """The gang waits for the link of GPU `row`: the others retry, it is silent."""
    fleet.gpu[SENT][:] = 5e7
    fleet.gpu[SENT][row] = 1e6


@pytest.mark.parametrize("ratio", [0.8, 0.6, 0.3])
@pytest.mark.parametrize("nodes", [2, 4])
def test_a_gpu_that_sends_less_than_its_siblings_has_a_slow_link(small_fleet: Small, ratio: float, nodes: int) -> None:
    fleet = sending(small_fleet, nodes)
    slow(fleet, 11, ratio, others=0.9)
    answer = fleet.tick(5)
    assert fleet.flagged(answer) == ["n002"]
    assert answer.risk.actions[1].code == "avoid"
    (said,) = fleet.sentences(answer, "n002")
    assert said.startswith("GPU 3: sends ")
    assert said.endswith("a slow link; no InfiniBand counters are sent")


def test_two_rails_a_node_are_compared_over_the_gang(small_fleet: Small) -> None:
    fleet = sending(small_fleet)
    for name, share in ((SENT, 1.0), (MEAN, 0.6), (BEFORE, 0.0)):
        fleet.gpu[name][:] = 6e5
        fleet.gpu[name][0::8] = fleet.gpu[name][1::8] = 2e9
        fleet.gpu[name][9] = 2e9 * (1 - share * 0.26)
    assert fleet.flagged(fleet.tick(5)) == ["n002"]


def test_one_slow_sample_says_nothing(small_fleet: Small) -> None:
    fleet = sending(small_fleet)
    slow(fleet, 11, 0.5)
    fleet.tick(1)
    slow(fleet, 11, 1.0)
    assert fleet.flagged(fleet.tick(6)) == []


def test_a_place_that_sends_less_on_every_node_is_meant_so(small_fleet: Small) -> None:
    fleet = sending(small_fleet)
    for name in (SENT, MEAN):
        fleet.gpu[name][3::8] = 1e9
    assert fleet.flagged(fleet.tick(8)) == []


def test_traffic_that_rises_falls_or_pauses_for_all_is_nobodys_link(small_fleet: Small) -> None:
    fleet = sending(small_fleet)
    for rate in (4e9, 1e9, 5e6, 0.0, 2e9):
        fleet.gpu[SENT][:] = rate * (1 + 0.004 * np.arange(32) / 32)
        assert fleet.flagged(fleet.tick(4)) == []


def test_a_gang_on_one_node_has_no_links_to_speak_of(small_fleet: Small) -> None:
    fleet = small_fleet(ports=False)
    fleet.start("train-1", fleet.names[:1])
    fleet.gpu[SENT], fleet.gpu[MEAN] = np.full(32, 2e9), np.full(32, 2e9)
    slow(fleet, 3, 0.4)
    assert fleet.flagged(fleet.tick(8)) == []


def test_where_ports_are_told_they_speak_for_themselves(small_fleet: Small) -> None:
    fleet = sending(small_fleet, ports=True)
    slow(fleet, 11, 0.5)
    assert fleet.flagged(fleet.tick(8)) == []


def test_ports_that_are_known_and_silent_tell_nothing(small_fleet: Small) -> None:
    fleet = sending(small_fleet, ports=True)
    for column in fleet.port.values():
        column[:] = np.nan
    slow(fleet, 11, 0.5)
    assert fleet.flagged(fleet.tick(5)) == ["n002"]


def test_without_pcie_rates_nothing_is_observed(small_fleet: Small) -> None:
    fleet = sending(small_fleet)
    fleet.gpu[SENT][:] = fleet.gpu[MEAN][:] = np.nan
    assert fleet.flagged(fleet.tick(8)) == []


def test_a_link_that_drops_twice_is_named_and_one_drop_is_not(small_fleet: Small) -> None:
    fleet = sending(small_fleet)
    for drops, flagged in ((1, []), (2, ["n002"])):
        stall(fleet, 11)
        answer = fleet.tick(1)
        assert fleet.flagged(answer) == flagged, drops
        slow(fleet, 11, 1.0)
        fleet.tick(3)
    (said,) = fleet.sentences(answer, "n002")
    assert "GPU 3: stopped sending 2 times in 30 min as its gang waited: a dropping link" in said


def test_drops_of_long_ago_or_of_several_gpus_at_once_do_not_count(small_fleet: Small) -> None:
    fleet = sending(small_fleet)
    for _ in range(3):
        stall(fleet, 11)
        fleet.gpu[SENT][12] = 1e6
        assert fleet.flagged(fleet.tick(1)) == []
        slow(fleet, 11, 1.0)
        fleet.tick(6)
    stall(fleet, 11)
    fleet.tick(1)
    slow(fleet, 11, 1.0)
    fleet.now_ms += 1_900_000
    fleet.tick(1)
    stall(fleet, 11)
    assert fleet.flagged(fleet.tick(1)) == []


def test_what_was_seen_dropping_outlives_a_restart_and_is_forgotten_with_a_repair(small_fleet: Small) -> None:
    fleet = sending(small_fleet)
    stall(fleet, 11)
    fleet.tick(1)
    streaks = fleet.memory.streaks
    about, arrays = streaks.dump()
    again = type(streaks)()
    again.load(about, arrays)
    assert again.drops == streaks.drops == {"n002/3": [fleet.now_ms]}
    again.shift_times(1000)
    assert again.drops["n002/3"][0] == streaks.drops["n002/3"][0] + 1000
    again.drop_node("n002")
    assert again.drops == {}


@pytest.mark.parametrize("ratio", [0.5, 0.3])
def test_a_node_at_half_its_clock_brakes_where_no_reasons_are_told(small_fleet: Small, ratio: float) -> None:
    fleet = small_fleet()
    fleet.gpu["clock_event_reasons"][:] = np.nan
    fleet.start("alone", fleet.names[1:2])
    fleet.tick(2)
    fleet.gpu["sm_clock_mhz"][8:16] = fleet.gpu["sm_clock_mhz_mean_2m"][8:16] = 1980 * ratio
    answer = fleet.tick(6)
    assert fleet.flagged(answer) == ["n002"]
    assert "by half at least, as brakes do" in fleet.sentences(answer, "n002")[0]


def test_an_idle_node_at_a_low_clock_brakes_nothing(small_fleet: Small) -> None:
    fleet = small_fleet()
    fleet.gpu["clock_event_reasons"][:] = np.nan
    fleet.tick(2)
    fleet.gpu["sm_clock_mhz"][8:16] = 345.0
    fleet.gpu["gpu_util"][8:16] = fleet.gpu["sm_active"][8:16] = 0.0
    fleet.gpu["power_w"][8:16] = 67.0
    assert fleet.flagged(fleet.tick(8)) == []


def test_fewer_replays_are_enough_where_nobody_tells_the_width_of_the_link(small_fleet: Small) -> None:
    fleet = small_fleet()
    fleet.gpu["pcie_replays_count_10m"][11] = 120.0
    assert fleet.flagged(fleet.tick(5)) == []
    fleet.gpu["pcie_link_width"][:] = fleet.gpu["pcie_max_link_width"][:] = np.nan
    assert fleet.flagged(fleet.tick(5)) == ["n002"]


@pytest.mark.parametrize("ports", [False, True])
def test_traffic_that_a_job_shares_out_unevenly_is_no_slow_link(small_fleet: Small, ports: bool) -> None:
    fleet = sending(small_fleet, nodes=16, ports=ports)
    uneven = np.exp(0.2 * np.random.default_rng(1).standard_normal(128))
    for columns, names in ((fleet.gpu, (SENT, MEAN, BEFORE)), (fleet.port, tuple(fleet.port))):
        for name in names:
            if "bytes_per_s" in name and "speed" not in name and len(columns[name]):
                columns[name][:] = columns[name] * uneven
    assert fleet.flagged(fleet.tick(40)) == []


def test_a_young_job_is_not_compared_with_the_half_hour_before_it(small_fleet: Small) -> None:
    fleet = sending(small_fleet)
    slow(fleet, 11, 0.5)
    fleet.now_ms -= 3_300_000  # five minutes after its start
    assert fleet.flagged(fleet.tick(8)) == []


def test_a_port_whose_data_waits_is_named_though_it_moves_as_much_as_the_others(small_fleet: Small) -> None:
    fleet = sending(small_fleet, ports=True)
    for name in ("tx_wait_per_s", "tx_wait_per_s_mean_2m"):
        fleet.port[name] = np.full(32, 1e7)
        fleet.port[name][11] = 2e8
    answer = fleet.tick(6)
    assert fleet.flagged(answer) == ["n002"]
    (said,) = fleet.sentences(answer, "n002")
    assert said == "port mlx5_3: its data waits 20 times as long to be sent as that of its sibling ports"


def test_waits_that_are_short_or_common_to_all_ports_accuse_none(small_fleet: Small) -> None:
    fleet = sending(small_fleet, ports=True)
    for usual, highest in ((1e5, 2e7), (2e8, 3e8)):
        for name in ("tx_wait_per_s", "tx_wait_per_s_mean_2m"):
            fleet.port[name] = np.full(32, usual)
            fleet.port[name][11] = highest
        assert fleet.flagged(fleet.tick(8)) == []
