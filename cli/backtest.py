"""`fleetcast backtest`: how good forecasts would have been, fitted again and again as history grew."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cli.given import (
    ArchiveOption,
    ConfigOption,
    DaskOption,
    DataOption,
    ProcessesOption,
    SeedOption,
    SetOption,
    StateOption,
    UntilOption,
    configured,
    given,
    telling,
)

if TYPE_CHECKING:
    from training.results import Results

TASKS = ("demand", "duration")


def backtest(
    task: Annotated[str, typer.Argument(help="What to judge.", metavar="|".join(TASKS))],
    data: DataOption = None,
    archive: ArchiveOption = None,
    sets: SetOption = None,
    until: UntilOption = None,
    windows: Annotated[int, typer.Option(min=1, max=200, help="How often it is fitted anew and judged.")] = 3,
    share: Annotated[float, typer.Option(min=0.01, max=0.9, help="Share of the history that is judged.")] = 0.3,
    seed: SeedOption = 0,
    dask: DaskOption = None,
    processes: ProcessesOption = 1,
    json: Annotated[Path | None, typer.Option("--json", help="Where to write the numbers; - is stdout.")] = None,
    html: Annotated[Path | None, typer.Option(help="A report with plots.")] = None,
    config: ConfigOption = None,
    state: StateOption = None,
) -> None:
    """Fit on what came before a window, judge on the window, go on to the next: beside the baselines of `evaluate`.

    Windows are independent pieces of work: with --dask they go to the workers of a scheduler, and come out the same.

    Examples:

      fleetcast backtest demand

      fleetcast backtest duration --data ~/data --set jobs/ricc --windows 5 --html backtest.html

      fleetcast backtest demand --dask tcp://127.0.0.1:8786
    """
    from fleet.errors import ConfigError
    from training.backtest import backtest as run
    from training.backtest import demand_windows, duration_windows

    if task not in TASKS:
        raise ConfigError(f"task {task!r}: expected one of {', '.join(TASKS)}")
    with telling(f"backtest {task}") as say:
        source = given(configured(config, state), data, archive, sets, until, say)
        if task == "demand":
            pieces = demand_windows(source.read_panels(), windows, seed, share)
        else:
            pieces = duration_windows(source.read_jobs(), windows, seed, share)
        results = run(task, pieces, address=dask, processes=processes, say=say)
    _write(results, {"seed": seed, "windows": len(pieces), "source": str(data or source.archive)}, json)
    if html is not None:
        from training.report import report_html

        html.write_text(report_html(results), encoding="utf-8")
        typer.echo(f"wrote {html}", err=True)


def _write(results: "Results", about: dict[str, object], json: Path | None) -> None:
    """The JSON to its file; for people a table on stderr."""
    import msgspec

    from training.results_files import summary

    for line in results.skipped:
        typer.echo(f"skipped {line}", err=True)
    typer.echo(summary(results), err=True)
    if json is None:
        return
    body = {"task": results.task, **about, "rows": results.rows, "skipped": results.skipped}
    text = msgspec.json.format(msgspec.json.encode(body), indent=1) + b"\n"
    if str(json) == "-":
        sys.stdout.buffer.write(text)
    else:
        json.write_bytes(text)
        typer.echo(f"wrote {json}", err=True)
