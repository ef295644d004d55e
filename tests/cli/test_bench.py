import pytest
from typer.testing import CliRunner

from cli.bench import available


def test_every_benchmark_module_can_run() -> None:
    assert {"decode", "store", "decide", "tick"} <= set(available())


def test_an_unknown_name_is_refused_with_the_known_ones() -> None:
    import typer

    from cli.bench import bench

    app = typer.Typer()
    app.command()(bench)
    result = CliRunner().invoke(app, ["nonsense"])
    assert result.exit_code == 2
    assert "decode" in result.output


@pytest.mark.parametrize("name", ["decode", "store", "decide", "tick"])
def test_a_benchmark_line_has_the_contract_keys(name: str) -> None:
    import importlib

    keys = {"bench", "case", "size", "value", "unit", "cpu_s", "repeats", "min", "median", "max", "peer", "ratio"}
    lines = list(importlib.import_module(f"benchmarks.{name}").run((64,)))
    assert lines
    for line in lines:
        assert keys | {"machine"} <= set(line)
        assert line["value"] > 0
