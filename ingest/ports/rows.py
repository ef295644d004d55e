"""A collector of port counters that are read one by one, and the base of such sources."""

import re
from collections.abc import Mapping
from typing import Any

from fleetcast.fleet.clock import Clock
from fleetcast.fleet.entities import Entities
from fleetcast.fleet.errors import RecordError
from fleetcast.fleet.metrics import find_metric_row
from fleetcast.fleet.samples import EntityKind, SampleBatch
from fleetcast.ingest.gpus import GpuInventory
from fleetcast.ingest.node_names import find_known_name, find_or_register_node
from fleetcast.ingest.pages.infiniband import PORT_READINGS, InfinibandResolver
from fleetcast.ingest.pages.text import Target
from fleetcast.ingest.series import Series
from fleetcast.ingest.source import Batch, Source
from fleetcast.ingest.tally import RecordTally, RunningTally, SkipRule

_READ = RecordTally(read=1)
# Counters and settings of adapters, in sysfs and in perfquery, that no forecast needs.
_KNOWN = re.compile(
    r"VL15_?dropped|(?:unicast|multicast)_(?:rcv|xmit)_packets|lifespan|(?:req|resp|rx|roce|np|rp|duplicate|implied)_\w+"
    r"|(?:Port|Counter)Select\w*|CapMask|VL15Dropped|QP1Dropped|Port(?:Xmit|Rcv)(?:Constraint|Switch)\w+"
    r"|Port(?:Uni|Multi)cast(?:Xmit|Rcv)Pkts",
    re.IGNORECASE,
)
_PORTS = find_metric_row(EntityKind.NODE, "ports_reported")


class PortRows:
    """A collector of the port counters of one round, which become one batch.

    It resolves each series only once.
    """

    def __init__(self, entities: Entities) -> None:
        self.saturated = 0  # readings that stood at their counter's width, since the beginning
        self._entities = entities
        self._resolve = InfinibandResolver(entities, GpuInventory())
        self._series: dict[tuple[str, str, int, str], Series] = {}
        self._rows: list[tuple[int, int, int, float]] = []
        self._taken: set[tuple[int, int]] = set()
        self._ports: dict[int, tuple[int, set[int]]] = {}  # node -> newest time, its ports
        self._bad: list[RecordError] = []
        self._tally = RunningTally()

    def add_port(self, node: str, device: str, port: int, readings: Mapping[str, float], time_ms: int) -> None:
        """Add the counters of one port, by their sysfs or perfquery names.

        If two names mean the same metric, the first one counts.
        """
        known = {name: raw for name, raw in readings.items() if name in PORT_READINGS}
        self.count_unused(*(name for name in readings if name not in known))
        left = len(known)
        try:
            for name, raw in known.items():
                rule = self._add_number(self._find_series(node, device, port, name), raw, time_ms)
                self._tally.add_tally(_READ if rule is None else RecordTally(ignored={rule: 1}))
                left -= 1
        except RecordError as error:
            self.record_error(error, left)

    def count_unused(self, *names: str) -> None:
        """Count the names of counters that no metric uses.

        A name that a rule skips counts as skipped, and any other name as unread.
        """
        others = tuple(name for name in names if _KNOWN.fullmatch(name) is None)
        ignored = {SkipRule.NOT_USED: len(names) - len(others)} if len(others) < len(names) else {}
        self._tally.add_tally(RecordTally(ignored=ignored, unread=len(others), names=others))

    def count_skipped(self, rule: SkipRule, count: int = 1) -> None:
        """Count `count` counters that a rule skips."""
        self._tally.add_tally(RecordTally(ignored={rule: count}))

    def record_link_layer(self, node: str, device: str, port: int, layer: str) -> None:
        """Record the link layer of a port that has samples."""
        name = f"{find_known_name(node, self._entities[EntityKind.NODE])}/{device}/{port}"
        if name in self._entities[EntityKind.PORT]:
            self._entities.record_trait(name, layer)

    def record_error(self, error: RecordError, numbers: int = 1) -> None:
        """Record an error, and count the counters that it makes unusable."""
        self._bad.append(error.with_traceback(None))
        self._tally.add_tally(RecordTally(refused=numbers))

    def pop_batch(self) -> Batch:
        """Return everything that was added since the last call."""
        rows, ports, bad = self._rows, self._ports, self._bad
        self._rows, self._taken, self._ports, self._bad = [], set(), {}, []
        tally, self._tally = self._tally.make_tally(), RunningTally()
        samples = [SampleBatch.from_rows(EntityKind.PORT, rows)] if rows else []
        if ports:
            nodes = [(_PORTS, node, time_ms, float(len(seen))) for node, (time_ms, seen) in ports.items()]
            samples.append(SampleBatch.from_rows(EntityKind.NODE, nodes))
        return Batch(samples=tuple(samples), bad=tuple(bad), tally=tally)

    def _find_series(self, node: str, device: str, port: int, name: str) -> Series:
        key = (node, device, port, name)
        series = self._series.get(key)
        if series is None:
            target = Target(find_or_register_node(node, self._entities), fixed=True)
            found = self._resolve(name, {"device": device, "port": str(port)}, target)
            assert isinstance(found, Series), name
            series = self._series[key] = found
        return series

    def _add_number(self, series: Series, raw: float, time_ms: int) -> SkipRule | None:
        """Add a counter's value. Returns the rule that skips it, or None if it was added."""
        if (series.metric, series.entity) in self._taken:
            return SkipRule.REPEATED
        self._taken.add((series.metric, series.entity))
        newest, ports = self._ports.setdefault(series.node, (time_ms, set()))
        ports.add(series.entity)
        self._ports[series.node] = (max(newest, time_ms), ports)
        if raw == series.ceiling:
            self.saturated += 1
            return SkipRule.NO_DATA
        self._rows.append((series.metric, series.entity, time_ms, raw * series.scale))
        return None


class PortSource(Source):
    """A source of port counters, read every `interval_s` of fleet time. It has no position."""

    misses = True  # what nobody reads is gone
    kind: str

    def __init__(self, name: str, interval_s: float, entities: Entities, clock: Clock) -> None:
        self.name = name
        self._interval_s = interval_s
        self._clock = clock
        self._rows = PortRows(entities)
        self._due_ms = self._bad = self._up = 0
        self._last: tuple[int, int] | None = None  # fleet ms and samples of the last round

    def position(self) -> dict[str, Any]:
        return {}

    def seek(self, position: dict[str, Any]) -> None: ...

    async def close(self) -> None: ...

    async def _wait_for_round(self) -> None:
        """Wait until the next round is due."""
        now_ms = self._clock.now_ms()
        if now_ms < self._due_ms <= now_ms + 2000 * self._interval_s:
            await self._clock.sleep((self._due_ms - now_ms) / 1000)
        self._due_ms = self._clock.now_ms() + round(self._interval_s * 1000)

    def _make_health(self, inputs: int) -> dict[str, Any]:
        """Return the source's row of the ingestion document.

        `up`: the number of inputs that answered in the last round.
        """
        at_ms, samples = self._last or (0, 0)
        return {
            "name": self.name,
            "kind": self.kind,
            "rate_per_s": round(samples / self._interval_s, 1),
            "lag_s": round(max(0, self._clock.now_ms() - at_ms) / 1000, 3) if self._last else None,
            "bad": self._bad,
            "up": self._up,
            "down": max(0, inputs - self._up),
            "saturated": self._rows.saturated,
        }
