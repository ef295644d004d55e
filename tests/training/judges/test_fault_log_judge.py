"""`fleetcast evaluate risk --faults`: any log of faults, with the size of the fleet beside it."""

import json

import numpy as np
import pytest
from typer.testing import CliRunner

from fleetcast.cli.main import app
from fleetcast.fleet.errors import ConfigError, RecordError
from fleetcast.training.judges.risk import evaluate_fault_log
from fleetcast.training.sets.fault_logs import read_fault_log

DAY_MS = 86_400_000
EPOCH_MS = 1_767_225_600_000  # 2026-01-01


@pytest.fixture(autouse=True)
def few_draws(monkeypatch):
    monkeypatch.setattr("fleetcast.training.judges.risk_metrics.DRAWS", 10)


def lemons(days=160, nodes=40, seed=0):
    """Rows of a log: every tenth node fails again and again."""
    rng = np.random.default_rng(seed)
    rows = []
    for node in range(nodes):
        for start in np.sort(rng.uniform(0, days, rng.poisson(14 if node % 10 == 0 else 0.4))):
            start_ms = EPOCH_MS + round(start * DAY_MS)
            rows.append(f"n{node:02d},{start_ms},{start_ms + DAY_MS // 4},gpu")
    return ["node,start,end,kind", *rows]


def write(folder, lines):
    path = folder / "faults.csv"
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def invoke(*words):
    result = CliRunner().invoke(app, [str(word) for word in words])
    if result.exception is not None:
        raise result.exception
    return result.output


def test_a_log_is_judged_on_windows_that_were_not_fitted_on(tmp_path):
    results = evaluate_fault_log(write(tmp_path, lemons()), 60, 0, lambda line: None)
    value = {(row.horizon_s, row.series, row.method, row.metric): row.value for row in results.rows}
    assert value[86_400, "all", "ours", "auroc"] > 0.7 > value[86_400, "all", "base_rate", "auroc"]
    assert value[86_400, "all", "ours", "brier_skill"] > 0
    windows = {row.series for row in results.rows} - {"all"}
    assert windows == {f"window {number} of 3" for number in (1, 2, 3)}
    assert {len(set(block["series"])) for block in results.predictions} == {60}  # also nodes that never failed


def test_what_comes_later_changes_no_forecast_of_a_log(tmp_path):
    """A fault of the last days, whatever it is, changes nothing that was said before it began."""
    lines = lemons()
    late_ms = EPOCH_MS + 158 * DAY_MS
    more = [*lines, f"n39,{late_ms},,gpu", f"n38,{late_ms},,gpu"]
    (tmp_path / "more").mkdir()
    before, after = (
        evaluate_fault_log(write(folder, text), 60, 0, lambda line: None).predictions[0]
        for folder, text in ((tmp_path, lines), (tmp_path / "more", more))
    )
    keys = [list(zip(part["issued_ms"], part["series"], strict=True)) for part in (before, after)]
    said = [dict(zip(key, part["value"], strict=True)) for key, part in zip(keys, (before, after), strict=True)]
    both = said[0].keys() & said[1].keys()
    assert len(both) > 1000
    assert {key: said[0][key] for key in both} == {key: said[1][key] for key in both}


def test_times_are_iso_or_epoch_milliseconds_and_mean_the_same(tmp_path):
    lines = [
        "kind,end,node,start",
        "PCIe,,a,2026-01-01T06:00:00+01:00",
        f"user,{EPOCH_MS + DAY_MS},b,{EPOCH_MS}",
        "Hardware Failure,2026-01-03,c,2026-01-02 12:00",
    ]
    log = read_fault_log(write(tmp_path, lines), 10)
    first = EPOCH_MS / DAY_MS
    assert log.names == ("a", "b", "c")
    assert (log.history.start_day - first).tolist() == pytest.approx([5 / 24, 0, 1.5])
    assert (log.history.end_day - first)[1:].tolist() == pytest.approx([1, 2])
    assert np.isnan(log.history.end_day[0])
    assert log.history.hardware.tolist() == [True, False, True]
    assert not log.skipped


def test_bad_rows_are_counted_by_reason_and_skipped(tmp_path):
    lines = [
        "node,start,end,kind",
        "a,2026-01-01,,gpu",
        "a,2026-01-01,2026-01-02,gpu",  # told twice, and the second row knows the end
        ",2026-01-01,,gpu",
        "b,,,gpu",
        "b,soon,,gpu",
        "b,1767225600,,gpu",  # seconds
        "b,2026-01-05,2026-01-04,gpu",
        "b",
    ]
    log = read_fault_log(write(tmp_path, lines), 3)
    assert log.skipped == {
        "reported twice": 1,
        "no node": 1,
        "no start": 2,
        "start is neither ISO 8601 nor epoch milliseconds": 1,
        "start is a number, but no epoch milliseconds": 1,
        "end before start": 1,
    }
    assert log.history.end_day.tolist() == [EPOCH_MS / DAY_MS + 1]


@pytest.mark.parametrize(
    ("lines", "nodes", "says"),
    [
        (["a,b", "1,2"], 3, "no column node, start, end; expected node,start,end,kind"),
        (["node,start,end,kind"], 3, "no row is a fault"),
        (["node,start,end,kind", "a,soon,,x"], 3, "no row is a fault .1 rows: start is neither"),
        (["node,start,end,kind", "a,1975-01-01,,x", "a,2040-01-01,,x"], 3, "start spans 23,741 days"),
        (["node,start,end,kind", "a,2026-01-01,,x", "b,2026-01-01,,x"], 1, "--nodes 1: .* names 2 nodes"),
    ],
)
def test_a_log_that_cannot_be_read_says_why(lines, nodes, says, tmp_path):
    with pytest.raises((RecordError, ConfigError), match=says):
        read_fault_log(write(tmp_path, lines), nodes)


def test_a_short_log_says_how_many_days_are_needed(tmp_path):
    with pytest.raises(RecordError, match="22 to fit on, 7 for outcomes needed"):
        evaluate_fault_log(write(tmp_path, ["node,start,end,kind", "a,2026-01-01,2026-01-20,x"]), 5, 0, print)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("risk", "--faults", "{log}"), "--nodes: how many nodes has the fleet.*says nothing of the others"),
        (("risk", "--nodes", "5"), "name one of a log"),
        (("risk", "--year", "--faults", "{log}", "--nodes", "60"), "name one of a log"),
        (("demand", "--year"), "demand judges data folders"),
        (("risk", "--faults", "{log}", "--nodes", "60", "--test", "."), "name one of a log .* two data folders"),
        (("demand", "--faults", "{log}", "--nodes", "60"), "demand judges data folders"),
        (("risk", "--faults", "nowhere.csv", "--nodes", "60"), "nowhere.csv: no such file"),
        (("risk",), "--test: risk needs a data folder.*takes a log of faults"),
        (("demand",), "--test: demand needs a data folder to judge on$"),
    ],
)
def test_options_that_do_not_go_together_are_refused(words, says, tmp_path):
    path = write(tmp_path, lemons())
    with pytest.raises(ConfigError, match=says):
        invoke("evaluate", *(word.format(log=path) for word in words))


def test_the_command_prints_ours_beside_the_baselines_and_writes_the_numbers(tmp_path):
    path = write(tmp_path, [*lemons(), "odd,soon,,gpu"])
    words = ("--json", tmp_path / "risk.json", "--html", tmp_path / "risk.html", "--results", tmp_path / "R.md")
    said = invoke("evaluate", "risk", "--faults", path, "--nodes", "60", *words)
    assert "skipped 1 rows of faults.csv: start is neither" in said
    assert "fault auroc 24 h" in said
    found = json.loads((tmp_path / "risk.json").read_text())
    assert (found["faults"], found["nodes"]) == (str(path), "60")
    assert f"fleetcast evaluate risk --faults={path} --nodes=60 --seed=0" in (tmp_path / "R.md").read_text()
    assert "Is the probability within 24 h true?" in (tmp_path / "risk.html").read_text()
