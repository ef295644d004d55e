"""The ports of Kueue and of the topology against a server of ours that answers as an API server does."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from fleetcast.clients import kube_api
from fleetcast.clients.kube_api import KubeAccount, KubeApi
from fleetcast.fleet.errors import ConfigError, SourceError
from fleetcast.schedulers.adapter import Write, WriteOutcome
from fleetcast.schedulers.kueue import ACTIVE, CHECK, GPUS, HELD, HOLD, JOB, NODES, NOTE, PENDING, WAITS
from fleetcast.schedulers.nodes import THEIRS
from fleetcast.service.doors import make_door
from fleetcast.service.ports import kube_objects
from fleetcast.service.ports.kueue import CONTROLLER, KueuePort, make_answer_patch
from fleetcast.service.ports.kueue_objects import KueueWorkload, decode_kueue_check, decode_kueue_workload
from fleetcast.service.ports.topology import TopologyPort, decode_labelled_node

GROUP = "/apis/kueue.x-k8s.io"
OURS = frozenset({"fleetcast"})
RACK = "label fleetcast.io/rack"
SLICES = [  # as v1beta2 packs them
    {"domainCount": 2, "valuesPerLevel": [{"universal": "r1"}, {"individual": {"prefix": "n", "roots": ["1", "2"]}}]},
    {"domainCount": 1, "valuesPerLevel": [{"universal": "r1"}, {"universal": "n9"}]},
]
DOMAINS = [{"values": ["r1", "n1"]}, {"values": ["r1", "n2"]}, {"values": ["r1", "n9"]}]  # and v1beta1 does not
LEVELS = ["fleetcast.io/rack", "kubernetes.io/hostname"]


def workload(name: str = "one", version: int = 5, conditions: Sequence[str] = (), **more: Any) -> dict[str, Any]:
    """A Workload as the server tells of it, less what nobody reads. conditions: those that are true."""
    container = {"name": "c", "resources": {"requests": {"nvidia.com/gpu": "4", "cpu": "1500m"}}}
    side = {"name": "s", "resources": {}}
    meta = {"name": name, "namespace": "team", "uid": f"uid-{name}", "resourceVersion": str(version)}
    owners = [{"kind": "Other", "name": "other"}, {"kind": "Job", "name": "train", "controller": True}]
    pods = {"name": "main", "count": 3, "template": {"spec": {"containers": [container, side]}}}
    status: dict[str, Any] = {"conditions": [{"type": name, "status": "True", "reason": "R"} for name in conditions]}
    status |= {"admissionChecks": more.get("checks", [check()])}
    status |= {key: more[key] for key in ("admission", "schedulingStats") if key in more}
    return {
        "metadata": meta | {"ownerReferences": owners},
        "spec": {"podSets": [pods]} | more.get("spec", {}),
        "status": status,
    }


def check(name: str = "fleetcast", state: str = PENDING, **more: Any) -> dict[str, Any]:
    return {"name": name, "state": state, "message": "", "lastTransitionTime": "2026-01-01T00:00:00Z", **more}


def read(thing: dict[str, Any]) -> KueueWorkload:
    return decode_kueue_workload(json.dumps(thing).encode())


def values(**more: Any) -> dict[str, str]:
    return read(workload(**more)).make_values(OURS)


KNOWN = {JOB: "team/train", GPUS: "12", HELD: "0"}


def test_who_has_its_quota_waits_for_us_and_who_has_not_waits_for_quota() -> None:
    assert values(conditions=["QuotaReserved"]) == {**KNOWN, HOLD: PENDING}
    assert values() == {**KNOWN, WAITS: "for quota"}
    noted = [check(message="forecast: expected start 2025-10-09T10:05Z")]
    assert values(checks=noted)[NOTE] == "forecast: expected start 2025-10-09T10:05Z"
    assert NOTE not in values(checks=[check(message="Reset to Pending after eviction. Previously: Retry")])


def test_who_is_being_evicted_is_not_asked_about_and_a_retry_is_a_hold() -> None:
    assert HOLD not in values(conditions=["QuotaReserved", "Evicted"])
    standing = [check(state="Retry", requeueAfterSeconds=60)]
    assert values(conditions=["QuotaReserved"], checks=standing)[HOLD] == "Retry 60"


def test_nothing_is_seen_of_who_is_answered_over_or_asks_somebody_else() -> None:
    for more in (
        {"checks": [check(state="Ready")]},
        {"checks": [check(state="Rejected")]},
        {"checks": [check("theirs")]},
        {"checks": []},
        {"conditions": ["QuotaReserved", "Finished"]},
        {"spec": {"active": False}},
    ):
        assert values(**more) == {}


def test_holds_are_counted_by_kueue() -> None:
    assert values(checks=[check(retryCount=2)])[HELD] == "2"
    evictions = [{"reason": "AdmissionCheck", "underlyingCause": "", "count": 3}, {"reason": "Preempted", "count": 9}]
    assert values(checks=[check()], schedulingStats={"evictions": evictions})[HELD] == "3"


@pytest.mark.parametrize("assigned", [{"domains": DOMAINS}, {"slices": SLICES}], ids=["v1beta1", "v1beta2"])
def test_the_nodes_of_both_versions_are_read(assigned: dict[str, Any]) -> None:
    sets = [{"name": "main", "topologyAssignment": {"levels": LEVELS, **assigned}}, {"name": "driver"}]
    found = values(conditions=["QuotaReserved"], admission={"podSetAssignments": sets})
    assert found[NODES] == "n1 n2 n9"
    to_racks = [{"topologyAssignment": {"levels": LEVELS[:1], **assigned}}]
    assert NODES not in values(admission={"podSetAssignments": to_racks})


def test_what_is_no_workload_is_refused() -> None:
    for body in (b"{}", b"[]", b'{"metadata": {"name": 1}}', b"\xff", b"[" * 100_000):
        for decode in (decode_kueue_workload, decode_kueue_check):
            with pytest.raises(SourceError, match="an object of Kueue that is none"):
                decode(body)


def test_a_patch_changes_our_checks_alone() -> None:
    found = read(workload(checks=[check("theirs"), check(retryCount=1, requeueAfterSeconds=9, podSetUpdates=[])]))

    def changed(field: str, value: str | None, why: str) -> dict[str, Any]:
        test, step = make_answer_patch(found, OURS, Write(found.key, field, value, None, why))
        assert test == {"op": "test", "path": "/metadata/resourceVersion", "value": "5"}
        assert (step["op"], step["path"]) == ("replace", "/status/admissionChecks/1")
        row: dict[str, Any] = step["value"]
        return {key: value for key, value in row.items() if key != "lastTransitionTime"}

    kept = {"name": "fleetcast", "retryCount": 1, "podSetUpdates": []}
    assert changed(HOLD, None, "so") == {**kept, "state": "Ready", "message": "so"}
    assert changed(HOLD, "Retry 60", "x" * 2000) == {
        **kept,
        "state": "Retry",
        "message": "x" * 1024,
        "requeueAfterSeconds": 60,
    }
    assert changed(NOTE, "forecast: y", "") == {
        **kept,
        "state": PENDING,
        "message": "forecast: y",
        "requeueAfterSeconds": 9,
    }


class KueueServer:
    """Serves `versions`; patches are answered by `answers`, then with the object, one version on."""

    def __init__(self, *versions: str) -> None:
        self.versions = versions
        self.things: dict[str, dict[str, Any]] = {}  # by path below the version
        self.answers: list[int] = []
        self.asked: list[tuple[str, str, Any]] = []

    async def handle(self, request: web.Request) -> web.StreamResponse:
        if request.path == GROUP:
            rows = [{"groupVersion": f"kueue.x-k8s.io/{version}", "version": version} for version in self.versions]
            return web.json_response(
                {"kind": "APIGroup", "versions": rows} if rows else {}, status=200 if rows else 404
            )
        version, _, path = request.path.removeprefix(GROUP + "/").partition("/")
        if request.method == "PATCH":
            self.asked.append((request.path, request.content_type, json.loads(await request.read())))
            status = self.answers.pop(0) if self.answers else 200
            thing = self.things[path.removesuffix("/status")]
            if status in (200, 409):  # 409: somebody else was there before
                thing["metadata"]["resourceVersion"] = str(int(thing["metadata"]["resourceVersion"]) + 1)
            return web.json_response(thing if status == 200 else {"code": status, "message": "no"}, status=status)
        if path in self.things:
            return web.json_response(self.things[path])
        if version not in self.versions:
            return web.json_response({"message": "no such version"}, status=404)
        if "watch" in request.query:
            answer = web.StreamResponse()
            await answer.prepare(request)
            await asyncio.sleep(60)
            return answer
        items = [thing for name, thing in self.things.items() if name.split("/")[-2] == path]
        return web.json_response({"metadata": {"resourceVersion": "7"}, "items": items})


@contextlib.asynccontextmanager
async def serving(server: KueueServer, folder: Path) -> AsyncIterator[KueuePort]:
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", server.handle)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    (folder / "token").write_text("secret\n")
    account = KubeAccount(f"http://127.0.0.1:{runner.addresses[0][1]}", str(folder / "token"))
    port = KueuePort(KubeApi(account), CONTROLLER)
    try:
        yield port
    finally:
        await port.close()
        await port.close()
        await runner.cleanup()


def server_with(*versions: str) -> KueueServer:
    server = KueueServer(*versions)
    server.things = {
        "namespaces/team/workloads/one": workload(conditions=["QuotaReserved"]),
        "namespaces/team/workloads/done": workload("done", checks=[check(state="Ready")]),
        "admissionchecks/fleetcast": {
            "metadata": {"name": "fleetcast", "uid": "u", "resourceVersion": "1"},
            "spec": {"controllerName": CONTROLLER},
        },
        "admissionchecks/theirs": {"metadata": {"name": "theirs"}, "spec": {"controllerName": "other.io/x"}},
    }
    return server


READY = Write("team/one", HOLD, None, PENDING, "so")


@pytest.mark.parametrize(
    ("served", "version"),
    [(["v1beta1"], "v1beta1"), (["v1beta1", "v1beta2"], "v1beta2"), (["v1", "v1beta2"], "v1beta2")],
)
def test_the_newest_version_that_both_speak_is_spoken(tmp_path: Path, served: list[str], version: str) -> None:
    async def scenario() -> KueueServer:
        server = server_with(*served)
        async with serving(server, tmp_path) as port:
            before = port.news()
            assert await port.read() == {"fleetcast": {CHECK: CONTROLLER}, "team/one": {**KNOWN, HOLD: PENDING}}
            assert port.news() > before
            active = Write("fleetcast", ACTIVE, "True Serving", None, "why")
            assert await port.write([READY, active]) == [WriteOutcome.DONE] * 2
        return server

    (path, kind, _), (check_path, check_kind, check) = asyncio.run(scenario()).asked
    assert (path, kind) == (f"{GROUP}/{version}/namespaces/team/workloads/one/status", kube_api.JSON_PATCH)
    assert (check_path, check_kind) == (f"{GROUP}/{version}/admissionchecks/fleetcast/status", kube_api.APPLY)
    assert check["apiVersion"] == f"kueue.x-k8s.io/{version}"
    (condition,) = check["status"]["conditions"]
    assert (condition["type"], condition["status"], condition["reason"]) == ("Active", "True", "Serving")


def test_news_are_what_concerns_us() -> None:
    port = KueuePort(KubeApi(KubeAccount("http://127.0.0.1:9")), CONTROLLER)
    moved: list[int] = []
    woken: list[int] = []
    port.follow_news(lambda: woken.append(port.news()))
    for thing in (
        workload(),
        workload(version=6),  # nothing that we look at
        workload(version=7, conditions=["QuotaReserved"]),
        workload(version=4),  # older
    ):
        before = port.news()
        port._workloads.store_if_newer(read(thing))
        moved.append(port.news() - before)
    assert moved == [1, 0, 1, 0]
    assert woken == [1, 2], "the number has moved before the host is woken"


def test_a_server_without_kueue_or_with_another_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kube_objects, "RETRY_S", 0.0)

    async def why(*versions: str) -> str:
        async with serving(KueueServer(*versions), tmp_path) as port:
            with pytest.raises(SourceError) as refused:
                await port.read()
        return str(refused.value)

    assert "Kueue is not installed" in asyncio.run(why())
    assert "Kueue serves ['v2'], and we speak v1beta2 and v1beta1" in asyncio.run(why("v2"))


@pytest.mark.parametrize(
    ("answers", "outcome", "times"),
    [
        ([409, 409], WriteOutcome.DONE, 3),  # in a newer version
        ([409] * 9, WriteOutcome.UNREACHABLE, 6),
        ([422], WriteOutcome.REFUSED, 1),  # in the version that we looked at: it is not about that
        ([403], WriteOutcome.REFUSED, 1),
        ([500], WriteOutcome.REFUSED, 1),
    ],
)
def test_what_becomes_of_an_answer(tmp_path: Path, answers: list[int], outcome: WriteOutcome, times: int) -> None:
    async def scenario() -> tuple[WriteOutcome, int]:
        server = server_with("v1beta2")
        server.answers = answers
        async with serving(server, tmp_path) as port:
            await port.read()
            (found,) = await port.write([READY])
            strange = READY._replace(key="team/gone"), READY._replace(seen="Retry 60")
            assert await port.write(strange) == [WriteOutcome.CONFLICT] * 2
        return found, len(server.asked)

    assert asyncio.run(scenario()) == (outcome, times)


def test_options_of_both_are_checked_at_the_start() -> None:
    for use, options, says in (
        ("kueue", {"level": "row"}, "options.level = 'row': must be any of nvlink_domain, rack"),
        ("kueue", {"max_risk": 0}, "options.max_risk = 0.0: must be above 0 and at most 1"),
        ("kueue", {"retry_s": 0}, "options.retry_s = 0: must be 1 to 3600"),
        ("kueue", {"hold_s": -1}, "options.hold_s = -1: must be 0 to 86400"),
        ("kueue", {"controller": "fleetcast"}, "options.controller = 'fleetcast': must be like fleetcast.io/forecast"),
        ("kueue", {"server": "http://far.example"}, "must be like https://HOST:6443"),
        ("kueue", {"colour": "red"}, "options.colour: no such key; there are controller, gate"),
        ("topology", {"labels": {"row": "x.io/y"}}, "options.labels.row: no level of a topology"),
        ("topology", {"labels": {"rack": "kubernetes.io/hostname"}}, "none of kubernetes.io"),
        ("topology", {"labels": {"rack": "no label"}}, "must be a label like fleetcast.io/rack"),
        ("topology", {"labels": {"rack": "x.io/y", "block": "x.io/y"}}, "a label of its own for each level"),
        ("topology", {"labels": {}}, "a label of its own for each level"),
    ):
        with pytest.raises(ConfigError, match=says):
            make_door(use, options)


def test_labels_of_others_are_told_from_ours_and_an_apply_names_all_that_stay() -> None:
    applied = {
        "manager": "fleetcast-topology",
        "operation": "Apply",
        "fieldsV1": {"f:metadata": {"f:labels": {"f:fleetcast.io/rack": {}}}},
    }
    meta = {"name": "a", "uid": "u", "labels": {"fleetcast.io/rack": "r1", "fleetcast.io/block": "x", "other": "y"}}
    body = {"metadata": meta | {"managedFields": [{**applied, "manager": "fleetcast"}, applied]}}
    labels = ("fleetcast.io/block", "fleetcast.io/rack", "fleetcast.io/nvlink-domain")
    node = decode_labelled_node(json.dumps(body).encode(), labels)
    assert node.values == {RACK: "r1", THEIRS + "label fleetcast.io/block": "x"}
    with pytest.raises(SourceError, match="a node that is none"):
        decode_labelled_node(b"{}", labels)

    class Applied(KubeApi):
        async def apply(self, path: str, thing: Any, manager: str) -> bytes:
            asked.append((path, thing["metadata"]["labels"], manager))
            return json.dumps(body).encode()

    asked: list[tuple[str, dict[str, str], str]] = []
    port = TopologyPort(Applied(KubeAccount("http://127.0.0.1:9")), labels)
    port._nodes.store_if_newer(node)
    domain = "label fleetcast.io/nvlink-domain"
    batch = [
        Write("a", domain, "d1", None, ""),
        Write("gone", RACK, "r2", None, ""),
        Write("a", RACK, "r2", "r1", ""),
    ]
    assert asyncio.run(port.write(batch)) == [WriteOutcome.DONE, WriteOutcome.CONFLICT, WriteOutcome.DONE]
    assert asyncio.run(port.write([Write("a", RACK, None, "r1", "")])) == [WriteOutcome.DONE]
    assert asyncio.run(port.write([Write("a", RACK, None, "r7", "")])) == [WriteOutcome.CONFLICT]
    path, manager = "/api/v1/nodes/a", "fleetcast-topology"
    assert asked == [
        (path, {"fleetcast.io/rack": "r2", "fleetcast.io/nvlink-domain": "d1"}, manager),
        (path, {}, manager),
    ]
