"""Trimaran's load watcher: `GET …/watcher` returns the load of nodes.

The protocol is that of scheduler-plugins (paypal/load-watcher 0.2). Trimaran uses an answer until it gets
the next good one, however late, and gives a missing node the worst score. So every answer contains
each requested node once. Without a forecast all nodes have the same load.

The series CPU is the load of the node's GPUs, or of its CPUs if its GPUs report none. Memory is the
load of host memory, if known. AVG is the median over the next minutes, and STD the standard
deviation that matches the p90. All values are in percent.
"""

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import cast

import msgspec
import numpy as np

from fleetcast.schedulers.adapter import NotKnown, Seen, Verb, Write
from fleetcast.schedulers.weather import Load, Weather

SOURCE = "fleetcast"
WINDOW, WINDOW_S = "15m", 900  # the only window that Trimaran reads
NEUTRAL = 50.0  # percent, of a node of which nothing is known, and of all without a forecast
Z_90 = 1.2816  # standard deviations of a normal distribution from its median to its p90

_encode = msgspec.json.Encoder().encode


class WatcherMetric(msgspec.Struct):
    """One number in percent. type: CPU or Memory. operator: AVG or STD."""

    name: str
    type: str
    operator: str
    value: float
    rollup: str = WINDOW


class WatcherMetadata(msgspec.Struct, frozen=True, rename={"data_center": "dataCenter"}):
    data_center: str = ""


class WatchedNode(msgspec.Struct):
    metrics: list[WatcherMetric]
    tags: dict[str, str] = {}
    metadata: WatcherMetadata = WatcherMetadata()


class WatcherData(msgspec.Struct, rename={"nodes": "NodeMetricsMap"}):
    nodes: dict[str, WatchedNode]


class WatcherWindow(msgspec.Struct):
    """The time span of the answer, in Unix seconds.

    Trimaran itself adds the pods that it placed after `end`.
    """

    duration: str
    start: int
    end: int


class WatcherMetrics(msgspec.Struct):
    """The answer of the load watcher. Trimaran's decoder distinguishes upper and lower case in keys."""

    timestamp: int
    window: WatcherWindow
    source: str
    data: WatcherData


class TrimaranAdapter:
    """The adapter `trimaran`, which answers Trimaran's load watcher with the load of nodes.

    The question lists all nodes, one on each line. The answer is made once for each board.
    """

    fields: frozenset[str] = frozenset()

    def __init__(self) -> None:
        self.verbs: Mapping[str, Verb] = {"watcher": Verb(self._answer_watcher, _encode_neutral_answer)}
        self._made: tuple[Weather, bytes, bytes] | None = None

    def wishes(self, weather: Weather | None, seen: Seen) -> Iterable[Write]:
        return ()

    def _answer_watcher(self, weather: Weather, names: bytes) -> bytes:
        if weather.load is None:
            raise NotKnown("the board has no load yet")
        if self._made is None or self._made[0] is not weather or self._made[1] != names:
            known = _split_names(names)
            nodes = dict(zip(known, _encode_nodes(weather.load, known), strict=True))
            self._made = weather, names, _encode_body(nodes, weather.as_of_ms // 1000)
        return self._made[2]


def _make_metrics(type: str) -> list[WatcherMetric]:
    return [WatcherMetric(type.lower(), type, operator, 0.0) for operator in ("AVG", "STD")]


def _make_node_template(*types: str) -> bytes:
    """Return a node's JSON with a `%.1f` for each number. Filling the template is faster than encoding each node."""
    metrics = [metric for type in types for metric in _make_metrics(type)]
    return _encode(WatchedNode(metrics)).replace(b"0.0", b"%.1f")


CPU_ALONE, CPU_AND_MEMORY = _make_node_template("CPU"), _make_node_template("CPU", "Memory")


def _encode_neutral_answer(names: bytes) -> bytes:
    return _encode_body(dict.fromkeys(_split_names(names), CPU_ALONE % (NEUTRAL, 0.0)), 0)


def _split_names(names: bytes) -> list[str]:
    return [name for name in names.decode().split("\n") if name]


def _encode_body(nodes: Mapping[str, bytes], at_s: int) -> bytes:
    """Encode the watcher's answer.

    nodes: node name → its JSON. at_s: the time of the data, 0 if it is unknown.
    """
    rows = {name: cast(WatchedNode, msgspec.Raw(node)) for name, node in nodes.items()}
    window = WatcherWindow(WINDOW, max(0, at_s - WINDOW_S), at_s)
    return _encode(WatcherMetrics(at_s, window, SOURCE, WatcherData(rows)))


def _encode_nodes(load: Load, names: list[str]) -> Iterator[bytes]:
    """Yield the JSON of each named node, with its load."""
    rows = np.array([load.rows.get(name, load.gpu.shape[1]) for name in names], np.intp)
    gpu, cpu, memory = (
        100 * np.pad(kind, ((0, 0), (0, 1)), constant_values=np.nan)[:, rows]
        for kind in (load.gpu, load.cpu, load.memory)
    )
    mean, high = np.where(np.isfinite(gpu), gpu, cpu)
    spread = np.nan_to_num(np.maximum(high - mean, 0.0)) / Z_90
    columns = (values.tolist() for values in (np.nan_to_num(mean, nan=NEUTRAL), spread, memory[0]))
    for middle, deviation, held in zip(*columns, strict=True):
        if math.isfinite(held):
            yield CPU_AND_MEMORY % (middle, deviation, held, 0.0)
        else:
            yield CPU_ALONE % (middle, deviation)
