"""The adapter that sizes CapacityBuffers (autoscaling.x-k8s.io) by the demand forecast.

A buffer makes the cluster-autoscaler reserve room for a number of pods.

    replicas = (largest p90 of wanted GPUs until the horizon - GPUs wanted now) / GPUs of a pod, rounded up

The autoscaler first fits a buffer's pods into free room, and adds machines for the rest. So free
GPUs are not subtracted here. If they were, the buffer would shrink as soon as its machines are ready.

The adapter sets the replicas above the user's minimum. They cost money, so it removes them if the forecast
is old or missing, or if the adapter withdraws.
"""

import math
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from fleetcast.fleet.errors import RequestError, UnknownEntity
from fleetcast.models.demand.rows import DemandRow
from fleetcast.schedulers.adapter import NotKnown, Seen, Verb, Write, withdraw_fields
from fleetcast.schedulers.demand_value import find_fresh_row
from fleetcast.schedulers.weather import DemandKey, Weather

PREFIX = "fleetcast.io/"
QUEUE, POOL, CLASS, GPUS = PREFIX + "queue", PREFIX + "pool", PREFIX + "class", PREFIX + "gpus-per-replica"
LEAST, MOST, QUANTILE, HORIZON = PREFIX + "min", PREFIX + "max", PREFIX + "quantile", PREFIX + "horizon-s"
REPLICAS = "spec.replicas"
THEIRS = f"theirs: {REPLICAS}"  # another owner holds the field
EVERY = "all"  # class and group of whole queues and pools
SLACK = 0.03  # of the forecast: a buffer shrinks only when it would even so; more than noise of 1 % up and down
REPLICAS_MAX = 2**31 - 1


class BufferSettings(NamedTuple):
    """The settings in a buffer's annotations. gpus: the GPUs of one pod.

    least, most: bounds on the replicas.
    """

    queue: str
    class_: str
    gpus: int
    least: int
    most: int
    quantile: float
    horizon_s: float
    pool: str = EVERY

    @property
    def owner_text(self) -> str:
        """The queue or pool, in words."""
        return f"queue {self.queue}" if self.pool == EVERY else f"pool {self.pool}"


def read_annotations(values: Mapping[str, str]) -> BufferSettings | None:
    """Read the annotations of a buffer. Returns None if they name neither a queue nor a pool.

    Raises RequestError that names the annotation and its value.
    """
    if POOL not in values and QUEUE not in values:
        return None
    ask = BufferSettings(
        queue=values.get(QUEUE, EVERY),
        class_=values.get(CLASS, EVERY),
        gpus=_read_whole_number(values, GPUS, 1),
        least=_read_whole_number(values, LEAST, 0, "0"),
        most=_read_whole_number(values, MOST, 0, str(REPLICAS_MAX)),
        quantile=_read_number(values, QUANTILE, "0.9"),
        horizon_s=_read_number(values, HORIZON, "600"),
        pool=values.get(POOL, EVERY),
    )
    if EVERY not in (ask.queue, ask.pool):
        raise RequestError(f"{POOL} = {ask.pool!r}: leave it out if there is {QUEUE} = {ask.queue!r}", POOL)
    if ask.most < ask.least:
        raise RequestError(f"{MOST} = {ask.most}: must be at least {LEAST} = {ask.least}", MOST)
    return ask


def read_minimum(values: Mapping[str, str]) -> int:
    """Return the user's minimum of replicas, or 0 if it is unreadable.

    This function also serves buffers that no longer opt in.

    >>> read_minimum({"fleetcast.io/min": "2"}), read_minimum({}), read_minimum({"fleetcast.io/min": "two"})
    (2, 0, 0)
    """
    try:
        return _read_whole_number(values, LEAST, 0, "0")
    except RequestError:
        return 0


class CapacityBuffers:
    """The adapter `buffers`, which sets the replicas of CapacityBuffers by the demand forecast.

    A key is namespace/name, and its values are our annotations and REPLICAS. REPLICAS is present only while we
    own the field and it is above the minimum. Writing None resets the field to the minimum.
    """

    verbs: Mapping[str, Verb] = {}
    fields = frozenset({REPLICAS})

    def wishes(self, weather: Weather | None, seen: Seen) -> Iterator[Write]:
        for key, values in seen.items():
            why, replicas, gpus = _compute_wanted_replicas(weather, values)
            if replicas is None:
                yield from withdraw_fields({key: values}, self.fields, why)
            elif THEIRS not in values and str(replicas) != values.get(REPLICAS):
                yield Write(key, REPLICAS, str(replicas), values.get(REPLICAS), why, gpus)


def _compute_wanted_replicas(weather: Weather | None, values: Mapping[str, str]) -> tuple[str, int | None, int]:
    """Return the reason in words, the wanted replicas, and the GPUs wanted above the present demand.

    The replicas are None if the user's minimum is enough.
    """
    try:
        ask = read_annotations(values)
    except RequestError as error:
        return str(error), None, 0
    if weather is None or ask is None:
        return "withdrawn" if weather is None else f"it has no annotation {QUEUE} or {POOL} now", None, 0
    try:
        row = find_fresh_row(weather, DemandKey(ask.queue, ask.class_, EVERY, "wanted", ask.pool))
    except (NotKnown, UnknownEntity) as error:
        return str(error), None, 0
    peak = _find_peak(row, ask)
    if peak is None:
        return f"there is no forecast of {ask.owner_text} within {ask.horizon_s / 60:g} min", None, 0
    held = max(int(values.get(REPLICAS, ask.least)), ask.least)
    grown, shrunk = (_count_pods(gpus - row.now, ask) for gpus in (peak, peak * (1 + SLACK)))
    replicas = max(grown, min(held, shrunk))
    why = f"p{100 * ask.quantile:g} of wanted GPUs within {ask.horizon_s / 60:g} min is {peak:g}, now {row.now:g}"
    return why, None if replicas == ask.least else replicas, max(0, int(peak - row.now))


def _find_peak(row: DemandRow, ask: BufferSettings) -> float | None:
    """Return the largest forecast up to the horizon in GPUs, or None if there is none.

    The forecast's lowest quantile that is at least the requested one is used. The nearest forecast counts too,
    because a burst that is about to arrive also needs room.
    """
    level = next((at for at, level in enumerate(row.quantiles) if level >= ask.quantile), len(row.quantiles) - 1)
    values = row.values[level]
    ends = next((at for at, lead_s in enumerate(row.horizons_s) if lead_s >= ask.horizon_s), len(values) - 1)
    return max((value for value in values[: ends + 1] if value is not None), default=None)


def _count_pods(gpus: float, ask: BufferSettings) -> int:
    """Return how many pods an amount of GPUs needs, within the bounds.

    >>> ask = BufferSettings("serve", "all", 8, least=1, most=9, quantile=0.9, horizon_s=600.0)
    >>> _count_pods(17.0, ask), _count_pods(-4.0, ask), _count_pods(99.0, ask)
    (3, 1, 9)
    """
    return min(max(math.ceil(gpus / ask.gpus), ask.least), ask.most)


def _read_whole_number(values: Mapping[str, str], name: str, lowest: int, default: str = "") -> int:
    text = values.get(name, default)
    if not (text.isascii() and text.isdecimal() and len(text) < 11 and lowest <= int(text) <= REPLICAS_MAX):
        raise RequestError(f"{name} = {text!r}: must be a whole number from {lowest} on", name)
    return int(text)


def _read_number(values: Mapping[str, str], name: str, default: str) -> float:
    try:
        number = float(values.get(name, default))
    except ValueError:
        number = math.nan
    if not 0 < number < math.inf:
        raise RequestError(f"{name} = {values[name]!r}: must be a number above 0", name)
    return number
