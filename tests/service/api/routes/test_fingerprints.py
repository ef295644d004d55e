"""Fingerprints of running jobs: from steps and phases where they are told, from telemetry where not."""

import asyncio
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from fleetcast.features import job_window
from fleetcast.features.store import WindowStore
from fleetcast.fleet.clock import ManualClock
from fleetcast.fleet.entities import Entities
from fleetcast.fleet.events import Checkpoint, JobEvent, Phase, Started, Step, StepParts, Submitted
from fleetcast.fleet.job_table import decode_job, encode_job
from fleetcast.fleet.metrics import find_metric_row
from fleetcast.fleet.requests import RankPlacement
from fleetcast.fleet.samples import EntityKind, SampleBatch
from fleetcast.fleet.topology import Level, NodeSpec, Topology
from fleetcast.ingest.source import Batch
from fleetcast.service.answers.fingerprints import Fingerprint
from fleetcast.service.api.app import create_app
from fleetcast.service.pipeline.jobs import fingerprints
from fleetcast.service.pipeline.jobs.fingerprint_answers import JobCopy, make_fingerprint
from fleetcast.service.pipeline.jobs.fingerprints import Fingerprints
from fleetcast.service.pipeline.state import FleetState
from tests.service.api_world import Client, config, publish

NOW_MS = 1_760_000_000_000
INTERVAL_S = 15
SLOTS = 100


def world(interval_s: int = INTERVAL_S) -> FleetState:
    entities = Entities()
    for node in ("n1", "n2"):
        for gpu in range(8):
            entities.add_to_node(EntityKind.GPU, node, gpu)
    racks = {Level.RACK: "r1"}
    nodes = [NodeSpec(name, gpus=8, gpu_model="NVIDIA H100 80GB HBM3", domains=racks) for name in ("n1", "n2")]
    topology = Topology.build(nodes)
    return FleetState(entities, WindowStore(entities, interval_s=interval_s), topology)


def cache(state: FleetState, metric: str, values: np.ndarray, kind: EntityKind = EntityKind.GPU) -> None:
    """(slot, GPU) readings that end now."""
    slots, gpus = values.shape
    times = NOW_MS - (slots - 1 - np.arange(slots)) * INTERVAL_S * 1000
    batch = SampleBatch(
        kind,
        np.full(slots * gpus, find_metric_row(kind, metric), np.int16),
        np.tile(np.arange(gpus, dtype=np.int32), slots),
        np.repeat(times, gpus),
        values.ravel().astype(np.float64),
    )
    for at in range(0, len(batch), gpus):
        state.store.write(batch.select_samples(np.arange(len(batch)) // gpus == at // gpus), int(times[at // gpus]))


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
    for _ in state.jobs.list_running():  # a pass may end after its first slice: its budget is time
        asyncio.run(prints.run_pass(state))
    body = {section.name: msgspec.json.decode(bytes(section.data)) for section in prints.latest}
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
    assert mark["last_checkpoint_ms"] == NOW_MS - 5 * minute
    assert (mark["class"], mark["class_told"], mark["looked_ms"]) == (None, "training", NOW_MS)
    assert use["train"]["communication_share"] == pytest.approx(0.35)
    assert use["train"]["mfu"] == pytest.approx(0.5)
    assert use["train"]["verdict"] == "unknown"


def test_steps_without_a_time_are_no_period_and_a_checkpoint_that_still_writes_is_not_the_last() -> None:
    state = world()
    tell(state, *start("train", "n1", 0, 1))
    for number in range(40):
        at = NOW_MS - 2000 * (40 - number)
        tell(state, Step(job="train", sequence=50 + number, time_ms=at, step=number, duration_s=0.0))
    for at, edge in ((60, "begin"), (59, "end"), (2, "begin")):
        time_ms = NOW_MS - at * 60_000
        tell(state, msgspec.convert({"type": "checkpoint", "job": "train", "sequence": 200 - at, "time_ms": time_ms,
                                     "edge": edge}, Checkpoint))  # fmt: skip
    mark = looked(state)[0]["train"]
    assert (mark["period_s"], mark["period_basis"]) == (None, None)
    assert "steps are reported to take 0 s" in mark["period_reason"]
    assert mark["last_checkpoint_ms"] == NOW_MS - 60 * 60_000


def test_a_job_that_only_telemetry_tells_of() -> None:
    state = world()
    tell(state, *start("silent", "n1", 0, 1, 2, 3), *start("held", "n1", 4, 5, **{"class_": "interactive"}))
    slot = np.arange(SLOTS)
    busy = np.where(slot % 8 < 5, 0.9, 0.1)[:, None] * np.array([1, 1, 1, 1, 0, 0, 0, 0])
    cache(state, "sm_active", busy)
    cache(state, "tensor_active", busy * 0.5)
    cache(state, "gpu_util", np.broadcast_to([1, 1, 1, 1, 0, 0, 0, 0], busy.shape))
    cache(state, "fb_used_bytes", np.broadcast_to(np.array([40, 40, 40, 40, 20, 20, 0, 0]) * 2.0**30, busy.shape))
    cache(state, "power_w", 100 + 500 * busy)
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
    cache(state, "power_w", np.full((SLOTS, 8), 600.0))
    prints = Fingerprints(ManualClock(NOW_MS))
    for _ in range(2):
        asyncio.run(prints.run_pass(state))
    body = {section.name: msgspec.json.decode(bytes(section.data)) for section in prints.latest}
    rows = {(row["domain_kind"], row["domain"]): row for row in body["doc.spikes"]}
    assert (rows["rack", "r1"]["p90"], rows["rack", "r1"]["jobs"]) == (1200.0, 2)
    assert rows["storage", "s3"]["p90"] == pytest.approx(2 * 10**11 / 50)
    assert 60_000 < rows["storage", "s3"]["peak_ms"] - NOW_MS < 240_000


def test_a_slice_a_pass_where_the_budget_is_spent_the_longest_unseen_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fingerprints, "SLICE_JOBS", 2)
    monkeypatch.setattr(fingerprints, "BUDGET_SHARE", 0.0)
    state = world()
    for number in range(3):
        tell(state, *start(f"j{number}", "n1", number))
    clock = ManualClock(NOW_MS)
    prints = Fingerprints(clock)
    seen, told = [], []
    for _ in range(4):
        asyncio.run(prints.run_pass(state))
        seen.append([job for job, _ in prints.answers])
        told.append(msgspec.json.decode(bytes(prints.latest[-1].data))["jobs_looked"])
        clock.advance(fingerprints.REFRESH_S)
    assert seen == [["j0", "j1"], ["j0", "j1"], ["j0", "j1", "j2"], ["j2", "j0", "j1"]]
    assert told == [2, 2, 3, 3]


def test_many_short_jobs_do_not_keep_a_known_one_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fingerprints, "SLICE_JOBS", 1)
    monkeypatch.setattr(fingerprints, "BUDGET_SHARE", 0.0)
    state, clock = world(), ManualClock(NOW_MS)
    tell(state, *start("long", "n1", 0))
    prints = Fingerprints(clock)
    for number in range(5):
        asyncio.run(prints.run_pass(state))
        tell(state, *(event for one in range(4) for event in start(f"short{number}.{one}", "n2", one)))
        clock.advance(fingerprints.REFRESH_S)
    looked_ms = {job: answers.use.looked_ms for (job, _), answers in prints.answers.items()}
    assert looked_ms["long"] == NOW_MS + 3000 * fingerprints.REFRESH_S  # of five passes the second and the fourth
    assert len(looked_ms) == 3


def test_all_jobs_are_looked_at_while_the_budget_lasts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fingerprints, "SLICE_JOBS", 2)
    monkeypatch.setattr(fingerprints, "BUDGET_SHARE", 1e6)
    state = world()
    for number in range(7):
        tell(state, *start(f"j{number}", "n1", number))
    prints = Fingerprints(ManualClock(NOW_MS))
    asyncio.run(prints.run_pass(state))
    assert len(prints.answers) == 7
    assert msgspec.json.decode(bytes(prints.latest[-1].data)) == {"jobs_looked": 7, "jobs_running": 7}


def test_a_clock_that_was_set_back_holds_up_neither_jobs_nor_spikes() -> None:
    state = world()
    tell(state, *start("a", "n1", 0, 1))
    cache(state, "power_w", np.full((SLOTS, 8), 600.0))
    clock = ManualClock(NOW_MS)
    prints = Fingerprints(clock)
    asyncio.run(prints.run_pass(state))
    clock.time_ms -= 3_600_000
    asyncio.run(prints.run_pass(state))
    body = {section.name: msgspec.json.decode(bytes(section.data)) for section in prints.latest}
    assert [row["looked_ms"] for row in body["doc.utilisation"]] == [clock.now_ms()]
    assert body["doc.spikes"]
    assert all(0 <= row["peak_ms"] - clock.now_ms() < 3_600_000 for row in body["doc.spikes"])


def test_a_large_job_is_copied_in_blocks_and_averaged_off_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job_window, "BLOCK_GPUS", 3)
    state = world()
    tell(state, *start("big", "n1", *range(8)))
    power = np.broadcast_to(np.arange(8) * 100.0, (SLOTS, 8))
    cache(state, "power_w", power)
    [job] = state.jobs.list_running()
    rows = job_window.find_job_rows(job, state.entities, {"n1": 8})

    async def copied() -> tuple[job_window.JobWindow | None, int]:
        task, turns = asyncio.ensure_future(job_window.copy_window(state.store, job, rows)), 0
        while not task.done():
            await asyncio.sleep(0)
            turns += 1
        return task.result(), turns

    window, turns = asyncio.run(copied())
    assert turns >= 3
    assert window is not None
    assert not {"gpu", "means", "heard"} & vars(window).keys()
    assert (window.reporting_gpus, window.is_representative) == (8, True)
    assert window.gpu[job_window.GPU_METRICS.index("power_w"), -1].tolist() == power[0].tolist()
    assert window.mean("power_w")[-1] == power[0].mean()


def test_of_a_job_that_is_mostly_unheard_of_nothing_is_said() -> None:
    state = world()
    tell(state, *start("half", "n1", 0, 1, 2, 3, labels={"flops_per_token": "1e9"}))
    tell(state, *start("most", "n2", *range(8)))
    power = np.full((SLOTS, 16), 600.0)
    power[:, [2, 3, 15]] = np.nan
    cache(state, "power_w", power)
    found, use = looked(state)
    assert (found["half"]["gpus_heard"], found["half"]["expected"], found["half"]["class_p"]) == (2, [], None)
    assert "only 2 of its 4 GPUs" in found["half"]["unheard_reason"]
    assert found["half"]["period_reason"] == found["half"]["unheard_reason"] == use["half"]["reason"]
    assert "reports its tokens" in use["half"]["mfu_reason"]
    assert found["most"]["unheard_reason"] == ""
    assert {row["p50"] for row in found["most"]["expected"]} == {8 * 600.0}  # seven are heard of


def test_a_periodic_job_is_expected_to_go_on_in_its_cycle() -> None:
    state = world()
    tell(state, *start("beat", "n1", 0, 1))
    swing = np.where(np.arange(SLOTS + 20) % 16 < 10, 600.0, 100.0)
    cache(state, "power_w", np.broadcast_to(swing[:SLOTS, None], (SLOTS, 16)))
    found, _ = looked(state)
    row = next(row for row in found["beat"]["expected"] if row["horizon_s"] == 300)
    assert (row["basis"], row["p50"]) == ("template", 2 * swing[SLOTS - 3 + 300 // INTERVAL_S])


def test_a_job_has_its_part_of_the_ports_of_a_node_that_it_shares() -> None:
    state = world()
    for port in range(2):
        state.entities.add_to_node(EntityKind.PORT, "n1", f"mlx5_{port}", 1)
    tell(state, *start("quarter", "n1", 0, 1), *start("whole", "n2", *range(8)))
    cache(state, "power_w", np.full((SLOTS, 16), 600.0))
    sent = np.arange(SLOTS)[:, None] * np.array([1e9, 3e9]) * INTERVAL_S
    cache(state, "tx_bytes", sent, EntityKind.PORT)
    found, _ = looked(state)
    metrics = {row["metric"]: row["p50"] for row in found["quarter"]["expected"]}
    assert metrics["ib_tx_bytes_per_s"] == pytest.approx(1e9)
    assert "ib_tx_bytes_per_s" not in {row["metric"] for row in found["whole"]["expected"]}


def test_readings_that_cannot_be_copied_end_no_task(monkeypatch: pytest.MonkeyPatch) -> None:
    def torn(*_: object) -> None:
        raise ValueError("operands could not be broadcast together")

    monkeypatch.setattr(fingerprints, "copy_window", torn)
    state = world()
    tell(state, *start("a", "n1", 0))
    prints = Fingerprints(ManualClock(NOW_MS))
    for _ in range(3):
        asyncio.run(prints.run_pass(state))
    assert "could not be broadcast" in prints.answers["a", 1].fingerprint.unheard_reason
    assert state.counts.bad == {"odd_fingerprint": 1}


def test_evaluations_are_foreseen_after_a_restart() -> None:
    state = world()
    tell(state, *start("train", "n1", 0))
    for turn in range(6):
        at = NOW_MS - 1000 - 600_000 * (5 - turn)
        tell(
            state,
            *(Phase(job="train", sequence=10 + 30 * turn + rank, time_ms=at + rank, name="evaluation", rank=rank)
              for rank in range(8)),
            Phase(job="train", sequence=25 + 30 * turn, time_ms=at + 60_000, name="steady"),
        )  # fmt: skip
    again = world()
    again.jobs.add_attempt(decode_job(encode_job([*state.jobs]))[0])
    found, _ = looked(again)
    assert found["train"]["next_evaluation_ms"]["p50"] == NOW_MS - 1000 + 600_000


def test_a_job_whose_numbers_are_odd_is_unknown_and_the_others_go_on(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def picky(seen: JobCopy) -> dict[str, Any]:
        if seen.attempt.job == "odd" and seen.window is not None:
            raise IndexError("list index out of range")
        return make_fingerprint(seen)

    monkeypatch.setattr(fingerprints, "make_fingerprint", picky)
    state = world()
    tell(state, *start("odd", "n1", 0, 1), *start("fine", "n1", 2))
    cache(state, "power_w", np.full((SLOTS, 8), 600.0))
    prints = Fingerprints(ManualClock(NOW_MS))
    for _ in range(4):
        asyncio.run(prints.run_pass(state))
    body = {section.name: msgspec.json.decode(bytes(section.data)) for section in prints.latest}
    assert body["doc.fingerprints"]["odd"]["period_s"] is None
    assert "list index out of range" in body["doc.fingerprints"]["odd"]["period_reason"]
    assert body["doc.fingerprints"]["fine"]["expected"]
    assert {row["job"]: row["gpus"] for row in body["doc.utilisation"]} == {"odd": 2, "fine": 1}
    assert state.counts.bad == {"odd_fingerprint": 1}
    assert len(caplog.records) == 1


def test_the_routes_answer_for_jobs_seen_unseen_and_unknown(tmp_path: Path) -> None:
    publish(tmp_path)
    with Client(create_app(config(tmp_path), ManualClock(NOW_MS))) as client:
        assert client.get("/v1/jobs/team/a/fingerprint").json()["period_s"] == 1.5
        waits = client.get("/v1/jobs/b/fingerprint").json()
        assert waits["period_s"] is None
        assert "queued" in waits["period_reason"]
        assert (waits["class"], waits["class_told"], waits["looked_ms"]) == (None, "training", None)
        assert msgspec.convert(waits, Fingerprint).last_checkpoint_ms is None
        assert client.get("/v1/jobs/none/fingerprint").status_code == 404
        rows = client.get("/v1/utilisation").json()["rows"]
        assert [row["job"] for row in rows] == ["d", "team/a"]
        only = client.get("/v1/utilisation?verdict=works").json()["rows"]
        assert [row["job"] for row in only] == ["team/a"]
        assert client.get("/v1/utilisation?verdict=lazy").status_code == 422
        body = client.get("/v1/spikes?domain_kind=rack").json()
        assert (body["jobs_looked"], body["jobs_running"]) == (2, 3)
        rows = body["rows"]
        assert rows == [{"domain_kind": "rack", "domain": "r01"}]
