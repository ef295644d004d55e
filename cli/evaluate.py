"""`fleetcast evaluate`: the judge. Our forecasts beside fair baselines, on the same origins, in one run."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from training.results import Results

TASKS = ("demand", "duration", "start")


def evaluate(
    task: Annotated[str, typer.Argument(help="What to judge.", metavar="|".join(TASKS))],
    train: Annotated[Path, typer.Option(help="Data folder to fit on; the layout of FLEETCAST_DATA.")],
    test: Annotated[Path, typer.Option(help="Data folder to judge on: later rows, unseen clusters, users or models.")],
    seed: Annotated[int, typer.Option(help="Same seed, same numbers.")] = 0,
    json: Annotated[Path | None, typer.Option("--json", help="Where to write the numbers; - is stdout.")] = None,
    html: Annotated[Path | None, typer.Option(help="A report with plots.")] = None,
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

    if task not in TASKS:
        raise ConfigError(f"task {task!r}: expected one of {', '.join(TASKS)}")
    for option, folder in (("--train", train), ("--test", test)):
        if not folder.is_dir():
            raise ConfigError(f"{option} {folder}: no such folder; `fleetcast data split` makes one")
    results: Results = import_module(f"training.evaluate_{task}").evaluate(train, test, seed, _say)
    for line in results.skipped:
        _say(f"skipped {line}")
    if not results.rows:
        raise FleetcastError(f"nothing to judge in {train} and {test}: no set that {task} reads is in both")
    _write(results, seed, (train, test), json)
    if predictions is not None:
        from training.results_files import write_predictions

        write_predictions(results, predictions)
        _say(f"wrote {predictions}")
    if html is not None:
        from training.report import report_html

        html.write_text(report_html(results), encoding="utf-8")
        _say(f"wrote {html}")


def _say(line: str) -> None:
    typer.echo(line, err=True)


def _write(results: "Results", seed: int, folders: tuple[Path, Path], json: Path | None) -> None:
    """The JSON to its file; for people a table on stderr."""
    import msgspec

    from training.results_files import summary

    _say(summary(results))
    if json is None:
        return
    train, test = (str(folder) for folder in folders)
    body = {"task": results.task, "seed": seed, "train": train, "test": test, "rows": results.rows}
    body["skipped"] = results.skipped
    text = msgspec.json.format(msgspec.json.encode(body), indent=1) + b"\n"
    if str(json) == "-":
        sys.stdout.buffer.write(text)
    else:
        json.write_bytes(text)
        _say(f"wrote {json}")
