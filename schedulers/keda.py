"""KEDA's external scaler: turns a trigger's metadata and the demand forecast into a metric.

The metric is a quantile of demand at the moment when a replica that is requested now would be warm.
KEDA divides it by `targetPerReplica`. Without a fresh forecast the adapter refuses to answer, so
that KEDA uses its own fallback.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import get_args

import msgspec

from fleetcast.fleet.decode_faults import explain_decode_error
from fleetcast.fleet.errors import RequestError, UnknownEntity
from fleetcast.fleet.events import JobClass
from fleetcast.models.demand.rows import DemandRow
from fleetcast.schedulers.adapter import NotKnown, Seen, Verb, Write
from fleetcast.schedulers.demand_value import compute_demand_value, find_fresh_row
from fleetcast.schedulers.weather import DemandKey, Weather

TARGETS = ("arriving", "running", "queued", "wanted", "request_rate")
CLASSES = ("all", *get_args(JobClass))
KEYS = ("queue", "pool", "class", "group", "target", "quantile", "horizonSeconds", "targetPerReplica", "activation")
OF_KEDA = {  # how it reaches us; these come along in the metadata
    *("scalerAddress", "enableTLS", "unsafeSsl", "caCert", "tlsCertFile", "tlsClientCert", "tlsClientKey"),
}
SERVING: JobClass = "inference"  # the class of every series of request_rate
QUANTILE = 0.9
LONGEST_S = 259_200.0


class Trigger(msgspec.Struct, frozen=True):
    """The settings of a trigger. horizon_s: None to use the cold start that the pipeline measured."""

    series: DemandKey
    quantile: float
    horizon_s: float | None
    per_replica: float
    activation: float

    @property
    def metric(self) -> str:
        return f"fleetcast-{self.series.target.replace('_', '-')}"


class ScalerQuestion(msgspec.Struct, rename="camel"):
    """The body of every question of KEDA: the scaled object and its settings.

    metric_name: the name from an earlier ScalerSpec, or "".
    """

    metadata: dict[str, str] = {}
    metric_name: str = ""


class ScalerSpec(msgspec.Struct, rename="camel"):
    metric_name: str
    target_size: float


class ScalerValue(msgspec.Struct, rename="camel"):
    metric_name: str
    value: float


class ScalerActivity(msgspec.Struct):
    active: bool


_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(ScalerQuestion).decode


class KedaAdapter:
    """The adapter `keda`, which answers KEDA's external scaler with a demand forecast.

    The metric's specification needs no weather. All other answers raise NotKnown without a forecast.
    """

    fields: frozenset[str] = frozenset()

    def __init__(self) -> None:
        self.verbs = {
            "metric_spec": Verb(lambda weather, body: answer_metric_spec(body), answer_metric_spec),
            "metrics": Verb(answer_metrics, _refuse_stale_answer),
            "is_active": Verb(answer_activity, _refuse_stale_answer),
        }

    def wishes(self, weather: Weather | None, seen: Seen) -> Iterable[Write]:
        return ()


def answer_metric_spec(body: bytes) -> bytes:
    """Return the encoded ScalerSpec of a trigger."""
    trigger = read_trigger(_decode_question(body).metadata)
    return _encode(ScalerSpec(trigger.metric, trigger.per_replica))


def answer_metrics(weather: Weather, body: bytes) -> bytes:
    """Return the encoded ScalerValue of a trigger."""
    asked = _decode_question(body)
    trigger = read_trigger(asked.metadata)
    return _encode(ScalerValue(asked.metric_name or trigger.metric, compute_wanted_demand(weather, trigger)))


def answer_activity(weather: Weather, body: bytes) -> bytes:
    """Return the encoded ScalerActivity: whether the demand is above `activation`."""
    trigger = read_trigger(_decode_question(body).metadata)
    return _encode(ScalerActivity(compute_wanted_demand(weather, trigger) > trigger.activation))


def _refuse_stale_answer(body: bytes) -> None:
    """Return None, so that the caller gets an error instead of an old forecast.

    Raises RequestError for an invalid trigger.
    """
    read_trigger(_decode_question(body).metadata)


def _decode_question(body: bytes) -> ScalerQuestion:
    try:
        return _decode(body)
    except msgspec.ValidationError as error:
        raise RequestError(explain_decode_error(error, _decode, body)) from None


def compute_wanted_demand(weather: Weather, trigger: Trigger) -> float:
    """Return the quantile of demand at the time when a replica that is requested now would be warm.

    Raises NotKnown, or RequestError if the forecast's horizon is too short.
    """
    try:
        row = find_fresh_row(weather, trigger.series)
        horizon_s = _find_cold_start_s(row) if trigger.horizon_s is None else trigger.horizon_s
        return compute_demand_value(row, trigger.quantile, horizon_s, weather.now_ms)
    except UnknownEntity as error:  # it may be forecast later
        raise NotKnown(str(error)) from None
    except RequestError as error:
        raise RequestError(f"scalerMetadata {error}", error.field) from None


def _find_cold_start_s(row: DemandRow) -> float:
    lead_s = row.prescale.lead_s if row.prescale else None
    if lead_s is None:
        raise NotKnown("no cold start was measured of this series: set horizonSeconds")
    return lead_s


def read_trigger(metadata: Mapping[str, str]) -> Trigger:
    """Parse the trigger of a ScaledObject. Raises RequestError that names key, value and fix."""
    for key in metadata:
        if key not in KEYS and key not in OF_KEDA:
            raise _make_trigger_error(key, metadata[key], f"no such key; known are {', '.join(KEYS)}")
    horizon_s = _read_number(metadata, "horizonSeconds", 0.0, LONGEST_S) if "horizonSeconds" in metadata else None
    target = _read_choice(metadata, "target", TARGETS)
    series = DemandKey(
        metadata.get("queue", "all"),
        _read_choice(metadata, "class", CLASSES, SERVING if target == "request_rate" else "all"),
        metadata.get("group", "all"),
        target,
        metadata.get("pool", "all"),
    )
    if series.queue != "all" and series.pool != "all":
        raise _make_trigger_error(
            "pool", series.pool, f"leave it out if there is queue = {series.queue[:80]!r}: a series is of one of them"
        )
    return Trigger(
        series,
        _read_number(metadata, "quantile", 0.0, 1.0, QUANTILE),
        horizon_s,
        _read_number(metadata, "targetPerReplica", 1e-6, 1e12),
        _read_number(metadata, "activation", 0.0, 1e12, 0.0),
    )


def _read_choice(metadata: Mapping[str, str], key: str, choices: Sequence[str], default: str | None = None) -> str:
    value = metadata.get(key, default)
    if value is None or value not in choices:
        raise _make_trigger_error(key, value, f"set one of {', '.join(choices)}")
    return value


def _read_number(
    metadata: Mapping[str, str], key: str, least: float, most: float, default: float | None = None
) -> float:
    text = metadata.get(key)
    if text is None and default is not None:
        return default
    try:
        value = float(text or "")
    except ValueError:
        value = math.nan
    if not least <= value <= most:
        raise _make_trigger_error(key, text, f"set a number from {least:g} to {most:g}")
    return value


def _make_trigger_error(key: str, value: str | None, fix: str) -> RequestError:
    shown = "is missing" if value is None else f"= {value[:80]!r}"
    return RequestError(f"scalerMetadata {key[:80]} {shown}: {fix}", key[:80])
