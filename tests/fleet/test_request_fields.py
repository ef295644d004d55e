"""What holds for each field of a request, also for one that is added later."""

import ast
from typing import Any

import msgspec
import pytest
from msgspec import structs

from fleetcast.fleet.errors import RecordError, RequestError
from fleetcast.fleet.events import ASKED_FIELDS, Submitted
from fleetcast.fleet.requests import Gang, PlacementRequest, check_request
from fleetcast.ingest.inbox.job_events import check_fields
from fleetcast.placement.ledger.promised import OpenRequest
from fleetcast.service.answers.jobs import Asks
from fleetcast.service.pipeline.open_requests import make_attempt_of_request
from fleetcast.service.pipeline.publish import make_queued_job
from tests.sources import list_nodes
from tests.test_arrows import MAY_IMPORT, ROOT, modules

NOW_MS = 1_789_000_000_000
SUBMISSION = {"job": "j", "sequence": 1, "time_ms": NOW_MS}
MOST_COPIED = 6  # fields of a request that one call may copy one by one
STATED: dict[str, Any] = {
    "gang": Gang(2, 4, 2),
    "gpu_model": "",
    "gpu_models": ("H100",),
    "gpu_share": 500,
    "class_": "batch",
    "preemptible": True,
    str: "x",
    int: 1,
    int | None: 3,
    float | None: 60.0,
}  # by field, else by type


def fields_of(struct: type[msgspec.Struct], kind: object) -> list[str]:
    return [field.name for field in structs.fields(struct) if field.type == kind]


@pytest.mark.parametrize("field", fields_of(PlacementRequest, str))
def test_a_request_refuses_names_that_cannot_be_printed(field: str) -> None:
    with pytest.raises(RequestError) as caught:
        check_request(PlacementRequest(**{"request_id": "a", field: "a\n"}))
    assert caught.value.field == field


@pytest.mark.parametrize("field", fields_of(PlacementRequest, float | None) + fields_of(PlacementRequest, int | None))
def test_a_request_refuses_amounts_below_zero(field: str) -> None:
    with pytest.raises(RequestError) as caught:
        check_request(PlacementRequest(**{"request_id": "a", field: -1}))
    assert caught.value.field == field


@pytest.mark.parametrize("field", fields_of(Submitted, str))
def test_a_submission_refuses_names_that_cannot_be_printed(field: str) -> None:
    with pytest.raises(RecordError, match=field):
        check_fields(Submitted(**{**SUBMISSION, field: "a\n"}), NOW_MS)


@pytest.mark.parametrize("field", fields_of(Submitted, float | None) + fields_of(Submitted, int | None))
def test_a_submission_refuses_amounts_below_zero(field: str) -> None:
    with pytest.raises(RecordError, match=field):
        check_fields(Submitted(**{**SUBMISSION, field: -1}), NOW_MS)


def stated() -> PlacementRequest:
    """A request that states every field which a submission may state, too."""
    kinds = {field.name: field.type for field in structs.fields(PlacementRequest)}
    values = {name: STATED[name] if name in STATED else STATED[kinds[name]] for name in ASKED_FIELDS}
    return PlacementRequest(request_id="r", job="j", **values)


def test_a_request_of_our_own_queue_is_an_attempt_with_all_its_fields() -> None:
    request = stated()
    submission = make_attempt_of_request(OpenRequest(request, 5), None).submission
    assert submission is not None
    assert {name: getattr(submission, name) for name in ASKED_FIELDS} == {
        name: getattr(request, name) for name in ASKED_FIELDS
    }


def test_a_waiting_job_asks_the_placer_what_its_submission_asked() -> None:
    asked = make_queued_job(make_attempt_of_request(OpenRequest(stated(), 5), None)).request
    names = [name for name in asked.__struct_fields__ if name in ASKED_FIELDS]
    assert {name: getattr(asked, name) for name in names} == {name: getattr(stated(), name) for name in names}
    assert msgspec.convert(msgspec.to_builtins(asked), PlacementRequest).job_name == "j"


def test_the_parts_of_a_request_have_its_names_and_types() -> None:
    kinds = {field.name: field.type for field in structs.fields(PlacementRequest)}
    for part in (Asks, Submitted):
        for field in structs.fields(part):
            if field.name in ASKED_FIELDS:
                assert field.type in (kinds[field.name], kinds[field.name] | msgspec.UnsetType), (part, field.name)


def test_no_code_copies_the_fields_of_a_request_one_by_one() -> None:
    paths = [path for package in MAY_IMPORT for path in modules(package)]
    found = {}
    for path in paths:
        for call in (node for node in list_nodes(path) if isinstance(node, ast.Call)):
            copied = [
                word.arg
                for word in call.keywords
                if word.arg in ASKED_FIELDS and isinstance(word.value, ast.Attribute) and word.value.attr == word.arg
            ]
            if len(copied) > MOST_COPIED:
                found[f"{path.relative_to(ROOT)}:{call.lineno}"] = copied
    assert not found, "take them by ASKED_FIELDS of fleet/events.py"
