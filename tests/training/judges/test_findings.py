"""What counts as found, as blamed rightly and as a false alarm."""

import numpy as np

from fleetcast.training.judges.findings import (
    Findings,
    FlagSpell,
    find_false_job_alarms,
    measure_healthy_time,
    score_findings,
    shuffle_faults,
    shuffle_findings,
)
from fleetcast.training.judges.straggler_metrics import Table
from fleetcast.training.reports.results import Results
from fleetcast.training.sets.fault_runs import RunTruth

NODES = ("n1", "n2", "n3", "n4")


def fault(node: str, start_s: int, end_s: int | None, **more) -> RunTruth:
    start_ms = start_s * 1000
    row = {"kind": "slow_nic", "visible_ms": start_ms, "visible": True, "port": 3, "job": "j", **more}
    return RunTruth(node=node, start_ms=start_ms, end_ms=None if end_s is None else end_s * 1000, **row)


def finding(node: str, first_s: int, last_s: int, **named: int) -> FlagSpell:
    """named: unit=second; port 3 is p3, GPU 5 is g5, the node is n."""
    names = {"p3": f"{node}/mlx5_3/1", "g5": f"{node}/5", "n": node}
    return FlagSpell(node, first_s * 1000, last_s * 1000, {names[unit]: at * 1000 for unit, at in named.items()})


def test_flags_in_a_row_are_one_finding_and_holes_are_closed() -> None:
    found = Findings()
    for at_s, name in ((1000, ""), (1015, "n1/2"), (1300, "n1/0"), (1315, "n1/2"), (4000, "")):
        found.record_flag("n1", at_s * 1000, name)
    assert [(row.first_ms, row.last_ms) for row in found.rows] == [(1_000_000, 1_315_000), (4_000_000, 4_000_000)]
    assert found.rows[0].named == {"n1/2": 1_015_000, "n1/0": 1_300_000}


def test_found_missed_and_unseen_faults() -> None:
    truth = [
        fault("n1", 970, 1200),
        fault("n2", 500, 600),  # missed
        fault("n2", 700, 800, visible_ms=None),  # nobody could see it
        fault("n1", 9000, 9100, benign=True),  # a look-alike is flagged
    ]
    one = score_findings([finding("n1", 1000, 1100, p3=1000), finding("n1", 9010, 9090)], truth)
    assert (one.right, one.missed, one.wrong) == (1, 1, 1)
    assert one.delays == [30.0]


def test_an_old_false_finding_finds_no_later_fault() -> None:
    standing = finding("n1", 100, 5000, g5=100)
    truth = [fault("n1", 2000, 4000)]
    one = score_findings([standing], truth)
    assert (one.right, one.missed, one.wrong) == (0, 1, 1)
    standing.named["n1/mlx5_3/1"] = 2_060_000  # now it has a reason of its own
    one = score_findings([standing], truth)
    assert (one.right, one.missed, one.wrong, one.own_units) == (1, 0, 1, 1)
    assert one.delays == [60.0]


def test_what_is_found_when_it_is_over_is_not_found_and_not_false() -> None:
    truth = [fault("n1", 2000, 2300)]
    late = score_findings([finding("n1", 2400, 2500)], truth)
    assert (late.right, late.missed, late.wrong) == (0, 1, 0)
    later = score_findings([finding("n1", 2300 + 601, 3000)], truth)
    assert (later.right, later.missed, later.wrong) == (0, 1, 1)


def test_a_precursor_that_is_seen_is_right_and_has_no_delay() -> None:
    truth = [fault("n1", 2000, 2300, lead_s=600.0, precursor=True)]
    assert score_findings([finding("n1", 1500, 2100)], truth).delays == [0.0]
    assert score_findings([finding("n1", 1399, 2100)], truth).wrong == 1


def test_the_unit_must_be_right_where_the_truth_has_one() -> None:
    truth = [fault("n1", 1000, 2000)]
    for named, own in (({"p3": 1000}, 1), ({"n": 1000}, 0), ({}, 0), ({"g5": 1000, "p3": 1015}, 0)):
        one = score_findings([finding("n1", 1000, 1100, **named)], truth)
        assert (one.units, one.own_units) == (1, own), named
    later = score_findings([finding("n1", 1000, 1100, n=1000, p3=1030)], truth)
    assert later.own_units == 1  # the node at first, then the right port and no other unit before it
    whole = score_findings([finding("n1", 1000, 1100, g5=1000)], [fault("n1", 1000, 2000, port=None)])
    assert (whole.right, whole.units) == (1, 0)


def test_the_node_must_be_flagged_before_its_healthy_peers() -> None:
    hosts = {"j": frozenset(("n1", "n2"))}
    truth = [fault("n1", 1000, 2000)]
    own, peer = finding("n1", 1060, 1900), finding("n2", 1030, 1900)
    assert (score_findings([own], truth, hosts).nodes, score_findings([own], truth, hosts).own_nodes) == (1, 1)
    both = score_findings([own, peer], truth, hosts)
    assert (both.nodes, both.own_nodes, both.wrong) == (1, 0, 1)
    alone = score_findings([peer], truth, hosts)
    assert (alone.nodes, alone.own_nodes, alone.missed) == (1, 0, 1)
    other_fault = [*truth, fault("n2", 1000, 2000, job="k")]
    assert score_findings([own, peer], other_fault, hosts).own_nodes == 2


def test_node_time_without_a_fault() -> None:
    truth = [fault("n1", 100, 200, lead_s=50.0), fault("n1", 150, 300), fault("n2", 900, None)]
    # n1: 50 s before, 100 s after its 10 minutes; n2: 900; n3: all of it
    assert measure_healthy_time(NODES[:3], 0, 1_000_000, truth).all_ms == (50 + 100 + 900 + 1000) * 1000


def test_a_flag_that_never_goes_away_takes_its_time_out_of_the_healthy_time() -> None:
    truth = [fault("n1", 1000, 2000), fault("n2", 9000, 9100, benign=True)]
    stands, false = finding("n1", 1500, 5000), finding("n2", 100, 300)
    time = measure_healthy_time(NODES[:2], 0, 10_000_000, truth, [stands, false, finding("n1", 6000, 6100)])
    assert time.all_ms == (1000 + 10_000 - 2600 + 10_000) * 1000
    assert time.all_ms - time.quiet_ms == (5000 - 2600 + 200 + 100) * 1000
    assert time.after_ms == (5000 - 2600) * 1000  # of the spell that began at the fault alone
    ends = measure_healthy_time(NODES[:2], 0, 10_000_000, truth, [finding("n1", 1500, 2600)])
    assert (ends.after_ms, ends.quiet_ms) == (0, ends.all_ms)


def test_a_spell_is_right_once_however_many_faults_it_finds() -> None:
    truth = [fault("n1", 1000, 2000), fault("n1", 1000, 2500, kind="ib_flap"), fault("n2", 1000, 2000)]
    one = score_findings([finding("n1", 1100, 1900), finding("n2", 1100, 1900), finding("n3", 1100, 1900)], truth)
    assert (one.right, one.spells, one.wrong, one.missed) == (3, 2, 1, 0)
    results = Results("straggler")
    Table(results, "simulated", "node").add_detection("ours", one.right, one.wrong, one.missed, spells=one.spells)
    values = {row.metric: row.value for row in results.rows}
    assert values == {"precision": 2 / 3, "recall": 1.0, "f1": 0.8}


def test_a_blame_on_a_job_is_false_where_none_of_its_nodes_has_a_fault() -> None:
    truth, hosts = [fault("n1", 1000, 2000)], {"j": frozenset(("n1", "n2")), "k": frozenset(("n3", "n4"))}
    blames = [finding("j", 1100, 1200), finding("k", 1100, 1200), finding("j", 2601, 2700)]
    assert find_false_job_alarms(blames, truth, hosts) == blames[1:]


def test_shuffled_truth_and_findings_at_random_are_elsewhere() -> None:
    rng = np.random.default_rng(0)
    truth = [fault("n1", 1000, 1100)] * 20
    assert {row.node for row in shuffle_faults(truth, NODES, rng)} == {"n2", "n3", "n4"}
    moved = shuffle_findings([finding("n1", 10, 40)] * 50, NODES, 0, 10_000_000, rng)
    assert {row.node for row in moved} == set(NODES)
    assert all(row.last_ms - row.first_ms == 30_000 and 0 <= row.first_ms <= 9_970_000 for row in moved)
