"""The executor `kubernetes` as a configuration names it, and its answers without a cluster."""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from fleetcast.clients.kube_api import KubeAccount, KubeApi, KubeRefused
from fleetcast.fleet.clock import Clock, ManualClock
from fleetcast.fleet.errors import ConfigError
from fleetcast.fleet.requests import RankPlacement
from fleetcast.schedulers.executor import ActionOrder, SendOutcome
from fleetcast.schedulers.kubernetes_stop import STOPPED, JobAddress, StopMark, StoppableJob, StoppablePod
from fleetcast.service.doors import make_executor
from fleetcast.service.ports.kube_jobs import KubeJobs
from fleetcast.service.ports.kubernetes_executor import KubernetesExecutor
from tests.ports import free_port


def make_order(kind: str = "preempt", job: str = "east/default/train") -> ActionOrder:
    return ActionOrder("0f-1", kind, job, 1, 8.0, [RankPlacement(0, "a", (0,))], (), "", 5.0, 1)


@pytest.mark.parametrize("options", [{"server": "http://example.org"}, {"prefx": ""}, {"prefix": 1}])
def test_bad_options_are_refused(options: dict[str, object]) -> None:
    with pytest.raises(ConfigError):
        make_executor("kubernetes", options)


def test_it_says_what_it_cannot_do_without_asking_the_cluster() -> None:
    executor = make_executor("kubernetes", {"prefix": "east/"})
    assert executor.explain_inability("preempt", "east/default/train") == ""
    assert (
        executor.explain_inability("preempt", "4711")
        == "'4711' is not named like east/NAMESPACE/NAME, as Jobs of Kubernetes are"
    )
    for kind in ("shrink", "replace"):
        assert executor.explain_inability(kind, "east/default/train") == ""
    for kind in ("grow", "move", "place"):
        assert executor.explain_inability(kind, "east/default/train") == f"the executor kubernetes cannot {kind} a Job"
        assert asyncio.run(executor.send(make_order(kind))).outcome is SendOutcome.REFUSED


def test_a_cluster_that_is_away_is_unreachable() -> None:
    executor = make_executor("kubernetes", {"prefix": "east/", "server": f"http://127.0.0.1:{free_port()}"})

    async def send_and_follow() -> list[SendOutcome]:
        order = make_order()
        replies = [await executor.send(order), *await executor.follow([order])]
        await executor.close()
        await executor.close()
        return [reply.outcome for reply in replies]

    assert asyncio.run(send_and_follow()) == [SendOutcome.UNREACHABLE] * 2


class StoppableCluster(KubeJobs):
    """A Job with one pod on the node `a`, in memory. suspended: what its spec says."""

    def __init__(self) -> None:
        super().__init__(KubeApi(KubeAccount("http://127.0.0.1:1")))
        self.job = msgspec.convert({"metadata": {"name": "train", "namespace": "default"}}, StoppableJob)
        self.suspended: list[bool] = []

    async def read_job(self, address: JobAddress) -> StoppableJob | None:
        return self.job if address.name == "train" else None

    async def list_stopped_jobs(self) -> list[StoppableJob]:
        return [self.job] if self.job.is_stopped_by_us else []

    async def list_pods(self, job: StoppableJob) -> list[StoppablePod]:
        pod = {"metadata": {"name": "p", "uid": "u"}, "spec": {"nodeName": "a"}, "status": {"phase": "Running"}}
        return [] if self.suspended[-1:] == [True] else [msgspec.convert(pod, StoppablePod, strict=False)]

    async def find_workload(self, job: StoppableJob) -> None:
        return None

    async def explain_evictions(self, *_: Any) -> str:
        return ""

    async def write_mark(
        self, job: StoppableJob, mark: StopMark, *, is_open: bool, spec: Any = None, version: str = ""
    ) -> StoppableJob:
        meta = job.metadata
        meta.labels = {STOPPED: "true"} if is_open else {}
        meta.annotations = {"fleetcast.io/stop-action": msgspec.json.encode(mark).decode()}
        self.suspended += [spec["suspend"]] if spec else []
        return job


def make_stopper(cluster: StoppableCluster, clock: Clock) -> KubernetesExecutor:
    executor = KubernetesExecutor(KubeApi(KubeAccount("http://127.0.0.1:1")), "east/", clock)
    executor._jobs = cluster
    return executor


ORDER = make_order()._replace(payer="elsewhere", by_ms=10_720_000)


@pytest.mark.parametrize("by_ms", [-3_600_000, 3_600_000])
def test_a_clock_that_is_set_resumes_no_job_early_or_late(by_ms: int) -> None:
    clock, cluster = ManualClock(10_000_000), StoppableCluster()
    executor = make_stopper(cluster, clock)

    def follow(orders: Sequence[ActionOrder] = ()) -> list[bool]:
        asyncio.run(executor.follow(orders))
        return cluster.suspended

    assert asyncio.run(executor.send(ORDER)).outcome is SendOutcome.ACCEPTED
    assert follow([ORDER]) == [True]
    clock.time_ms += by_ms
    clock.advance(719)
    assert follow() == [True]
    clock.advance(1)
    assert follow() == [True, False]
    clock.time_ms -= by_ms
    assert follow() == [True, False], "it is resumed once"


def test_a_clock_that_was_set_back_between_two_processes_gives_at_most_the_whole_time_again() -> None:
    clock, cluster = ManualClock(10_000_000), StoppableCluster()
    asyncio.run(make_stopper(cluster, clock).send(ORDER))
    clock.time_ms -= 3_600_000
    executor = make_stopper(cluster, clock)
    for seconds, suspended in ((0, [True]), (719, [True]), (1, [True, False])):
        clock.advance(seconds)
        asyncio.run(executor.follow([]))
        assert cluster.suspended == suspended


def test_the_client_reads_the_clock_of_the_server(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("secret")

    async def answer(request: web.Request) -> web.Response:
        return web.json_response({}, headers={"date": request.query_string or "no date"})

    async def ask() -> tuple[int | None, int | None]:
        app = web.Application()
        app.router.add_get("/now", answer)
        async with TestServer(app) as server:
            api = KubeApi(KubeAccount(str(server.make_url("")), str(tmp_path / "token")))
            await api.get("/now")
            before = api.server_ms
            await api.get("/now?Fri,%2027%20Nov%202026%2009:50:27%20GMT")
            await api.close()
            return before, api.server_ms

    assert asyncio.run(ask()) == (None, 1_795_773_027_000)


def test_a_refusal_that_is_no_text_is_a_refusal_all_the_same(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("secret")

    async def answer(request: web.Request) -> web.Response:
        return web.Response(status=502, body=b'{"message": "\xff"}')

    async def ask() -> int:
        app = web.Application()
        app.router.add_get("/now", answer)
        async with TestServer(app) as server:
            api = KubeApi(KubeAccount(str(server.make_url("")), str(tmp_path / "token")))
            with pytest.raises(KubeRefused) as refusal:
                await api.get("/now")
            await api.close()
            return refusal.value.status

    assert asyncio.run(ask()) == 502


def test_whether_a_pod_is_overdue_is_read_on_the_clock_of_the_server() -> None:
    cluster, clock = StoppableCluster(), ManualClock(5)
    assert cluster.read_server_ms(clock) == 5, "no answer has a time yet"
    cluster._api.server_ms = 7
    assert cluster.read_server_ms(clock) == 7
