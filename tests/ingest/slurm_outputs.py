"""Outputs of Slurm as its versions write them, made small, and a client that gives them."""

import json
from collections.abc import Sequence
from typing import Any

from fleetcast.clients.slurm import NoAccounting
from fleetcast.fleet.errors import SourceError

T = 1_760_000_000  # seconds


def amount(number: int | None, infinite: bool = False) -> dict[str, Any]:
    """A number as data_parser writes it."""
    return {"set": number is not None, "infinite": infinite, "number": number or 0}


def old_job(number: int = 7, state: str = "RUNNING", **fields: Any) -> dict[str, Any]:
    """A job of `squeue --json`, 22.05: on n1 and n2 with two GPUs each."""
    held = state in ("RUNNING", "COMPLETING")
    began = state != "PENDING"
    return {
        "job_id": number,
        "job_state": state,
        "state_reason": "None" if began else "Resources",
        "array_job_id": 0,
        "array_task_id": None,
        "array_task_string": "",
        "het_job_id": 0,
        "het_job_offset": 0,
        "restart_cnt": 0,
        "submit_time": T,
        "start_time": T + 10 if began else 0,
        "end_time": T + 100 if began else 0,
        "resize_time": 0,
        "nodes": "n[1-2]" if began else "",
        "node_count": 2,
        "gres_detail": ["gpu:h100:2(IDX:0-1)", "gpu:h100:2(IDX:2,3)"] if held else [],
        "tres_req_str": "cpu=4,mem=16G,node=2,billing=4,gres/gpu=4",
        "tres_alloc_str": "cpu=4,node=2,gres/gpu=4" if began else "",
        "tres_per_node": "gres:gpu:h100:2",
        "user_name": "ada",
        "group_name": "research",
        "account": "vision",
        "partition": "train",
        "qos": "normal",
        "name": "llama|7b",
        "cluster": "made",
        "priority": 4_294_901_759,
        "time_limit": 60,
        "cpus": 4,
        "comment": "",
        "exit_code": 0,
        "preempt_time": 0,
        "flags": [],
        **fields,
    }


def new_job(number: int = 7, state: Sequence[str] = ("RUNNING",), **fields: Any) -> dict[str, Any]:
    """The same job as 24.11 tells of it."""
    job = old_job(number, state[0])
    for key in ("restart_cnt", "user_name", "name", "nodes", "gres_detail", "cluster", "partition"):
        assert key in job
    numbers = ("array_job_id", "array_task_id", "het_job_id", "het_job_offset", "submit_time", "start_time", "end_time")
    job |= {key: amount(job[key]) for key in (*numbers, "resize_time", "node_count", "priority", "time_limit", "cpus")}
    job["exit_code"] = {"status": ["SUCCESS"], "return_code": amount(0), "signal": {"id": amount(None), "name": ""}}
    job["tres_per_node"] = "gres/gpu:h100:2"
    return job | {"job_state": list(state), "failed_node": "", "job_resources": {"nodes": {"count": 2}}} | fields


def queue(*jobs: dict[str, Any]) -> bytes:
    return json.dumps({"meta": {}, "errors": [], "jobs": list(jobs)}).encode()


def node(name: str = "n1", state: str = "idle", *flags: str, reason: str = "", at: int = 0) -> dict[str, Any]:
    """A node of `sinfo --json`, 22.05."""
    return {
        "name": name,
        "state": state,
        "state_flags": list(flags),
        "reason": reason,
        "reason_changed_at": at,
        "gres": "gpu:h100:8",
    }


def nodes(*rows: dict[str, Any]) -> bytes:
    return json.dumps({"meta": {}, "errors": [], "nodes": list(rows)}).encode()


ACCOUNT_HEADER = "JobID|State|ExitCode|Submit|Start|End|NodeList|NNodes|ReqTRES|AllocTRES|User|Partition|Reason|JobName"


def accounts(*lines: str) -> bytes:
    return "\n".join((ACCOUNT_HEADER, *lines, "")).encode()


def account(job: str = "7", state: str = "COMPLETED", submit: int = T, end: int | str = T + 100) -> str:
    """A line of `sacct -P` with times in seconds."""
    tres = "cpu=4,gres/gpu=4,node=2"
    return f"{job}|{state}|0:0|{submit}|{submit + 10}|{end}|n[1-2]|2|{tres}|{tres}|ada|train|None|llama|7b"


class FakeSlurm:
    """Gives the prepared answers one after the other, the last one for ever; an exception is raised."""

    def __init__(
        self, queues: Sequence[bytes | Exception], rows: Sequence[bytes] = (b"",), book: bytes | Exception | None = None
    ) -> None:
        self.queues = list(queues)
        self.rows = list(rows)
        self.book = NoAccounting("accounting storage is disabled") if book is None else book
        self.asked: list[tuple[int, list[str]]] = []

    async def read_queue(self) -> bytes:
        found = self.queues.pop(0) if len(self.queues) > 1 else self.queues[0]
        if isinstance(found, Exception):
            raise found
        return found

    async def read_nodes(self) -> bytes:
        return self.rows.pop(0) if len(self.rows) > 1 else self.rows[0]

    async def read_accounting(self, since_s: int, jobs: Sequence[str]) -> list[bytes]:
        self.asked.append((since_s, list(jobs)))
        if isinstance(self.book, Exception):
            raise self.book
        return [self.book]

    async def close(self) -> None:
        pass


AWAY = SourceError("slurmctld does not answer", 1.0)
