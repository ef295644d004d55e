"""Fingerprints of running jobs: from steps and phases where they are told, from telemetry where not."""

import asyncio
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from features.store import WindowStore
from fleet.clock import ManualClock
from fleet.entities import Entities
from fleet.events import Checkpoint, JobEvent, Phase, Started, Step, StepParts, Submitted
from fleet.metrics import metric_row
from fleet.requests import RankPlacement
from fleet.samples import EntityKind, SampleBatch
from fleet.topology import Level, NodeSpec, Topology
from ingest.source import Batch
from service import fingerprints
from service.api import create_app
from service.fingerprint_answers import Seen, episodes, fingerprint_of
from service.fingerprints import Fingerprints
from service.state import FleetState
from tests.service.api_world import Client, config, publish

NOW_MS = 1_760_000_000_000
INTERVAL_S = 15
SLOTS = 100


def world() -> FleetState:
    entities = Entities()
    for node in ("n1", "n2"):
        for gpu in range(8):
            entities.of_node(EntityKind.GPU, node, gpu)
    racks = {Level.RACK: "r1"}
    nodes = [NodeSpec(name, gpus=8, gpu_model="NVIDIA H100 80GB HBM3", domains=racks) for name in ("n1", "n2")]
    topology = Topology.build(nodes)
    return FleetState(entities, WindowStore(entities, interval_s=INTERVAL_S), topology)


def feed(state: FleetState, metric: str, values: np.ndarray) -> None:
    """(slot, GPU) readings that end now."""
    slots, gpus = values.shape
    times = NOW_MS - (slots - 1 - np.arange(slots)) * INTERVAL_S * 1000
    batch = SampleBatch(
        EntityKind.GPU,
        np.full(slots * gpus, metric_row(EntityKind.GPU, metric), np.int16),
        np.tile(np.arange(gpus, dtype=np.int32), slots),
        np.repeat(times, gpus),
        values.ravel().astype(np.float64),
    )
    for at in range(0, len(batch), gpus):
        state.store.write(batch.where(np.arange(len(batch)) // gpus == at // gpus), int(times[at // gpus]))


def tell(state: FleetState, *events: JobEvent) -> None:
    state.apply(Batch(events=events), NOW_MS)


def start(job: str, node: str, *gpus: int, **more: Any) -> tuple[JobEvent, JobEvent]:
    begin_ms = NOW_MS - 3_600_000
    return (
        Submitted(job=job, sequence=1, time_ms=begin_ms, **more),
        Started(job=job, sequence=2, time_ms=begin_ms, ranks=(RankPlacement(rank=0, node=node, gpus=gpus),)),
    )


def looked(state: FleetState) -> tuple[dict[str, Any], dict[str, Any]]:
    """job -> fingerprint, job -> use."""
    prints = Fingerprints(ManualClock(NOW_MS))
    for _ in state.jobs.running():  # a pass may end after the first one: its budget is wall time
        asyncio.run(prints.look(state))
    body = {section.name: msgspec.json.decode(bytes(section.data)) for section in prints.sections}
    return body["doc.fingerprints"], {row["job"]: row for row in body["doc.utilisation"]}


def test_a_job_that_tells_steps_and_checkpoints() -> None:
    state = world()
    tell(state, *start("train", "n1", 0, 1, labels={"flops_per_token": "1e9"}))
    minute = 60_000
    for number in range(6):
        at = NOW_MS - (55 - 10 * number) * minute
        tell(
            state,
            Checkpoint(job="train", sequence=10 + 2 * number, time_ms=at, edge="begin"),
            Checkpoint(job="train", sequence=11 + 2 * number, time_ms=at + 30_000, edge="end"),
        )
    parts = StepParts(compute=1.0, communication=0.7, data=0.1)
    for number in range(5):
        tell(state, Step(job="train", sequence=50 + number, time_ms=NOW_MS - 9000 + 2000 * number, step=number,
                         duration_s=2.0, parts=parts, tokens=1_978_000))  # fmt: skip
    tell(state, Phase(job="train", sequence=60, time_ms=NOW_MS - 5 * minute, name="steady"))
    found, use = looked(state)
    mark = found["train"]
    assert (mark["period_s"], mark["period_basis"], mark["phase"]) == (2.0, "steps", "steady")
    assert mark["next_checkpoint_ms"] == dict.fromkeys(("p10", "p50", "p90"), NOW_MS + 5 * minute)
    assert use["train"]["communication_share"] == pytest.approx(0.35)
    assert use["train"]["mfu"] == pytest.approx(0.5)
    assert use["train"]["verdict"] == "unknown"


def test_a_job_that_only_telemetry_tells_of() -> None:
    state = world()
    tell(state, *start("silent", "n1", 0, 1, 2, 3), *start("held", "n1", 4, 5, **{"class_": "interactive"}))
    slot = np.arange(SLOTS)
    busy = np.where(slot % 8 < 5, 0.9, 0.1)[:, None] * np.array([1, 1, 1, 1, 0, 0, 0, 0])
    feed(state, "sm_active", busy)
    feed(state, "tensor_active", busy * 0.5)
    feed(state, "gpu_util", np.broadcast_to([1, 1, 1, 1, 0, 0, 0, 0], busy.shape))
    feed(state, "fb_used_bytes", np.broadcast_to(np.array([40, 40, 40, 40, 20, 20, 0, 0]) * 2.0**30, busy.shape))
    feed(state, "power_w", 100 + 500 * busy)
    found, use = looked(state)
    assert found["silent"]["period_s"] == pytest.approx(8 * INTERVAL_S, rel=0.02)
    assert (found["silent"]["class"], found["silent"]["phase"]) == ("training", "steady")
    assert found["silent"]["next_checkpoint_ms"] is None
    assert {row["metric"] for row in found["silent"]["expected"]} == {"power_w"}
    assert found["held"]["class"] == "idle"
    assert found["held"]["period_s"] is None
    assert "swings" in found["held"]["period_reason"]
    assert (use["silent"]["verdict"], use["silent"]["busy"]) == ("works", 1.0)
    assert use["held"]["held_gpu_memory_gib"] == pytest.approx(40)
    assert use["held"]["idle_s"] >= (SLOTS - 5) * INTERVAL_S
    assert use["held"]["verdict"] == "idle"


def test_jobs_together_are_the_load_of_a_rack_and_of_a_store() -> None:
    state = world()
    for number, job in enumerate(("a", "b")):
        tell(state, *start(job, "n1", number))
        for turn in range(4):
            at = NOW_MS - 1000 - 600_000 * (4 - turn) + 120_000
            begin = Checkpoint(job=job, sequence=10 + 2 * turn, time_ms=at, edge="begin", bytes=10**11, target="s3")
            tell(state, begin, Checkpoint(job=job, sequence=11 + 2 * turn, time_ms=at + 50_000, edge="end"))
    feed(state, "power_w", np.full((SLOTS, 8), 600.0))
    prints = Fingerprints(ManualClock(NOW_MS))
    for _ in range(2):
        asyncio.run(prints.look(state))
    body = {section.name: msgspec.json.decode(bytes(section.data)) for section in prints.sections}
    rows = {(row["domain_kind"], row["domain"]): row for row in body["doc.spikes"]}
    assert (rows["rack", "r1"]["p90"], rows["rack", "r1"]["jobs"]) == (1200.0, 2)
    assert rows["storage", "s3"]["p90"] == pytest.approx(2 * 10**11 / 50)
    assert 60_000 < rows["storage", "s3"]["peak_ms"] - NOW_MS < 240_000


def test_a_few_jobs_a_pass_the_longest_unseen_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fingerprints, "MOST_JOBS", 2)
    monkeypatch.setattr(fingerprints, "BUDGET_WALL_S", 60.0)
    state = world()
    for number in range(3):
        tell(state, *start(f"j{number}", "n1", number))
    prints = Fingerprints(ManualClock(NOW_MS))
    seen = []
    for _ in range(3):
        asyncio.run(prints.look(state))
        seen.append([job for job, _ in prints._answers])
    assert seen == [["j0", "j1"], ["j1", "j2", "j0"], ["j0", "j1", "j2"]]


def test_a_job_whose_numbers_are_odd_is_unknown_and_the_others_go_on(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def picky(seen: Seen) -> dict[str, Any]:
        if seen.attempt.job == "odd" and seen.window is not None:
            raise IndexError("list index out of range")
        return fingerprint_of(seen)

    monkeypatch.setattr(fingerprints, "fingerprint_of", picky)
    state = world()
    tell(state, *start("odd", "n1", 0, 1), *start("fine", "n1", 2))
    feed(state, "power_w", np.full((SLOTS, 8), 600.0))
    prints = Fingerprints(ManualClock(NOW_MS))
    for _ in range(4):
        asyncio.run(prints.look(state))
    body = {section.name: msgspec.json.decode(bytes(section.data)) for section in prints.sections}
    assert body["doc.fingerprints"]["odd"]["period_s"] is None
    assert "list index out of range" in body["doc.fingerprints"]["odd"]["period_reason"]
    assert body["doc.fingerprints"]["fine"]["expected"]
    assert {row["job"]: row["gpus"] for row in body["doc.utilisation"]} == {"odd": 2, "fine": 1}
    assert state.counts.bad == {"odd_fingerprint": 1}
    assert len(caplog.records) == 1


def test_ranks_that_begin_one_checkpoint_begin_one() -> None:
    edges = [
        Checkpoint(job="a", sequence=at, time_ms=at, edge="end" if at in (9000, 9005, 70_000) else "begin")
        for at in (0, 5, 9000, 9005, 60_000, 70_000)
    ]
    assert episodes(edges) == ([0, 60_000], [9.0, 10.0])


def test_the_routes_answer_for_jobs_seen_unseen_and_unknown(tmp_path: Path) -> None:
    publish(tmp_path)
    with Client(create_app(config(tmp_path), ManualClock(NOW_MS))) as client:
        assert client.get("/v1/jobs/team/a/fingerprint").json()["period_s"] == 1.5
        waits = client.get("/v1/jobs/b/fingerprint").json()
        assert waits["period_s"] is None
        assert "queued" in waits["period_reason"]
        assert client.get("/v1/jobs/none/fingerprint").status_code == 404
        rows = client.get("/v1/utilisation").json()["rows"]
        assert [row["job"] for row in rows] == ["d", "team/a"]
        only = client.get("/v1/utilisation?verdict=works").json()["rows"]
        assert [row["job"] for row in only] == ["team/a"]
        assert client.get("/v1/utilisation?verdict=lazy").status_code == 422
        rows = client.get("/v1/spikes?domain_kind=rack").json()["rows"]
        assert rows == [{"domain_kind": "rack", "domain": "r01"}]
