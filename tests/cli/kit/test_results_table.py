"""Measured tables in Markdown: written under their command and date, and read back."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from fleetcast.cli.kit.results_table import write_table
from fleetcast.cli.main import app
from fleetcast.training.reports.results import ResultRow, Results

MACHINE = {"cpu": "a processor", "cores": 2, "memory_gib": 24.0, "python": "3.11.9"}
LINE = {"bench": "tick", "size": {"gpus": 10_000}, "machine": MACHINE}
OTHER = {"name": "other", "value": 90.0}
BEFORE = "# Speed\n\nBefore.\n\n<!-- begin bench tick -->\nold | table\n<!-- end bench tick -->\n\nAfter.\n"


def read_table(path: Path, name: str) -> tuple[str, list[list[str]]]:
    """The line with the command, and the rows without the rule below the header."""
    (found,) = re.findall(rf"<!-- begin {name} -->\n(.*?)\n<!-- end {name} -->", path.read_text(), re.DOTALL)
    command, _, *rows = found.split("\n")
    return command, [[cell.strip() for cell in row.strip("|").split(" | ")] for row in rows if "---" not in row]


def invoke(*words: object) -> None:
    result = CliRunner().invoke(app, [str(word) for word in words])
    assert result.exit_code == 0, result.output


def test_a_benchmark_writes_its_table_between_its_markers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(name: str, sizes: object) -> Iterator[dict[str, object]]:
        yield {
            **LINE,
            "case": "whole",
            "value": 176.4,
            "unit": "ms",
            "peer": {"name": "other", "value": 90.0},
            "ratio": 2,
        }
        yield {**LINE, "case": "rate", "value": 2_300_000.0, "unit": "samples/s", "peer": None}

    monkeypatch.setattr("fleetcast.cli.lab.bench._run_benchmark", run)
    path = tmp_path / "RESULTS.md"
    path.write_text(BEFORE)
    invoke("bench", "tick", "--size", 10000, "--results", path)
    command, rows = read_table(path, "bench tick")
    assert re.fullmatch(
        r"`fleetcast bench tick --size=10000` · \d{4}-\d\d-\d\d · a processor, 2 cores, 24.0 GiB, Python 3.11.9",
        command,
    )
    assert rows == [
        ["case", "size", "Fleetcast", "alternative"],
        ["whole", "10,000 gpus", "176 ms", "other **90**"],
        ["rate", "10,000 gpus", "2,300,000 samples/s", "–"],
    ]
    text = path.read_text()
    assert text.startswith("# Speed\n\nBefore.\n\n<!-- begin")
    assert text.endswith("-->\n\nAfter.\n")
    assert "old" not in text


def test_a_judge_writes_its_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    row = ResultRow("venus", "running", "all", 3600, "ours", "theta", "wql", 0.125, 0.1, 0.15, 40)
    other = ResultRow("venus", "running", "all", 3600, "persistence", "", "wql", 0.25, None, None, 40)
    monkeypatch.setattr("fleetcast.training.judges.demand.evaluate", lambda *_: Results("demand", [row, other]))
    path = tmp_path / "RESULTS.md"
    for _ in range(2):  # the second time it replaces what the first one added
        invoke("evaluate", "demand", "--train", tmp_path, "--test", tmp_path, "--seed", 3, "--results", path)
    command, rows = read_table(path, "evaluate demand")
    assert re.match(rf"`fleetcast evaluate demand --train={tmp_path} --test={tmp_path} --seed=3` · \d{{4}}-", command)
    assert rows[1:] == [["venus", "running", "wql", "1 h", "0.125 (0.1 to 0.15)", "persistence 0.25"]]


def test_other_tables_stay_and_a_bar_in_a_cell_does_not_break_the_row(tmp_path: Path) -> None:
    path = tmp_path / "RESULTS.md"
    path.write_text(BEFORE)
    write_table(path, "bench other", ["fleetcast", "bench", "other"], [["a", "b"], ["x|y", "1"]])
    assert path.read_text().startswith(BEFORE)
    assert "| x\\|y | 1 |" in path.read_text()
