"""The placer's own Prometheus metrics."""

import math
from collections.abc import Mapping, Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector

from fleetcast.models.risk.record import Calibration
from fleetcast.models.start_record import LOOKS_S, StartRecord
from fleetcast.placement.ahead.start_time import LEVELS
from fleetcast.placement.fragmentation import PoolFragments
from fleetcast.placement.queues.showback import ChargeSum
from fleetcast.placement.queues.tree import ANY
from fleetcast.service.answers.queues import QueueState

QUEUES_SHOWN = 50  # the largest, users among them
SECONDS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)


class PlacerMetrics:
    """The placer's metrics. Each instance has its own registry, so one process can have several."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        ProcessCollector(namespace="fleetcast_placer", registry=self.registry)
        self._add_requests()
        self._add_state_metrics()
        self.starts = StartTimeMetrics(self.registry)
        self.queues = QueueMetrics(self.registry)
        self.actions = ActionMetrics(self.registry)

    def _add_requests(self) -> None:
        """Add the metrics of requests, decisions and connections."""
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
        self.refused_connections = Counter(
            "fleetcast_placer_refused_connections",
            "Connections closed by the placer: too many (503), too slow, no HTTP, or displaced.",
            ["status"],
            registry=self.registry,
        )
        self.refused_requests = Counter(
            "fleetcast_placer_bad_requests", "Requests answered with a problem.", ["status"], registry=self.registry
        )

    def _add_state_metrics(self) -> None:
        """Add the metrics of the queue, the promises and the placer's own state."""
        self.queue_length = Gauge("fleetcast_placer_queue_length", "Requests that wait.", registry=self.registry)
        self.intents = Gauge(
            "fleetcast_placer_intents", "Placements of which nothing has been seen yet.", registry=self.registry
        )
        self.paused = Gauge(
            "fleetcast_placer_paused_promises",
            "Promises whose time is over, and that wait for a source of starts, or whose own start was refused.",
            ["source"],
            registry=self.registry,
        )
        self._paused: Mapping[str, int] = {}
        self.view_age_s = Gauge(
            "fleetcast_placer_view_age_seconds", "Fleet time since the board decided upon.", registry=self.registry
        )
        self.state_doubts = Gauge(
            "fleetcast_placer_state_doubts",
            "Parts of the state that lack what another has seen; nothing is placed while there is one.",
            registry=self.registry,
        )
        self.audit_position = Gauge(
            "fleetcast_placer_audit_position", "Number of the newest line of the audit trail.", registry=self.registry
        )
        self.failures = Counter(
            "fleetcast_placer_failures",
            "Failures of the placer's own code and of plugins, by part. The placer goes on.",
            ["part"],
            registry=self.registry,
        )
        self.queues_refused = Gauge(
            "fleetcast_placer_queues_refused",
            "1 while the file of queues does not serve: the tree before it does, or one line.",
            registry=self.registry,
        )

    def set_paused_promises(self, paused: Mapping[str, int]) -> None:
        """Set the number of paused promises for each source that they wait for.

        A source without paused promises loses its series.
        """
        if paused == self._paused:
            return
        self._paused = dict(paused)
        self.paused.clear()
        for source, count in paused.items():
            self.paused.labels(source).set(count)

    def count_refused_connection(self, reason: int | str) -> None:
        """Count a connection that the placer refused or closed, under its status or reason."""
        self.refused_connections.labels(str(reason)).inc()

    def observe(self, route: str, method: str, status: int, seconds: float) -> None:
        """Count an answered request if its status is 400 or higher."""
        if status >= 400:
            self.refused_requests.labels(str(status)).inc()


AGENTS = "agents"  # the executor that every placer has


class ActionMetrics:
    """The metrics of actions on running jobs, and of the switches that stop them."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.open = Gauge(
            "fleetcast_actions_open", "Open actions by kind and state.", ["kind", "state"], registry=registry
        )
        self.oldest_s = Gauge(
            "fleetcast_action_oldest_seconds",
            "Fleet time since the oldest action that is open was sent, by executor.",
            ["executor"],
            registry=registry,
        )
        self.failed = Counter(
            "fleetcast_actions_failed",
            "Actions that an executor refused or let expire, or that telemetry contradicted.",
            ["executor"],
            registry=registry,
        )
        self.proposed = Counter(
            "fleetcast_actions_proposed",
            "Actions that were proposed, by kind and reason. The reason names the step of recovery.",
            ["kind", "reason"],
            registry=registry,
        )
        self.notices = Counter(
            "fleetcast_action_notices",
            "Requests of the webhook of actions, by outcome: delivered, failed (a try), given_up (a notice).",
            ["outcome"],
            registry=registry,
        )
        self.failed.labels(AGENTS)
        self.oldest_s.labels(AGENTS)
        self.paused = Gauge("fleetcast_actions_paused", "1 while a person has paused all actions.", registry=registry)
        self.breaker = Gauge(
            "fleetcast_actions_breaker_open", "1 while the circuit breaker of actions is open.", registry=registry
        )
        self._add_foreseen(registry)

    def _add_foreseen(self, registry: CollectorRegistry) -> None:
        """Add the metrics of advice to replace nodes before they fail."""
        self.foreseen_matured = Gauge(
            "fleetcast_foreseen_matured_swaps",
            "Swaps of nodes that were advised before a failure, and whose horizon is over.",
            registry=registry,
        )
        self.foreseen_mean = Gauge(
            "fleetcast_foreseen_mean_forecast_ratio",
            "Mean probability of a failure with which these swaps were advised.",
            registry=registry,
        )
        self.foreseen_observed = Gauge(
            "fleetcast_foreseen_observed_ratio",
            "Share of these swaps whose node was lost within the horizon.",
            registry=registry,
        )

    def set_foreseen(self, calibration: Calibration) -> None:
        """Set the calibration of foreseen failures. Its ratios are NaN before any advice has matured."""
        self.foreseen_matured.set(calibration.matured)
        self.foreseen_mean.set(math.nan if calibration.mean_p is None else calibration.mean_p)
        self.foreseen_observed.set(math.nan if calibration.observed is None else calibration.observed)

    def set_open(self, counts: Mapping[tuple[str, str], int], oldest_s: Mapping[str, float]) -> None:
        """Set the counts of open actions, and the age of the oldest of each executor.

        The executor `agents` has an age of 0 without open actions, so that an alert can tell 0 from no answer.
        """
        self.open.clear()
        for key, count in counts.items():
            self.open.labels(*key).set(count)
        self.oldest_s.clear()
        for executor, age_s in {AGENTS: 0.0, **oldest_s}.items():
            self.oldest_s.labels(executor).set(age_s)


class StartTimeMetrics:
    """The metrics of issued start times: their age, and how often requests started by them."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.coverage = Gauge(
            "fleetcast_start_coverage_ratio",
            "Share of the last requests that started by the quantile shown, of those whose quantile has passed.",
            ["quantile"],
            registry=registry,
        )
        self.scored = Gauge(
            "fleetcast_start_scored_requests",
            "Requests with a start time of which at least the p10 has passed.",
            registry=registry,
        )
        self.age_s = Gauge(
            "fleetcast_start_times_age_seconds",
            "Fleet time since start times and room were sampled.",
            registry=registry,
        )
        self.age_coverage = Gauge(
            "fleetcast_start_age_coverage_ratio",
            "Share of requests that started by the quantile shown when they had waited so long since the first answer.",
            ["age_s", "quantile"],
            registry=registry,
        )
        self.age_scored = Gauge(
            "fleetcast_start_age_scored_requests",
            "Requests whose quantile shown at that age has passed.",
            ["age_s", "quantile"],
            registry=registry,
        )

    def set_record(self, record: StartRecord) -> None:
        """Set, for each quantile, the share of requests that started by it."""
        judgement = record.evaluate_answers()
        self.scored.set(judgement.all_ages.requests[0])
        for level, share in zip(LEVELS.values(), judgement.all_ages.shares.tolist(), strict=True):
            self.coverage.labels(f"{level:g}").set(share)
        for age_s, at in zip(LOOKS_S, judgement.by_age, strict=True):
            for level, share, requests in zip(LEVELS.values(), at.shares.tolist(), at.requests.tolist(), strict=True):
                self.age_coverage.labels(f"{age_s:g}", f"{level:g}").set(share)
                self.age_scored.labels(f"{age_s:g}", f"{level:g}").set(requests)


class QueueMetrics:
    """The metrics of fragmentation, queues and charges."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.fragments = Gauge(
            "fleetcast_fragmentation_gpus",
            "GPUs that are free, that the present demand cannot use (lost), and that lack CPUs (stranded).",
            ["pool", "kind"],
            registry=registry,
        )
        self.largest_gang = Gauge(
            "fleetcast_largest_gang_gpus",
            "GPUs of the largest gang that fits now into one domain of a level.",
            ["pool", "level"],
            registry=registry,
        )
        self.queue_gpus = Gauge(
            "fleetcast_queue_stand_gpus",
            "GPUs of a queue: held by its jobs or promised to them, guaranteed, its limit, borrowed beyond its "
            "guarantee, lent of it, waited for.",
            ["queue", "kind"],
            registry=registry,
        )
        self.queue_share = Gauge(
            "fleetcast_queue_share", "What the order counts for a queue; the least is next.", ["queue"],
            registry=registry,
        )  # fmt: skip
        self.charged = Gauge(
            "fleetcast_charged_gpu_seconds",
            "GPU-seconds of a queue within the last day: granted, used, idle, lost to failures, preempted, waited for.",
            ["queue", "kind"],
            registry=registry,
        )
        self.charged_money = Gauge(
            "fleetcast_charged_money",
            "What the last day costs a queue, by [prices].",
            ["queue"],
            registry=registry,
        )

    def set_fragments(self, pools: Sequence[PoolFragments]) -> None:
        """Set the metrics of fragmentation. Pools that no longer exist lose their series."""
        self.fragments.clear()
        self.largest_gang.clear()
        for row in pools:
            for kind, gpus in (("free", row.free_gpus), ("lost", row.lost_gpus), ("stranded", row.stranded_gpus)):
                if gpus is not None:
                    self.fragments.labels(row.pool, kind).set(gpus)
            for level, most in row.largest_gang.items():
                self.largest_gang.labels(row.pool, level).set(most)

    def set_queues(self, rows: Sequence[QueueState]) -> None:
        """Set the state of the queues.

        A queue loses its series if it no longer exists or is not among the largest.
        """
        self.queue_gpus.clear()
        self.queue_share.clear()
        size = {row.queue: max(row.held.get(ANY, 0.0), row.guaranteed.get(ANY, 0.0)) for row in rows}
        for row in sorted(rows, key=lambda row: (-size[row.queue], row.queue))[:QUEUES_SHOWN]:
            values = {"held": row.held, "guaranteed": row.guaranteed, "limit": row.limit, "borrowed": row.borrowed}
            for kind, amounts in {**values, "lent": row.lent, "waiting": {ANY: row.waiting_gpus}}.items():
                if ANY in amounts:
                    self.queue_gpus.labels(row.queue, kind).set(amounts[ANY])
            self.queue_share.labels(row.queue).set(row.share)

    def set_charges(self, day: Mapping[str, ChargeSum]) -> None:
        """Set the metrics of the last day's charges, by queue."""
        self.charged.clear()
        self.charged_money.clear()
        for name in sorted(day, key=lambda name: (-day[name].granted, name))[:QUEUES_SHOWN]:
            row = day[name]
            values = {"granted": row.granted, "lost": row.lost, "preempted": row.preempted, "waited": row.waited}
            if row.seen:
                values |= {"used": row.used, "idle": max(0.0, row.seen - row.used)}
            for kind, gpu_s in values.items():
                self.charged.labels(name, kind).set(gpu_s)
            if row.money is not None:
                self.charged_money.labels(name).set(row.money)
