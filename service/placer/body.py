"""Decode the body of a placement request, or say what is wrong with it."""

import msgspec

from fleet.requests import Gang, PlacementRequest, TopologyConstraint
from service.http.problems import FieldError, Problem
from service.http.request_body import decoded

UNKNOWN = "no such key"
NESTED = {"gang": Gang, "topology": TopologyConstraint}

_decode_request = msgspec.json.Decoder(PlacementRequest).decode


def decode(body: bytes) -> PlacementRequest:
    """The request, or a 400 or 422 problem; of unknown keys all are named, where msgspec would name the first."""
    return decoded(body, _decode)


def _decode(body: bytes) -> PlacementRequest:
    try:
        return _decode_request(body)
    except msgspec.ValidationError:
        _refuse_unknown(body)
        raise


def _refuse_unknown(body: bytes) -> None:
    """A 422 problem when there are any."""
    document = msgspec.json.decode(body)
    if not isinstance(document, dict):
        raise Problem(422, "bad_request", f"expected a JSON object, got {type(document).__name__}")
    known = {field.encode_name for field in msgspec.structs.fields(PlacementRequest)}
    unknown = sorted(set(document) - known)
    for name, kind in NESTED.items():
        inner = document.get(name)
        if isinstance(inner, dict):
            unknown += [f"{name}.{key}" for key in sorted(set(inner) - set(kind.__struct_fields__))]
    if unknown:
        detail = f"unknown {'key' if len(unknown) == 1 else 'keys'}: {', '.join(unknown)}"
        raise Problem(422, "bad_request", detail, errors=[FieldError(name, expected=UNKNOWN) for name in unknown])
