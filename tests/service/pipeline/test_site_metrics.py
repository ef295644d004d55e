"""The page of what a site is judged by: waits by queue and class, use by pool and model, failures by category."""

from fleetcast.fleet.events import Failed, Finished, Preempted, Started, Submitted
from fleetcast.fleet.jobs import JobAttempt
from fleetcast.fleet.requests import RankPlacement
from fleetcast.fleet.topology import NodeSpec, Topology
from fleetcast.service.pipeline import site_metrics
from fleetcast.service.pipeline.fleet_metrics import QUEUES_SHOWN
from fleetcast.service.pipeline.gpu_states import compute_gpu_states
from fleetcast.service.pipeline.site_metrics import make_site_page
from fleetcast.service.pipeline.tick import Tick
from tests.service.pipeline.test_fleet_metrics import NOW_MS, Crowd, make_tick, of, series
from tests.service.ticks import tick_of

MINUTE_MS = 60_000


def attempt(job: str, queue: str, waited_s: int, started_ms: int, class_: str = "training") -> JobAttempt:
    row = JobAttempt(job, 1)
    submitted_ms = started_ms - 1000 * waited_s
    row.fold(Submitted(job=job, sequence=0, time_ms=submitted_ms, queue=queue, class_=class_))  # type: ignore[arg-type]
    row.fold(Started(job=job, sequence=1, time_ms=started_ms, ranks=(RankPlacement(0, "n1", (0, 1)),)))
    return row


def ended(job: str, event: type, minutes_ago: int, **fields: str) -> JobAttempt:
    row = attempt(job, "q", 5, NOW_MS - 3 * 60 * MINUTE_MS)
    row.fold(event(job=job, sequence=2, time_ms=NOW_MS - minutes_ago * MINUTE_MS, **fields))
    return row


def tick(running: list[JobAttempt], over: list[JobAttempt]) -> Tick:
    nodes = [NodeSpec("n1", 8, "H100", pool="train"), NodeSpec("n2", 4, "A100", pool="train")]
    return tick_of(NOW_MS, Topology.build(nodes), make_tick(Crowd(nodes=2, jobs=0)).fleet, running, ended=over)


def test_waits_are_told_by_queue_and_class() -> None:
    lately, long_ago = NOW_MS - MINUTE_MS, NOW_MS - 120 * MINUTE_MS
    rows = [attempt("a", "q", 60, lately), attempt("b", "q", 180, lately), attempt("c", "q", 10, lately, "inference")]
    found = series(make_site_page(tick([*rows, attempt("old", "q", 9, long_ago)], [])))
    waits = of(found, "class_started_wait_seconds", "queue", "class", "quantile")
    assert (waits["q", "training", "0.5"], waits["q", "training", "1"]) == (120, 180)
    assert waits["q", "inference", "0.5"] == 10


def test_gpus_are_told_by_pool_and_model() -> None:
    found = series(make_site_page(tick([attempt("a", "q", 1, NOW_MS - 1)], [])))
    gpus = of(found, "pool_gpus", "pool", "gpu_model", "state")
    assert (gpus["train", "H100", "running"], gpus["train", "H100", "free"], gpus["train", "A100", "free"]) == (2, 6, 4)
    assert of(found, "pool_gpu_utilization_ratio", "pool") == {}  # no telemetry: unknown is no zero


def test_ends_within_the_last_hour_are_told_by_category_and_outcome() -> None:
    over = [
        ended("a", Failed, 10, category="hardware"),
        ended("b", Failed, 20, category="out_of_memory"),
        ended("c", Failed, 70, category="out_of_memory"),
        ended("d", Finished, 5),
        ended("e", Preempted, 6),
    ]
    found = series(make_site_page(tick([], over)))
    failed = {category: count for (category,), count in of(found, "failed_jobs", "category").items() if count}
    assert failed == {"hardware": 1, "out_of_memory": 1}
    assert of(found, "ended_jobs", "outcome") == {("finished",): 1, ("failed",): 2, ("preempted",): 1}


def test_the_series_stay_bounded() -> None:
    crowd = Crowd(nodes=1000, queues=500, jobs=2000)
    found = series(make_site_page(make_tick(crowd)))
    waits = of(found, "class_started_wait_seconds", "queue", "quantile")
    assert len({queue for queue, _ in waits}) == QUEUES_SHOWN + 1
    nodes = [NodeSpec(f"n{number}", 8, f"m{number}") for number in range(200)]
    fleet = make_tick(Crowd(nodes=200, jobs=0)).fleet
    gpus = of(series(make_site_page(tick_of(NOW_MS, Topology.build(nodes), fleet))), "pool_gpus", "gpu_model", "state")
    assert len(gpus) == len(compute_gpu_states(make_tick(crowd))) * (site_metrics.KINDS_SHOWN + 1)
    assert gpus["other", "free"] == 8 * (200 - site_metrics.KINDS_SHOWN)
