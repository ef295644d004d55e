"""Metrics of jobs: what the alerts rest on, bounded, and made no more often than they must be."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from msgspec import structs
from prometheus_client.parser import text_string_to_metric_families

from fleetcast.fleet.events import Started
from fleetcast.fleet.jobs import JobAttempt
from fleetcast.fleet.topology import NodeSpec, Topology
from fleetcast.models.jobs.checkpointing import make_checkpoint_plan
from fleetcast.models.risk.scores import RISK_HORIZONS_S, RISK_KINDS
from fleetcast.service.answers.fingerprints import Fingerprint
from fleetcast.service.board.board import Section
from fleetcast.service.pipeline import job_metrics
from fleetcast.service.pipeline.job_metrics import (
    EXAMINED,
    GANGS_SHOWN,
    MADE_EVERY_MS,
    RENEWED,
    ROWS_SHOWN,
    CheckpointInterval,
    JobMetrics,
    RenewedIntervals,
    make_job_page,
)
from fleetcast.service.pipeline.publish import encode
from fleetcast.service.pipeline.tick import Tick
from tests.service.pipeline.test_node_past import NODES, NOW_MS, tick

NEVER = Fingerprint(
    job="", attempt=1, as_of_ms=0, class_told="", unheard_reason="", period_reason="", checkpoint_cost_s=30.0
)
CHECKPOINTS = structs.replace(NEVER, checkpoint_every_s=600.0)


def gang(job: str, nodes: tuple[str, ...] = NODES) -> JobAttempt:
    row = JobAttempt(job, 1)
    row.fold(Started(job=job, sequence=1, time_ms=NOW_MS, nodes=nodes))
    return row


def read(page: bytes) -> dict[str, list[tuple[dict[str, str], float]]]:
    return {
        family.name.removeprefix("fleetcast_"): [(sample.labels, sample.value) for sample in family.samples]
        for family in text_string_to_metric_families(page.decode())
    }


def use(job: str, verdict: str, gpus: int = 8, idle_s: float | None = 0.0) -> dict[str, Any]:
    return {"job": job, "verdict": verdict, "gpus": gpus, "idle_s": idle_s}


def spike(domain: str, p90: float, capacity: float | None) -> dict[str, Any]:
    return {"domain_kind": "rack", "domain": domain, "quantity": "power_w", "p90": p90, "capacity": capacity}


def test_a_gang_with_a_risky_node_names_it() -> None:
    rows = read(make_job_page(tick(p=0.4, running=(gang("a"),)), {}, {}))["gang_interruption_probability"]
    [(labels, p)] = rows
    assert labels == {"job_id": "a", "weakest": "n1", "horizon": "1h"}
    assert 0.4 < p < 0.5


def test_gangs_at_the_highest_risk_are_shown_and_of_equal_ones_the_largest() -> None:
    many = GANGS_SHOWN + 3
    names = [f"n{number}" for number in range(4 * many)]
    sizes = {0: 2, many - 2: 2, many - 1: 4}  # the others are gangs of three
    hosts = [tuple(names[4 * number : 4 * number + sizes.get(number, 3)]) for number in range(many)]
    jobs = [f"j{number:02d}" for number in range(many)]
    values = np.zeros((len(RISK_KINDS), len(RISK_HORIZONS_S), len(names)))
    values[:, :, 1] = 0.9  # of the first
    values[:, :, names.index(hosts[-2][1])] = np.nan  # as usual: more than nothing
    world = tick(running=tuple(gang(job, nodes) for job, nodes in zip(jobs, hosts, strict=True)))
    topology = Topology.build([NodeSpec(name, 8) for name in names])
    fleet = replace(world.fleet, risk=replace(world.fleet.risk, values=values))
    page = read(make_job_page(replace(world, topology=topology, fleet=fleet), {}, {}))
    shown = [labels["job_id"] for labels, _ in page["gang_interruption_probability"]]
    assert shown == [jobs[0], jobs[-2], jobs[-1], *jobs[1:-5]]
    assert page["job_metrics_left_out"][0] == ({"what": "gangs"}, 3)


def told_by(prints: dict[str, Fingerprint]) -> Callable[[JobAttempt], Fingerprint | None]:
    return lambda attempt: prints.get(attempt.job)


def intervals(at: Tick, prints: dict[str, Fingerprint]) -> dict[tuple[str, int], CheckpointInterval]:
    """Once the turn of all has come."""
    known = RenewedIntervals()
    for _ in range(2 + len(at.events.running) // RENEWED):
        known.renew(at, told_by(prints))
    return known.of


def test_a_checkpoint_interval_is_told_beside_the_best_one() -> None:
    prints = {"a": CHECKPOINTS, "gone": CHECKPOINTS, "never": NEVER}
    at = tick(p=0.4, running=(gang("a"), gang("b"), gang("never")))
    page = read(make_job_page(at, {}, intervals(at, prints)))
    best_s = make_checkpoint_plan(
        30.0, 0.5108 + 0.01005 + 0.1 * 0.5
    ).interval_s  # of both nodes, and what their rack shares
    assert page["checkpoint_interval_ratio"] == [({"job_id": "a"}, pytest.approx(600.0 / best_s, rel=0.05))]
    [(_, lost)] = page["checkpoint_lost_time_ratio"]
    assert 0 < lost < 0.05


def test_a_tick_asks_for_the_fingerprints_of_a_bounded_number_of_jobs() -> None:
    asked: list[str] = []
    at, known = tick(running=tuple(gang(f"j{number}") for number in range(2 * EXAMINED))), RenewedIntervals()
    for _ in range(4):
        known.renew(at, lambda attempt: asked.append(attempt.job))
    assert len(asked) <= 3 * EXAMINED  # the first tick begins a turn
    assert set(asked) == {row.job for row in at.events.running}  # and all jobs have had theirs


def test_a_tick_looks_at_the_checkpoints_of_few_jobs_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    risk = job_metrics.compute_gang_risk
    monkeypatch.setattr(job_metrics, "compute_gang_risk", lambda *args: (asked.append(1), risk(*args))[1])
    many = tuple(gang(f"j{number}") for number in range(3 * RENEWED))
    prints = {row.job: CHECKPOINTS for row in many[::2]}
    known, at = RenewedIntervals(), tick(running=many)
    seen = []
    for _ in range(5):
        asked.clear()
        known.renew(at, told_by(prints))
        seen.append((len(asked), len(known.of)))
    half = len(prints) - RENEWED
    assert seen == [(0, 0), (RENEWED, RENEWED), (half, len(prints)), (RENEWED, len(prints)), (half, len(prints))]
    known.renew(tick(running=many[:2]), told_by({}))
    known.renew(tick(running=many[:2]), told_by({}))
    assert list(known.of) == [("j0", 1)]  # the others run no more, and it was not looked at anew


def test_sessions_that_do_nothing_are_told_with_what_they_hold() -> None:
    uses = [use("a", "works"), use("b", "abandoned", 2, 1800.0), use("c", "idle", 4, None), use("d", "new word")]
    page = read(make_job_page(tick(), {"doc.utilisation": uses}, {}))
    by_verdict = {labels["verdict"]: value for labels, value in page["job_use_gpus"]}
    assert by_verdict == by_verdict | {"works": 8, "abandoned": 2, "idle": 4, "unknown": 8}
    assert [labels["job_id"] for labels, _ in page["idle_job_gpus"]] == ["b", "c"]
    assert page["idle_job_seconds"] == [({"job_id": "b", "verdict": "abandoned"}, 1800.0)]


def test_a_peak_is_told_against_what_the_domain_can_take() -> None:
    page = read(
        make_job_page(
            tick(), {"doc.spikes": [spike("r1", 50.0, 100.0), spike("r2", 120.0, 100.0), spike("r3", 9, None)]}, {}
        )
    )
    assert [(labels["domain"], value) for labels, value in page["spike_load_ratio"]] == [("r2", 1.2), ("r1", 0.5)]


def test_many_jobs_stay_a_small_page() -> None:
    many = tuple(gang(f"j{number}") for number in range(200))
    told = {
        "doc.utilisation": [use(row.job, "idle", 1, 60.0) for row in many],
        "doc.spikes": [spike(row.job, 1.0, 2.0) for row in many],
    }
    at = tick(running=many)
    page = read(make_job_page(at, told, intervals(at, {row.job: CHECKPOINTS for row in many})))
    left = {labels["what"]: value for labels, value in page["job_metrics_left_out"]}
    assert left == {
        "gangs": 200 - GANGS_SHOWN,
        **dict.fromkeys(("checkpoints", "idle_jobs", "spikes"), 200 - ROWS_SHOWN),
    }
    assert sum(map(len, page.values())) < 400


def test_the_page_is_made_once_a_minute() -> None:
    metrics, first = JobMetrics(), Section("doc.utilisation", encode([use("a", "idle")]), NOW_MS)
    page = metrics.renew_page(tick(0), [first], told_by({}))
    assert b'job_id="a"' in page
    assert metrics.renew_page(tick(1), [], told_by({})) is page
    late = replace(tick(0), now_ms=NOW_MS + MADE_EVERY_MS)
    assert b'job_id="a"' not in metrics.renew_page(late, [], told_by({}))
