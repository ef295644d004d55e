"""A vanished GPU is a hard failure only with a witness; otherwise its exporter is watched."""

import json
from collections.abc import Callable, Sequence

import numpy as np
import pytest

from fleetcast.fleet.events import Failed, NodeEvent
from fleetcast.fleet.jobs import JobAttempt
from fleetcast.models.risk.local import score_own_nodes
from fleetcast.models.risk.score import FleetMoment, FoldedEvents, ScoredFleet, score_fleet
from fleetcast.models.risk.state import RiskState
from tests.models.conftest import SmallFleet

Small = Callable[..., SmallFleet]
PARTIAL = "its exporter no longer lists "


def gone(fleet: SmallFleet, node: str = "n002", gpus: Sequence[int] = (3,)) -> None:
    for gpu in gpus:
        row = fleet.row(node, gpu)
        fleet.gpu["silent_s"][row] = fleet.gpu["age_s"][row] = 45.0


def listed(fleet: SmallFleet) -> None:
    fleet.gpu["silent_s"][:], fleet.gpu["age_s"][:] = 0.0, 1.0


def told(fleet: SmallFleet, **about: object) -> None:
    event = NodeEvent(node="n002", source="kernel", sequence=1, time_ms=fleet.now_ms, **about)  # type: ignore[arg-type]
    fleet.node_events.apply(event)


@pytest.mark.parametrize("gpus", [(3,), (1, 2, 3, 4, 5, 6, 7)])
def test_a_page_that_lists_fewer_gpus_is_the_exporters_fault(small_fleet: Small, gpus: tuple[int, ...]) -> None:
    fleet = small_fleet(4)
    fleet.tick(2)
    gone(fleet, gpus=gpus)
    answer = fleet.tick(20)
    assert fleet.flagged(answer) == []
    assert not answer.risk.hard.any()
    assert answer.risk.actions[1].code == "watch"
    (reason,) = answer.risk.reasons[1]
    assert (reason.feature, reason.entity, reason.value) == ("exporter_partial", "n002", len(gpus))
    assert reason.sentence.startswith(f"{PARTIAL}{len(gpus)} of 8 GPUs")
    listed(fleet)
    assert fleet.tick(4).risk.reasons == {}


WITNESSES = {
    "xid of the GPU": {"type": "xid", "code": 79, "gpu": 3},
    "xid of a device that no page names": {"type": "xid", "code": 79, "device": "0000:9b:00"},
    "failed check of the GPU": {"type": "health", "severity": "fatal", "check": "count", "gpu": 3},
    "failed check of GPUs": {"type": "health", "severity": "fatal", "check": "gpu_count"},
}
NO_WITNESSES = {
    "xid of another GPU": {"type": "xid", "code": 79, "gpu": 5},
    "application xid": {"type": "xid", "code": 43, "gpu": 3},
    "failed check of a fan": {"type": "health", "severity": "fatal", "check": "fan"},
    "warning": {"type": "health", "severity": "warning", "check": "gpu", "gpu": 3},
}


@pytest.mark.parametrize("name", WITNESSES)
@pytest.mark.parametrize("first", [False, True])
def test_a_witness_makes_it_a_hard_failure(small_fleet: Small, name: str, first: bool) -> None:
    fleet = small_fleet(4)
    fleet.tick(2)
    if first:
        told(fleet, **WITNESSES[name])
    gone(fleet)
    fleet.tick(2)
    told(fleet, **WITNESSES[name])
    answer = fleet.tick(2)
    assert answer.risk.actions[1].code == "drain_now"
    assert "GPU 3: series vanished" in " ".join(fleet.sentences(answer, "n002"))


@pytest.mark.parametrize("name", NO_WITNESSES)
def test_what_says_nothing_of_the_gpu_is_no_witness(small_fleet: Small, name: str) -> None:
    fleet = small_fleet(4)
    fleet.tick(2)
    told(fleet, **NO_WITNESSES[name])
    gone(fleet)
    said = fleet.sentences(fleet.tick(4), "n002")
    assert not any("series vanished" in text for text in said)
    assert any(text.startswith(PARTIAL) for text in said)


def test_a_confirmed_loss_outlives_the_word_of_its_witness_and_a_restart(small_fleet: Small) -> None:
    fleet = small_fleet(4)
    fleet.tick(2)
    told(fleet, **WITNESSES["xid of the GPU"])
    gone(fleet)
    fleet.tick(2)
    about, arrays = fleet.memory.dump()
    fleet.memory = RiskState()
    fleet.memory.load(json.loads(json.dumps(about)), arrays)
    fleet.now_ms += 2 * 86_400_000
    assert fleet.tick(2).risk.actions[1].code == "drain_now"
    listed(fleet)
    fleet.tick(4)
    gone(fleet)
    assert fleet.flagged(fleet.tick(3)) == [], "a later loss needs a witness of its own"


def test_a_partial_page_lowers_no_action_of_a_gpu_that_it_left_out(small_fleet: Small) -> None:
    fleet = small_fleet(4)
    fleet.tick(2)
    fleet.throttle("n002", 3)
    before = fleet.tick(4).risk.actions[1].code
    gone(fleet)
    assert fleet.tick(20).risk.actions[1].code == before == "drain_at_job_end"


def test_a_job_whose_other_gpus_wait_is_a_witness(small_fleet: Small) -> None:
    fleet = small_fleet(4)
    fleet.start("train", ["n001", "n002"])
    fleet.tick(2)
    gone(fleet)
    assert fleet.flagged(fleet.tick(2)) == []
    rows = [fleet.row(node, gpu) for node in ("n001", "n002") for gpu in range(8)]
    fleet.gpu["power_w"][rows] = 120.0
    fleet.gpu["power_w"][fleet.row("n002", 3)] = np.nan
    assert "n002" in fleet.flagged(fleet.tick(2))


def scored(fleet: SmallFleet, ended: Sequence[JobAttempt]) -> ScoredFleet:
    fleet.now_ms += 15_000
    local = score_own_nodes(fleet.frames(), fleet.entities, fleet.topology, fleet.memory, fleet.now_ms)
    events = FoldedEvents(running=(), ended=ended, nodes={})
    return score_fleet(FleetMoment(fleet.now_ms, fleet.topology, [local], events), fleet.memory)


@pytest.mark.parametrize(("category", "flagged"), [("hardware", ["n002"]), ("user", []), ("out_of_memory", [])])
def test_a_job_that_ended_by_a_hardware_failure_is_a_witness(
    small_fleet: Small, category: str, flagged: list[str]
) -> None:
    fleet = small_fleet(4)
    fleet.start("train", ["n001", "n002"])
    fleet.tick(2)
    failed = Failed(job="train", sequence=9, time_ms=fleet.now_ms, category=category, node="n002")  # type: ignore[arg-type]
    fleet.jobs.apply(failed)
    gone(fleet)
    ended = [fleet.jobs.attempts["train", 1]]
    scored(fleet, ended)
    assert fleet.flagged(scored(fleet, ended)) == flagged
