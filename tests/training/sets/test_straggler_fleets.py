"""Judging fleets: runs of our own making, replayed through the code that serves."""

from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest

from fleetcast.simulator.faults.fault_file import parse_fault_file
from fleetcast.simulator.instrument import simulate_faults
from fleetcast.training.judges.findings import Findings
from fleetcast.training.reports.results import ResultRow, Results
from fleetcast.training.sets import straggler_fleets
from fleetcast.training.sets.fault_runs import RunTruth, read_fault_runs
from fleetcast.training.sets.straggler_fleets import BLAMED, OURS, FlaggedRun, judge_fleets

WORLD = """name = "{name}"
hours = 0.8
interval_s = 60
[fleet]
nodes = 4
[jobs]
sizes = [2]
weights = [1.0]
step_every_s = 0
[draw]
scale = {scale}
decoy_scale = {decoys}
precursor_share = 0.0
[kinds.gpu_off_bus]
rate = {rate}
warns_share = 0.0
"""
ALONE = "\n".join(
    f"[kinds.{kind}]\nrate = 0.0"
    for kind in ("thermal_throttle", "ecc_storm", "ib_flap", "pcie_downgrade", "slow_nic", "power_brake", "node_lost")
)


def write(out: Path, name: str, rate: float = 0.0, decoys: float = 0.0) -> None:
    text = WORLD.format(name=name, rate=rate, scale=1.0 if rate else 0.0, decoys=decoys)
    simulate_faults(parse_fault_file(f"{text}{ALONE}\n[kinds.cpu_contention]\nrate = 0.0\n"), out)


@pytest.fixture(scope="module")
def judged(tmp_path_factory: pytest.TempPathFactory) -> Results:
    out = tmp_path_factory.mktemp("fleets")
    write(out, "broken", rate=120_000.0)
    write(out, "busy", decoys=30.0)
    results = Results("straggler")
    judge_fleets(read_fault_runs(out), results, 0, lambda line: None)
    return results


def one(judged: Results, **wanted: str) -> ResultRow:
    (row,) = judged.select(dataset="simulated", **wanted)
    return row


def test_gpus_off_the_bus_are_found_and_named_and_others_are_not(judged: Results) -> None:
    for metric in ("precision", "recall", "top1", "node_top1"):
        row = one(judged, method="ours", series="all", metric=metric)
        assert row.value == 1.0, metric
        assert row.n >= 1
    delay = one(judged, method="ours", series="all", metric="delay_s").value
    worst = one(judged, method="ours", series="all", metric="delay_s_p90").value
    assert delay is not None
    assert worst is not None
    assert 0 <= delay <= worst <= 240
    assert one(judged, method="ours", series="gpu_off_bus", metric="recall").value == 1.0


def test_elsewhere_they_are_not_found(judged: Results) -> None:
    ours = one(judged, method="ours", series="all", metric="f1").value
    elsewhere = one(judged, method="ours", series="shuffled truth", metric="f1").value
    assert ours == 1.0
    assert elsewhere is not None
    assert elsewhere < 0.7


def test_look_alikes_alone_are_counted_apart_with_poisson_bounds(judged: Results) -> None:
    days = one(judged, method="truth", series="decoys alone", metric="healthy_node_days").value
    assert days == pytest.approx(4 * 47 / 1440, rel=0.01)
    row = one(judged, method="ours", series="decoys alone", metric="false_alarms_per_node_day")
    assert row.n == 0
    assert row.high == pytest.approx(3.689 / days, rel=0.01)
    decoys = one(judged, method="truth", series="decoys alone", metric="decoys").value
    assert decoys is not None
    assert decoys > 0
    assert not judged.select(series="decoys alone", metric="recall")


def flags(node: str, *spans_s: tuple[int, int]) -> Findings:
    """Flags every minute of these spans."""
    found = Findings()
    for first_s, last_s in spans_s:
        for at_s in range(first_s, last_s + 1, 60):
            found.record_flag(node, at_s * 1000)
    return found


def test_a_flag_that_stays_and_a_blame_on_a_healthy_stage_are_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, "one")
    run = read_fault_runs(tmp_path)[0]
    sick, other, *_ = run.topology.names
    truth = RunTruth("slow_nic", sick, 3_600_000, 7_200_000, 3_600_000)
    (run.folder / "truth.jsonl").write_bytes(msgspec.json.encode(truth))
    stays, ends = flags(sick, (3660, 21_600)), flags(sick, (3660, 7200))
    watched = FlaggedRun(
        {OURS: stays, BLAMED: Findings(), "other": ends},
        flags("j", (3660, 3900), (30_000, 30_300)),  # the first while a node of it has a fault
        {"j": frozenset((sick, other))},
        0,
        86_400_000,
    )
    monkeypatch.setattr(straggler_fleets, "replay_run", lambda run: watched)
    results = Results("straggler")
    judge_fleets(read_fault_runs(tmp_path), results, 0, lambda line: None)
    healthy_s = 4 * 86_400 - 3600 - 600
    for method, wrong, after_s in ((OURS, 1, 21_600 - 7800), ("other", 0, 0)):
        share = one(results, method=method, series="all", metric="flagged_after_repair_share")
        rate = one(results, method=method, series="all", metric="false_alarms_per_node_day")
        assert share.value == pytest.approx(after_s / healthy_s)
        assert (rate.n, rate.value) == (wrong, pytest.approx(wrong * 86_400 / (healthy_s - after_s)))


def test_a_blame_on_a_stage_is_no_node_s_whatever_the_node_is_called() -> None:
    def body(kind: str, name: str, slow: bool = True) -> dict[str, object]:
        return {"slow": slow, "culprit": {"kind": kind, "name": name}}

    bodies = {"a": body("stage", "2"), "b": body("link", "2/mlx5_0/1"), "c": body("nobody", "None", slow=False)}
    fleet = SimpleNamespace(stragglers=bodies)
    assert list(straggler_fleets._find_blamed_nodes(fleet, {"2"})) == [("2", "2/mlx5_0/1")]
    assert list(straggler_fleets._find_stage_blames(fleet)) == ["a"]


def test_a_blame_on_a_power_cap_is_no_finding_of_a_fault() -> None:
    bodies = {
        cause: {"slow": True, "culprit": {"kind": "node", "name": cause}, "cause": cause}
        for cause in ("power_cap", "compute")
    }
    fleet = SimpleNamespace(stragglers=bodies)
    assert list(straggler_fleets._find_blamed_nodes(fleet, set(bodies))) == [("compute", "compute")]


def test_a_run_that_cannot_be_read_is_left_out_with_the_reason(tmp_path: Path) -> None:
    write(tmp_path, "whole")
    folder = tmp_path / "faults" / "simulated"
    for name, file, content in (
        ("a", "truth.jsonl", '{"kind": 3}'),
        ("b", "truth.jsonl", '{"kind": "x", "node": "elsewhere", "start_ms": 1, "end_ms": null}'),
        ("c", "config.toml", "interval_s = 0"),
        ("d", "topology.toml", "[["),
    ):
        (folder / name).mkdir()
        for whole in ("truth.jsonl", "config.toml", "topology.toml"):
            (folder / name / whole).write_bytes((folder / "whole-1" / whole).read_bytes())
        (folder / name / file).write_text(content)
    skipped: list[str] = []
    assert [run.name for run in read_fault_runs(tmp_path, skipped=skipped)] == ["whole-1"]
    assert len(skipped) == 4
    for reason, words in zip(skipped, ("line 1", "not in topology", "greater than 0", "topology.toml"), strict=True):
        assert words in reason
