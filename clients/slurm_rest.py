"""A client that controls Slurm by slurmrestd, which has `POST node/…` from v0.0.40 (Slurm 23.11) on.

An answer of 200 may contain errors. An answer of 500 may mean a wrong token, a refused field or a
slurmctld that is down. Only the list `errors` decides. The token is a file that is read again when
it changes.
"""

import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

import aiohttp
import msgspec

from fleetcast.clients.slurm import MAX_BYTES
from fleetcast.clients.slurm_control import (
    ControlledJob,
    ControlledNode,
    NodeChange,
    format_hostlists,
    make_refusal,
)
from fleetcast.fleet.errors import SourceError

FIRST_WITH_NODES = (0, 0, 40)
_VERSION = re.compile(rb"/slurm\\?/v(\d+)\.(\d+)\.(\d+)\\?/nodes")
_LOGIN = re.compile(r"authenti|authori|token|credential", re.IGNORECASE)

Words = str | list[str] | None  # of one version a text with commas, of another a list


class _Fault(msgspec.Struct):
    error: str | None = None
    description: str | None = None
    error_number: int | None = None


class _RestNode(msgspec.Struct):
    name: str
    state: Words = None
    state_flags: Words = None
    reason: str | None = None
    features: Words = None
    active_features: Words = None
    extra: str | None = None


class _RestPriority(msgspec.Struct):
    """A job's priority in the form in which slurmrestd writes numbers from v0.0.39 on."""

    number: int | None = None
    set: bool = True


class _RestJob(msgspec.Struct):
    job_id: int
    array_job_id: int | _RestPriority | None = None
    array_task_id: int | _RestPriority | None = None
    array_task_string: str | None = None
    job_state: Words = None
    restart_cnt: int | None = None
    comment: str | None = None
    admin_comment: str | None = None


class _Answer(msgspec.Struct):
    errors: list[_Fault] | None = None
    nodes: list[_RestNode] | None = None
    jobs: list[_RestJob] | None = None


_decode = msgspec.json.Decoder(_Answer).decode


@dataclass(frozen=True, slots=True)
class SlurmRestAccount:
    """The address of a slurmrestd, and the account to use there.

    version: "" for the newest version that it serves. token_file: "" for a Unix socket.
    """

    url: str
    user: str = ""
    token_file: str = ""
    version: str = ""

    def make_headers(self) -> dict[str, str]:
        """Make the headers that authenticate us. Raises SourceError."""
        found = {"content-type": "application/json"}
        if self.user:
            found["X-SLURM-USER-NAME"] = self.user
        if self.token_file:
            try:
                token = Path(self.token_file).read_text(encoding="ascii").strip().removeprefix("SLURM_JWT=")
            except (OSError, UnicodeDecodeError) as error:
                raise SourceError(f"cannot read the token in {self.token_file}: {error}") from None
            found["X-SLURM-USER-TOKEN"] = token
        return found


class SlurmRestControl:
    """A client of one slurmrestd."""

    def __init__(self, account: SlurmRestAccount, timeout_s: float = 3.0) -> None:
        self._account, self._timeout_s = account, timeout_s
        self._version = account.version
        self._socket = account.url.removeprefix("unix:") if account.url.startswith("unix:") else ""
        self._url = "http://localhost" if self._socket else account.url.rstrip("/")
        self._session: aiohttp.ClientSession | None = None
        self._headers: tuple[int, dict[str, str]] = (-1, {})

    async def read_nodes(self) -> list[ControlledNode]:
        return [_make_node(row) for row in (await self._request_answer("GET", "nodes/")).nodes or ()]

    async def read_jobs(self) -> list[ControlledJob]:
        return [_make_job(row) for row in (await self._request_answer("GET", "jobs/")).jobs or ()]

    async def change_nodes(self, names: Sequence[str], change: NodeChange) -> None:
        body = _make_node_body(change)
        for part in format_hostlists(names):
            await self._request_answer("POST", f"node/{quote(part, safe='')}", body)

    async def change_job(self, job: str, *, comment: str) -> None:
        await self._request_answer("POST", f"job/{quote(job)}", {"comment": comment})

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def _request_answer(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> _Answer:
        return _decode_answer(
            *await self._send_request(method, f"/slurm/{await self._find_served_version()}/{path}", body)
        )

    async def _find_served_version(self) -> str:
        if not self._version:
            _, answer = await self._send_request("GET", "/openapi/v3", None)
            found = {tuple(int(part) for part in row) for row in _VERSION.findall(answer)}
            if not found:
                raise SourceError("slurmrestd names no version of /slurm/…/nodes", retry_after_s=60.0)
            self._version = "v" + ".".join(map(str, max(found)))
        return self._version

    async def _send_request(self, method: str, path: str, body: Mapping[str, Any] | None) -> tuple[int, bytes]:
        if self._session is None:
            connector = aiohttp.UnixConnector(self._socket) if self._socket else None
            timeout = aiohttp.ClientTimeout(total=self._timeout_s)
            self._session = aiohttp.ClientSession(connector=connector, timeout=timeout)
        data = None if body is None else json.dumps(body)
        try:
            async with self._session.request(
                method, self._url + path, data=data, headers=self._refresh_headers()
            ) as response:
                read = await response.content.read(MAX_BYTES)
                while len(read) < MAX_BYTES and (part := await response.content.read(MAX_BYTES - len(read))):
                    read += part
                return response.status, read
        except TimeoutError:
            raise SourceError(f"slurmrestd did not answer within {self._timeout_s:g} s") from None
        except (aiohttp.ClientError, OSError, ValueError) as error:
            raise SourceError(f"slurmrestd: {str(error)[:200]}") from None

    def _refresh_headers(self) -> dict[str, str]:
        """Return the headers. Reads the token again if its file has changed. Raises SourceError."""
        file = self._account.token_file
        try:
            changed_ns = os.stat(file).st_mtime_ns if file else 0
        except OSError as error:
            raise SourceError(f"cannot read the token in {file}: {error.strerror}") from None
        if self._headers[0] != changed_ns:
            self._headers = changed_ns, self._account.make_headers()
        return self._headers[1]


def _decode_answer(status: int, body: bytes) -> _Answer:
    """Decode an answer. Raises SourceError or SlurmRefused for an answer with errors, whatever its status."""
    try:
        answer = _decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        answer = _Answer()
        if status < 400:
            raise SourceError("slurmrestd answers with what is no answer", 5.0) from None
    said = "; ".join(filter(None, (fault.error or fault.description for fault in answer.errors or ())))[:300]
    if status < 400 and not answer.errors:
        return answer
    words = f"slurmrestd answers {status}: {said or 'it does not say why'}"
    if status in (401, 403) or _LOGIN.search(said):
        raise SourceError(f"{words} (check the token)")
    if status >= 500 and not said:
        raise SourceError(words)
    raise make_refusal(words)


def _make_node_body(change: NodeChange) -> dict[str, Any]:
    body: dict[str, Any] = {}
    if change.available is not None:
        body["features"] = list(change.available)
    if change.active is not None:
        body["features_act"] = list(change.active)
    if change.extra is not None:
        body["extra"] = change.extra
    if change.drain:
        body |= {"state": ["DRAIN"], "reason": change.drain}
    elif change.drain is not None:
        body["state"] = ["UNDRAIN"]
    return body


def _split_list(value: Words) -> tuple[str, ...]:
    parts = value.split(",") if isinstance(value, str) else value or ()
    return tuple(filter(None, (part.strip() for part in parts)))


def _make_node(row: _RestNode) -> ControlledNode:
    states = " ".join((*_split_list(row.state), *_split_list(row.state_flags))).upper().split()
    return ControlledNode(
        name=row.name,
        is_drained=any(state.startswith("DRAIN") for state in states),
        reason=row.reason or "",
        available=_split_list(row.features),
        active=_split_list(row.active_features),
        extra=row.extra or "",
    )


def _make_job(row: _RestJob) -> ControlledJob:
    states = _split_list(row.job_state)
    return ControlledJob(
        id=_format_job_id(row),
        state=states[0].upper() if states else "",
        restarts=row.restart_cnt or 0,
        comment=row.comment or "",
        admin_comment=row.admin_comment or "",
    )


def _format_job_id(row: _RestJob) -> str:
    """Format the id of a job. An array that waits as a whole has brackets, as in squeue's output."""
    whole, task = _get_number(row.array_job_id), _get_number(row.array_task_id)
    if whole and row.array_task_string:
        return f"{whole}_[{row.array_task_string}]"
    return f"{whole}_{task}" if whole and task is not None else str(row.job_id)


def _get_number(value: int | _RestPriority | None) -> int | None:
    if isinstance(value, _RestPriority):
        return value.number if value.set else None
    return value
