"""`fleetcast bench`: every hot path at its sizes, a JSON line a case."""

import contextlib
import importlib
import json
import os
import pkgutil
import sys
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, TextIO

import typer

SIZES = (1_000, 10_000, 100_000)
TOOLS = {"case", "exporters", "load", "peer_prometheus", "recorded", "service", "written"}  # parts of benchmarks


def bench(
    names: Annotated[list[str] | None, typer.Argument(help="Benchmarks to run [all].")] = None,
    json_path: Annotated[str | None, typer.Option("--json", help="Write JSON lines here; - is stdout.")] = None,
    size: Annotated[
        list[int] | None, typer.Option(help="Fleet size in GPUs; repeat it [1000, 10000, 100000; some have their own].")
    ] = None,
) -> None:
    """Measure the hot paths beside the library that one would use instead, in the same run.

    Examples:

      fleetcast bench                               everything, as a table

      fleetcast bench decode store --size 10000     two benchmarks at one size

      fleetcast bench --json bench.jsonl            for scripts
    """
    known = available()
    for name in names or ():
        if name not in known:
            raise typer.BadParameter(f"{name!r}: known are {', '.join(known)}", param_hint="NAME")
    failed = False
    with _output(json_path) as file:
        for name in names or known:
            try:
                for line in _run(name, size):
                    typer.echo(_human(line), err=True)
                    file.write(json.dumps(line) + "\n")
                    file.flush()
            except AssertionError as error:
                typer.echo(f"{name}: measures no success: {error}", err=True)
                failed = True
    if failed:
        raise typer.Exit(1)


def _output(path: str | None) -> contextlib.AbstractContextManager[TextIO]:
    """Where the lines go; a run that is cut off leaves those that it had."""
    if path == "-":
        return contextlib.nullcontext(sys.stdout)
    return open(path or os.devnull, "w", encoding="utf-8")


def available() -> list[str]:
    """Modules of `benchmarks/` that have a `run(sizes)`."""
    package = importlib.import_module("benchmarks")
    return [info.name for info in pkgutil.iter_modules(package.__path__) if info.name not in TOOLS]


def _run(name: str, sizes: Sequence[int] | None) -> Iterator[dict[str, Any]]:
    module = importlib.import_module(f"benchmarks.{name}")
    own: Sequence[int] = getattr(module, "SIZES", SIZES)
    yield from module.run(tuple(sizes or own))


def _human(line: dict[str, Any]) -> str:
    peer = line.get("peer")
    beside = f"   {peer['name']} {_short(peer['value'])}, ratio {line['ratio']:.2f}" if peer else ""
    size = " ".join(f"{key}={value:,}" for key, value in line["size"].items())
    return f"{line['bench']:<10} {line['case']:<32} {size:<18} {_short(line['value']):>12} {line['unit']}{beside}"


def _short(value: float) -> str:
    """Three digits of what is below a thousand, whole numbers above."""
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"
