"""What holds of every answer, whatever was asked: its status, problem documents, strict JSON, honest headers."""

from http import HTTPStatus
from typing import Any

import msgspec

from fleetcast.service.http.problems import MEDIA_TYPE, TYPE_PREFIX
from tests.fuzz.asgi import Answered, Asked, Unlawful

LIBRARY_WORDS = (
    *(b"msgspec", b"Expected `", b"got `", b"at `$", b"Object missing", b"Object contains", b"Invalid enum value"),
    *(b"Invalid value", b"JSON is malformed", b"Input data was truncated", b"Invalid RFC3339"),
)  # that no user should have to read
SERVER_STATUSES = frozenset({503})  # somebody is away, or asked too much
_encode = msgspec.json.Encoder().encode
BODILESS = frozenset({204, 304})


def check(asked: Asked, answered: Answered) -> None:
    """Raises Unlawful, with what is wrong."""
    status = answered.status
    if not status:
        return  # the client had gone away
    if not (200 <= status < 300 or status == 304 or 400 <= status < 500 or status in SERVER_STATUSES):
        raise Unlawful(f"status {status}: {answered.body[:300]!r}")
    _check_length(asked, answered)
    check_words(answered.body)
    if asked.method == "HEAD" or asked.leaves:
        return
    if status >= 400:
        _check_problem(answered)
    elif answered.headers.get("content-type", "").startswith("application/json"):
        _check_answer(_strict(answered.body), asked)


def check_words(body: bytes) -> None:
    """Raise Unlawful where an answer speaks the words of a library."""
    if leak := next((word for word in LIBRARY_WORDS if word in body), None):
        raise Unlawful(f"{leak.decode()!r} in an answer: {body[:300]!r}")


def _check_length(asked: Asked, answered: Answered) -> None:
    length = answered.headers.get("content-length")
    if answered.status in BODILESS and answered.body:
        raise Unlawful(f"a {answered.status} with {len(answered.body)} bytes of body")
    is_said = length is not None and asked.method != "HEAD"  # the server below sends no body of those
    if is_said and int(length) != len(answered.body) and answered.is_whole:
        raise Unlawful(f"content-length {length}, body of {len(answered.body)}")
    for name, value in answered.headers.items():
        if "\r" in value or "\n" in value or "\0" in value:
            raise Unlawful(f"header {name} is {value!r}")


def _strict(body: bytes) -> Any:
    try:
        return msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise Unlawful(f"no JSON ({error}): {body[:200]!r}") from None


def _check_problem(answered: Answered) -> None:
    if answered.headers.get("content-type") != MEDIA_TYPE:
        raise Unlawful(f"a {answered.status} of type {answered.headers.get('content-type')!r}")
    told = _strict(answered.body)
    right = {"status": answered.status, "title": HTTPStatus(answered.status).phrase}
    if not isinstance(told, dict) or any(told.get(key) != value for key, value in right.items()):
        raise Unlawful(f"no problem of status {answered.status}: {answered.body[:200]!r}")
    if not str(told.get("type", "")).startswith(TYPE_PREFIX) or not told.get("detail") or "instance" not in told:
        raise Unlawful(f"a problem without type, detail or instance: {answered.body[:200]!r}")
    told.pop("rejected", None)  # a row for each refused record, as in the answer of a success
    if len(_encode(told)) > 20_000:
        raise Unlawful(f"a problem of {len(answered.body)} bytes: {answered.body[:200]!r}")
    for status, header in ((503, "retry-after"), (429, "retry-after"), (405, "allow"), (401, "www-authenticate")):
        if answered.status == status and header not in answered.headers:
            raise Unlawful(f"a {status} without {header}")


def _check_answer(told: Any, asked: Asked) -> None:
    path = asked.target.partition("?")[0].removeprefix("/v1")
    if asked.method == "POST" and path in ("/placements", "/queue"):
        if told["nodes"] != told["candidates"] + sum(told["rejected"].values()):
            raise Unlawful(f"{told['nodes']} nodes, {told['candidates']} candidates, rejected {told['rejected']}")
        if told["outcome"] == "placed":
            held = [(rank["node"], gpu) for rank in told["ranks"] for gpu in rank["gpus"]]
            if len(set(held)) != len(held):
                raise Unlawful(f"a GPU twice in one placement: {told['ranks']}")
