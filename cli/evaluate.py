"""`fleetcast evaluate`: compare our forecasts with baselines at the same origins."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cli.options import HtmlOption, JsonOption, SeedOption, check_folder, check_outputs, write_html, write_json
from cli.results_table import write_table

if TYPE_CHECKING:
    from training.reports.results import Results

TASKS = ("demand", "duration", "start", "straggler", "risk", "fingerprint", "interference")
FIT_NOTHING = frozenset({"straggler"})


def evaluate(
    task: Annotated[str, typer.Argument(help="What to judge.", metavar="|".join(TASKS))],
    test: Annotated[Path, typer.Option(help="Data folder to judge on: later rows, unseen clusters, users or models.")],
    train: Annotated[
        Path | None, typer.Option(help="Data folder to fit on; the layout of FLEETCAST_DATA. straggler needs none.")
    ] = None,
    seed: SeedOption = 0,
    json: JsonOption = None,
    html: HtmlOption = None,
    predictions: Annotated[Path | None, typer.Option(help="Every forecast with its outcome (Parquet).")] = None,
    results: Annotated[Path | None, typer.Option(help="Replace this task's table in this Markdown file.")] = None,
) -> None:
    """Judge forecasts against fair baselines. `fleetcast data split` makes a pair of folders.

    Forecasts begin after the end of the train folder. History at an origin is both folders up to it; nothing is
    fitted on the test folder, but state may move with outcomes known at the time.

    Examples:

      fleetcast data split demand/venus --at 2020-08-11 --out split

      fleetcast evaluate demand --train split/train --test split/test --json demand.json --html demand.html
    """
    from importlib import import_module

    from fleet.errors import ConfigError, FleetcastError
    from training.reports.report import report_html
    from training.reports.results_files import summary, table, write_predictions

    if task not in TASKS:
        raise ConfigError(f"task {task!r}: expected one of {', '.join(TASKS)}")
    if train is None and task not in FIT_NOTHING:
        raise ConfigError(f"--train: {task} needs a data folder to fit on; `fleetcast data split` makes a pair")
    train = test if train is None else train
    check_folder("--train", train)
    check_folder("--test", test)
    check_outputs(json, html=html, predictions=predictions, results=results)
    found: Results = import_module(f"training.judges.{task}").evaluate(train, test, seed, _say)
    for line in found.skipped:
        _say(f"skipped {line}")
    if not found.rows:
        raise FleetcastError(f"nothing to judge in {train} and {test}: no set that {task} reads is in both")
    _say(summary(found))
    about = {"task": task, "seed": seed, "train": str(train), "test": str(test)}
    write_json(json, {**about, "rows": found.rows, "skipped": found.skipped})
    if predictions is not None:
        write_predictions(found, predictions)
        _say(f"wrote {predictions}")
    if results is not None:
        command = ["fleetcast", "evaluate", task, f"--train={train}", f"--test={test}", f"--seed={seed}"]
        write_table(results, f"evaluate {task}", command, table(found))
        _say(f"wrote {results}")
    write_html(html, lambda: report_html(found))


def _say(line: str) -> None:
    typer.echo(line, err=True)
