"""slurmrestd of several versions: a server of ours that answers as they do."""

import asyncio
import contextlib
import json
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from fleetcast.clients.slurm_control import ControlledJob, ControlledNode, NodeChange, SlurmRefused
from fleetcast.clients.slurm_rest import SlurmRestAccount, SlurmRestControl
from fleetcast.fleet.errors import SourceError

V0_0_38 = {
    "nodes": [
        {
            "name": "n1",
            "state": "idle",
            "state_flags": ["DRAIN"],
            "reason": "[fleetcast] p",
            "features": "a,risk_low",
            "active_features": "a",
            "extra": '{"rack": 7}',
        }
    ],
    "jobs": [{"job_id": 7, "array_job_id": 0, "job_state": "PENDING", "comment": "mine", "restart_cnt": 0}],
    "errors": [],
}
V0_0_40 = {
    "nodes": [
        {
            "name": "n1",
            "state": ["IDLE", "DRAIN"],
            "reason": "[fleetcast] p",
            "features": ["a", "risk_low"],
            "active_features": ["a"],
            "extra": '{"rack": 7}',
        }
    ],
    "jobs": [
        {
            "job_id": 7,
            "array_job_id": {"set": True, "number": 0},
            "array_task_id": {"set": False, "number": 0},
            "job_state": ["PENDING"],
            "comment": "mine",
        },
        {"job_id": 9, "array_job_id": {"set": True, "number": 8}, "array_task_id": {"set": True, "number": 3}},
        {"job_id": 8, "array_job_id": {"set": True, "number": 8}, "array_task_string": "4-6"},
    ],
    "warnings": [{"description": "old"}],
    "errors": [],
}
PATHS = "/slurm/v0.0.39/nodes/ /slurm/v0.0.41/nodes/ /slurm/v0.0.40/nodes/"


class RestServer:
    """Answers what `answer` holds with `status`; `asked`: method, path and body; `tokens`: what it was shown."""

    def __init__(self, answer: Any = None, status: int = 200) -> None:
        self.answer, self.status = answer or {"errors": []}, status
        self.asked: list[tuple[str, str, Any]] = []
        self.tokens: list[str] = []

    async def handle(self, request: web.Request) -> web.Response:
        if request.path == "/openapi/v3":
            return web.Response(text=json.dumps({"paths": {path: {} for path in PATHS.split()}}))
        body = await request.read()
        self.asked.append((request.method, request.raw_path, json.loads(body) if body else None))
        self.tokens.append(request.headers.get("X-SLURM-USER-TOKEN", ""))
        if isinstance(self.answer, float):
            await asyncio.sleep(self.answer)
        text = self.answer if isinstance(self.answer, str) else json.dumps(self.answer)
        return web.Response(text=text, status=self.status)


@contextlib.asynccontextmanager
async def serving(server: RestServer, token: str = "", timeout_s: float = 20.0) -> AsyncIterator[SlurmRestControl]:
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", server.handle)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    account = SlurmRestAccount(f"http://127.0.0.1:{runner.addresses[0][1]}", "fleetcast", token)
    control = SlurmRestControl(account, timeout_s)
    try:
        yield control
    finally:
        await control.close()
        await runner.cleanup()


def asked(server: RestServer, ask: Callable[[SlurmRestControl], Awaitable[Any]], timeout_s: float = 20.0) -> Any:
    async def scenario() -> Any:
        async with serving(server, timeout_s=timeout_s) as control:
            return await ask(control)

    return asyncio.run(scenario())


def test_nodes_and_jobs_of_each_version_are_read() -> None:
    node = ControlledNode("n1", True, "[fleetcast] p", ("a", "risk_low"), ("a",), '{"rack": 7}')
    for answer in (V0_0_38, V0_0_40):
        assert asked(RestServer(answer), SlurmRestControl.read_nodes) == [node]
    assert asked(RestServer(V0_0_38), SlurmRestControl.read_jobs) == [ControlledJob("7", "PENDING", comment="mine")]
    jobs = asked(RestServer(V0_0_40), SlurmRestControl.read_jobs)
    assert [job.id for job in jobs] == ["7", "8_3", "8_[4-6]"]
    assert asked(RestServer(), SlurmRestControl.read_nodes) == []


def test_changes_go_to_many_nodes_at_once_by_the_newest_version() -> None:
    async def changes(control: SlurmRestControl) -> None:
        await control.change_nodes(["n1", "n2"], NodeChange("[fleetcast] p", ("a", "risk_high"), ("risk_high",), "{}"))
        await control.change_nodes(["n1"], NodeChange(drain=""))
        await control.change_job("7", comment="[fleetcast] start")

    server = RestServer()
    asked(server, changes)
    assert server.asked == [
        (
            "POST",
            "/slurm/v0.0.41/node/n%5B1-2%5D",
            {
                "features": ["a", "risk_high"],
                "features_act": ["risk_high"],
                "extra": "{}",
                "state": ["DRAIN"],
                "reason": "[fleetcast] p",
            },
        ),
        ("POST", "/slurm/v0.0.41/node/n1", {"state": ["UNDRAIN"]}),
        ("POST", "/slurm/v0.0.41/job/7", {"comment": "[fleetcast] start"}),
    ]


@pytest.mark.parametrize(
    ("status", "answer", "kind", "says"),
    [
        (200, {"errors": [{"error": "Unknown key", "error_number": 1}]}, SlurmRefused, "Unknown key"),
        (500, {"errors": [{"error": "Invalid node name specified"}]}, SlurmRefused, "Invalid node name"),
        (500, {"errors": [{"error": "Unable to contact slurm controller"}]}, SourceError, "Unable to contact"),
        (500, {"errors": [{"description": "Authentication failure"}]}, SourceError, "check the token"),
        (500, "", SourceError, "it does not say why"),
        (401, "Unauthorized", SourceError, "check the token"),
        (405, "", SlurmRefused, "405"),
        (200, "<html>", SourceError, "what is no answer"),
        (200, {"nodes": 7}, SourceError, "what is no answer"),
    ],
)
def test_what_counts_is_what_it_says_whatever_the_status(
    status: int, answer: Any, kind: type[Exception], says: str
) -> None:
    with pytest.raises(kind, match=says):
        asked(RestServer(answer or " ", status), lambda control: control.change_nodes(["n1"], NodeChange(drain="")))


def test_a_server_that_hangs_or_is_gone_has_seconds() -> None:
    with pytest.raises(SourceError, match=r"did not answer within 0\.2 s"):
        asked(RestServer(30.0), SlurmRestControl.read_nodes, timeout_s=0.2)

    async def gone() -> None:
        control = SlurmRestControl(SlurmRestAccount("unix:/nowhere.sock", version="v0.0.40"))
        try:
            with pytest.raises(SourceError, match="slurmrestd"):
                await control.read_nodes()
        finally:
            await control.close()

    asyncio.run(gone())


def test_a_token_is_read_again_when_its_file_changes(tmp_path: Path) -> None:
    token, server = tmp_path / "token", RestServer()

    async def scenario() -> None:
        async with serving(server, str(token)) as control:
            with pytest.raises(SourceError, match="cannot read the token"):
                await control.read_nodes()
            for number, text in enumerate(("SLURM_JWT=one\n", "two\n")):
                token.write_text(text)
                os.utime(token, (number + 1, number + 1))
                await control.read_nodes()
                await control.read_nodes()

    asyncio.run(scenario())
    assert server.tokens == ["one", "one", "two", "two"]
