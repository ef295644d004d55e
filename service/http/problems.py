"""Problem details (RFC 9457): the answer of the API to every error, as application/problem+json.

{"type": "urn:fleetcast:problem:unknown_entity", "title": "Not found", "status": 404, "detail": "no node 'n9'",
 "instance": "/v1/nodes/n9", "errors": [{"field", "value", "expected"}]}
"""

import errno
import logging
import uuid
from collections.abc import Mapping, Sequence
from http import HTTPStatus
from typing import Any

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from fleetcast.fleet.errors import (
    ConflictError,
    FleetcastError,
    ModelError,
    RecordError,
    RequestError,
    SourceError,
    StaleError,
    UnknownEntity,
)
from fleetcast.placement.ledger.rows import LedgerError

logger = logging.getLogger(__name__)

MEDIA_TYPE = "application/problem+json"
TYPE_PREFIX = "urn:fleetcast:problem:"
MOST_CHARACTERS = 2000  # of what a caller sent, where a problem says it back
MOST_ERRORS = 50


class FieldError(msgspec.Struct, frozen=True, omit_defaults=True):
    """One wrong key or parameter: its name, its value, and what was expected."""

    field: str
    value: Any = None
    expected: str = ""


class ProblemBody(msgspec.Struct, frozen=True, omit_defaults=True):
    """The body of every error answer."""

    type: str
    title: str
    status: int
    detail: str
    instance: str
    errors: tuple[FieldError, ...] = ()


class Problem(FleetcastError):
    """An error with the HTTP answer to it.

    `code`: the last part of the type URN. `extra`: further members of the body.
    """

    def __init__(
        self,
        status: int,
        code: str,
        detail: str,
        *,
        errors: Sequence[FieldError] = (),
        headers: Mapping[str, str] | None = None,
        extra: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(detail)
        self.status = status
        self.code = code
        self.detail = detail
        self.errors = tuple(errors)
        self.headers = dict(headers or {})
        self.extra = dict(extra or {})

    def make_body(self, instance: str) -> dict[str, Any]:
        """Return the members of the body.

        Long texts are truncated, so an answer never repeats a whole request.
        """
        body = {
            "type": TYPE_PREFIX + self.code,
            "title": HTTPStatus(self.status).phrase,
            "status": self.status,
            "detail": _truncate_text(self.detail),
            "instance": _truncate_text(instance),
        }
        errors = [_truncate_error(error) for error in self.errors[:MOST_ERRORS]]
        return body | ({"errors": errors} if errors else {}) | self.extra

    def make_response(self, instance: str) -> Response:
        return Response(
            msgspec.json.encode(self.make_body(instance)),
            self.status,
            {"cache-control": "no-store", **self.headers},
            MEDIA_TYPE,
        )


def _truncate_text(text: str) -> str:
    return text if len(text) <= MOST_CHARACTERS else f"{text[:MOST_CHARACTERS]}…"


def _truncate_error(error: FieldError) -> FieldError:
    value = _truncate_text(error.value) if isinstance(error.value, str) else error.value
    return FieldError(_truncate_text(error.field), value, _truncate_text(error.expected))


_STATUS: tuple[tuple[type[FleetcastError], int, str], ...] = (
    (RequestError, 422, "bad_request"),
    (RecordError, 422, "bad_record"),
    (UnknownEntity, 404, "unknown_entity"),
    (ConflictError, 409, "conflict"),
    (StaleError, 503, "stale"),
    (ModelError, 503, "model"),
    (SourceError, 503, "unavailable"),
    (LedgerError, 503, "unavailable"),
)


def convert_to_problem(error: FleetcastError) -> Problem:
    """Convert an error of Fleetcast into a problem.

    An error that no request can cause is a bug. It is raised again.

    >>> convert_to_problem(UnknownEntity("no node 'n9'")).status
    404
    """
    if isinstance(error, Problem):
        return error
    for kind, status, code in _STATUS:
        if isinstance(error, kind):
            field = getattr(error, "field", None)
            errors = (FieldError(field, expected=str(error)),) if field else ()
            retry_after_s = getattr(error, "retry_after_s", None)
            headers = {} if retry_after_s is None else {"retry-after": f"{max(1, round(retry_after_s))}"}
            return Problem(status, code, str(error), errors=errors, headers=headers)
    raise error


async def answer_starlette_error(request: Request, error: Exception) -> Response:
    """Answer an error that Starlette raises: an unknown path (404), or a method that the path lacks (405)."""
    assert isinstance(error, HTTPException)
    code = {404: "not_found", 405: "method_not_allowed"}.get(error.status_code, "http")
    return Problem(error.status_code, code, error.detail, headers=error.headers).make_response(request.scope["path"])


def is_out_of_files(error: BaseException) -> bool:
    """Return whether the process or the system has no file descriptor left."""
    return isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE)


def answer_unexpected_error(error: Exception, path: str) -> Response:
    """Answer an unexpected error with a 500. If no file descriptor is left, answer with a 503.

    Call this while the exception is being handled.
    """
    if is_out_of_files(error):
        logger.error("no file descriptor is left: raise ulimit -n (systemd: LimitNOFILE)")
        detail = "no file descriptor is left for this request: try again"
        return Problem(503, "out_of_files", detail, headers={"retry-after": "5"}).make_response(path)
    return answer_bug(path)


def answer_bug(path: str) -> Response:
    """Log the exception, and return a 500 answer with the id of the log entry.

    Call this while the exception is being handled.
    """
    number = uuid.uuid4().hex[:12]
    logger.exception("answered 500 with id %s", number)
    detail = f"an error of ours; the log has it under {number}"
    return Problem(500, "bug", detail, extra={"id": number}).make_response(path)


def make_unprocessable_problem(field: str, value: Any, expected: str) -> Problem:
    """Return a 422 problem for one bad key, with its value and what was expected."""
    detail = f"{field} = {_format_value(value)}: expected {expected}"
    return Problem(422, "bad_request", detail, errors=[FieldError(field, value, expected)])


def _format_value(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:80]}…"


def make_warming_problem(detail: str = "no board was published yet; the pipeline is starting or down") -> Problem:
    return Problem(503, "warming", detail, headers={"retry-after": "5"})
