"""The port of a Kubernetes cluster against a server of ours that answers as an API server does."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from fleetcast.clients import kube_api
from fleetcast.clients.kube_api import KubeAccount, KubeApi
from fleetcast.fleet.errors import ConfigError, SourceError
from fleetcast.schedulers.adapter import Write, WriteOutcome
from fleetcast.schedulers.nodes import CONDITION, FEATURE, LABEL, MARK, SLINKY, TAINT, THEIRS
from fleetcast.service.doors import make_door
from fleetcast.service.ports import kube_objects
from fleetcast.service.ports.nodes import NodesPort, decode_node_marks, make_taint_patch

APPLIED = {"manager": "fleetcast", "operation": "Apply"}
OURS_LABEL = {**APPLIED, "fieldsV1": {"f:metadata": {"f:labels": {f"f:{MARK}": {}}}}}
KEY = 'k:{"type":"GpuFailureExpected"}'
FIELDS = {"f:status": {"f:conditions": {KEY: {"f:status": {}}}}}
OURS_CONDITION = {**APPLIED, "subresource": "status", "fieldsV1": FIELDS}
OTHER = {"key": "other.io/mine", "effect": "NoSchedule"}
OUR_TAINT = {"key": MARK, "value": "high", "effect": "PreferNoSchedule"}


def node(name: str, version: int = 1, **more: Any) -> dict[str, Any]:
    """A v1.Node as the server tells of it, less what nobody reads."""
    labels = {"kubernetes.io/hostname": name} | more.get("labels", {})
    managed = [{"manager": "kubelet", "operation": "Update", "fieldsV1": {}}, *more.get("managed", ())]
    meta = {"name": name, "uid": f"uid-{name}", "resourceVersion": str(version), "labels": labels}
    conditions = [{"type": "Ready", "status": "True", "reason": "KubeletReady"}, *more.get("conditions", ())]
    spec = {"taints": more["taints"]} if "taints" in more else {}
    return {"metadata": meta | {"managedFields": managed}, "spec": spec, "status": {"conditions": conditions}}


class ApiServer:
    """Lists `nodes` in pages of one; watches tell `events`; patches are answered by `answers`, then with the node."""

    def __init__(self) -> None:
        self.nodes: dict[str, dict[str, Any]] = {}
        self.events: list[dict[str, Any]] = []
        self.answers: list[int] = []
        self.asked: list[tuple[str, str, Any]] = []
        self.watched: list[str] = []
        self.tokens: set[str] = set()
        self.told = asyncio.Event()

    async def handle(self, request: web.Request) -> web.StreamResponse:
        self.tokens.add(request.headers["authorization"])
        name = request.path.removeprefix("/api/v1/nodes").strip("/").partition("/")[0]
        if request.method == "PATCH":
            return await self._patched(request, name)
        if name:
            return web.json_response(self.nodes[name])
        return await (self._watch(request) if "watch" in request.query else self._page(request))

    async def _page(self, request: web.Request) -> web.Response:
        at = int(request.query.get("continue", 0))
        names = sorted(self.nodes)
        more = {"continue": str(at + 1)} if at + 1 < len(names) else {}
        items = [self.nodes[name] for name in names[at : at + 1]]
        return web.json_response({"metadata": {"resourceVersion": "7", **more}, "items": items})

    async def _watch(self, request: web.Request) -> web.StreamResponse:
        self.watched.append(request.query["resourceVersion"])
        answer = web.StreamResponse()
        await answer.prepare(request)
        while self.events:
            await answer.write(json.dumps(self.events.pop(0)).encode() + b"\n")
        if len(self.watched) > 1:
            self.told.set()
            await asyncio.sleep(60)
        return answer

    async def _patched(self, request: web.Request, name: str) -> web.Response:
        body = json.loads(await request.read())
        self.asked.append((request.path, request.content_type, body))
        status = self.answers.pop(0) if self.answers else 200
        if status != 200:
            return web.json_response({"kind": "Status", "code": status, "message": "no"}, status=status)
        return web.json_response(self.nodes[name])


@contextlib.asynccontextmanager
async def serving(server: ApiServer, folder: Path) -> AsyncIterator[NodesPort]:
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", server.handle)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    (folder / "token").write_text("secret\n")
    port = NodesPort(KubeApi(KubeAccount(f"http://127.0.0.1:{runner.addresses[0][1]}", str(folder / "token"))))
    try:
        yield port
    finally:
        await port.close()
        await port.close()
        await runner.cleanup()


def test_what_is_ours_is_told_from_what_somebody_else_took() -> None:
    expected = {"type": "GpuFailureExpected", "status": "True", "reason": "Xid"}
    marks = {"labels": {MARK: "high"}, "conditions": [expected], "taints": [OTHER, OUR_TAINT]}
    ours = decode_node_marks(json.dumps(node("a", managed=[OURS_LABEL, OURS_CONDITION], **marks)).encode())
    assert ours.values == {LABEL: "high", CONDITION: "True Xid", TAINT: "high:PreferNoSchedule"}
    theirs = decode_node_marks(json.dumps(node("a", **marks)).encode())
    assert theirs.values == {THEIRS + LABEL: "high", THEIRS + CONDITION: "True Xid", TAINT: "high:PreferNoSchedule"}
    with pytest.raises(SourceError, match="a node that is none"):
        decode_node_marks(b"{}")


def test_taints_of_others_stay_whatever_is_done_to_ours() -> None:
    def steps(value: str | None, *taints: dict[str, str]) -> list[dict[str, Any]]:
        test, *rest = make_taint_patch(decode_node_marks(json.dumps(node("a", 5, taints=[*taints])).encode()), value)
        assert test == {"op": "test", "path": "/metadata/resourceVersion", "value": "5"}
        return rest

    ours = {"key": MARK, "value": "high", "effect": "NoSchedule"}
    assert steps("high:NoSchedule") == [{"op": "add", "path": "/spec/taints", "value": [ours]}]
    assert steps("high:NoSchedule", OTHER) == [{"op": "add", "path": "/spec/taints/-", "value": ours}]
    assert steps(None, OTHER, OUR_TAINT, OTHER) == [{"op": "remove", "path": "/spec/taints/1"}]
    assert steps("high:NoSchedule", OUR_TAINT, OTHER)[0] == {"op": "remove", "path": "/spec/taints/0"}


def test_nodes_are_listed_in_pages_and_then_followed_also_past_a_version_that_is_gone(tmp_path: Path) -> None:
    async def scenario() -> None:
        server = ApiServer()
        server.nodes = {name: node(name) for name in ("a", "b", "gone")}
        server.events = [
            {"type": "MODIFIED", "object": node("b", 9, taints=[OUR_TAINT])},
            {"type": "MODIFIED", "object": node("b", 8)},  # older than what is known
            {"type": "DELETED", "object": node("gone", 10)},
            {"type": "ADDED", "object": node("c", 11)},
            {"type": "BOOKMARK", "object": {"metadata": {"resourceVersion": "12"}}},
        ]
        async with serving(server, tmp_path) as port:
            await port.read()
            await asyncio.wait_for(server.told.wait(), 30)
            assert await port.read() == {"a": {}, "b": {TAINT: "high:PreferNoSchedule"}, "c": {}}
        assert server.watched == ["7", "12"]
        assert server.tokens == {"Bearer secret"}
        expired = ApiServer()
        expired.nodes = {"a": node("a")}
        expired.events = [{"type": "ERROR", "object": {"kind": "Status", "code": 410, "message": "too old"}}]
        async with serving(expired, tmp_path) as port:
            await port.read()
            await asyncio.wait_for(expired.told.wait(), 30)
        assert expired.watched == ["7", "7"]

    asyncio.run(scenario())


def write(field: str, value: str | None, seen: str | None = None, key: str = "a") -> Write:
    return Write(key, field, value, seen, "risk 90% within 1 h")


def test_each_mark_is_written_in_its_own_way(tmp_path: Path) -> None:
    async def scenario() -> ApiServer:
        server = ApiServer()
        server.nodes = {"a": node("a", taints=[OTHER])}
        async with serving(server, tmp_path) as port:
            await port.read()
            batch = [write(CONDITION, "True Xid"), write(LABEL, "high"), write(TAINT, "high:NoSchedule")]
            assert await port.write(batch) == [WriteOutcome.DONE] * 3
            assert await port.write([write(LABEL, None), write(CONDITION, None)]) == [WriteOutcome.DONE] * 2
        return server

    asked = asyncio.run(scenario()).asked
    assert [path for path, *_ in asked[:3]] == ["/api/v1/nodes/a/status", "/api/v1/nodes/a", "/api/v1/nodes/a"]
    assert [kind for _, kind, _ in asked] == [*[kube_api.APPLY] * 2, kube_api.JSON_PATCH, *[kube_api.APPLY] * 2]
    (condition,) = asked[0][2]["status"]["conditions"]
    assert (condition["status"], condition["reason"], condition["message"]) == ("True", "Xid", "risk 90% within 1 h")
    assert asked[1][2]["metadata"] == {"name": "a", "uid": "uid-a", "labels": {MARK: "high"}}
    assert (asked[3][2]["metadata"]["labels"], asked[4][2]["status"]) == ({}, {"conditions": []})


def test_the_annotation_for_slurm_operator_has_a_manager_of_its_own(tmp_path: Path) -> None:
    thing = node("a", managed=[{"manager": "fleetcast-slinky", "operation": "Apply"}])
    thing["metadata"]["annotations"] = {SLINKY: "risk_high"}
    assert decode_node_marks(json.dumps(thing).encode()).values == {FEATURE: "risk_high"}
    thing["metadata"]["managedFields"] = [APPLIED]
    assert decode_node_marks(json.dumps(thing).encode()).values == {THEIRS + FEATURE: "risk_high"}

    async def scenario() -> list[tuple[str, str, Any]]:
        server = ApiServer()
        server.nodes = {"a": node("a")}
        async with serving(server, tmp_path) as port:
            await port.read()
            assert await port.write([write(FEATURE, "risk_high"), write(FEATURE, None)]) == [WriteOutcome.DONE] * 2
        return server.asked

    bodies = [body["metadata"] for _, _, body in asyncio.run(scenario())]
    assert [body["annotations"] for body in bodies] == [{SLINKY: "risk_high"}, {}]
    assert not any("labels" in body for body in bodies)


@pytest.mark.parametrize(
    ("answers", "outcome", "times"),
    [
        ([409], WriteOutcome.CONFLICT, 1),
        ([404], WriteOutcome.CONFLICT, 1),
        ([403], WriteOutcome.REFUSED, 1),
        ([500], WriteOutcome.REFUSED, 1),
    ],
)
def test_what_the_server_says_no_to(tmp_path: Path, answers: list[int], outcome: WriteOutcome, times: int) -> None:
    assert asyncio.run(answered(tmp_path, answers, write(LABEL, "high"))) == (outcome, times)


def test_a_taint_is_tried_again_when_a_heartbeat_came_between_but_not_over_somebody_elses(tmp_path: Path) -> None:
    assert asyncio.run(answered(tmp_path, [422, 409], write(TAINT, "high:NoSchedule"))) == (WriteOutcome.DONE, 3)
    assert asyncio.run(answered(tmp_path, [422] * 9, write(TAINT, "high:NoSchedule"))) == (WriteOutcome.UNREACHABLE, 6)
    assert asyncio.run(answered(tmp_path, [403], write(TAINT, "high:NoSchedule"))) == (WriteOutcome.REFUSED, 1)
    seen = write(TAINT, None, "low:NoSchedule")
    assert asyncio.run(answered(tmp_path, [], seen)) == (WriteOutcome.CONFLICT, 0)
    assert asyncio.run(answered(tmp_path, [], write(LABEL, "low", key="gone"))) == (WriteOutcome.CONFLICT, 0)


async def answered(folder: Path, answers: list[int], one: Write) -> tuple[WriteOutcome, int]:
    """What becomes of a write, and how often the server was asked."""
    server = ApiServer()
    server.nodes, server.answers = {"a": node("a")}, answers
    async with serving(server, folder) as port:
        await port.read()
        (outcome,) = await port.write([one])
    return outcome, len(server.asked)


def test_a_server_that_is_away_or_a_token_that_is_missing_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kube_objects, "RETRY_S", 0.0)

    async def why(account: KubeAccount) -> str:
        port = NodesPort(KubeApi(account))
        try:
            with pytest.raises(SourceError) as refused:
                await port.read()
            assert await port.write([write(LABEL, "low")]) == [WriteOutcome.CONFLICT]  # it knows no node
        finally:
            await port.close()
        return str(refused.value)

    (tmp_path / "token").write_text("secret")
    token = str(tmp_path / "token")
    assert "http://127.0.0.1:9 does not answer" in asyncio.run(why(KubeAccount("http://127.0.0.1:9", token)))
    assert "cannot read the token in /nowhere" in asyncio.run(why(KubeAccount("http://127.0.0.1:9", "/nowhere")))
    no_authority = KubeAccount("https://127.0.0.1:9", token, "/nowhere")
    assert "the certificate of the authority in /nowhere" in asyncio.run(why(no_authority))


def test_options_are_checked_at_the_start() -> None:
    for options, says in (
        ({"taint": "NoExecute"}, "options.taint = 'NoExecute': must be empty, PreferNoSchedule or NoSchedule"),
        ({"server": "http://far.example"}, "options.server = 'http://far.example': must be like https://HOST:6443"),
        ({"colour": "red"}, "options.colour: no such key; there are taint, slinky, server, token_file, ca_file"),
    ):
        with pytest.raises(ConfigError, match=says):
            make_door("nodes", options)
