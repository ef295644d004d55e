"""The body of a placement request: decoded, and what is wrong with it in words."""

import re

import msgspec

from fleet.errors import FleetcastError, RequestError
from fleet.requests import Gang, PlacementRequest, TopologyConstraint
from service.problems import FieldError, Problem, as_problem

UNKNOWN = "no such key"
BODY_ERRORS = (RequestError, msgspec.ValidationError, msgspec.DecodeError, RecursionError, UnicodeDecodeError)
NESTED = {"gang": Gang, "topology": TopologyConstraint}

decode_request = msgspec.json.Decoder(PlacementRequest).decode


def decode(body: bytes) -> PlacementRequest:
    """The request; of unknown keys all are named, where msgspec would name the first."""
    try:
        return decode_request(body)
    except msgspec.ValidationError:
        refuse_unknown(body)
        raise


def refuse_unknown(body: bytes) -> None:
    """UnknownKeys when there are any."""
    document = msgspec.json.decode(body)
    if not isinstance(document, dict):
        raise RequestError(f"expected a JSON object, got {type(document).__name__}")
    known = {field.encode_name for field in msgspec.structs.fields(PlacementRequest)}
    unknown = sorted(set(document) - known)
    for name, kind in NESTED.items():
        inner = document.get(name)
        if isinstance(inner, dict):
            unknown += [f"{name}.{key}" for key in sorted(set(inner) - set(kind.__struct_fields__))]
    if unknown:
        raise UnknownKeys(unknown)


class UnknownKeys(RequestError):
    """Keys that no version of the request has."""

    def __init__(self, names: list[str]) -> None:
        super().__init__(f"unknown {'key' if len(names) == 1 else 'keys'}: {', '.join(names)}", names[0])
        self.names = names


def field_of(message: str) -> str:
    """The key that msgspec's message is about.

    >>> field_of("Expected `int`, got `str` - at `$.gang.min`"), field_of("Object missing required field `request_id`")
    ('gang.min', 'request_id')
    """
    path = re.search(r"at `\$\.?([^`]*)`", message)
    name = re.search(r"field `([^`]+)`", message)
    return ".".join(found.group(1) for found in (path, name) if found and found.group(1))


def body_problem(error: Exception) -> Problem:
    """The problem document of what `decode` and `check_request` raise (BODY_ERRORS), and of any error of our tree."""
    match error:
        case UnknownKeys():
            errors = [FieldError(name, expected=UNKNOWN) for name in error.names]
            return Problem(422, "bad_request", str(error), errors=errors)
        case FleetcastError():
            return as_problem(error)
        case msgspec.ValidationError():
            errors = [FieldError(field_of(str(error)), expected=str(error))]
            return Problem(422, "bad_request", str(error), errors=errors)
        case _:
            return Problem(400, "not_json", f"the body is not JSON: {error}")
