"""The placer's own Prometheus metrics."""

from collections.abc import Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector

from placement.fragmentation import PoolFragments

SECONDS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)


class PlacerMetrics:
    """A registry of its own, so that several can live in one process."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        ProcessCollector(namespace="fleetcast_placer", registry=self.registry)
        self.decisions = Counter(
            "fleetcast_placer_decisions", "Decisions by outcome and door.", ["outcome", "door"], registry=self.registry
        )
        self.decide_s = Histogram(
            "fleetcast_placer_decide_seconds", "Time to decide on one request.", buckets=SECONDS, registry=self.registry
        )
        self.cycle_s = Histogram(
            "fleetcast_placer_queue_pass_seconds",
            "Time of a pass over the queue.",
            buckets=SECONDS,
            registry=self.registry,
        )
        self.queue_length = Gauge("fleetcast_placer_queue_length", "Requests that wait.", registry=self.registry)
        self.intents = Gauge(
            "fleetcast_placer_intents", "Placements of which nothing has been seen yet.", registry=self.registry
        )
        self.view_age_s = Gauge(
            "fleetcast_placer_view_age_seconds", "Fleet time since the board decided upon.", registry=self.registry
        )
        self.state_doubts = Gauge(
            "fleetcast_placer_state_doubts",
            "Parts of the state that lack what another has seen; nothing is placed while there is one.",
            registry=self.registry,
        )
        self.start_coverage = Gauge(
            "fleetcast_start_coverage_ratio",
            "Share of the last requests (up to 1,000) that started by the quantile that they were told.",
            ["quantile"],
            registry=self.registry,
        )
        self.start_scored = Gauge(
            "fleetcast_start_scored_requests", "Requests that this coverage is of.", registry=self.registry
        )
        self.fragments = Gauge(
            "fleetcast_fragmentation_gpus",
            "GPUs that are free, that the present demand cannot use (lost), and that lack CPUs (stranded).",
            ["pool", "kind"],
            registry=self.registry,
        )
        self.largest_gang = Gauge(
            "fleetcast_largest_gang_gpus",
            "GPUs of the largest gang that fits now into one domain of a level.",
            ["pool", "level"],
            registry=self.registry,
        )
        self.refused_requests = Counter(
            "fleetcast_placer_bad_requests", "Requests answered with a problem.", ["status"], registry=self.registry
        )

    def tell_fragments(self, pools: Sequence[PoolFragments]) -> None:
        """What is free in pieces; pools that are gone lose their series."""
        self.fragments.clear()
        self.largest_gang.clear()
        for row in pools:
            for kind, gpus in (("free", row.free_gpus), ("lost", row.lost_gpus), ("stranded", row.stranded_gpus)):
                if gpus is not None:
                    self.fragments.labels(row.pool, kind).set(gpus)
            for level, most in row.largest_gang.items():
                self.largest_gang.labels(row.pool, level).set(most)

    def observe(self, route: str, method: str, status: int, seconds: float) -> None:
        """Count an answered request, if it is a problem."""
        if status >= 400:
            self.refused_requests.labels(str(status)).inc()
