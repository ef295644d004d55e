"""The Prometheus metrics of the API, and the metrics page about the pipeline.

The pipeline's counts come from the board section `doc.ingestion`.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from fleetcast.service.http.connection_pool import DISPLACED

CONTENT_TYPE = CONTENT_TYPE_PLAIN_0_0_4
BOUNDS = ("live_jobs", "unknown_nodes", "names_per_minute")
LATENCY_BUCKETS_S = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0, 5.0)


class ApiMetrics:
    """The metrics of one API process, in a registry of its own.

    Only the event loop updates them, so they need no locks.
    """

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        ProcessCollector(namespace="fleetcast_api", registry=self.registry)
        self.registry.register(_RequestCollector(self))
        self.events = Counter(
            "fleetcast_api_events", "Events by what became of them.", ("outcome",), registry=self.registry
        )
        for outcome in ("accepted", "duplicate", "rejected", "limited"):
            self.events.labels(outcome)  # there from the start, so that a rate sees the first one
        self.refused = Counter(
            "fleetcast_api_refused_records",
            "Records this process refused; the pipeline counts them, too.",
            ("reason",),
            registry=self.registry,
        )
        self.limited = Counter(
            "fleetcast_limit_refused",
            "New names that this process refused (429), by the bound that they met.",
            ("limit",),
            registry=self.registry,
        )
        for bound in BOUNDS:
            self.limited.labels(bound)
        self.written = Counter(
            "fleetcast_api_written_samples",
            "Samples received by remote write, by the version of its protocol.",
            ("version",),
            registry=self.registry,
        )
        self.neutral = Counter(
            "fleetcast_kube_neutral_answers",
            "Answers to schedulers of Kubernetes that say nothing, for want of a fresh board.",
            registry=self.registry,
        )
        self.streams = Gauge("fleetcast_stream_clients", "Open event streams.", registry=self.registry)
        self.requests: dict[tuple[str, str, int], int] = {}
        self.seconds: dict[str, Latency] = {}
        self._certificates: list[Callable[[], float]] = []
        self._make_admission_metrics()

    def _make_admission_metrics(self) -> None:
        """Create the counters of refused connections, callers and bodies, and the gauges of open ones."""
        self.refused_connections = Counter(
            "fleetcast_api_refused_connections",
            "Connections closed by us: too many (429: of one address), too slow, no HTTP, no TLS, or displaced.",
            ("status",),
            registry=self.registry,
        )
        for status in ("429", "503", DISPLACED, "no_tls"):
            self.refused_connections.labels(status)
        self.auth_failures = Counter(
            "fleetcast_api_auth_failures",
            "Callers refused: no token, an unknown one, one of too many (slowed), an unknown certificate, no scope.",
            ("reason",),
            registry=self.registry,
        )
        for reason in ("missing", "unknown", "slowed", "subject", "scope"):
            self.auth_failures.labels(reason)
        self.refused_bodies = Counter(
            "fleetcast_api_refused_bodies",
            "Bodies refused since those of all requests took up the budget.",
            registry=self.registry,
        )
        self.body_bytes = Gauge(
            "fleetcast_api_body_bytes", "Bodies of requests in memory, as sent and unpacked.", registry=self.registry
        )
        self.body_budget_bytes = Gauge(
            "fleetcast_api_body_budget_bytes", "What they may take up together.", registry=self.registry
        )
        self.connections = Gauge(
            "fleetcast_api_connections",
            "Places that connections hold, over all ports: one by gRPC holds three.",
            registry=self.registry,
        )
        self.max_connections = Gauge(
            "fleetcast_api_max_connections", "How many places there are.", registry=self.registry
        )

    def observe(self, route: str, method: str, status: int, seconds: float) -> None:
        """Count one answered request."""
        key = (route, method, status)
        self.requests[key] = self.requests.get(key, 0) + 1
        latency = self.seconds.get(route)
        if latency is None:
            latency = self.seconds[route] = Latency()
        latency.counts[bisect_left(LATENCY_BUCKETS_S, seconds)] += 1
        latency.sum_s += seconds

    def count_refused_connection(self, reason: int | str) -> None:
        """Count a connection that this process refused or closed. reason: its HTTP status or a label."""
        self.refused_connections.labels(str(reason)).inc()

    def publish_certificate_expiry(self, until_s: Callable[[], float]) -> None:
        """Publish the expiry time of a certificate of this process as a metric.

        If there are several, the earliest expiry counts. Without TLS, there is no such metric.
        """
        self._certificates.append(until_s)
        if len(self._certificates) == 1:
            Gauge(
                "fleetcast_tls_certificate_expiry_timestamp_seconds",
                "When the certificate that clients are shown expires.",
                registry=self.registry,
            ).set_function(lambda: min(named() for named in self._certificates))

    def make_page(self) -> str:
        return generate_latest(self.registry).decode()


@dataclass(slots=True)
class Latency:
    """A latency histogram: the number of requests in each interval of `LATENCY_BUCKETS_S`.

    The last count covers requests above all bounds.
    """

    counts: list[int] = field(default_factory=lambda: [0] * (len(LATENCY_BUCKETS_S) + 1))
    sum_s: float = 0.0


class _RequestCollector(Collector):
    """A collector that yields the request counts as metric families.

    It costs half a microsecond for each request. The metrics of prometheus_client would cost four.
    """

    def __init__(self, metrics: ApiMetrics) -> None:
        self._metrics = metrics

    def collect(self) -> Iterator[Metric]:
        requests = CounterMetricFamily(
            "fleetcast_http_requests", "Requests answered.", labels=("route", "method", "status")
        )
        for (route, method, status), count in self._metrics.requests.items():
            requests.add_metric((route, method, str(status)), count)
        yield requests
        seconds = HistogramMetricFamily(
            "fleetcast_http_request_seconds", "Wall time from routing to the end of the answer.", labels=("route",)
        )
        edges = [*map(floatToGoString, LATENCY_BUCKETS_S), "+Inf"]
        for route, latency in self._metrics.seconds.items():
            seconds.add_metric((route,), list(zip(edges, accumulate(latency.counts), strict=True)), latency.sum_s)
        yield seconds


class _FamilyCollector(Collector):
    def __init__(self, families: list[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterator[Metric]:
        return iter(self._families)


def format_pipeline_page(
    ingestion: Mapping[str, Any], board_age_s: float | None, sequence: int | None, stale_after_s: float | None = None
) -> str:
    """Format the pipeline's metrics as exposition text. Unknown values are left out."""
    families: list[Metric] = []
    _add_counter(families, "fleetcast_samples", "Samples applied.", ingestion.get("samples_total"))
    _add_counter(families, "fleetcast_late_samples", "Samples older than their series.", ingestion.get("late_total"))
    _add_counter(families, "fleetcast_events", "Job and node events applied.", ingestion.get("events_total"))
    _add_counter(families, "fleetcast_duplicate_events", "Events seen before.", ingestion.get("duplicates_total"))
    _add_counter(families, "fleetcast_ticks", "Ticks finished.", ingestion.get("ticks"))
    bad = CounterMetricFamily("fleetcast_bad_records", "Input records skipped, by reason.", labels=("reason",))
    for reason, count in (ingestion.get("bad_records") or {}).items():
        bad.add_metric((str(reason),), float(count))
    families.append(bad)
    _add_limit_metrics(families, ingestion.get("limits") or {})
    _add_gauge(families, "fleetcast_samples_per_second", "Samples a fleet second.", ingestion.get("samples_per_s"))
    _add_gauge(
        families,
        "fleetcast_newest_sample_timestamp_seconds",
        "Newest sample.",
        _convert_to_seconds(ingestion.get("newest_sample_ms")),
    )
    _add_quantiles(families, "fleetcast_tick_seconds", "Wall time of a tick.", ingestion.get("tick_ms"))
    _add_quantiles(families, "fleetcast_lag_seconds", "Wall time from arrival to the board.", ingestion.get("lag_ms"))
    targets = GaugeMetricFamily("fleetcast_targets", "Scrape targets by state.", labels=("state",))
    for state, count in (ingestion.get("targets") or {}).items():
        targets.add_metric((str(state),), float(count))
    families.append(targets)
    families += _make_source_metrics(ingestion.get("sources") or ())
    _add_archive_metrics(families, ingestion.get("archive") or {})
    _add_gauge(families, "fleetcast_board_age_seconds", "Fleet time since the board was made.", board_age_s)
    _add_gauge(families, "fleetcast_board_stale_after_seconds", "The age from which a board is stale.", stale_after_s)
    _add_gauge(families, "fleetcast_board_sequence", "Boards published since the pipeline began.", sequence)
    registry = CollectorRegistry()
    registry.register(_FamilyCollector(families))
    return generate_latest(registry).decode()


OUTCOMES = ("read", "refused", "ignored", "unread")
SOURCE_GAUGES = (
    ("targets_unread", "fleetcast_source_unread_targets", "Targets with a page of which nothing is read."),
    (
        "targets_refusing",
        "fleetcast_source_refusing_targets",
        "Targets with lines that are refused at every scrape.",
    ),
    ("rate_per_s", "fleetcast_source_records_per_second", "Good records a second, over about a minute."),
    ("lag_s", "fleetcast_source_lag_seconds", "How far behind its newest record a source is read."),
    ("lag_records", "fleetcast_source_lag_records", "Records that wait at a source."),
    ("backlog_bytes", "fleetcast_source_backlog_bytes", "Bytes that wait at a source."),
)


def _add_limit_metrics(families: list[Metric], limits: Mapping[str, Mapping[str, int]]) -> None:
    """Add the size of each bound on names, and how much of the bound is used."""
    most = GaugeMetricFamily("fleetcast_limit", "The largest number that each bound allows.", labels=("limit",))
    used = GaugeMetricFamily("fleetcast_limit_used", "The number in use, by bound.", labels=("limit",))
    for bound, row in limits.items():
        most.add_metric((bound,), float(row["most"]))
        used.add_metric((bound,), float(row["used"]))
    families += [most, used]


def _add_archive_metrics(families: list[Metric], archive: Mapping[str, Any]) -> None:
    """Add the metrics of the archive. Adds nothing if the archive is off."""
    for name, text in (
        ("rows", "Samples written to the archive."),
        ("events", "Events written to the archive."),
        ("files", "Files written to the archive, before they are compacted."),
        ("bytes", "Bytes written to the archive, before they are compacted."),
        ("repeats", "Samples and events that the archive held before."),
        ("too_old", "Samples and events older than archive.keep_days, which were not written."),
    ):
        _add_counter(families, f"fleetcast_archive_{name}", text, archive.get(name))
    if archive:
        waiting = archive.get("waiting_bytes")
        _add_gauge(families, "fleetcast_archive_waiting_bytes", "In memory, and not on disk yet.", waiting)
        full = float(bool(archive.get("full")))
        _add_gauge(families, "fleetcast_archive_full", "1 while sources wait for the archive's disk.", full)
        failing = float(bool(archive.get("failing")))
        _add_gauge(families, "fleetcast_archive_failing", "1 while the archive cannot be written.", failing)


def _make_source_metrics(rows: Sequence[Mapping[str, Any]]) -> list[Metric]:
    """Return the metrics that each source reports about itself.

    A source that reads many targets is up while any of them answers.
    """
    labels = ("source", "kind")
    up = GaugeMetricFamily("fleetcast_source_up", "Whether a source answers.", labels=labels)
    bad = CounterMetricFamily("fleetcast_source_bad_records", "Records that a source skipped.", labels=labels)
    errors = CounterMetricFamily("fleetcast_source_errors", "Bugs that a source was started again for.", labels=labels)
    gauges = {key: GaugeMetricFamily(name, text, labels=labels) for key, name, text in SOURCE_GAUGES}
    records = CounterMetricFamily(
        "fleetcast_source_records", "Records of a source, by what became of them.", labels=(*labels, "outcome")
    )
    fields = CounterMetricFamily(
        "fleetcast_source_unknown_fields", "Fields of read records that nothing reads.", labels=labels
    )
    named = {(str(row.get("name", "")), str(row.get("kind", ""))): row for row in rows}
    for label, row in named.items():
        if row.get("up") is not None:
            up.add_metric(label, float(bool(row["up"])))
        if isinstance(row.get("bad"), int | float):
            bad.add_metric(label, float(row["bad"]))
        if isinstance(row.get("errors"), int):
            errors.add_metric(label, float(row["errors"]))
        if isinstance(counts := row.get("records"), dict):
            for outcome in OUTCOMES:
                records.add_metric((*label, outcome), float(counts.get(outcome, 0)))
            fields.add_metric(label, float(counts.get("unknown_fields", 0)))
        for key, family in gauges.items():
            if isinstance(row.get(key), int | float):
                family.add_metric(label, float(row[key]))
    return [up, bad, errors, records, fields, *gauges.values()]


def _add_counter(families: list[Metric], name: str, text: str, value: float | None) -> None:
    if value is not None:
        families.append(CounterMetricFamily(name, text, value=float(value)))


def _add_gauge(families: list[Metric], name: str, text: str, value: float | None) -> None:
    if value is not None:
        families.append(GaugeMetricFamily(name, text, value=float(value)))


def _add_quantiles(families: list[Metric], name: str, text: str, values: Mapping[str, float | None] | None) -> None:
    family = Metric(name, text, "summary")
    for label, value in (values or {}).items():
        if value is not None and label.startswith("p"):
            family.add_sample(name, {"quantile": f"{int(label[1:]) / 100:g}"}, value / 1000)
    families.append(family)


def _convert_to_seconds(time_ms: float | None) -> float | None:
    return None if time_ms is None else time_ms / 1000


def merge_pages(*pages: str) -> str:
    """Join pages of exposition text. If several pages contain a metric family, only the first keeps it.

    The text format allows each family only once.
    """
    seen: set[str] = set()
    lines: list[str] = []
    for page in pages:
        families = list(_split_by_family(page))
        lines += [line for name, rows in families if name not in seen for line in rows]
        seen.update(name for name, _ in families)
    return "\n".join(lines) + "\n" if lines else ""


def _split_by_family(page: str) -> Iterator[tuple[str, list[str]]]:
    """Yield (name, lines) for each family of a page. Every family begins with its HELP or TYPE line."""
    name, rows = "", list[str]()
    for line in page.split("\n"):  # a label may hold other line breaks
        words = line.split(" ", 3)
        if len(words) >= 3 and words[0] == "#" and words[1] in ("HELP", "TYPE") and words[2] != name:
            if rows:
                yield name, rows
            name, rows = words[2], []
        if line:
            rows.append(line)
    if rows:
        yield name, rows
