"""Where one spell of a signal ends and another begins, and which of them are told as faults."""

from collections.abc import Sequence

import numpy as np
import pytest

from fleetcast.models.risk.node_risk import score_nodes
from fleetcast.models.risk.scores import Reason
from fleetcast.models.risk.signals import Signal, Signals
from fleetcast.service.api.routes.timeline import Happening, _make_timeline
from fleetcast.service.pipeline.node_past import NodePasts, PublishedTimeline, Spell
from tests.service.pipeline.test_node_past import NOW_MS, TICK_MS, tick


def reasons(*given: Signal) -> tuple[Reason, ...]:
    """What the model says of the first node."""
    return score_nodes(Signals.from_signals(given), np.ones(2, bool), NOW_MS, None).reasons.get(0, ())


def spells(*ticks: Sequence[Signal]) -> list[Spell]:
    """Of the first node, after these ticks."""
    pasts = NodePasts()
    for at, given in enumerate(ticks):
        now = tick(at)
        now.fleet.risk.reasons[0] = reasons(*given)
        pasts.make_sections(now)
    return pasts.of["n1"].signals


def faults(*given: Signal) -> list[Happening]:
    [*found] = spells(given)
    return _make_timeline(PublishedTimeline(NOW_MS, signals=found, node="n1"), NOW_MS - 60_000, NOW_MS).events


@pytest.mark.parametrize("code", [95.0, 79.0, 93.0])
def test_another_code_is_another_spell(code: float) -> None:
    first = Signal("xid_hard", 0, "n1/3", 94.0, since_ms=NOW_MS - 5000)
    then = Signal("xid_hard", 0, "n1/3", code, since_ms=NOW_MS - 5000)  # the rule's since may be that of the first
    one, other = spells([first], [then], [then])
    assert (one.points, one.began_ms, one.ended_ms) == ([(NOW_MS, 94.0)], NOW_MS - 5000, NOW_MS + TICK_MS)
    assert (other.points, other.began_ms, other.ended_ms) == ([(NOW_MS + TICK_MS, code)], NOW_MS + TICK_MS, None)
    assert f"XID {code:.0f}" in other.sentence


def test_another_code_after_a_pause_keeps_the_first_one_s_end() -> None:
    one, other = spells([Signal("xid_hard", 0, "n1/3", 94.0)], [], [Signal("xid_hard", 0, "n1/3", 79.0)])
    assert (one.ended_ms, other.began_ms) == (NOW_MS + TICK_MS, NOW_MS + 2 * TICK_MS)


def test_what_becomes_hard_is_a_fault_from_then() -> None:
    soft, hard = Signal("exporter_silent", 0, "n1", 60.0), Signal("node_silent", 0, "n1", 70.0, since_ms=NOW_MS - 9000)
    one, other = spells([soft], [hard], [soft])
    assert (one.fault, one.ended_ms, other.fault, other.began_ms) == (False, NOW_MS + TICK_MS, True, NOW_MS + TICK_MS)
    assert [row.fault for row in spells([soft, hard], [hard, soft])] == [True]  # given together, the hard one counts


@pytest.mark.parametrize("rule", ["exporter_silent", "xid_old", "xid_noted", "health_degraded"])
def test_soft_evidence_of_a_metric_that_hard_rules_use_is_no_fault(rule: str) -> None:
    assert faults(Signal(rule, 0, "n1", 31.0)) == []


@pytest.mark.parametrize(("rule", "entity", "gpu"), [("node_silent", "17", None), ("gpu_vanished", "n1/3", 3)])
def test_a_fault_has_a_gpu_where_one_is_named(rule: str, entity: str, gpu: int | None) -> None:
    assert [(row.type, row.gpu) for row in faults(Signal(rule, 0, entity, 90.0))] == [("fault", gpu)]
