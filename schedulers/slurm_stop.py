"""The marks by which the Slurm executor recognizes its own stops: texts at the end of a job's AdminComment.

A mark holds all that a later step needs, so it survives a restart of Fleetcast. The text before it belongs to others
and stays.
"""

import re
from collections.abc import Mapping
from typing import NamedTuple

from fleetcast.clients.slurm_control import ControlledJob

_JOB = re.compile(r"[0-9]+(?:_[0-9]+)?")
_MARK = re.compile(
    r" ?\[fleetcast\] (preempt|shrink|grow|replace) by action (\S+): "
    r"attempt (\d+), since (\d+), grace (\d+), until (\d+), nodes (\S+), for (\S+)$"
)
PENDING, REPLACE = "PENDING", "replace"
NO_PAYER, REQUEST = "-", "request"  # in place of a Slurm job: no payer, and a payer outside Slurm
GANG = "gang-"  # before the id of a running Slurm job that lost nodes


class SlurmStop(NamedTuple):
    """A stop or a growth that has begun. since_s, until_s: Unix seconds.

    nodes: those that a stop frees, or those that the job held before it grew. payer: the Slurm job, gang or request
    that gets the nodes.
    """

    kind: str
    action: str
    attempt: int
    since_s: int
    grace_s: int
    until_s: int
    nodes: tuple[str, ...]
    payer: str = ""

    @property
    def ends_s(self) -> int:
        """The end of the grace in Unix seconds."""
        return self.since_s + self.grace_s

    @property
    def slurm_payer(self) -> str:
        """The id of the waiting Slurm job that gets the nodes, or "" if there is none."""
        return "" if self.payer == REQUEST or self.gang else self.payer

    @property
    def gang(self) -> str:
        """The id of the running Slurm job that gets the nodes in place of lost ones, or "" if there is none."""
        return self.payer.removeprefix(GANG) if self.payer.startswith(GANG) else ""


def parse_slurm_job(name: str, prefix: str) -> str:
    r"""Return Slurm's id of a job, or "" if the name is not one of a Slurm job.

    >>> parse_slurm_job("\nsite-7_2", "site-"), parse_slurm_job("train", "")
    ('7_2', '')
    """
    name = name.strip()
    number = name.removeprefix(prefix)
    return number if name.startswith(prefix) and _JOB.fullmatch(number) else ""


def parse_stop(comment: str) -> SlurmStop | None:
    """Return the mark in an AdminComment, or None without one.

    >>> stop = SlurmStop("preempt", "0f-1", 1, 100, 120, 700, ("n1", "n2"), "9")
    >>> parse_stop(add_stop("theirs", stop)) == stop, parse_stop("[fleetcast] requeued off n1")
    (True, None)
    """
    found = _MARK.search(comment)
    if found is None:
        return None
    kind, action, attempt, since_s, grace_s, until_s, nodes, payer = found.groups()
    return SlurmStop(
        kind,
        action,
        int(attempt),
        int(since_s),
        int(grace_s),
        int(until_s),
        tuple(nodes.split(",")),
        "" if payer == NO_PAYER else payer,
    )


def add_stop(comment: str, stop: SlurmStop) -> str:
    """Return an AdminComment with a mark at its end."""
    mark = (
        f"[fleetcast] {stop.kind} by action {stop.action}: attempt {stop.attempt}, since {stop.since_s}, "
        f"grace {stop.grace_s}, until {stop.until_s}, nodes {','.join(stop.nodes)}, for {stop.payer or NO_PAYER}"
    )
    return f"{comment} {mark}" if comment else mark


def remove_stop(comment: str) -> str:
    """Return an AdminComment without our mark."""
    return _MARK.sub("", comment)


def find_attempt(job: ControlledJob) -> int:
    """Return the attempt of a job as the source `slurm` counts it."""
    return job.restarts + 1


def is_replaced(job: ControlledJob) -> bool:
    """Return whether a job is being moved to other nodes."""
    stop = parse_stop(job.admin_comment)
    return stop is not None and stop.kind == REPLACE


def may_release(stop: SlurmStop, jobs: Mapping[str, ControlledJob]) -> bool:
    """Return whether a stopped job may compete for nodes again.

    It is not visible here when a payer outside Slurm, or a gang that goes on running, has the nodes.

    jobs: id → all jobs of Slurm.
    """
    if stop.payer == REQUEST or stop.gang:
        return False
    payer = jobs.get(stop.payer)
    return payer is None or payer.state != PENDING
