"""A board with demand and pools, the gRPC door over it in this process, and a client's calls."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import msgspec
import numpy as np

from fleetcast.clients.grpc_stubs import expander_pb2 as expander
from fleetcast.clients.grpc_stubs import externalscaler_pb2 as scaler
from fleetcast.fleet.clock import ManualClock
from fleetcast.models.demand.rows import DemandRow
from fleetcast.service.api.grpc_door import serve_grpc
from fleetcast.service.api.role import make_connection_limits
from fleetcast.service.api.routes.context import Context
from fleetcast.service.api.wiring import make_api_context
from fleetcast.service.board.board import BoardWriter, Section
from fleetcast.service.config import ApiConfig, Config
from fleetcast.service.http.access import Access
from fleetcast.service.http.connection_pool import ConnectionPool
from fleetcast.service.pipeline.demand.sections import make_demand_sections
from tests.ports import free_port

NOW_MS = 1_760_000_000_000
PATIENCE_S = 60.0
METADATA = {"target": "running", "targetPerReplica": "8", "horizonSeconds": "300", "activation": "5"}
KEDA, EXPANDER = "/externalscaler.ExternalScaler/", "/grpcplugin.Expander/"
ANSWERS = {
    "GetMetricSpec": scaler.GetMetricSpecResponse,
    "GetMetrics": scaler.GetMetricsResponse,
    "IsActive": scaler.IsActiveResponse,
    "BestOptions": expander.BestOptionsResponse,
}
POOLS = ("calm", "shaky")


def demand_sections_of(value: float, issued_ms: int = NOW_MS) -> list[Section]:
    """The p90 of `running` is this at any horizon."""
    row = DemandRow(
        queue="all",
        class_="all",
        group="all",
        target="running",
        now=value,
        model="persistence",
        issued_ms=issued_ms,
        horizons_s=[300, 3600],
        quantiles=[0.5, 0.9],
        values=[[value / 2] * 2, [value] * 2],
        record=None,
    )
    return make_demand_sections([row], {}, [], issued_ms)


def node_sections(as_of_ms: int) -> list[Section]:
    """Two nodes, one in each pool."""
    risk = np.full((3, 4, 2), 0.01)
    risk[:, :, 1] = 0.4
    parts: dict[str, Any] = {
        "names.node": b"n1\nn2",
        "names.pool": "\n".join(POOLS).encode(),
        "node.pool": np.array([0, 1], np.int16),
        "node.risk": risk,
        "node.state": np.zeros(2, np.int8),
        "gpu.usable": np.ones((2, 4), bool),
        "gpu.job": np.full((2, 4), -1, np.int32),
        "risk.reason": b"{}",
    }
    return [Section(name, data, as_of_ms) for name, data in parts.items()]


def ref(**more: str) -> Any:
    """A ScaledObjectRef."""
    return scaler.ScaledObjectRef(name="web", namespace="default", scalerMetadata=METADATA | more)


@dataclass
class GrpcWorld:
    """publish and move the clock; ask as a client does."""

    folder: Path
    context: Context
    clock: ManualClock
    channel: Any
    board: BoardWriter = field(init=False)

    def __post_init__(self) -> None:
        self.board = BoardWriter(self.context.config.board)

    def publish(self, value: float, at_ms: int | None = None) -> None:
        at_ms = self.clock.now_ms() if at_ms is None else at_ms
        self.board.publish([*node_sections(at_ms), *demand_sections_of(value, at_ms)], at_ms)

    async def call(self, method: str, message: Any, **options: Any) -> Any:
        return await call(self.channel, method, message, **options)

    def watch(self, message: Any) -> Any:
        """The stream of StreamIsActive."""
        return self.channel.unary_stream(f"{KEDA}StreamIsActive")(message.SerializeToString())


async def call(channel: Any, method: str, message: Any, **options: Any) -> Any:
    """message: of a method's, or bytes. Raises grpc.aio.AioRpcError."""
    body = message if isinstance(message, bytes) else message.SerializeToString()
    asked = channel.unary_unary(method)
    answer = ANSWERS.get(method.rpartition("/")[2], scaler.IsActiveResponse)()
    answer.ParseFromString(await asked(body, timeout=PATIENCE_S, wait_for_ready=True, **options))
    return answer


async def refusal(asked: Any) -> tuple[grpc.StatusCode, str]:
    """The code and the details of a call that must fail."""
    try:
        await asked
    except grpc.aio.AioRpcError as error:
        return error.code(), error.details() or ""
    raise AssertionError("it was answered")


@contextlib.asynccontextmanager
async def grpc_world(folder: Path, access: Access | None = None, **api: Any) -> AsyncIterator[GrpcWorld]:
    clock, port = ManualClock(NOW_MS), free_port()
    config = Config(state=str(folder), api=msgspec.structs.replace(ApiConfig(), grpc_port=port, **api))
    context = make_api_context(config, clock, access or Access())
    context.cache._hold_s = 0.0
    pool = ConnectionPool(make_connection_limits(config.api))
    async with serve_grpc(context, pool, None), grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        try:
            yield GrpcWorld(folder, context, clock, channel)
        finally:
            await context.placer.close()


async def within(answer: Any) -> Any:
    return await asyncio.wait_for(answer, PATIENCE_S)
