from typing import Any

import msgspec
import pytest

from fleetcast.fleet.errors import RequestError
from fleetcast.fleet.requests import Decision, Gang, PlacementRequest, check_request, list_ignored_facts


def test_a_plain_request_passes() -> None:
    check_request(PlacementRequest(request_id="a"))
    check_request(PlacementRequest(request_id="a", gang=Gang(1, 8, 1), gpus_per_node=8, max_risk=0.0, tenant="t"))


@pytest.mark.parametrize(
    ("field", "changed"),
    [
        ("request_id", {"request_id": ""}),
        ("request_id", {"request_id": "x" * 254}),
        ("request_id", {"request_id": "a\nb"}),
        ("job", {"job": "a\0"}),
        ("user", {"user": "\u2028"}),
        ("attempt", {"attempt": -1}),
        ("attempt", {"attempt": 10**5000}),
        ("priority", {"priority": -(10**30)}),
        ("cpus", {"cpus": 10**400}),
        ("limit_s", {"limit_s": 1e308}),
        ("gang", {"gang": 0}),
        ("gang", {"gang": 10**9}),
        ("gang.min", {"gang": Gang(0, 4)}),
        ("gang.desired", {"gang": Gang(4, 2)}),
        ("gang.step", {"gang": Gang(2, 4, 0)}),
        ("gpus_per_node", {"gpus_per_node": 0}),
        ("gpus_per_node", {"gpus_per_node": -1, "cpus": 4}),
        ("gpu_model", {"gpus_per_node": 0, "cpus": 4, "gpu_model": "H100"}),
        ("gpu_memory_gib", {"gpus_per_node": 0, "cpus": 4, "gpu_memory_gib": 80.0}),
        ("gpu_share", {"gpus_per_node": 0, "cpus": 4, "gpu_share": 500}),
        ("gpu_share", {"gpu_share": 0}),
        ("gpu_share", {"gpu_share": 1001}),
        ("gpu_share", {"gpu_share": 500, "gpus_per_node": 2}),
        ("mig_profile", {"gpu_share": 500, "mig_profile": "1g.10gb"}),
        ("gpu_models", {"gpu_models": ("H100", "")}),
        ("gpu_models", {"gpu_models": ("A\n",)}),
        ("gpu_models", {"gpu_models": ("H100",) * 101}),
        ("gpu_models", {"gpu_models": ("H100",), "gpu_model": "A100"}),
        ("pool", {"pool": "a\nb"}),
        ("gpus_per_node", {"gpus_per_node": 5000}),
        ("max_risk", {"max_risk": 1.5}),
        ("cpus", {"cpus": 0}),
        ("host_memory_gib", {"host_memory_gib": -1.0}),
        ("limit_s", {"limit_s": 0.0}),
        ("checkpoint_cost_s", {"checkpoint_cost_s": -1.0}),
        ("mig_profile", {"mig_profile": "1g.10gb"}),
        ("nvme_gib", {"nvme_gib": 100.0}),
        ("power_w", {"power_w": 700.0}),
        ("deadline_ms", {"deadline_ms": 5}),
        ("tolerated_wait_s", {"tolerated_wait_s": 5.0}),
    ],
)
def test_a_bad_value_is_refused_with_its_field(field: str, changed: dict[str, Any]) -> None:
    with pytest.raises(RequestError) as caught:
        check_request(PlacementRequest(**({"request_id": "a"} | changed)), with_queues=False)
    assert caught.value.field == field
    assert field.rsplit(".", maxsplit=1)[-1] in str(caught.value)


STATED: dict[str, Any] = {
    "preemptible": True,
    "queue": "nosuchqueue",
    "tenant": "research",
    "class": "batch",
    "checkpoint_cost_s": 30.0,
    "user": "ada",
    "priority": 3,
    "gang": 2,
}


def test_facts_that_change_nothing_are_named_as_the_request_spells_them_and_sorted() -> None:
    request = msgspec.convert({"request_id": "a", **STATED}, PlacementRequest)
    assert list_ignored_facts(request) == ("checkpoint_cost_s", "class", "preemptible", "queue", "tenant")
    assert list_ignored_facts(request, used=("queue",)) == ("checkpoint_cost_s", "class", "preemptible", "tenant")


def test_a_default_states_nothing_written_out_or_not() -> None:
    written = {"preemptible": None, "queue": "default", "tenant": "", "class": "training", "checkpoint_cost_s": None}
    assert list_ignored_facts(msgspec.convert({"request_id": "a", **written}, PlacementRequest)) == ()
    assert list_ignored_facts(PlacementRequest(request_id="a")) == ()


def test_no_is_stated_and_encoded_and_not_said_is_left_out() -> None:
    protected, silent = (PlacementRequest(request_id="a", preemptible=value) for value in (False, None))
    assert list_ignored_facts(protected) == ("preemptible",)
    assert b'"preemptible":false' in msgspec.json.encode(protected)
    assert msgspec.json.encode(silent) == b'{"request_id":"a"}'
    assert msgspec.json.decode(b'{"request_id":"a"}', type=PlacementRequest).preemptible is None


def test_a_decision_that_was_stored_without_what_it_ignored_is_read() -> None:
    stored = b'{"request_id":"a","decision_id":"d-1","outcome":"refused","sentence":"refused: no room"}'
    assert msgspec.json.decode(stored, type=Decision).ignored == ()
