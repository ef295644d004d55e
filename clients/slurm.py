"""Slurm's answers as bytes: from its commands, slurmrestd, or files in a folder.

    commands  squeue --json, scontrol show nodes --json (from 23.02 on) or sinfo --json, and sacct -P (22.05's JSON of
              it lacks exit codes and users); else text of all three. `shell` runs them elsewhere: ["ssh", "login1"]
    rest      GET of http://host:6820 or unix:/run/slurmrestd.sock; the token from SLURM_JWT
    folder    queue.json, nodes.json, accounting.json (or .txt), as a cron job on a login node leaves them

With SLURM_TIME_FORMAT, text output has times in Unix seconds, so time zones do not matter.

**Users' texts and Slurm's facts come in separate tables.** A job's name can contain line breaks and
whole rows of other jobs. So text comes from two calls. One has only columns that Slurm alone
writes. The other has the users' texts, whose fields end with a secret of that call. The client
joins both to one table, and replaces unprintable characters with blanks.
"""

import asyncio
import contextlib
import os
import re
import secrets
import shlex
from asyncio.subprocess import DEVNULL, PIPE
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

import aiohttp

from fleetcast.fleet.errors import SourceError

MAX_BYTES = 2**29
CHUNK_BYTES = 2**18
WHOLE_ARRAYS = "SLURM_BITSTR_LEN=0"  # else lists of an array's tasks are cut after 64 characters
MOST_JOBS = 200  # named in one call
MOST_REST_JOBS = 20
_QUEUE = (
    *("JobArrayID", "State", "RestartCnt", "SubmitTime", "StartTime", "EndTime", "ResizeTime", "NodeList", "NumNodes"),
    *("tres-alloc", "UserName", "GroupName", "Partition", "QOS", "Cluster", "PriorityLong", "TimeLimit", "NumCPUs"),
    *("exit_code", "NumTasks"),
)
_QUEUE_TEXTS = {
    **{"tres-per-node": "TRES_PER_NODE", "tres-per-job": "TRES_PER_JOB", "tres-per-task": "TRES_PER_TASK"},
    **{"Account": "ACCOUNT", "Reason": "REASON", "Name": "NAME", "Comment": "Comment"},
}
_NODES = ("NodeList", "StateComplete", "Gres", "Timestamp", "NodeHost", "NodeAddr", "CPUs", "Memory")
_NODE_TEXTS = {"Reason": "REASON"}
_ACCOUNTING = (
    "JobID,Submit,State,ExitCode,Start,End,NodeList,NNodes,ReqTRES,AllocTRES,User,Group,Partition,QOS,Cluster,"
    "Priority,TimelimitRaw,ReqCPUS,Reason"
)
_ACCOUNTING_TEXTS = ("Account", "JobName")
_NO_ACCOUNTING = re.compile(rb"accounting.storage.is.disabled|Only.JOB_COMP|accounting_storage/none", re.IGNORECASE)
_JOB = re.compile(r"[0-9]{1,12}(?:[_+][0-9]{1,9})?")
_VERSION = re.compile(rb"/slurm\\?/v(\d+)\.(\d+)\.(\d+)\\?/jobs")


class NoAccounting(SourceError):
    """The error for a Slurm that has no accounting."""


class SlurmClient(Protocol):
    """A client of Slurm. Methods raise SourceError while Slurm does not answer."""

    async def read_queue(self) -> bytes:
        """Return all jobs that slurmctld knows: those that wait, run, or ended recently."""

    async def read_nodes(self) -> bytes: ...

    async def read_accounting(self, since_s: int, jobs: Sequence[str]) -> list[bytes]:
        """Return the records of `jobs` or, if `jobs` is empty, of the last `since_s` seconds.

        Raises NoAccounting if Slurm has no accounting.
        """

    async def close(self) -> None: ...


class SlurmCommands:
    """A client that runs Slurm's commands.

    `json`: whether the commands can write JSON. If it is None, the client finds out at the first call.
    """

    def __init__(self, shell: Sequence[str], timeout_s: float, json: bool | None) -> None:
        self._shell = list(shell)
        self._timeout_s = timeout_s
        self._json = json
        self._scontrol = True

    async def read_queue(self) -> bytes:
        if self._json is not False:
            try:
                return await self._run_command("squeue", "--json", "--all", "--states=all")
            except _CommandError as refused:
                if self._json or not refused.unknown_option:
                    raise
                self._json = False
        return await self._read_table(["squeue", "--all", "--array", "--states=all"], _QUEUE, _QUEUE_TEXTS)

    async def read_nodes(self) -> bytes:
        if self._json is False:
            return await self._read_table(["sinfo", "--all", "--Node"], _NODES, _NODE_TEXTS)
        if self._scontrol:
            try:
                return await self._run_command("scontrol", "show", "nodes", "--json")
            except _CommandError as refused:
                if not refused.unknown_option:
                    raise
                self._scontrol = False
        return await self._run_command("sinfo", "--json", "--all")

    async def read_accounting(self, since_s: int, jobs: Sequence[str]) -> list[bytes]:
        named = [job for job in jobs if _JOB.fullmatch(job)][:MOST_JOBS]
        which = [f"--jobs={','.join(named)}"] if jobs else [f"--starttime=now-{since_s}seconds", "--endtime=now"]
        command = ["sacct", "--allusers", "--duplicates", *which]
        if self._json:
            return [await self._run_command(*command, "--json")]
        command += ["--allocations", "--parsable"]
        facts = await self._run_command(*command, f"--format={_ACCOUNTING}")
        if facts.count(b"\n") < 2:
            return [facts]
        end = _make_random_delimiter()
        texts = [f"--delimiter={end}", "--noheader", f"--format=JobID,Submit,{','.join(_ACCOUNTING_TEXTS)}"]
        return [join_texts(facts, await self._run_command(*command, *texts), end, 2, _ACCOUNTING_TEXTS)]

    async def _read_table(self, command: Sequence[str], facts: Sequence[str], texts: Mapping[str, str]) -> bytes:
        """Return the output of squeue or sinfo as one table.

        `texts`: columns that users write → their headings.
        """
        end = _make_random_delimiter()
        table = await self._run_command(*command, f"--Format={_format_columns(facts, '|')}")
        printed = await self._run_command(
            *command, "--noheader", f"--Format={_format_columns((facts[0], *texts), end)}"
        )
        return join_texts(table, printed, end, 1, (*texts.values(),))

    async def close(self) -> None:
        """Do nothing, because no connection stays open between calls."""

    async def _run_command(self, *command: str) -> bytes:
        """Run a command and return its output.

        Raises SourceError if the command is missing, fails, takes too long or prints too much.
        """
        setting = [] if "--json" in command else ["SLURM_TIME_FORMAT=%s"]  # with it, sacct --json reads no time
        settings = ["env", WHOLE_ARRAYS, *setting]
        code, out, err = await run_command([*settings, *command], self._shell, self._timeout_s)
        if code:
            raise _make_refusal(command[0], err)
        return out


async def run_command(command: Sequence[str], shell: Sequence[str], timeout_s: float) -> tuple[int, bytes, bytes]:
    """Run a command, and return its exit status, its output and its error output.

    `shell`: a command that runs it elsewhere. Raises SourceError if the command cannot start, takes longer than
    `timeout_s` or prints too much. A command that takes too long or prints too much is killed.
    """
    words = [*shell, *command]
    if shell and Path(shell[0]).name == "ssh":  # it hands one text to a shell over there
        words = [*shell, shlex.join(command)]
    try:
        process = await asyncio.create_subprocess_exec(
            *words, stdin=DEVNULL, stdout=PIPE, stderr=PIPE, start_new_session=True
        )
    except OSError as error:
        raise SourceError(f"{words[0]}: {error.strerror or error}", retry_after_s=30.0) from None
    try:
        async with asyncio.timeout(timeout_s):
            out, err = await asyncio.gather(_read_bounded(process.stdout), _read_bounded(process.stderr))
            await process.wait()
    except TimeoutError:
        name = next(word for word in command if word != "env" and "=" not in word)
        raise SourceError(f"{name} did not end within {timeout_s:g} s") from None
    finally:
        await _kill_process(process)
    return process.returncode or 0, out, err


def _format_columns(names: Sequence[str], end: str) -> str:
    """Format a list of columns for a Slurm command. Each is as wide as its values, and `end` follows it."""
    return ",".join(f"{name}:{end}" for name in names)


def _make_random_delimiter() -> str:
    return f"|{secrets.token_hex(16)}|"


def join_texts(facts: bytes, texts: bytes, end: str, keys: int, headings: Sequence[str]) -> bytes:
    r"""Append users' texts as columns to the lines of facts with the same first `keys` fields.

    facts: a header, and lines whose fields end with `|`. texts: fields that end with `end`. If Slurm
    prints two different texts for one key, both are left out.

    >>> join_texts(b"JOBID|STATE|\n7|RUNNING|\n", b"7~a|\n8|FAILED|~\n", "~", 1, ["NAME"])
    b'JOBID|STATE|NAME|\n7|RUNNING|a| 8|FAILED||\n'
    """
    fields, width = texts.decode("utf-8", "replace").split(end), keys + len(headings)
    texts_by_key: dict[tuple[str, ...], tuple[str, ...]] = {}
    for at in range(0, len(fields) - width, width):
        key = tuple(part.strip() for part in fields[at : at + keys])
        words = tuple(map(_replace_unprintable, fields[at + keys : at + width]))
        words = (
            *(part.replace("|", " ") for part in words[:-1]),
            words[-1],
        )  # a reader takes the rest of a line as the last
        texts_by_key[key] = words if texts_by_key.get(key, words) == words else ("",) * len(headings)
    header, *lines = facts.decode("utf-8", "replace").split("\n")
    if not header:
        return facts
    table = ["".join((header, *(f"{heading}|" for heading in headings)))]
    for line in lines:
        found = texts_by_key.get(tuple(part.strip() for part in line.split("|", keys)[:keys]), ("",) * len(headings))
        table.append("".join((line, *(f"{words}|" for words in found))) if line else line)
    return "\n".join(table).encode()


def _replace_unprintable(text: str) -> str:
    return text if text.isprintable() else "".join(one if one.isprintable() else " " for one in text)


async def _read_bounded(stream: asyncio.StreamReader | aiohttp.StreamReader | None) -> bytes:
    parts, size = [], 0
    while stream is not None and (part := await stream.read(CHUNK_BYTES)):
        size += len(part)
        if size > MAX_BYTES:
            raise SourceError(f"Slurm answers more than {MAX_BYTES:,} bytes", retry_after_s=60.0)
        parts.append(part)
    return b"".join(parts)


async def _kill_process(process: asyncio.subprocess.Process) -> None:
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()


class _CommandError(SourceError):
    """The error for a command that fails.

    `unknown_option`: whether it failed because this version of Slurm does not know one of its options.
    """

    def __init__(self, message: str, unknown_option: bool) -> None:
        super().__init__(message, retry_after_s=10.0)
        self.unknown_option = unknown_option


def _make_refusal(command: str, words: bytes) -> SourceError:
    said = " ".join(words.decode("utf-8", "replace").split())[:300]
    if command == "sacct" and _NO_ACCOUNTING.search(words):
        return NoAccounting(f"sacct: {said}")
    unknown = any(part in said for part in ("unrecognized option", "invalid option", "serializer", "JSON support"))
    return _CommandError(f"{command}: {said or 'it failed and said nothing'}", unknown)


class SlurmRest:
    """A client of slurmrestd. If `version` is "", it uses the newest version that slurmrestd serves.

    SLURM_JWT holds the token.
    """

    def __init__(self, url: str, version: str, user: str, timeout_s: float) -> None:
        self._socket = url.removeprefix("unix:") if url.startswith("unix:") else ""
        self._url = "http://localhost" if self._socket else url.rstrip("/")
        self._version = version
        self._user = user
        self._timeout_s = timeout_s
        self._session: aiohttp.ClientSession | None = None

    async def read_queue(self) -> bytes:
        return await self._fetch(f"/slurm/{await self._find_served_version()}/jobs/")

    async def read_nodes(self) -> bytes:
        return await self._fetch(f"/slurm/{await self._find_served_version()}/nodes/")

    async def read_accounting(self, since_s: int, jobs: Sequence[str]) -> list[bytes]:
        """Return the records of the last `since_s` seconds, or of at most MOST_REST_JOBS of `jobs`.

        slurmrestd answers for one job at a time.
        """
        root = f"/slurmdb/{await self._find_served_version()}"
        if not jobs:
            return [await self._fetch(f"{root}/jobs?start_time=now-{since_s}seconds")]
        named = [job for job in jobs if _JOB.fullmatch(job)][:MOST_REST_JOBS]
        return [await self._fetch(f"{root}/job/{job.partition('+')[0]}") for job in named]

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def _find_served_version(self) -> str:
        if not self._version:
            found = _VERSION.findall(await self._fetch("/openapi/v3"))
            if not found:
                raise SourceError("slurmrestd names no version of /slurm/…/jobs", retry_after_s=60.0)
            newest = max(tuple(int(part) for part in row) for row in found)
            self._version = "v" + ".".join(map(str, newest))
        return self._version

    async def _fetch(self, path: str) -> bytes:
        if self._session is None:
            connector = aiohttp.UnixConnector(self._socket) if self._socket else None
            timeout = aiohttp.ClientTimeout(total=self._timeout_s)
            self._session = aiohttp.ClientSession(connector=connector, timeout=timeout)
        try:
            async with self._session.get(self._url + path, headers=self._make_headers()) as response:
                if response.status >= 400:
                    what = "check SLURM_JWT" if response.status in (401, 403) else "it refuses"
                    raise SourceError(f"slurmrestd answers {response.status} to {path}: {what}", retry_after_s=30.0)
                return await _read_bounded(response.content)
        except TimeoutError:
            raise SourceError(f"slurmrestd did not answer within {self._timeout_s:g} s") from None
        except (aiohttp.ClientError, OSError, ValueError) as error:
            raise SourceError(f"slurmrestd: {str(error)[:200]}") from None

    def _make_headers(self) -> dict[str, str]:
        token = os.environ.get("SLURM_JWT", "")
        headers = {"X-SLURM-USER-TOKEN": token} if token else {}
        if self._user:
            headers["X-SLURM-USER-NAME"] = self._user
        return headers


class SlurmFolder:
    """A reader of recorded outputs in a folder. It reads the files again at each call."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    async def read_queue(self) -> bytes:
        return await asyncio.to_thread(self._read_output, "queue", True)

    async def read_nodes(self) -> bytes:
        return await asyncio.to_thread(self._read_output, "nodes", False)

    async def read_accounting(self, since_s: int, jobs: Sequence[str]) -> list[bytes]:
        found = await asyncio.to_thread(self._read_output, "accounting", False)
        if not found:
            raise NoAccounting(f"{self._folder} holds no accounting.json")
        return [found]

    async def close(self) -> None:
        """Do nothing, because no file stays open."""

    def _read_output(self, name: str, needed: bool) -> bytes:
        for suffix in (".json", ".txt"):
            with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                return self._read_file(self._folder / f"{name}{suffix}")
        if needed:
            raise SourceError(f"{self._folder} holds neither {name}.json nor {name}.txt", retry_after_s=10.0)
        return b""

    @staticmethod
    def _read_file(path: Path) -> bytes:
        try:
            with open(path, "rb") as file:
                return file.read(MAX_BYTES)
        except (FileNotFoundError, NotADirectoryError):
            raise
        except OSError as error:
            raise SourceError(f"{path}: {error.strerror or error}", retry_after_s=10.0) from None
