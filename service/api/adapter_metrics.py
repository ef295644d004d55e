"""Prometheus metrics of the adapters process. The api serves them, because that process has no port."""

from collections.abc import Iterable

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from fleetcast.service.adapter_records import AdaptersStatus, AdapterStatus

COUNTS = {
    "fleetcast_adapter_wishes": "Changes of another system that were due, whether they were written or only observed.",
    "fleetcast_adapter_writes": "Changes that were written.",
    "fleetcast_adapter_conflicts": "Changes that were not made, since another writer had written there.",
    "fleetcast_adapter_errors": "Changes that were refused, and times that the other system was away.",
}
GAUGES = (
    ("fleetcast_adapter_held_back", "Changes that wait for the limit of changes a minute.", "held_back"),
    ("fleetcast_adapter_marked", "Keys of the other system that hold something of ours.", "ours"),
    ("fleetcast_adapter_withdrawn", "1 while restrictions are being withdrawn.", "withdrawn"),
)


class _AdapterCollector(Collector):
    def __init__(self, families: Iterable[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterable[Metric]:
        return self._families


def make_adapters_page(status: AdaptersStatus, now_ms: int) -> str:
    """Return the exposition text of the adapters' metrics. It is empty if no adapter writes."""
    if not status.adapters:
        return ""
    registry = CollectorRegistry()
    registry.register(_AdapterCollector(_make_families(status.adapters, now_ms)))
    return generate_latest(registry).decode()


def _make_families(rows: list[AdapterStatus], now_ms: int) -> list[Metric]:
    families: list[Metric] = []
    for name, text in COUNTS.items():
        counter = CounterMetricFamily(name, text, labels=("adapter",))
        for row in rows:
            counter.add_metric((row.name,), float(getattr(row, name.rpartition("_")[2])))
        families.append(counter)
    for name, text, field in GAUGES:
        gauge = GaugeMetricFamily(name, text, labels=("adapter",))
        for row in rows:
            gauge.add_metric((row.name,), float(getattr(row, field)))
        families.append(gauge)
    age = GaugeMetricFamily(
        "fleetcast_adapter_seen_age_seconds", "Fleet time since the other system was read.", labels=("adapter",)
    )
    for row in rows:
        if row.seen_ms is not None:
            age.add_metric((row.name,), (now_ms - row.seen_ms) / 1000)
    return [*families, age]
