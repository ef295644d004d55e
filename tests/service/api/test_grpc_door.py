"""The gRPC door in this process: a client's calls, a board, and a clock that the test moves."""

import asyncio
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import grpc
import pytest

from fleetcast.clients.grpc_stubs import expander_pb2 as expander
from fleetcast.clients.grpc_stubs import externalscaler_pb2 as scaler
from fleetcast.fleet.errors import ConfigError
from fleetcast.service.api import grpc_keda
from fleetcast.service.api.grpc_door import serve_grpc
from fleetcast.service.api.grpc_extra import require_grpc
from fleetcast.service.http.access import Access, parse_tokens
from fleetcast.service.http.connection_pool import ConnectionLimits, ConnectionPool
from tests.service.grpc_world import EXPANDER, KEDA, GrpcWorld, grpc_world, ref, refusal, within

TOKEN, POSTER = "0123456789abcdef", "fedcba9876543210"
UNAVAILABLE, INVALID = grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.INVALID_ARGUMENT
STALE_S = 61.0


def played(
    folder: Path, play: Callable[[GrpcWorld], Awaitable[None]], access: Access | None = None, **api: Any
) -> None:
    async def run() -> None:
        async with grpc_world(folder, access, **api) as world:
            await within(play(world))

    asyncio.run(run())


def asked_metrics(**more: str) -> Any:
    return scaler.GetMetricsRequest(scaledObjectRef=ref(**more), metricName="fleetcast-running")


def test_keda_gets_a_specification_a_value_and_an_activity(tmp_path: Path) -> None:
    async def play(world: GrpcWorld) -> None:
        world.publish(20.0)
        (spec,) = (await world.call(f"{KEDA}GetMetricSpec", ref())).metricSpecs
        assert (spec.metricName, spec.targetSizeFloat, spec.targetSize) == ("fleetcast-running", 8.0, 8)
        (value,) = (await world.call(f"{KEDA}GetMetrics", asked_metrics())).metricValues
        assert (value.metricName, value.metricValueFloat, value.metricValue) == ("fleetcast-running", 20.0, 20)
        assert (await world.call(f"{KEDA}IsActive", ref())).result is True
        assert (await world.call(f"{KEDA}IsActive", ref(activation="20"))).result is False

    played(tmp_path, play)


def test_nothing_wanted_is_zero_in_both_fields(tmp_path: Path) -> None:
    async def play(world: GrpcWorld) -> None:
        world.publish(0.0)
        (value,) = (await world.call(f"{KEDA}GetMetrics", asked_metrics())).metricValues
        assert (value.metricValueFloat, value.metricValue) == (0.0, 0)

    played(tmp_path, play)


def test_a_stale_board_is_unavailable_and_the_specification_is_there_all_the_same(tmp_path: Path) -> None:
    async def play(world: GrpcWorld) -> None:
        for _ in range(2):  # without any board, then with an old one
            for method, message in (("GetMetrics", asked_metrics()), ("IsActive", ref())):
                code, why = await refusal(world.call(f"{KEDA}{method}", message))
                assert (code, "no fresh board" in why) == (UNAVAILABLE, True)
            assert len((await world.call(f"{KEDA}GetMetricSpec", ref())).metricSpecs) == 1
            world.publish(20.0)
            assert (await world.call(f"{KEDA}IsActive", ref())).result is True
            world.clock.advance(STALE_S)

    played(tmp_path, play)


def test_a_series_that_nobody_forecasts_is_unavailable_and_named(tmp_path: Path) -> None:
    async def play(world: GrpcWorld) -> None:
        world.publish(20.0)
        code, why = await refusal(world.call(f"{KEDA}GetMetrics", asked_metrics(pool="nowhere")))
        assert code is UNAVAILABLE
        assert "no forecast of pool 'nowhere'" in why

    played(tmp_path, play)


@pytest.mark.parametrize("method", ["GetMetricSpec", "GetMetrics", "IsActive"])
def test_bad_metadata_is_an_invalid_argument_that_names_key_value_and_fix(tmp_path: Path, method: str) -> None:
    async def play(world: GrpcWorld) -> None:
        message = asked_metrics(quantile="high") if method == "GetMetrics" else ref(quantile="high")
        code, why = await refusal(world.call(f"{KEDA}{method}", message))
        assert code is INVALID
        assert why == "scalerMetadata quantile = 'high': set a number from 0 to 1"

    played(tmp_path, play)


def test_garbage_is_an_invalid_argument_and_the_door_answers_on(tmp_path: Path) -> None:
    async def play(world: GrpcWorld) -> None:
        world.publish(20.0)
        for method in (f"{KEDA}GetMetrics", f"{KEDA}IsActive", f"{KEDA}GetMetricSpec", f"{EXPANDER}BestOptions"):
            code, _ = await refusal(world.call(method, b"\xff\xff\xff"))
            assert code is INVALID
        code, _ = await refusal(world.call(f"{KEDA}StreamMetricSpec", ref()))
        assert code is grpc.StatusCode.UNIMPLEMENTED
        assert (await world.call(f"{KEDA}IsActive", ref())).result is True

    played(tmp_path, play)


def test_a_bug_is_internal_and_tells_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def play(world: GrpcWorld) -> None:
        monkeypatch.setattr(world.context.answerers, "answer_verb", lambda *asked: 1 / 0)
        code, why = await refusal(world.call(f"{KEDA}IsActive", ref()))
        assert (code, why) == (grpc.StatusCode.INTERNAL, "an error of ours; the log of the api has it")

    played(tmp_path, play)


def test_a_push_tells_the_state_then_each_crossing_and_nothing_while_stale(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grpc_keda, "CHECK_INTERVAL_S", 0.02)

    async def play(world: GrpcWorld) -> None:
        stream, told = world.watch(ref()), []

        async def listen() -> None:
            async for body in stream:
                told.append(scaler.IsActiveResponse.FromString(body).result)

        listening = asyncio.ensure_future(listen())
        for number, (value, after) in enumerate([(0.0, 1), (4.0, 1), (20.0, 2), (30.0, 2), (1.0, 3)]):
            world.publish(value)
            while len(told) < after:
                await asyncio.sleep(0.02)
            await asyncio.sleep(0.2)  # for a push that must not come
            assert told == [False, True, False][:after], number
        world.clock.advance(STALE_S)
        await asyncio.sleep(0.2)
        world.publish(20.0)
        while len(told) < 4:
            await asyncio.sleep(0.02)
        assert told == [False, True, False, True]
        stream.cancel()
        await asyncio.gather(listening, return_exceptions=True)

    played(tmp_path, play)


def test_pushes_that_stay_leave_room_for_who_polls(tmp_path: Path) -> None:
    async def play(world: GrpcWorld) -> None:
        world.publish(20.0)
        streams = [world.watch(ref()) for _ in range(3)]
        for stream in streams:
            assert await stream.read() != grpc.aio.EOF
        code, why = await refusal(world.watch(ref()).read())
        assert (code, why) == (
            grpc.StatusCode.RESOURCE_EXHAUSTED,
            "3 streams are open (api.max_connections): poll instead",
        )
        assert (await world.call(f"{KEDA}IsActive", ref())).result is True
        for stream in streams:
            stream.cancel()

    played(tmp_path, play, max_connections=3)


def test_a_push_for_bad_metadata_ends_with_the_reason(tmp_path: Path) -> None:
    async def play(world: GrpcWorld) -> None:
        async def first() -> None:
            async for _ in world.watch(ref(target="?")):
                pass

        code, why = await refusal(first())
        assert code is INVALID
        assert "target = '?'" in why

    played(tmp_path, play)


def options(*groups: str, pool: dict[str, str] | None = None, node: bytes = b"") -> Any:
    nodes = {
        group: expander.Node(
            metadata=expander.ObjectMeta(name="t", labels={"fleetcast.io/pool": name})
        ).SerializeToString()
        for group, name in (pool or {}).items()
    }
    rows = [expander.Option(nodeGroupId=group, nodeCount=1, podBytes=[b"pod"]) for group in groups]
    return expander.BestOptionsRequest(options=rows, nodeBytesMap=nodes or {"?": node})


def test_the_autoscaler_gets_the_groups_that_are_least_likely_to_fail(tmp_path: Path) -> None:
    async def play(world: GrpcWorld) -> None:
        world.publish(20.0)
        asked = options("calm", "asg-2", pool={"asg-2": "shaky"})
        assert [row.nodeGroupId for row in (await world.call(f"{EXPANDER}BestOptions", asked)).options] == ["calm"]
        garbled = options("a", "b", node=b"\xff")
        assert len((await world.call(f"{EXPANDER}BestOptions", garbled)).options) == 2
        world.clock.advance(STALE_S)
        assert len((await world.call(f"{EXPANDER}BestOptions", asked)).options) == 2

    played(tmp_path, play)


def test_callers_are_those_of_the_api(tmp_path: Path) -> None:
    access = Access(parse_tokens(f"keda read {TOKEN}\nposter events {POSTER}", "tokens"))

    async def play(world: GrpcWorld) -> None:
        world.publish(20.0)

        def call(*authorization: str, method: str = f"{KEDA}IsActive", message: Any = None) -> Any:
            metadata = [("authorization", value) for value in authorization]
            return world.call(method, message or ref(), metadata=metadata)

        assert (await call(f"Bearer {TOKEN}")).result is True
        assert (await refusal(call()))[0] is grpc.StatusCode.UNAUTHENTICATED
        assert (await refusal(call("Bearer wrong-token-0000")))[0] is grpc.StatusCode.UNAUTHENTICATED
        assert (await refusal(call(f"Bearer {POSTER}")))[0] is grpc.StatusCode.PERMISSION_DENIED
        asked = options("calm", "shaky")
        answer = await call(method=f"{EXPANDER}BestOptions", message=asked)
        assert len(answer.options) == 1

    played(tmp_path, play, access, grpc_open=("expander",))


def test_whoever_guesses_tokens_is_slowed(tmp_path: Path) -> None:
    access = Access(parse_tokens(f"keda read {TOKEN}", "tokens"))
    reasons: list[str] = []

    async def play(world: GrpcWorld) -> None:
        access.failed = reasons.append
        codes = set()
        for number in range(30):
            metadata = [("authorization", f"Bearer wrong-token-{number:04}")]
            codes.add((await refusal(world.call(f"{KEDA}IsActive", ref(), metadata=metadata)))[0])
            if grpc.StatusCode.RESOURCE_EXHAUSTED in codes:
                break
        assert codes == {grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.RESOURCE_EXHAUSTED}
        assert reasons[-1] == "slowed"

    played(tmp_path, play, access)


def test_answers_are_counted_by_method_and_status(tmp_path: Path) -> None:
    async def play(world: GrpcWorld) -> None:
        world.publish(20.0)
        await world.call(f"{KEDA}IsActive", ref())
        await refusal(world.call(f"{KEDA}IsActive", ref(quantile="?")))
        page = world.context.metrics.make_page()
        labels = f'method="GRPC",route="{KEDA}IsActive",status='
        row = f'fleetcast_http_requests_total{{{labels}"%s"}} 1.0'
        assert row % 200 in page
        assert row % 422 in page

    played(tmp_path, play)


def test_a_port_that_is_taken_is_refused_with_its_key(tmp_path: Path) -> None:
    async def play(world: GrpcWorld) -> None:
        with pytest.raises(
            ConfigError,
            match=r"api\.grpc_port = 127\.0\.0\.1:\d+: cannot listen there \(Address already in use\): set another",
        ):
            async with serve_grpc(world.context, ConnectionPool(ConnectionLimits()), None):
                pass

    played(tmp_path, play)


@pytest.mark.parametrize("missing", ["grpc", "google.protobuf"])
def test_a_port_without_the_packages_is_refused_with_the_extra(missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(ConfigError, match=r"api\.grpc_port = 9443: .* pip install 'fleetcast\[grpc\]'"):
        require_grpc(9443)
