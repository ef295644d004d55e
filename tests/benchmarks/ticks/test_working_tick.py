from pathlib import Path

import pytest

from fleetcast.benchmarks.ticks.working_tick import BESIDE, PARTS, Size, WorkingFleet, main, measure_fleet
from fleetcast.service.pipeline.jobs.interference import InterferenceLearner


def test_every_part_of_a_tick_is_called(tmp_path: Path) -> None:
    """A part that is timed under a name that nobody calls any more would tell zero."""
    fleet = WorkingFleet(Size(gpus=48, step_s=2.0, scrapes=2), tmp_path)
    fleet.measure_tick()
    assert set(fleet.watch.seconds) == {*PARTS, *BESIDE}


def test_a_line_has_every_part() -> None:
    line = measure_fleet(Size(gpus=48, step_s=2.0, scrapes=2), ticks=1)
    assert set(line["parts"]) == {name.strip() for name in (*PARTS, *BESIDE)}
    assert line["value"] > 0
    assert line["events_per_s"] > 0


def test_the_fleet_works_as_a_real_one_does(tmp_path: Path) -> None:
    fleet = WorkingFleet(Size(gpus=64, ranks=2, step_s=2.0, scrapes=2), tmp_path)
    for _ in range(3):
        fleet.measure_tick()
    state = fleet.pipeline.state
    assert len(state.jobs.list_running()) == fleet.jobs
    assert {step.rank for row in state.jobs.list_running() for step in row.steps} >= {0, 1}
    assert any(row.checkpoints for row in state.jobs.list_running())
    assert state.nodes.nodes["n00000"].events
    assert fleet.pipeline.capabilities[InterferenceLearner].co_runs.dump()[0]["together"], (
        "nobody was seen to share hardware"
    )
    assert state.counts.late == state.counts.duplicates == 0
    assert not state.counts.bad


def test_help_teaches(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.argv", ["working_tick", "--help"])
    with pytest.raises(SystemExit):
        main()
    told = capsys.readouterr().out
    assert "--gpus 2000 --ranks 8" in told
    assert "CPU milliseconds of the median tick" in told
