"""Every fault that msgspec finds is explained, in words that are ours."""

import ast
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleetcast.fleet.decode_faults import Fault, explain_json_error, find_document_faults, find_first_json_fault
from fleetcast.fleet.events import JobEvent, NodeEvent
from fleetcast.fleet.requests import PlacementRequest
from fleetcast.service.config import Config
from tests.fuzz.bounds import examples
from tests.fuzz.law import check_words
from tests.sources import list_nodes

KINDS = (PlacementRequest, JobEvent, NodeEvent, Config)
SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-9, 9)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=5)
)
VALUES = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3)
)
KEYS = st.sampled_from(sorted({
    field.encode_name
    for kind in (PlacementRequest, NodeEvent, Config, *JobEvent.__args__)
    for field in msgspec.structs.fields(kind)
})) | st.text(max_size=4)  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "document", "sentence"),
    [
        (PlacementRequest, {"gang": {"min": 2.0}, "request_id": "a"}, "gang.min: is 2.0, must be a whole number"),
        (PlacementRequest, {"gang": {"min": "x"}, "request_id": "a"}, "gang.min: is 'x', must be a whole number"),
        (PlacementRequest, {"request_id": "a", "gangs": 1}, "gangs: no such key; did you mean gang?"),
        (PlacementRequest, {}, "request_id: is missing, must be text"),
        (PlacementRequest, [], "is [], must be an object of keys and values"),
        (
            PlacementRequest,
            {"request_id": "a", "gang": "x"},
            "gang: is 'x', must be an object of keys and values or a whole number",
        ),
        (
            PlacementRequest,
            {"request_id": "a", "class": "traning"},
            "class: is 'traning', must be one of batch, fine_tuning, inference, interactive, training"
            "; did you mean training?",
        ),
        (PlacementRequest, {"request_id": "a", "avoid_nodes": ["n1", 2]}, "avoid_nodes[1]: is 2, must be text"),
        (PlacementRequest, {"request_id": "a", "limit_s": "1h"}, "limit_s: is '1h', must be a number or null"),
        (PlacementRequest, {"request_id": "a", "dry_run": "yes"}, "dry_run: is 'yes', must be true or false"),
    ],
)  # fmt: skip
def test_a_fault_names_the_place_the_value_and_what_is_allowed(kind: type, document: object, sentence: str) -> None:
    assert next(find_document_faults(kind, document)).sentence == sentence


def test_an_unknown_type_of_event_lists_the_types() -> None:
    (fault,) = find_document_faults(JobEvent, {"job": "a", "sequence": 1, "time_ms": 5, "type": "finish"})
    assert fault.why.startswith("is 'finish', must be one of ")
    assert "submitted" in fault.why
    assert fault.why.endswith("did you mean finished?")


def test_every_unknown_key_is_found() -> None:
    found = find_document_faults(
        PlacementRequest, {"request_id": "a", "x": 1, "y": 2, "gang": {"min": 1, "desired": 1, "z": 3}}
    )
    assert [fault.field for fault in found] == ["x", "y", "gang.z"]


@examples(300)
@given(st.sampled_from(KINDS), st.dictionaries(KEYS, VALUES, max_size=5) | VALUES)
def test_a_document_has_a_fault_if_and_only_if_the_decoder_refuses_it(kind: type, document: object) -> None:
    data = msgspec.json.encode(document)
    found = list(find_document_faults(kind, msgspec.json.decode(data)))
    try:
        msgspec.json.decode(data, type=kind)
    except msgspec.ValidationError as error:
        assert found
        fault = find_first_json_fault(error, kind, data)
        assert isinstance(fault, Fault)
        check_words(fault.sentence.encode())
    else:
        assert not found


@pytest.mark.parametrize("data", [b"nope", b'{"x":1,}', b'{"x":1', b"", b'{"x":NaN}', b'"\x01"'])
def test_no_json_is_explained_without_the_words_of_a_library(data: bytes) -> None:
    with pytest.raises(msgspec.DecodeError) as caught:
        msgspec.json.decode(data)
    check_words(explain_json_error(caught.value).encode())


def test_a_check_of_the_struct_itself_speaks_with_its_own_words() -> None:
    class Even(msgspec.Struct):
        number: int

        def __post_init__(self) -> None:
            if self.number % 2:
                raise ValueError(f"{self.number} is odd")

    with pytest.raises(msgspec.ValidationError) as caught:
        msgspec.json.decode(b'{"number": 3}', type=Even)
    assert find_first_json_fault(caught.value, Even, b'{"number": 3}').sentence == "3 is odd"


def test_a_number_that_no_reader_can_hold_is_out_of_range() -> None:
    data = b'{"request_id": "a", "attempt": ' + b"9" * 6_000 + b"}"
    with pytest.raises(msgspec.ValidationError) as caught:
        msgspec.json.decode(data, type=PlacementRequest)
    assert find_first_json_fault(caught.value, PlacementRequest, data).label == "out_of_range"


ROOT = Path(__file__).parents[2]
FOLDERS = ("cli", "clients", "fleet", "ingest", "models", "placement", "schedulers", "service", "simulator", "training")


def _names_of(node: ast.AST | None) -> str:
    return "" if node is None else ast.unparse(node)


@pytest.mark.parametrize("folder", FOLDERS)
def test_no_handler_of_the_decoder_prints_its_words(folder: str) -> None:
    """A handler that names an error of msgspec explains it: it puts the error itself into no text."""
    found = []
    for path in sorted((ROOT / folder).rglob("*.py")):
        for handler in list_nodes(path):
            if not isinstance(handler, ast.ExceptHandler) or "msgspec." not in _names_of(handler.type):
                continue
            for part in ast.walk(handler):
                plain = isinstance(part, ast.FormattedValue) and _names_of(part.value) == handler.name
                as_text = isinstance(part, ast.Call) and _names_of(part) == f"str({handler.name})"
                if handler.name and (plain or as_text):
                    found.append(f"{path.relative_to(ROOT)}:{part.lineno}")
    assert found == []
