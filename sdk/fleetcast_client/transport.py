"""One HTTP request with the standard library: JSON bodies, a bearer token, problems as exceptions.

HTTPS verifies the server with the system's authorities, or with those in a file.
"""

from __future__ import annotations

import json
import os
import ssl
import urllib.error
import urllib.request
from http.client import HTTPException
from typing import Any
from urllib.parse import urlsplit

from fleetcast_client.errors import ApiError, NotAllowed, NotFound, Unreachable

MOST_ANSWER_BYTES = 256 * 2**20


class NoRedirects(urllib.request.HTTPRedirectHandler):
    """A handler that refuses redirects, which would send the token elsewhere."""

    def redirect_request(self, *given: Any, **named: Any) -> None:
        return None


def make_opener(ca: str | os.PathLike[str] | None, verify: bool) -> urllib.request.OpenerDirector:
    """Make the opener of requests. ca: a file of authorities in PEM, FLEETCAST_CA by default.

    verify=False accepts any certificate, so that a machine in between may read the token. Raises
    ValueError for a bad `ca`.
    """
    path = os.fspath(ca) if ca is not None else os.environ.get("FLEETCAST_CA", "")
    try:
        context = ssl.create_default_context(cafile=path or None)
    except OSError as error:
        why = error.strerror or str(error)
        raise ValueError(f"Fleetcast's authorities are in {path!r}: expected a file in PEM ({why})") from None
    if not verify:
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return urllib.request.build_opener(NoRedirects(), urllib.request.HTTPSHandler(context=context))


def check_url(url: str) -> str:
    """Return the URL without its trailing slash. Raises ValueError."""
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError(f"Fleetcast's URL is {url!r}: expected something like http://fleetcast:8080")
    return url.rstrip("/")


def send_request(
    through: urllib.request.OpenerDirector, method: str, url: str, body: bytes | None, token: str, timeout_s: float
) -> Any:
    """Send a request and return the decoded answer. Raises Unreachable, ApiError."""
    request = urllib.request.Request(url, body, method=method)
    request.add_header("Accept", "application/json")
    request.add_header("User-Agent", "fleetcast-client")
    if body is not None:
        request.add_header("Content-Type", "application/json")
    if token:
        request.add_unredirected_header("Authorization", f"Bearer {token}")
    try:
        with through.open(request, timeout=timeout_s) as response:
            return _decode_answer(response.read(MOST_ANSWER_BYTES), url)
    except urllib.error.HTTPError as error:
        with error:
            raise _make_api_error(error) from None
    except (OSError, HTTPException) as error:
        why = str(getattr(error, "reason", error)) or type(error).__name__
        raise Unreachable(url, why) from None


def _decode_answer(raw: bytes, url: str) -> Any:
    if not raw:
        return None
    try:
        return json.loads(raw)
    except ValueError:
        raise Unreachable(url, f"its answer is no JSON: {raw[:80]!r}") from None


def _make_api_error(error: urllib.error.HTTPError) -> ApiError:
    try:
        answer = json.loads(error.read(2**20))
    except (ValueError, OSError):
        answer = None
    problem: dict[str, Any] = answer if isinstance(answer, dict) else {"detail": f"HTTP {error.code} {error.reason}"}
    kind = {401: NotAllowed, 403: NotAllowed, 404: NotFound}.get(error.code, ApiError)
    return kind(error.code, problem, _parse_seconds(error.headers.get("Retry-After", "")))


def _parse_seconds(text: str) -> float | None:
    return float(text) if text.isascii() and text.isdecimal() and len(text) < 7 else None
