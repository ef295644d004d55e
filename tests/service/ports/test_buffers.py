"""The port of CapacityBuffers against a server of ours that answers as an API server does."""

import asyncio
import json
import logging
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from fleetcast.clients import kube_api
from fleetcast.clients.kube_api import KubeAccount, KubeApi
from fleetcast.fleet.errors import ConfigError, SourceError
from fleetcast.schedulers.adapter import Seen, Write, WriteOutcome
from fleetcast.schedulers.buffers import GPUS, LEAST, POOL, REPLICAS, THEIRS
from fleetcast.service.doors import make_door
from fleetcast.service.ports.buffers import BuffersPort, decode_annotated_buffer

HOLDS = {"f:spec": {"f:replicas": {}}}
OURS = {"manager": "fleetcast", "operation": "Apply", "fieldsV1": HOLDS}
KUBECTL = {
    "manager": "kubectl",
    "operation": "Apply",
    "fieldsV1": {"f:metadata": {}, "f:spec": {"f:podTemplateRef": {}}},
}
ASKS = {POOL: "serve", GPUS: "8"}
ALL = "/apis/autoscaling.x-k8s.io/v1beta1/capacitybuffers"


def buffer(name: str, replicas: int | None = 0, *managed: dict[str, Any], **annotations: str) -> dict[str, Any]:
    """As the server tells of it, less what nobody reads."""
    meta = {"name": name, "namespace": "serve", "uid": f"uid-{name}", "resourceVersion": "7"}
    meta |= {"annotations": {"other.io/mine": "x", **annotations}, "managedFields": [KUBECTL, *managed]}
    spec = {"podTemplateRef": {"name": "server"}} | ({} if replicas is None else {"replicas": replicas})
    return {"metadata": meta, "spec": spec}


def values(*told: Any, **annotations: str) -> dict[str, str]:
    return dict(decode_annotated_buffer(json.dumps(buffer("ahead", *told, **annotations)).encode()).values)


def test_replicas_are_ours_theirs_or_at_rest() -> None:
    assert values(4, OURS, **ASKS) == ASKS | {REPLICAS: "4"}
    assert values(0, OURS, **ASKS) == ASKS
    assert values(2, OURS, **ASKS, **{LEAST: "2"}) == ASKS | {LEAST: "2"}
    assert values(0, OURS, **ASKS, **{LEAST: "2"}) == ASKS | {LEAST: "2", REPLICAS: "0"}
    by_hand = {"manager": "kubectl-edit", "operation": "Update", "fieldsV1": HOLDS}
    assert values(7, by_hand, **ASKS) == values(7, OURS, by_hand, **ASKS) == ASKS | {THEIRS: "7"}
    assert values(None, **ASKS) == ASKS
    assert values(4, OURS) == {REPLICAS: "4"}
    with pytest.raises(SourceError, match="a buffer that is none"):
        decode_annotated_buffer(b"{}")


async def written(
    folder: Path, things: list[dict[str, Any]], batch: list[Write], status: int = 200
) -> tuple[Seen, list[WriteOutcome], list[tuple[str, str, Any]], Seen]:
    """What is seen, what becomes of writes, what the server was asked, and what is seen then."""
    asked: list[tuple[str, str, Any]] = []

    async def handle(request: web.Request) -> web.StreamResponse:
        if request.method == "PATCH":
            body = json.loads(await request.read())
            asked.append((request.path_qs, request.content_type, body))
            after = buffer(body["metadata"]["name"], body["spec"]["replicas"], OURS, **ASKS)
            return web.json_response(after if status == 200 else {"code": status, "message": "no"}, status=status)
        if "watch" in request.query:
            answer = web.StreamResponse()
            await answer.prepare(request)
            await asyncio.sleep(60)
        return web.json_response({"metadata": {"resourceVersion": "7"}, "items": things})

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", handle)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    (folder / "token").write_text("secret\n")
    port = BuffersPort(KubeApi(KubeAccount(f"http://127.0.0.1:{runner.addresses[0][1]}", str(folder / "token"))))
    try:
        before = dict(await port.read())
        outcomes = [*await port.write(batch)]
        return before, outcomes, asked, dict(await port.read())
    finally:
        await port.close()
        await port.close()
        await runner.cleanup()


def write(value: str | None, seen: str | None = None, name: str = "ahead") -> Write:
    return Write(f"serve/{name}", REPLICAS, value, seen, "p90 of wanted GPUs")


def test_replicas_alone_are_applied_and_never_forced(tmp_path: Path) -> None:
    things = [buffer("ahead", 0, OURS, **ASKS), buffer("strange")]
    before, outcomes, asked, after = asyncio.run(written(tmp_path, things, [write("4")]))
    assert (before, after) == ({"serve/ahead": ASKS}, {"serve/ahead": ASKS | {REPLICAS: "4"}})
    assert outcomes == [WriteOutcome.DONE]
    ((path, kind, body),) = asked
    where = ALL.replace("capacitybuffers", "namespaces/serve/capacitybuffers/ahead")
    assert (path, kind) == (f"{where}?fieldManager=fleetcast&force=false", kube_api.APPLY)
    assert body.keys() == {"apiVersion", "kind", "metadata", "spec"}
    assert body["metadata"] == {"name": "ahead", "namespace": "serve", "uid": "uid-ahead"}
    assert body["spec"] == {"replicas": 4}


def test_a_withdrawal_writes_the_users_minimum(tmp_path: Path) -> None:
    things = [buffer("ahead", 4, OURS, **ASKS, **{LEAST: "1"})]
    _, outcomes, asked, _ = asyncio.run(written(tmp_path, things, [write(None, "4")]))
    assert (outcomes, asked[0][2]["spec"]) == ([WriteOutcome.DONE], {"replicas": 1})


@pytest.mark.parametrize(
    ("status", "outcome"),
    [
        (409, WriteOutcome.CONFLICT),
        (404, WriteOutcome.CONFLICT),
        (403, WriteOutcome.REFUSED),
        (422, WriteOutcome.REFUSED),
        (500, WriteOutcome.REFUSED),
    ],
)
def test_what_the_server_says_no_to(tmp_path: Path, status: int, outcome: WriteOutcome) -> None:
    _, outcomes, asked, after = asyncio.run(written(tmp_path, [buffer("ahead", 0, **ASKS)], [write("4")], status))
    assert (outcomes, len(asked), after) == ([outcome], 1, {} if status == 404 else {"serve/ahead": ASKS})


def test_nothing_is_written_over_what_was_not_seen(tmp_path: Path) -> None:
    by_hand = {"manager": "kubectl-edit", "operation": "Update", "fieldsV1": HOLDS}
    things = [buffer("ahead", 4, OURS, **ASKS), buffer("theirs", 7, by_hand, **ASKS)]
    batch = [write("5", "3"), write("4", name="theirs"), write("4", name="gone")]
    _, outcomes, asked, _ = asyncio.run(written(tmp_path, things, batch))
    assert (outcomes, asked) == ([WriteOutcome.CONFLICT] * 3, [])


def test_a_buffer_that_is_left_alone_is_told_once_with_the_reason(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    by_hand = {"manager": "kubectl-edit", "operation": "Update", "fieldsV1": HOLDS}
    things = [buffer("theirs", 7, by_hand, **ASKS), buffer("mistaken", 0, OURS, **ASKS | {GPUS: "eight"})]
    with caplog.at_level(logging.WARNING):
        asyncio.run(written(tmp_path, things, []))
    assert [record.getMessage() for record in caplog.records] == [
        "buffer serve/theirs is left alone: its replicas are held by kubectl-edit",
        "buffer serve/mistaken is left alone: "
        "fleetcast.io/gpus-per-replica = 'eight': must be a whole number from 1 on",
    ]


def test_options_are_checked_at_the_start() -> None:
    for options, says in (
        ({"namespace": "a/b"}, "options.namespace = 'a/b': must be the name of one, or empty for all"),
        ({"server": "http://far.example"}, "options.server = 'http://far.example': must be like https://HOST:6443"),
        ({"colour": "red"}, "options.colour: no such key; there are namespace, server, token_file, ca_file"),
    ):
        with pytest.raises(ConfigError, match=says):
            make_door("buffers", options)
