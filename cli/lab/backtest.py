"""`fleetcast backtest`: evaluates forecasts on history, with a new fit before each window."""

from typing import Annotated

import typer

from fleetcast.cli.kit.options import (
    ArchiveOption,
    ConfigOption,
    DaskOption,
    DataOption,
    ForecasterOption,
    HtmlOption,
    JsonOption,
    ProcessesOption,
    SeedOption,
    SetOption,
    StateOption,
    UntilOption,
    check_choice,
    check_outputs,
    choose_training_inputs,
    load_own_forecasters,
    load_site_config,
    print_progress,
    write_html,
    write_json,
)
from fleetcast.cli.kit.screen import echo

TASKS = ("demand", "duration")


def backtest(
    task: Annotated[str, typer.Argument(help="What to judge.", metavar="|".join(TASKS))],
    data: DataOption = None,
    archive: ArchiveOption = None,
    sets: SetOption = None,
    until: UntilOption = None,
    windows: Annotated[int, typer.Option(min=1, max=200, help="How often it is fitted again and judged.")] = 3,
    share: Annotated[float, typer.Option(min=0.01, max=0.9, help="Share of the history that is judged.")] = 0.3,
    seed: SeedOption = 0,
    forecaster: ForecasterOption = None,
    dask: DaskOption = None,
    processes: ProcessesOption = 1,
    json: JsonOption = None,
    html: HtmlOption = None,
    config: ConfigOption = None,
    state: StateOption = None,
) -> None:
    """Back-test forecasts: fit before each window, evaluate on the window, and compare with baselines.

    The baselines are those of `evaluate`. Windows are independent pieces of work. With --dask they go
    to the workers of a scheduler, with the same results.

    Examples:

      fleetcast backtest demand

      fleetcast backtest duration --data ~/data --set jobs/ricc --windows 5 --html backtest.html

      fleetcast backtest demand --dask tcp://127.0.0.1:8786
    """
    from fleetcast.training.fits.backtest import backtest as run
    from fleetcast.training.fits.backtest import make_demand_windows, make_duration_windows
    from fleetcast.training.reports.report import render_report
    from fleetcast.training.reports.results_files import format_summary

    check_choice("task", task, TASKS)
    own = load_own_forecasters(forecaster, task, "backtest")
    check_outputs(json, html=html)
    with print_progress(f"backtest {task}") as say:
        source = choose_training_inputs(load_site_config(config, state), data, archive, sets, until, say)
        if task == "demand":
            pieces = make_demand_windows(source.read_panels(), windows, seed, share, own)
        else:
            pieces = make_duration_windows(source.read_jobs(), windows, seed, share)
        results = run(task, pieces, address=dask, processes=processes, say=say)
    for line in results.skipped:
        echo(f"skipped {line}", err=True)
    echo(format_summary(results), err=True)
    about = {"task": task, "seed": seed, "windows": len(pieces), "source": str(data or source.archive)}
    write_json(json, {**about, "rows": results.rows, "skipped": results.skipped})
    write_html(html, lambda: render_report(results))
