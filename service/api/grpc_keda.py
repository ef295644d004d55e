"""KEDA's external scaler, as a servicer of the gRPC port."""

import asyncio
import contextlib
import math
from collections.abc import AsyncIterator

import msgspec

from fleetcast.clients.grpc_stubs.externalscaler_pb2 import (
    GetMetricSpecResponse,
    GetMetricsRequest,
    GetMetricsResponse,
    IsActiveResponse,
    MetricSpec,
    MetricValue,
    ScaledObjectRef,
)
from fleetcast.fleet.errors import StaleError
from fleetcast.schedulers.keda import ScalerActivity, ScalerQuestion, ScalerSpec, ScalerValue
from fleetcast.service.api.grpc_service import Ask, GrpcService, encode_message

CHECK_INTERVAL_S = 0.5  # wall; for a crossing of the activation


def answer_metric_spec(ask: Ask, body: bytes) -> bytes:
    reply = msgspec.json.decode(ask("metric_spec", _encode_question(_parse_object_ref(body))), type=ScalerSpec)
    size = reply.target_size
    spec = MetricSpec(metricName=reply.metric_name, targetSize=math.ceil(size), targetSizeFloat=size)
    return encode_message(GetMetricSpecResponse(metricSpecs=[spec]))


def answer_metrics(ask: Ask, body: bytes) -> bytes:
    asked = GetMetricsRequest()
    asked.ParseFromString(body)
    answer = ask("metrics", _encode_question(asked.scaledObjectRef, asked.metricName))
    reply = msgspec.json.decode(answer, type=ScalerValue)
    value = MetricValue(metricName=reply.metric_name, metricValue=math.ceil(reply.value), metricValueFloat=reply.value)
    return encode_message(GetMetricsResponse(metricValues=[value]))


def answer_activity(ask: Ask, body: bytes) -> bytes:
    return encode_message(IsActiveResponse(result=_is_scaler_active(ask, _encode_question(_parse_object_ref(body)))))


async def stream_scaler_activity(ask: Ask, body: bytes) -> AsyncIterator[bytes]:
    """Yield whether the scaler is active, at once and after each change.

    While this is unknown, yield nothing. A caller that polls gets an error instead.
    """
    question, reply = _encode_question(_parse_object_ref(body)), None
    while True:
        with contextlib.suppress(StaleError):
            active = _is_scaler_active(ask, question)
            if active is not reply:
                reply = active
                yield encode_message(IsActiveResponse(result=active))
        await asyncio.sleep(CHECK_INTERVAL_S)


def _parse_object_ref(body: bytes) -> ScaledObjectRef:
    ref = ScaledObjectRef()
    ref.ParseFromString(body)
    return ref


def _encode_question(ref: ScaledObjectRef, metric_name: str = "") -> bytes:
    return msgspec.json.encode(ScalerQuestion(dict(ref.scalerMetadata), metric_name))


def _is_scaler_active(ask: Ask, question: bytes) -> bool:
    return msgspec.json.decode(ask("is_active", question), type=ScalerActivity).active


KEDA = GrpcService(
    "keda",
    "externalscaler.ExternalScaler",
    {"GetMetricSpec": answer_metric_spec, "GetMetrics": answer_metrics, "IsActive": answer_activity},
    {"StreamIsActive": stream_scaler_activity},
)
