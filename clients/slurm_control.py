"""Clients that read and change Slurm's current nodes and jobs by its commands (22.05 and newer).

The client reads the text of `scontrol show node -o` and `squeue`, since every version writes it.
**Users' texts and Slurm's own fields come in separate tables.** One call of squeue has columns that no
user can write. Another has the comments, in fields that end with a random mark of that call. So a user
who writes rows into a comment changes only that comment. Each command is killed after some seconds,
because scontrol itself waits forever for a slurmctld that hangs.
"""

import logging
import re
import secrets
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Protocol, TypeVar

from fleetcast.clients.slurm import run_command
from fleetcast.fleet.errors import FleetcastError, SourceError

logger = logging.getLogger(__name__)

LONGEST = 60_000  # of a list of nodes, in characters: an argument may have 128 KiB
_AWAY = re.compile(r"contact|timed out|connect|communicat|not responding|zero bytes|shutdown", re.IGNORECASE)
UNKNOWN_JOB = re.compile(r"invalid job id", re.IGNORECASE)
_REASON = re.compile(r" Reason=(.*?)(?: \[[^\[\]]*@[^\[\]]*\])?(?= (?:Comment|Extra|InstanceId|ResvName)=|\s*$)")
_EXTRA = re.compile(r" Extra=(.*?)(?= (?:Reason|InstanceId|ResvName)=|\s*$)")
_FACTS = (  # Slurm alone writes these
    *("JobArrayID", "State", "RestartCnt", "PriorityLong", "Requeue", "BatchFlag"),
    *("NodeList", "UserName", "Reservation"),
)
_TEXTS = ("JobArrayID", "admin_comment", "Comment")
_SEPARATOR = "|"
_EXCLUDED = re.compile(r"[^\s=]+")
_NUMBERED = re.compile(r"(.*?)([0-9]{1,9})")
_NULL = ("(null)", "N/A", "None")
Row = TypeVar("Row")


class SlurmRefused(FleetcastError):
    """The error for a change that Slurm refuses."""


@dataclass(frozen=True, slots=True)
class ControlledNode:
    """A node as Slurm reports it, including settings from other tools or operators.

    available, active: the node's available and active features.
    """

    name: str
    is_drained: bool
    reason: str = ""
    available: tuple[str, ...] = ()
    active: tuple[str, ...] = ()
    extra: str = ""


@dataclass(frozen=True, slots=True)
class ControlledJob:
    """A job that waits, runs or is being requeued.

    is_held: held by a user, an operator or us. may_requeue: the job is a batch job that may be requeued.
    nodes: the list of its nodes as Slurm writes it. reservation: the one that the job must use, or "".
    """

    id: str
    state: str
    restarts: int = 0
    is_held: bool = False
    may_requeue: bool = False
    comment: str = ""
    admin_comment: str = ""
    is_batch: bool = False
    nodes: str = ""
    user: str = ""
    reservation: str = ""


@dataclass(frozen=True, slots=True)
class NodeChange:
    """A change of a node. None leaves a field unchanged. drain: the reason, or "" to end the drain."""

    drain: str | None = None
    available: tuple[str, ...] | None = None
    active: tuple[str, ...] | None = None
    extra: str | None = None


class SlurmControl(Protocol):
    """The interface of clients that control Slurm.

    Methods raise SourceError while Slurm does not answer, and SlurmRefused if it refuses.
    """

    async def read_nodes(self) -> list[ControlledNode]: ...

    async def read_jobs(self) -> list[ControlledJob]: ...

    async def change_nodes(self, names: Sequence[str], change: NodeChange) -> None: ...

    async def change_job(self, job: str, *, comment: str) -> None: ...

    async def close(self) -> None: ...


class ScontrolCommands:
    """A client that runs scontrol and squeue. `shell` runs them elsewhere, for example ["ssh", "login1"]."""

    def __init__(self, shell: Sequence[str] = (), timeout_s: float = 3.0) -> None:
        self._shell, self._timeout_s = list(shell), timeout_s

    async def read_nodes(self) -> list[ControlledNode]:
        return parse_node_lines(await self._run_command("scontrol", "show", "node", "-o"))

    async def read_jobs(self) -> list[ControlledJob]:
        return await self._list_jobs()

    async def find_job(self, job: str) -> ControlledJob | None:
        """Read one job. Returns None if Slurm does not know the job, or lists its id more than once."""
        try:
            found = await self._list_jobs("-j", job)
        except SlurmRefused as error:
            if UNKNOWN_JOB.search(str(error)):
                return None
            raise
        return found[0] if [one.id for one in found] == [job] else None

    async def _list_jobs(self, *which: str) -> list[ControlledJob]:
        """Return the jobs that squeue lists. `which`: further arguments of squeue.

        Slurm's own fields and the users' texts come from two calls, so that no text can imitate Slurm's
        fields.
        """
        end = f"|{secrets.token_hex(16)}|"
        listed = ("squeue", "-h", "-a", "-t", "PD,R,CG", *which)
        facts = await self._run_command(*listed, f"--Format={_format_columns(_FACTS, _SEPARATOR)}")
        texts = await self._run_command(*listed, f"--Format={_format_columns(_TEXTS, end)}")
        return join_job_rows(facts, texts, end)

    async def change_nodes(self, names: Sequence[str], change: NodeChange) -> None:
        words = list(_format_node_settings(change))
        for part in format_hostlists(names):
            await self._run_command("scontrol", "update", f"NodeName={part}", *words)

    async def change_job(self, job: str, *, comment: str | None = None, admin_comment: str | None = None) -> None:
        comments = {"Comment": comment, "AdminComment": admin_comment}
        words = [f"{name}={_replace_unprintable(value)}" for name, value in comments.items() if value is not None]
        await self._run_command("scontrol", "update", f"JobId={job}", *words)

    async def release_excluding_node(self, job: str, node: str) -> None:
        """Exclude a node from a held job, and release the job."""
        others = _clean_value(await self._run_command("squeue", "-h", "-a", "-j", job, "-o", "%x"))
        if others and not _EXCLUDED.fullmatch(others):
            raise SlurmRefused(f"job {job}: its excluded nodes {others[:80]!r} are no list of nodes")
        excluded = ",".join(filter(None, (others, node)))
        await self._run_command("scontrol", "update", f"JobId={job}", "ReqNodeList=", f"ExcNodeList={excluded}")
        await self._run_command("scontrol", "release", job)

    async def close(self) -> None:
        """Do nothing, because no connection stays open between calls."""

    async def _run_command(self, *command: str) -> str:
        code, out, err = await run_command(command, self._shell, self._timeout_s)
        if code or b"Invalid job format" in err:  # squeue leaves a column that it does not know empty, and succeeds
            said = " ".join((err or out).decode("utf-8", "replace").split())[:300]
            raise make_refusal(f"{' '.join(command[:2])}: {said or 'it failed and said nothing'}")
        return out.decode("utf-8", "replace")


def make_refusal(said: str) -> FleetcastError:
    """Return SourceError if Slurm's message means that it is down, otherwise SlurmRefused."""
    return SourceError(said) if _AWAY.search(said) else SlurmRefused(said)


def _format_node_settings(change: NodeChange) -> Iterable[str]:
    if change.available is not None:
        yield f"AvailableFeatures={','.join(change.available)}"
    if change.active is not None:
        yield f"ActiveFeatures={','.join(change.active)}"
    if change.extra is not None:
        yield f"Extra={_replace_unprintable(change.extra)}"
    if change.drain:
        yield from ("State=DRAIN", f"Reason={_replace_unprintable(change.drain)}")
    elif change.drain is not None:
        yield "State=UNDRAIN"  # RESUME would also call up a node that is down


def _replace_unprintable(text: str) -> str:
    return "".join(letter if letter.isprintable() else " " for letter in text)


def parse_node_lines(text: str) -> list[ControlledNode]:
    """Parse the lines of `scontrol show node -o`, one for each node.

    Texts that people write come last in a line, so the first match of a field is Slurm's own.
    """
    return [_parse_node(line) for line in text.splitlines() if re.match(r"NodeName=\S", line)]


def _parse_node(line: str) -> ControlledNode:
    fields = dict(re.findall(r"(?:^| )(NodeName|State|AvailableFeatures|ActiveFeatures)=(\S*)", line)[::-1])
    reason, extra = _REASON.search(line), _EXTRA.search(line)
    states = re.sub(r"[*~#!%$@^-]+$", "", fields.get("State", "")).split("+")
    return ControlledNode(
        name=fields["NodeName"],
        is_drained=any(state.startswith("DRAIN") for state in states),
        reason=_clean_value(reason[1] if reason else ""),
        available=_split_list(fields.get("AvailableFeatures", "")),
        active=_split_list(fields.get("ActiveFeatures", "")),
        extra=_clean_value(extra[1] if extra else ""),
    )


def _clean_value(text: str) -> str:
    text = text.strip()
    return "" if text in _NULL or text == "none" else text


def _split_list(text: str) -> tuple[str, ...]:
    return tuple(filter(None, _clean_value(text).split(",")))


def drop_ambiguous_rows(rows: Iterable[Row], name: Callable[[Row], str]) -> list[Row]:
    """Drop all rows whose name occurs more than once, because none of them can be trusted."""
    listed = list(rows)
    counts = Counter(map(name, listed))
    if doubled := sorted(key for key, count in counts.items() if count > 1):
        logger.warning("slurm: %d names come more than once and are left alone: %s", len(doubled), doubled[:3])
    return [row for row in listed if counts[name(row)] == 1]


def join_job_rows(facts: str, texts: str, end: str) -> list[ControlledJob]:
    """Join Slurm's fields and the users' texts of `squeue --Format` by job id.

    end: the mark at the end of each text. Skips lines of another form. Also skips jobs that do not occur exactly
    once in both outputs.
    """
    lines = (line.split(_SEPARATOR) for line in facts.splitlines())
    known = drop_ambiguous_rows((line for line in lines if len(line) == len(_FACTS) + 1), lambda row: row[0].strip())
    texts_by_id = {
        row[0].strip(): row for row in drop_ambiguous_rows(_split_text_rows(texts, end), lambda row: row[0].strip())
    }
    return [_make_job(row, texts_by_id[row[0].strip()]) for row in known if row[0].strip() in texts_by_id]


def _split_text_rows(texts: str, end: str) -> list[list[str]]:
    """Split texts into rows at the end marks of fields. A line break within a field is part of its text."""
    fields = texts.split(end)
    return [fields[at : at + len(_TEXTS)] for at in range(0, len(fields) - len(_TEXTS), len(_TEXTS))]


def _make_job(facts: Sequence[str], texts: Sequence[str]) -> ControlledJob:
    row = dict(zip(_FACTS, (part.strip() for part in facts), strict=False))
    restarts = row["RestartCnt"]
    return ControlledJob(
        id=row["JobArrayID"],
        state=row["State"],
        restarts=int(restarts) if restarts.isdecimal() else 0,
        is_held=row["PriorityLong"] == "0",
        may_requeue=(row["Requeue"], row["BatchFlag"]) == ("1", "1"),
        admin_comment=_clean_value(texts[1]),
        comment=_clean_value(texts[2]),
        is_batch=row["BatchFlag"] == "1",
        nodes=_clean_value(row["NodeList"]),
        user=_clean_value(row["UserName"]),
        reservation=_clean_value(row["Reservation"]),
    )


def _format_columns(names: Sequence[str], end: str) -> str:
    return ",".join(f"{name}:{end}" for name in names)


def format_hostlists(names: Iterable[str]) -> list[str]:
    """Format node names in Slurm's notation, in few texts of at most LONGEST characters.

    >>> format_hostlists(["n3", "n1", "n2", "gpu07", "login", "gpu08", "gpu10"])
    ['gpu[07-08,10],login,n[1-3]']
    """
    by_form: dict[tuple[str, int], set[int]] = {}
    for name in names:
        found = _NUMBERED.fullmatch(name)
        width = len(found[2]) if found else 0
        key = (found[1], width) if found else (name, 0)
        by_form.setdefault(key, set()).add(int(found[2]) if found else 0)
    parts = []
    for (prefix, width), numbers in sorted(by_form.items()):
        spans = [_format_range(span, width) for span in _group_consecutive(sorted(numbers))] if width else []
        if len(spans) == 1 and "-" not in spans[0]:
            parts.append(prefix + spans[0])
        else:
            parts += [f"{prefix}[{','.join(spans[at : at + 1000])}]" for at in range(0, len(spans), 1000)] or [prefix]
    return _join_within_limit(parts)


def _group_consecutive(numbers: Sequence[int]) -> list[list[int]]:
    return [[n for _, n in run] for _, run in groupby(enumerate(numbers), key=lambda pair: pair[1] - pair[0])]


def _format_range(run: Sequence[int], width: int) -> str:
    first, last = f"{run[0]:0{width}}", f"{run[-1]:0{width}}"
    return first if first == last else f"{first}-{last}"


def _join_within_limit(parts: Sequence[str]) -> list[str]:
    texts: list[str] = []
    for part in parts:
        if texts and len(texts[-1]) + len(part) < LONGEST:
            texts[-1] += f",{part}"
        else:
            texts.append(part)
    return texts
