"""A client of a Kubernetes API server for adapters that write. It needs only aiohttp.

A caller lists a collection, and then watches it from the version of the list. A watch ends after about
a minute. The caller then watches again from the last version or bookmark. After ExpiredError (status
410) it must list again.
"""

import asyncio
import json
import os
import ssl
from collections.abc import AsyncIterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Any

import aiohttp
import msgspec

from fleetcast.clients.kubernetes import ExpiredError
from fleetcast.fleet.decode_faults import explain_decode_error
from fleetcast.fleet.errors import FleetcastError, SourceError

ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
PAGE = 500
TOKEN_S = 60.0  # bound tokens are renewed in their file within the hour
CONNECT_S, ANSWER_S, WATCH_S, LINGERS_S = 5.0, 15.0, 60, 10.0
APPLY, JSON_PATCH = "application/apply-patch+yaml", "application/json-patch+json"
JSON_BODY, MERGE_PATCH = "application/json", "application/merge-patch+json"


class KubeRefused(FleetcastError):
    """The error for a request that the API server refuses. cause: the first cause that it states, or ""."""

    def __init__(self, status: int, message: str, cause: str = "") -> None:
        super().__init__(f"HTTP {status} {message[:300]}".strip())
        self.status, self.cause = status, cause


@dataclass(frozen=True, slots=True)
class KubeAccount:
    """The API server and the account to use. Empty fields mean the account of the pod in which we run."""

    server: str = ""
    token_file: str = ""
    ca_file: str = ""

    @property
    def url(self) -> str:
        host, port = os.environ.get("KUBERNETES_SERVICE_HOST", ""), os.environ.get("KUBERNETES_SERVICE_PORT", "443")
        return self.server.rstrip("/") or f"https://{f'[{host}]' if ':' in host else host}:{port}"

    def read_token(self) -> str:
        """Read the bearer token. Raises SourceError."""
        path = Path(self.token_file) if self.token_file else ACCOUNT / "token"
        try:
            return path.read_text(encoding="ascii").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise SourceError(f"cannot read the token in {path}: {error}") from None

    def make_tls_context(self) -> ssl.SSLContext:
        """Make the TLS context that verifies the server. Raises SourceError."""
        path = Path(self.ca_file) if self.ca_file else ACCOUNT / "ca.crt"
        try:
            return ssl.create_default_context(cafile=str(path))
        except OSError as error:
            raise SourceError(f"cannot read the certificate of the authority in {path}: {error}") from None


class _Meta(msgspec.Struct, rename={"version": "resourceVersion", "token": "continue"}):
    version: str = ""
    token: str = ""


class _KubePage(msgspec.Struct):
    metadata: _Meta
    items: list[msgspec.Raw] | None = None


class _Event(msgspec.Struct):
    type: str
    object: msgspec.Raw


class _Cause(msgspec.Struct):
    reason: str = ""
    message: str = ""


class _Details(msgspec.Struct):
    causes: list[_Cause] | None = None


class _Object(msgspec.Struct):
    metadata: _Meta | None = None
    code: int = 0
    message: str = ""
    details: _Details | None = None


_page = msgspec.json.Decoder(_KubePage).decode
_event = msgspec.json.Decoder(_Event).decode
_object = msgspec.json.Decoder(_Object).decode


class KubeApi:
    """A client of one API server, which keeps its connections open.

    Methods raise SourceError while the server does not answer, and KubeRefused if it refuses. server_ms: the server's
    clock in its last answer, in Unix ms. None before the first one.
    """

    def __init__(self, account: KubeAccount) -> None:
        self._account = account
        self._session: aiohttp.ClientSession | None = None
        self._token, self._token_s = "", -TOKEN_S
        self.server_ms: int | None = None

    async def list_all(self, path: str, labels: str = "") -> tuple[list[msgspec.Raw], str]:
        """Return all objects of a collection, and the version of the list.

        labels: a label selector, or "" for every object.
        """
        objects: list[msgspec.Raw] = []
        token = ""
        while True:
            query = {"limit": str(PAGE)} | ({"continue": token} if token else {})
            query |= {"labelSelector": labels} if labels else {}
            page = _decode_or_raise(_page, await self._request_body("GET", path, query))
            objects += page.items or ()
            token = page.metadata.token
            if not token:
                return objects, page.metadata.version

    async def watch(self, path: str, version: str) -> AsyncIterator[tuple[str, msgspec.Raw, str]]:
        """Yield changes as they arrive, for about a minute: (kind, object, its version).

        The kind is ADDED, MODIFIED, DELETED or BOOKMARK. Raises ExpiredError if the version is too old.
        """
        query = {
            "watch": "1",
            "allowWatchBookmarks": "true",
            "resourceVersion": version,
            "timeoutSeconds": f"{WATCH_S}",
        }
        limits = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S, sock_read=WATCH_S + LINGERS_S)
        rest = b""
        try:
            async with self._open_request("GET", path, query, timeout=limits) as answer:
                if answer.status != 200:
                    raise _make_refusal(answer.status, await answer.read())
                yield "BOOKMARK", msgspec.Raw(b"{}"), version  # it answers
                async for piece in answer.content.iter_any():
                    *lines, rest = (rest + piece).split(b"\n")
                    for line in filter(None, lines):
                        yield _decode_change(line)
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise SourceError(f"{self._account.url}: the watch broke: {error or 'no answer'}", 1.0) from None

    async def get(self, path: str) -> bytes:
        return await self._request_body("GET", path, {})

    async def apply(self, path: str, thing: Mapping[str, Any], manager: str) -> bytes:
        """Apply an object on the server as a field manager, without force.

        The server answers 409 if another manager owns a field.
        """
        return await self._request_body("PATCH", path, {"fieldManager": manager, "force": "false"}, APPLY, thing)

    async def send_json_patch(self, path: str, steps: list[dict[str, Any]], manager: str) -> bytes:
        return await self._request_body("PATCH", path, {"fieldManager": manager}, JSON_PATCH, steps)

    async def merge(self, path: str, thing: Mapping[str, Any], manager: str) -> bytes:
        """Merge fields into an object. None removes a field.

        If the fields include a resourceVersion, the server answers 409 for an object that has changed since.
        """
        return await self._request_body("PATCH", path, {"fieldManager": manager}, MERGE_PATCH, thing)

    async def create(self, path: str, thing: Mapping[str, Any], *, is_trial: bool = False) -> bytes:
        """Create an object. is_trial: the server only says whether it would (a dry run)."""
        return await self._request_body("POST", path, {"dryRun": "All"} if is_trial else {}, JSON_BODY, thing)

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def _request_body(
        self, method: str, path: str, query: Mapping[str, str], kind: str = "", thing: Any = None
    ) -> bytes:
        limits = aiohttp.ClientTimeout(total=ANSWER_S, sock_connect=CONNECT_S)
        more = {"data": json.dumps(thing), "headers": {"content-type": kind}} if kind else {}
        try:
            async with self._open_request(method, path, query, timeout=limits, **more) as answer:
                body: bytes = await answer.read()
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise SourceError(f"{self._account.url} does not answer: {error or f'{ANSWER_S:g} s'}", 1.0) from None
        with suppress(ValueError):
            self.server_ms = round(1000 * parsedate_to_datetime(answer.headers.get("date", "")).timestamp())
        if answer.status >= 300:
            raise _make_refusal(answer.status, body)
        return body

    def _open_request(self, method: str, path: str, query: Mapping[str, str], **more: Any) -> Any:
        if self._session is None:
            secure = self._account.make_tls_context() if self._account.url.startswith("https:") else False
            self._session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(ssl=secure, limit=16))
        headers = {"authorization": f"Bearer {self._refresh_token()}", "accept": "application/json"}
        headers |= more.pop("headers", {})
        url = self._account.url + path
        return self._session.request(method, url, params=query, headers=headers, allow_redirects=False, **more)

    def _refresh_token(self) -> str:
        now_s = asyncio.get_running_loop().time()
        if now_s - self._token_s >= TOKEN_S:
            self._token, self._token_s = self._account.read_token(), now_s
        return self._token


def _decode_change(line: bytes) -> tuple[str, msgspec.Raw, str]:
    event = _decode_or_raise(_event, line)
    head = _decode_or_raise(_object, event.object)
    if event.type == "ERROR":
        raise _make_refusal(head.code, bytes(event.object))
    return event.type, event.object, head.metadata.version if head.metadata else ""


def _make_refusal(status: int, body: bytes) -> Exception:
    try:
        head = _object(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        head = _Object()
    if status == 410:
        return ExpiredError(head.message)
    cause = next(iter((head.details.causes if head.details else None) or ()), _Cause())
    message = head.message if cause.message in head.message else f"{head.message} {cause.message}"
    return KubeRefused(status, message, cause.reason)


def _decode_or_raise(decode: Any, body: Any) -> Any:
    try:
        return decode(body)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise SourceError(
            f"an API server does not answer like that: {explain_decode_error(error, decode, body)}", 5.0
        ) from None
