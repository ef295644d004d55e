"""The first day: exporters alone, and no job event at all."""

import asyncio
from pathlib import Path

import msgspec
import pytest

from fleetcast.fleet.events import Finished, Started, Submitted
from fleetcast.fleet.requests import RankPlacement
from fleetcast.ingest.inbox.records import decode_records
from fleetcast.ingest.inbox.segments import Record, RecordKind
from fleetcast.ingest.remote_write.decoder import WriteDecoder
from fleetcast.ingest.source import Batch
from fleetcast.service.answers.fleet import GpuCounts
from fleetcast.service.config import PlacerConfig
from tests.ingest.write_requests import gpu, message_v1, message_v2, packed
from tests.service.bare_world import BUSY, GPUS, IDLE, NOW_MS, BareWorld, page

FULL = page("n3", [(BUSY, {})] * GPUS)
EMPTY = page("n1", [(IDLE, {})] * GPUS)
UNTOLD = "8 GPUs of node n3 are in use by work that no job event names"


def test_gpus_that_telemetry_shows_at_work_get_nothing_and_the_decision_says_why(tmp_path: Path) -> None:
    world = BareWorld(tmp_path)
    board = world.run(90, n1=EMPTY, n3=FULL)
    placed = world.decide(board, gang=1, gpus_per_node=8)
    assert placed.outcome == "placed"
    assert {rank.node for rank in placed.ranks} == {"n1"}
    assert placed.rejected == {"unknown_use": 1}
    assert placed.sentence.endswith(f"; {UNTOLD}")
    refused = world.decide(board, gang=2, gpus_per_node=8)
    assert refused.outcome == "refused"
    assert refused.nodes == refused.candidates + sum(refused.rejected.values())
    assert "1 in use by work that no job event names" in refused.sentence
    assert refused.sentence.endswith(f"; {UNTOLD}")


def counts(**stated: int) -> dict[str, int]:
    return msgspec.to_builtins(GpuCounts(**{"running": 0, "free": 0, "unusable": 0, "total": 0, **stated}))


def test_the_map_the_node_the_metrics_and_demand_tell_of_unknown_use(tmp_path: Path) -> None:
    world = BareWorld(tmp_path)
    board = world.run(240, n1=EMPTY, n3=FULL)
    fleet = board.json("doc.fleet")
    assert fleet["gpus"] == counts(running=8, free=8, total=16, unknown_use=8)
    by_node = {row["node"]: row["gpus"] for row in fleet["nodes"]}
    assert by_node["n3"] == [{"job": None, "usable": True, "held_by": "unknown"}] * GPUS
    assert by_node["n1"] == [{"job": None, "usable": True}] * GPUS
    assert bytes(board.raw("answers.node")).count(b'"held_by":"unknown"') == GPUS
    metrics = bytes(board.raw("metrics.fleet"))
    assert b'fleetcast_gpus{state="running"} 8' in metrics
    assert b"fleetcast_gpus_unknown_use 8" in metrics
    world.forecast()
    assert world.running() == world.running(pool="unknown") == [8.0, 8.0, 8.0]


def test_an_operator_may_ignore_unknown_use(tmp_path: Path) -> None:
    world = BareWorld(tmp_path, placer=PlacerConfig(unknown_use="ignore"))
    board = world.run(90, n3=FULL)
    assert world.decide(board, gang=1, gpus_per_node=8).outcome == "placed"
    assert board.json("doc.fleet")["gpus"]["unknown_use"] == 8, "the map tells of it all the same"


def test_a_job_event_takes_the_gpus_over_at_once_and_its_end_frees_them(tmp_path: Path) -> None:
    world = BareWorld(tmp_path)
    world.run(90, n3=FULL)
    ranks = (RankPlacement(0, "n3", tuple(range(GPUS))),)
    at = {"job": "j", "time_ms": world.clock.now_ms()}
    world.pipeline.apply_batch(Batch(events=(Started(sequence=3, ranks=ranks, **at),)))
    assert world.tick().json("doc.fleet")["gpus"]["unknown_use"] == 0
    world.pipeline.apply_batch(Batch(events=(Finished(sequence=9, **at),)))
    gpus = world.tick().json("doc.fleet")["gpus"]
    assert (gpus["free"], gpus["unknown_use"]) == (8, 0)


def test_gpus_of_a_job_that_names_nodes_only_are_those_at_work(tmp_path: Path) -> None:
    world = BareWorld(tmp_path)
    readings = [IDLE] * 6 + [BUSY] * 2
    board = world.run(90, n3=page("n3", [(one, {}) for one in readings]))
    assert board.json("doc.fleet")["gpus"]["unknown_use"] == 2
    told = Submitted(job="j", sequence=1, time_ms=NOW_MS, gpus_per_node=2)
    world.pipeline.apply_batch(Batch(events=(told, Started(job="j", sequence=3, time_ms=NOW_MS, nodes=("n3",)))))
    board = world.tick()
    assert board.array("gpu.job")[0].tolist() == [-1] * 6 + [0] * 2
    assert board.json("doc.fleet")["gpus"]["unknown_use"] == 0


def test_verdicts_outlive_a_restart(tmp_path: Path) -> None:
    world = BareWorld(tmp_path)
    world.run(90, n1=EMPTY, n3=FULL)
    asyncio.run(world.pipeline.save())
    again = BareWorld(tmp_path)
    again.clock.advance(100)
    board = again.tick()
    assert board.json("doc.fleet")["gpus"]["unknown_use"] == 8, "before any page is read"


def pod(name: str, namespace: str = "ml", prefix: str = "") -> dict[str, str]:
    """The labels of dcgm-exporter's Kubernetes mapping; prefix: as after a Prometheus that keeps its own."""
    own = OWN_POD if prefix else {}
    return {**own, f"{prefix}pod": name, f"{prefix}namespace": namespace, f"{prefix}container": "main"}


OWN_POD = {"pod": "nvidia-dcgm-exporter-x8k2p", "namespace": "gpus", "container": "exporter"}
NO_POD = {"pod": "", "namespace": "", "container": ""}


def half(node: str, labels: dict[str, str], others: dict[str, str]) -> bytes:
    """A node whose first four GPUs are at work."""
    return page(node, [(BUSY, labels)] * 4 + [(IDLE, others)] * 4)


@pytest.mark.parametrize(
    ("first", "second", "others", "job", "queue"),
    [
        (pod("train-42-master-0"), pod("train-42-worker-0"), NO_POD, "ml/train-42", "ml"),
        (
            pod("a-master-0", "ml", "exported_"),
            pod("a-worker-0", "ml", "exported_"),
            OWN_POD,
            "ml/a",
            "ml",
        ),
        ({"hpc_job": "4711"}, {"hpc_job": "4711"}, {}, "4711", "default"),
    ],
    ids=["Kubernetes", "through a Prometheus", "HPC"],
)
def test_labels_alone_give_a_job_its_place_its_demand_and_its_run_time(
    tmp_path: Path, first: dict[str, str], second: dict[str, str], others: dict[str, str], job: str, queue: str
) -> None:
    world = BareWorld(tmp_path)
    empty = {node: page(node, [(IDLE, others)] * GPUS) for node in ("n1", "n2")}
    world.run(30, **empty)
    board = world.run(300, n1=half("n1", first, others), n2=half("n2", second, others))
    (row,) = board.json("doc.jobs")
    assert (row["job"], row["queue"], row["gpus"], row["nodes"]) == (job, queue, 8, ["n1", "n2"])
    assert (row["state"], row["source"]) == ("running", "labels")
    assert board.json("doc.job")[job]["placement"][1] == {"rank": 1, "node": "n2", "gpus": [0, 1, 2, 3]}
    assert board.json("doc.fleet")["gpus"] == counts(running=8, free=8, total=16)
    assert world.running() == world.running(pool=queue) == [8.0] * 3
    assert world.decide(board, gang=1, gpus_per_node=8).outcome == "refused"
    board = world.run(120, **empty)
    assert board.json("doc.jobs")[0]["state"] == "finished"
    learnt = board.json("durations")["all"]
    assert (learnt["n"], learnt["p50"]) == (1, 285.0)
    assert world.running() == [0.0] * 3


@pytest.mark.parametrize("kind", [RecordKind.WRITE, RecordKind.WRITE_V2])
def test_remote_write_alone_gives_a_job_and_a_replay_changes_nothing(tmp_path: Path, kind: RecordKind) -> None:
    world, decoder = BareWorld(tmp_path), None
    labels = pod("a-worker-0", prefix="exported_")
    records: list[Record] = []
    for number in range(12):
        world.clock.advance(15)
        now_ms = world.clock.now_ms()
        held = labels if 2 <= number < 6 else OWN_POD
        rows = [
            (gpu("DCGM_FI_DEV_GPU_UTIL", at, **(held if at < 4 else OWN_POD)), [(now_ms, 0.0)]) for at in range(GPUS)
        ]
        make = message_v1 if kind is RecordKind.WRITE else message_v2
        records.append(Record(kind, now_ms, packed(make(rows))))
        decoder = decoder or WriteDecoder(world.resolver)
        world.pipeline.apply_batch(decode_records(records[-1:], (), decoder))
        board = world.tick()
        if number == 5:
            assert board.array("gpu.job")[0].tolist() == [0] * 4 + [-1] * 4
    assert decoder is not None
    world.pipeline.apply_batch(decode_records(records, (), decoder))
    (row,) = world.tick().json("doc.jobs")
    assert (row["job"], row["attempt"], row["state"], row["queue"], row["gpus"]) == ("ml/a", 1, "finished", "ml", 4)
    assert row["ended_ms"] - row["started_ms"] == 45_000


def test_pods_that_share_a_gpu_and_mig_instances_are_counted(tmp_path: Path) -> None:
    world = BareWorld(tmp_path)
    divided = {**pod("slice-a"), "GPU_I_ID": "1", "GPU_I_PROFILE": "1g.10gb"}
    text = page("n1", [(BUSY, pod("one")), (BUSY, NO_POD)], shared=[(0, pod("two")), (1, divided)])
    board = world.run(90, n1=text)
    assert board.json("doc.ingestion")["labels"] == {"labelled": 1, "shared": 1, "divided": 1}
    assert [row["job"] for row in board.json("doc.jobs")] == ["ml/one", "ml/two"], "both hold the shared one"
    assert board.json("doc.fleet")["gpus"]["unknown_use"] == 1, "of the divided one nobody tells who holds it"


def test_a_restart_in_the_middle_goes_on_with_the_same_attempt(tmp_path: Path) -> None:
    world = BareWorld(tmp_path)
    labelled = half("n1", pod("a"), NO_POD)
    world.run(30, n1=EMPTY)
    board = world.run(60, n1=labelled)
    asyncio.run(world.pipeline.save())
    again = BareWorld(tmp_path)
    again.clock.advance(2000)
    again.tick()
    after = again.run(60, n1=labelled)
    assert after.json("occupancy")["running"] == board.json("occupancy")["running"] == [["ml/a", 1]]


def test_real_events_of_a_labelled_job_take_it_over_without_counting_it_twice(tmp_path: Path) -> None:
    world = BareWorld(tmp_path)
    labelled = half("n1", pod("a"), NO_POD)
    world.run(60, n1=EMPTY)
    world.run(60, n1=labelled)
    told = Submitted(job="ml/a", sequence=1, time_ms=NOW_MS, queue="gold", gpus_per_node=4)
    started = Started(job="ml/a", sequence=3, time_ms=NOW_MS + 60_000, ranks=(RankPlacement(0, "n1", ()),))
    world.pipeline.apply_batch(Batch(events=(told, started)))
    board = world.run(60, n1=labelled)
    (row,) = board.json("doc.jobs")
    assert (row["source"], row["queue"], row["gpus"], row["attempt"]) == ("board", "gold", 1 * 4, 1)
    assert board.json("doc.fleet")["gpus"]["running"] == 4
    assert world.running(bins=1) == [4.0]
