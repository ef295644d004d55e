"""Slurm as one that is told: nodes and jobs as they are now, and changes of them, by its commands (22.05 and newer).

Text of `scontrol show node -o` and `squeue --Format`, since every version writes it. Each command has seconds, then it
is killed: scontrol itself would wait nine for a slurmctld that is down, and for ever for one that stands still.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Protocol

from clients.slurm import run_command
from fleet.errors import FleetcastError, SourceError

LONGEST = 60_000  # of a list of nodes, in characters: an argument may have 128 KiB
_AWAY = re.compile(r"contact|timed out|connect|communicat|not responding|zero bytes|shutdown", re.IGNORECASE)
_REASON = re.compile(r" Reason=(.*?)(?: \[[^\[\]]*@[^\[\]]*\])?(?= (?:Comment|Extra|InstanceId|ResvName)=|\s*$)")
_EXTRA = re.compile(r" Extra=(.*?)(?= (?:Reason|InstanceId|ResvName)=|\s*$)")
_QUEUE = ("JobArrayID", "State", "RestartCnt", "PriorityLong", "Requeue", "BatchFlag", "admin_comment", "Comment")
_SEPARATOR = "\x1f"
_NUMBERED = re.compile(r"(.*?)([0-9]{1,9})")
_NULL = ("(null)", "N/A", "None")


class SlurmRefused(FleetcastError):
    """Slurm answered, and does not do it."""


@dataclass(frozen=True, slots=True)
class ControlledNode:
    """What can be told of a node, and what others told. available, active: its features."""

    name: str
    is_drained: bool
    reason: str = ""
    available: tuple[str, ...] = ()
    active: tuple[str, ...] = ()
    extra: str = ""


@dataclass(frozen=True, slots=True)
class ControlledJob:
    """A job that waits, runs or is being requeued. is_held: by whomever. may_requeue: it is a batch job that may."""

    id: str
    state: str
    restarts: int = 0
    is_held: bool = False
    may_requeue: bool = False
    comment: str = ""
    admin_comment: str = ""


@dataclass(frozen=True, slots=True)
class NodeChange:
    """None: stays as it is. drain: the reason, empty: no longer drained."""

    drain: str | None = None
    available: tuple[str, ...] | None = None
    active: tuple[str, ...] | None = None
    extra: str | None = None


class SlurmControl(Protocol):
    """Methods raise SourceError while Slurm is away, SlurmRefused where it says no."""

    async def nodes(self) -> list[ControlledNode]: ...

    async def jobs(self) -> list[ControlledJob]: ...

    async def change_nodes(self, names: Sequence[str], change: NodeChange) -> None: ...

    async def change_job(self, job: str, *, comment: str | None = None, admin_comment: str | None = None) -> None: ...

    async def requeue_held(self, job: str) -> None: ...

    async def release_without(self, job: str, node: str) -> None:
        """Add a node to those that a held job does not run on, and let the job go."""

    async def close(self) -> None: ...


class ScontrolCommands:
    """Runs scontrol and squeue; `shell` runs them elsewhere, as in ["ssh", "login1"]."""

    def __init__(self, shell: Sequence[str] = (), timeout_s: float = 3.0) -> None:
        self._shell, self._timeout_s = list(shell), timeout_s

    async def nodes(self) -> list[ControlledNode]:
        return node_lines(await self._run("scontrol", "show", "node", "-o"))

    async def jobs(self) -> list[ControlledJob]:
        columns = ",".join(f"{name}:{_SEPARATOR}" for name in _QUEUE)
        return job_lines(await self._run("squeue", "-h", "-a", "-t", "PD,R,CG", f"--Format={columns}"))

    async def change_nodes(self, names: Sequence[str], change: NodeChange) -> None:
        words = list(_settings(change))
        for part in hostlists(names):
            await self._run("scontrol", "update", f"NodeName={part}", *words)

    async def change_job(self, job: str, *, comment: str | None = None, admin_comment: str | None = None) -> None:
        told = {"Comment": comment, "AdminComment": admin_comment}
        words = [f"{name}={_printable(value)}" for name, value in told.items() if value is not None]
        await self._run("scontrol", "update", f"JobId={job}", *words)

    async def requeue_held(self, job: str) -> None:
        await self._run("scontrol", "requeuehold", job)

    async def release_without(self, job: str, node: str) -> None:
        shown = await self._run("scontrol", "show", "job", "-o", job)
        found = re.search(r" ExcNodeList=(\S+)", shown)
        others = found[1] if found and found[1] not in _NULL else ""
        excluded = ",".join(filter(None, (others, node)))
        await self._run("scontrol", "update", f"JobId={job}", "ReqNodeList=", f"ExcNodeList={excluded}")
        await self._run("scontrol", "release", job)

    async def close(self) -> None:
        """Nothing stays open between two calls."""

    async def _run(self, *command: str) -> str:
        code, out, err = await run_command(command, self._shell, self._timeout_s)
        if code or b"Invalid job format" in err:  # squeue leaves a column that it does not know empty, and succeeds
            said = " ".join((err or out).decode("utf-8", "replace").split())[:300]
            raise refusal(f"{' '.join(command[:2])}: {said or 'it failed and said nothing'}")
        return out.decode("utf-8", "replace")


def refusal(said: str) -> FleetcastError:
    """SourceError where Slurm is away, SlurmRefused where it says no, by its own words."""
    return SourceError(said) if _AWAY.search(said) else SlurmRefused(said)


def _settings(change: NodeChange) -> Iterable[str]:
    if change.available is not None:
        yield f"AvailableFeatures={','.join(change.available)}"
    if change.active is not None:
        yield f"ActiveFeatures={','.join(change.active)}"
    if change.extra is not None:
        yield f"Extra={_printable(change.extra)}"
    if change.drain:
        yield from ("State=DRAIN", f"Reason={_printable(change.drain)}")
    elif change.drain is not None:
        yield "State=UNDRAIN"  # RESUME would also call up a node that is down


def _printable(text: str) -> str:
    return "".join(letter if letter.isprintable() else " " for letter in text)


def node_lines(text: str) -> list[ControlledNode]:
    """`scontrol show node -o`, a line a node. Words that people write stand last, so the first match is Slurm's own."""
    return [_node(line) for line in text.splitlines() if re.match(r"NodeName=\S", line)]


def _node(line: str) -> ControlledNode:
    fields = dict(re.findall(r"(?:^| )(NodeName|State|AvailableFeatures|ActiveFeatures)=(\S*)", line)[::-1])
    reason, extra = _REASON.search(line), _EXTRA.search(line)
    states = re.sub(r"[*~#!%$@^-]+$", "", fields.get("State", "")).split("+")
    return ControlledNode(
        name=fields["NodeName"],
        is_drained=any(state.startswith("DRAIN") for state in states),
        reason=_plain(reason[1] if reason else ""),
        available=_listed(fields.get("AvailableFeatures", "")),
        active=_listed(fields.get("ActiveFeatures", "")),
        extra=_plain(extra[1] if extra else ""),
    )


def _plain(text: str) -> str:
    text = text.strip()
    return "" if text in _NULL or text == "none" else text


def _listed(text: str) -> tuple[str, ...]:
    return tuple(filter(None, _plain(text).split(",")))


def job_lines(text: str) -> list[ControlledJob]:
    """`squeue --Format` with `_QUEUE`; lines of another form are skipped."""
    rows = (line.split(_SEPARATOR) for line in text.splitlines())
    return [_job(dict(zip(_QUEUE, row, strict=False))) for row in rows if len(row) == len(_QUEUE) + 1]


def _job(row: Mapping[str, str]) -> ControlledJob:
    restarts = row["RestartCnt"].strip()
    return ControlledJob(
        id=row["JobArrayID"].strip(),
        state=row["State"].strip(),
        restarts=int(restarts) if restarts.isdecimal() else 0,
        is_held=row["PriorityLong"].strip() == "0",
        may_requeue=(row["Requeue"].strip(), row["BatchFlag"].strip()) == ("1", "1"),
        comment=_plain(row["Comment"]),
        admin_comment=_plain(row["admin_comment"]),
    )


def hostlists(names: Iterable[str]) -> list[str]:
    """Names as few texts in Slurm's notation, none longer than LONGEST.

    >>> hostlists(["n3", "n1", "n2", "gpu07", "login", "gpu08", "gpu10"])
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
        spans = [_span(span, width) for span in _runs(sorted(numbers))] if width else []
        if len(spans) == 1 and "-" not in spans[0]:
            parts.append(prefix + spans[0])
        else:
            parts += [f"{prefix}[{','.join(spans[at : at + 1000])}]" for at in range(0, len(spans), 1000)] or [prefix]
    return _joined(parts)


def _runs(numbers: Sequence[int]) -> list[list[int]]:
    return [[n for _, n in run] for _, run in groupby(enumerate(numbers), key=lambda pair: pair[1] - pair[0])]


def _span(run: Sequence[int], width: int) -> str:
    first, last = f"{run[0]:0{width}}", f"{run[-1]:0{width}}"
    return first if first == last else f"{first}-{last}"


def _joined(parts: Sequence[str]) -> list[str]:
    texts: list[str] = []
    for part in parts:
        if texts and len(texts[-1]) + len(part) < LONGEST:
            texts[-1] += f",{part}"
        else:
            texts.append(part)
    return texts
