"""The errors of a client of Fleetcast. A Reporter only counts errors, and raises none.

FleetcastError
├── Unreachable      no answer in time, or the answer was not JSON: try again
└── ApiError         it answered with a problem: `status`, `code`, `detail`, `errors`
    ├── NotAllowed   401, 403: the token is missing, wrong, or not for this
    └── NotFound     404: no such node, job or request
"""

from __future__ import annotations

from typing import Any


class FleetcastError(Exception):
    """The base class of all errors of this client. The client raises only its subclasses."""


class Unreachable(FleetcastError):
    """The error for a service that did not answer. `url`: its address."""

    def __init__(self, url: str, why: str) -> None:
        super().__init__(f"{url} does not answer: {why}")
        self.url = url


class ApiError(FleetcastError):
    """The error for a problem that the service reported.

    `code` is its short name, `errors` the fields at fault with what was expected, `rejected` the
    refused events with their reasons. `retry_after_s`: in how many seconds to try again, None if the
    service does not say.
    """

    def __init__(self, status: int, problem: dict[str, Any], retry_after_s: float | None = None) -> None:
        self.status = status
        self.code = str(problem.get("type", "")).rpartition(":")[2]
        self.detail = str(problem.get("detail", "")) or f"HTTP {status}"
        self.rejected: list[dict[str, Any]] = list(problem.get("rejected") or [])
        self.errors: list[dict[str, Any]] = list(problem.get("errors") or [])
        self.retry_after_s = retry_after_s
        super().__init__(f"{status} {self.code}: {self.detail}" if self.code else f"{status}: {self.detail}")


class NotAllowed(ApiError):
    """The error for a token that is missing, wrong, or not valid for this request."""


class NotFound(ApiError):
    """The error for a node, job or request that does not exist."""
