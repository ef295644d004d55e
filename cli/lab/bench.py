"""`fleetcast bench`: measures every hot path at several sizes, and writes one JSON line for each case."""

import contextlib
import importlib
import json
import os
import pkgutil
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, TextIO

import typer

from fleetcast.cli.kit.options import check_outputs
from fleetcast.cli.kit.results_table import describe_machine, format_short, make_bench_rows, write_table
from fleetcast.cli.kit.screen import echo

SIZES = (1_000, 10_000, 100_000)
TOOLS = "fleetcast.benchmarks.kit."  # parts of benchmarks


def run_benchmarks(
    names: Annotated[list[str] | None, typer.Argument(help="Benchmarks to run [all].")] = None,
    json_path: Annotated[str | None, typer.Option("--json", help="Write JSON lines here; - is stdout.")] = None,
    results: Annotated[
        Path | None, typer.Option(help="Replace the tables of these benchmarks in this Markdown file.")
    ] = None,
    size: Annotated[
        list[int] | None,
        typer.Option(help="Fleet size in GPUs; repeat it [1000, 10000, 100000; some have their own].", min=1),
    ] = None,
) -> None:
    """Measure the hot paths, each compared with the usual alternative library in the same run.

    Examples:

      fleetcast bench                               everything, as a table

      fleetcast bench decode store --size 10000     two benchmarks at one size

      fleetcast bench --json bench.jsonl            for scripts

      fleetcast bench decide --results benchmarks/RESULTS.md
    """
    known = list_benchmarks()
    for name in names or ():
        if name not in known:
            raise typer.BadParameter(f"{name!r}: known are {', '.join(known)}", param_hint="NAMES")
    check_outputs(Path(json_path) if json_path else None, results=results)
    failed = False
    with _open_output(json_path) as file:
        for name in names or known:
            lines = []
            try:
                for line in _run_benchmark(name, size):
                    lines.append(line)
                    echo(_format_line(line), err=True)
                    file.write(json.dumps(line) + "\n")
                    file.flush()
                if results is not None and lines:
                    command = ["fleetcast", "bench", name, *(f"--size={one}" for one in size or ())]
                    write_table(results, f"bench {name}", command, make_bench_rows(lines), describe_machine(lines[0]))
            except AssertionError as error:
                echo(f"{name}: measures no success: {error}", err=True)
                failed = True
    if failed:
        raise typer.Exit(1)


def _open_output(path: str | None) -> contextlib.AbstractContextManager[TextIO]:
    """Open the file for the JSON lines, stdout for -, or a null device without a path."""
    if path == "-":
        return contextlib.nullcontext(sys.stdout)
    return open(path or os.devnull, "w", encoding="utf-8")


def list_benchmarks() -> list[str]:
    """Return the names of all benchmarks, sorted."""
    return sorted(find_benchmark_modules())


def find_benchmark_modules() -> dict[str, str]:
    """Return the name of each benchmark -> its full module name. The name is the last part of the module name."""
    package = importlib.import_module("fleetcast.benchmarks")
    found = pkgutil.walk_packages(package.__path__, f"{package.__name__}.")
    names = [info.name for info in found if not info.ispkg and not info.name.startswith(TOOLS)]
    return {name.rpartition(".")[2]: name for name in names}


def _run_benchmark(name: str, sizes: Sequence[int] | None) -> Iterator[dict[str, Any]]:
    module = importlib.import_module(find_benchmark_modules()[name])
    own: Sequence[int] = getattr(module, "SIZES", SIZES)
    yield from module.run(tuple(sizes or own))


def _format_line(line: dict[str, Any]) -> str:
    peer = line.get("peer")
    beside = f"   {peer['name']} {format_short(peer['value'])}, ratio {line['ratio']:.2f}" if peer else ""
    size = " ".join(f"{key}={value:,}" for key, value in line["size"].items())
    return f"{line['bench']:<10} {line['case']:<32} {size:<18} {format_short(line['value']):>12} {line['unit']}{beside}"
