"""`fleetcast simulate`: faults as a file says, refused with the fix where the file is wrong."""

import asyncio
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from fleetcast.cli.lab.waiting_fleet import WaitingFleet
from fleetcast.cli.main import app
from fleetcast.fleet.errors import ConfigError
from fleetcast.simulator.days.traces import JobTrace, drop_oversized_jobs, generate_trace
from fleetcast.simulator.faults.fault_file import FaultFile, parse_fault_file
from fleetcast.simulator.hardware.cluster import FleetSpec
from fleetcast.training.sets.fault_runs import read_fault_runs


def run(*words: str, code: int = 0) -> str:
    result = CliRunner().invoke(app, ["simulate", *words])
    assert result.exit_code == code, result.output
    return result.output


def test_the_printed_file_is_one_that_can_be_used() -> None:
    text = run("faults", "--print-config")
    assert parse_fault_file(text) == FaultFile()
    assert "[kinds.thermal_throttle]" in text


def test_faults_are_written_where_evaluate_looks_for_them(tmp_path: Path) -> None:
    config = tmp_path / "few.toml"
    config.write_text('name = "few"\nhours = 0.6\n[fleet]\nnodes = 3\n[kinds.power_brake]\nrate = 1e5\n')
    said = run("faults", "--config", str(config), "--out", str(tmp_path), "--seed", "4")
    (found,) = read_fault_runs(tmp_path)
    assert found.folder == tmp_path / "faults" / "simulated" / "few-4"
    assert found.truth
    assert f"{sum(not row.benign for row in found.truth)} faults" in said


def test_a_wrong_file_is_refused_with_the_key_and_the_fix(tmp_path: Path) -> None:
    config = tmp_path / "bad.toml"
    config.write_text("[kinds.thermal_throttle]\nhot = [80, 90]\n")
    words = ("simulate", "faults", "--config")
    refusal = CliRunner().invoke(app, [*words, str(config), "--out", str(tmp_path)]).exception
    assert isinstance(refusal, ConfigError)
    assert str(refusal).startswith(f"--config: {config}")
    assert "line 2: kinds.thermal_throttle.hot: no such key; did you mean hot_c?" in str(refusal)
    assert "such as var/data" in run("faults", code=2)
    config.write_bytes(b"\xff\xfe")
    refusal = CliRunner().invoke(app, [*words, str(config), "--out", str(tmp_path)]).exception
    assert isinstance(refusal, ConfigError)
    assert "no text in UTF-8" in str(refusal)


@pytest.mark.parametrize(
    ("words", "names"),
    [
        (("cluster", "--input", "h100", "--nodes", "4", "--teams"), ("--nodes", "--teams", "h100")),
        (("cluster", "--input", "h100", "--faults", "faults.toml"), ("--faults", "h100")),
        (("cluster", "--input", "h100", "--unruly", "0.5"), ("--unruly", "h100")),
        (("cluster", "--kafka-topic", "telemetry"), ("--kafka-topic", "--kafka HOST:PORT")),
        (("faults", "--print-config"), ("--out", "--print-config")),
    ],
)
def test_options_that_have_no_effect_together_are_refused(
    tmp_path: Path, words: tuple[str, ...], names: tuple[str, ...]
) -> None:
    said = run(*words, "--out", str(tmp_path), code=2)
    assert all(name in said for name in (*names, "no effect"))


@pytest.mark.parametrize("teams", [False, True])
def test_a_simulated_queue_is_told_start_times(tmp_path: Path, teams: bool) -> None:
    spec, start_ms = FleetSpec(nodes=4), 1_760_000_000_000
    trace = generate_trace(32, start_ms=start_ms, seed=2, days_before=1, days_after=1)
    fleet = WaitingFleet(tmp_path, drop_oversized_jobs(trace, nodes=4, gpus_per_node=8), 2, spec, teams)
    told = fleet.service.backlog.starts
    asyncio.run(fleet.run_for(60))
    assert fleet.service.backlog.starts
    assert fleet.service.backlog.starts is not told
    assert (fleet.service.queues.tree is not None) == teams


def test_a_job_of_a_simulated_queue_stops_for_owed_gpus_and_waits_again(tmp_path: Path) -> None:
    start_ms = 1_760_000_000_000
    lent = ("job-4", "job-5", "job-6", "job-7")  # of language, which borrows all that vision lends
    trace = JobTrace(
        job=(*lent, "job-1"),
        submit_ms=np.array([start_ms - 3_600_000] * 4 + [start_ms + 15_000], np.int64),
        run_s=np.full(5, 36_000.0),
        gpus=np.full(5, 8, np.int32),
        user=("ada",) * 5,
        class_=("fine_tuning",) * 5,
        start_ms=start_ms,
        source="test",
        note="",
    )
    fleet = WaitingFleet(tmp_path, trace, 2, FleetSpec(nodes=4), teams=True, reclaims=True)
    asyncio.run(fleet.run_for(600))
    assert fleet.agents is not None
    assert fleet.agents.stops == 1
    assert fleet.agents.payers == {"job-1"}
    assert fleet.first.make_summary()["asked"] == 2  # the payer, and the next attempt of the job that stopped
    assert len(fleet.service.ledger.list_queue_entries()) == 1


def test_a_cold_site_gives_no_start_time_before_anything_is_known(tmp_path: Path) -> None:
    spec, start_ms = FleetSpec(nodes=4), 1_760_000_000_000
    trace = drop_oversized_jobs(
        generate_trace(32, start_ms=start_ms, seed=2, days_before=1, days_after=1, rush_h=2), nodes=4, gpus_per_node=8
    )
    fleet = WaitingFleet(tmp_path, trace, 2, spec, is_cold=True)
    asyncio.run(fleet.run_for(60))
    assert fleet.first.make_summary()["asked"] > 0
    assert fleet.first.make_summary()["given"] == 0
    assert not fleet.service.backlog.starts


def test_no_start_time_is_issued_while_the_fleet_warms_up(tmp_path: Path) -> None:
    spec, start_ms = FleetSpec(nodes=4), 1_760_000_000_000
    trace = drop_oversized_jobs(
        generate_trace(32, start_ms=start_ms, seed=2, days_before=1, days_after=1), nodes=4, gpus_per_node=8
    )
    fleet = WaitingFleet(tmp_path, trace, 2, spec)
    asyncio.run(fleet.run_for(0, warm_up_s=600))
    assert (fleet.clock.now_ms(), fleet.first.make_summary()["asked"]) == (start_ms + 600_000, 0)
    assert not fleet.service.backlog.starts  # the same fleet has some after a minute without a warm-up


def test_reclaim_without_teams_is_refused() -> None:
    assert "--reclaim" in run("starts", "--reclaim", code=2)


def test_a_wrong_time_of_the_trace_is_refused() -> None:
    assert "--at" in run("starts", "--at", "noon", code=2)
