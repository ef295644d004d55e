"""`fleetcast evaluate`: the judge. Our forecasts beside fair baselines, on the same origins, in one run."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cli.given import HtmlOption, JsonOption, SeedOption, check_folder, check_outputs, write_html, write_json

if TYPE_CHECKING:
    from training.results import Results

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
    from training.report import report_html
    from training.results_files import summary, write_predictions

    if task not in TASKS:
        raise ConfigError(f"task {task!r}: expected one of {', '.join(TASKS)}")
    if train is None and task not in FIT_NOTHING:
        raise ConfigError(f"--train: {task} needs a data folder to fit on; `fleetcast data split` makes a pair")
    train = test if train is None else train
    check_folder("--train", train)
    check_folder("--test", test)
    check_outputs(json, html=html, predictions=predictions)
    results: Results = import_module(f"training.evaluate_{task}").evaluate(train, test, seed, _say)
    for line in results.skipped:
        _say(f"skipped {line}")
    if not results.rows:
        raise FleetcastError(f"nothing to judge in {train} and {test}: no set that {task} reads is in both")
    _say(summary(results))
    about = {"task": task, "seed": seed, "train": str(train), "test": str(test)}
    write_json(json, {**about, "rows": results.rows, "skipped": results.skipped})
    if predictions is not None:
        write_predictions(results, predictions)
        _say(f"wrote {predictions}")
    write_html(html, lambda: report_html(results))


def _say(line: str) -> None:
    typer.echo(line, err=True)
