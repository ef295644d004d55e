import importlib
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from fleetcast.cli.lab.bench import find_benchmark_modules, list_benchmarks, run_benchmarks


def test_every_benchmark_module_can_run() -> None:
    assert {"decode", "store", "decide", "tick"} <= set(list_benchmarks())


def test_an_unknown_name_is_refused_with_the_known_ones() -> None:
    app = typer.Typer()
    app.command()(run_benchmarks)
    result = CliRunner().invoke(app, ["nonsense"])
    assert result.exit_code == 2
    assert "decode" in result.output


@pytest.mark.parametrize("name", ["decode", "store", "decide", "tick"])
def test_a_benchmark_line_has_the_contract_keys(name: str) -> None:
    keys = {"bench", "case", "size", "value", "unit", "cpu_s", "repeats", "min", "median", "max", "peer", "ratio"}
    lines = list(importlib.import_module(find_benchmark_modules()[name]).run((64,)))
    assert lines
    for line in lines:
        assert keys | {"machine"} <= set(line)
        assert line["value"] > 0


def test_a_benchmark_that_fails_is_told_and_leaves_the_lines_of_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    line = {"bench": "good", "case": "c", "size": {}, "value": 1.0, "unit": "ms", "peer": None}

    def run(name: str, sizes: object) -> Iterator[dict[str, object]]:
        yield line | {"bench": name}
        assert name != "store", "nothing was stored"

    monkeypatch.setattr("fleetcast.cli.lab.bench._run_benchmark", run)
    app = typer.Typer()
    app.command()(run_benchmarks)
    path = tmp_path / "lines"
    result = CliRunner().invoke(app, ["store", "decode", "--json", str(path)])
    assert result.exit_code == 1
    assert "store: measures no success: nothing was stored" in result.output
    assert [json.loads(text)["bench"] for text in path.read_text().splitlines()] == ["store", "decode"]
