"""`fleetcast evaluate`: compares our forecasts with baselines at the same origins."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fleetcast.cli.kit.options import (
    ForecasterOption,
    HtmlOption,
    JsonOption,
    SeedOption,
    check_choice,
    check_folder,
    check_outputs,
    load_own_forecasters,
    write_html,
    write_json,
)
from fleetcast.cli.kit.results_table import write_table
from fleetcast.cli.kit.screen import echo

if TYPE_CHECKING:
    from fleetcast.training.reports.results import Results

    Judge = Callable[[int], Results]  # of a seed

TASKS = (
    *("demand", "duration", "start", "straggler", "risk", "fingerprint", "interference", "placement", "queue"),
    "node_load",
)
YEAR_NODES = 400
QUEUES = frozenset({"queue"})  # which play on a count of GPUs
FIT_NOTHING = frozenset({"straggler", "node_load"})
ROLLING = frozenset({"demand", "duration"})
WATCH_RUNS = frozenset({"straggler", "risk"})  # which read telemetry, so that some of it can be left out

TestOption = Annotated[
    Path | None, typer.Option(help="Data folder to judge on: later rows, unseen clusters, users or models.")
]
TrainOption = Annotated[
    Path | None, typer.Option(help="Data folder to fit on; the layout of FLEETCAST_DATA. straggler needs none.")
]
FaultsOption = Annotated[
    Path | None, typer.Option(help="risk: a log of your faults instead of folders: CSV node,start,end,kind.")
]
NodesOption = Annotated[
    int | None, typer.Option(min=1, help="With --faults, --year: nodes of the fleet, those that never failed included.")
]
YearOption = Annotated[
    bool, typer.Option("--year", help="risk: fit and judge a site's own risk on a simulated year of --nodes.")
]
WindowsOption = Annotated[
    int,
    typer.Option(
        min=0, max=100, help="Rolling windows of demand, duration, each fitted for; 0: as many as a set gives."
    ),
]
DropOption = Annotated[
    list[str] | None,
    typer.Option(
        help="Judge without this telemetry (straggler, risk; repeatable).", metavar="default|ib|xid|prof|host"
    ),
]
CapacityOption = Annotated[
    int | None, typer.Option(min=1, help="queue: GPUs or cores of the fleet; default: train's jobs fill 85 % of it.")
]
MaxWaitOption = Annotated[
    float | None, typer.Option(min=0, help="queue: hours after which no job is passed any more (default 24).")
]
CurveOption = Annotated[
    str | None,
    typer.Option(help="straggler, risk: simulate and judge at several points.", metavar="magnitude|interval|drop"),
]


def evaluate(
    task: Annotated[str, typer.Argument(help="What to judge.", metavar="|".join(TASKS))],
    test: TestOption = None,
    train: TrainOption = None,
    faults: FaultsOption = None,
    nodes: NodesOption = None,
    year: YearOption = False,
    seed: SeedOption = 0,
    windows: WindowsOption = 0,
    forecaster: ForecasterOption = None,
    capacity: CapacityOption = None,
    max_wait_h: MaxWaitOption = None,
    drop: DropOption = None,
    curve: CurveOption = None,
    runs: Annotated[int, typer.Option(min=1, help="With --curve: fleets at each point, from --seed on.")] = 5,
    plot: Annotated[Path | None, typer.Option(help="With --curve: the plot as SVG.")] = None,
    json: JsonOption = None,
    html: HtmlOption = None,
    predictions: Annotated[Path | None, typer.Option(help="Every forecast with its outcome (Parquet).")] = None,
    results: Annotated[Path | None, typer.Option(help="Replace this task's table in this Markdown file.")] = None,
) -> None:
    """Compare forecasts with fair baselines.

    `fleetcast data split` makes a pair of folders. Forecasts begin after the end of the train folder.
    A forecast may use all earlier data of both folders. Demand is fitted again before each of several windows, on
    all data before the window and on none within it.

    Examples:

      fleetcast data split demand/venus --at 2020-08-11 --out split

      fleetcast evaluate demand --train split/train --test split/test --json demand.json --html demand.html

      fleetcast evaluate straggler --test var/judged --drop default --drop ib

      fleetcast evaluate queue --train split/train --test split/test --capacity 8192

      fleetcast evaluate risk --faults faults.csv --nodes 400

      fleetcast evaluate risk --year --nodes 400 --seed 1

      fleetcast evaluate straggler --curve magnitude --seed 6 --plot curve.svg
    """
    from fleetcast.cli.lab.curves import CurveOutputs, evaluate_curve
    from fleetcast.fleet.errors import ConfigError

    check_choice("task", task, TASKS)
    if drop and (task not in WATCH_RUNS or faults is not None or year):
        raise ConfigError(f"--drop: {task} reads no telemetry; risk and straggler with data folders do")
    if curve is not None or plot is not None:
        beside = {"train": train, "test": test, "faults": faults, "html": html, "predictions": predictions}
        to = CurveOutputs(json, results, plot)
        evaluate_curve(task, curve, beside, range(seed, seed + runs), drop or [], to, _print_line)
        return
    rolling = _make_rolling_arguments(task, windows, forecaster) | _make_queue_arguments(task, capacity, max_wait_h)
    judge, source = _choose_evaluation(task, (train, test), (faults, nodes, year), drop or [], rolling)
    check_outputs(json, html=html, predictions=predictions, results=results)
    asked = _format_numbers({"windows": windows, "capacity": capacity, "max-wait-h": max_wait_h})
    asked += _format_repeated_option("forecaster", forecaster)
    _run_evaluation(task, judge, source, seed, (drop or [], asked), _Outputs(json, html, predictions, results))


def _format_numbers(numbers: dict[str, float | None]) -> list[str]:
    """Return the words of a command for the numbers that were given, by option."""
    return [f"--{name}={value}" for name, value in numbers.items() if value]


@dataclass(frozen=True)
class _Outputs:
    """The files that an evaluation writes. A file that is None is not written."""

    json: Path | None
    html: Path | None
    predictions: Path | None
    results: Path | None


def _run_evaluation(
    task: str, judge: "Judge", source: dict[str, str], seed: int, asked: tuple[list[str], list[str]], to: _Outputs
) -> None:
    """Run the evaluation, print its result, and write the files.

    source: option -> its value, for the report. asked: telemetry that was left out, and further words of the
    command. Raises FleetcastError if there was nothing to evaluate.
    """
    from fleetcast.fleet.errors import FleetcastError
    from fleetcast.training.reports.report import render_report
    from fleetcast.training.reports.results_files import format_summary, make_task_tables, write_predictions
    from fleetcast.training.reports.window_rows import summarise_windows

    drop, words = asked
    found = judge(seed)
    for line in found.skipped:
        _print_line(f"skipped {line}")
    if not found.rows:
        where = " and ".join(source.values())
        raise FleetcastError(f"nothing to judge in {where}: no set that {task} reads is in both")
    _print_line(format_summary(found))
    without = {"drop": drop} if drop else {}
    rolled = {"windows": found.windows, "over_windows": summarise_windows(found.windows)} if found.windows else {}
    about = {"task": task, "seed": seed, **source, **without}
    write_json(to.json, {**about, "rows": found.rows, **rolled, "skipped": found.skipped})
    if to.predictions is not None:
        write_predictions(found, to.predictions)
        _print_line(f"wrote {to.predictions}")
    if to.results is not None:
        left_out = _format_repeated_option("drop", drop)
        given = [f"--{key}={value}" if value else f"--{key}" for key, value in source.items()]
        command = ["fleetcast", "evaluate", task, *given, f"--seed={seed}", *left_out, *words]
        beside = [*left_out, *(f"--{key}" for key in ("faults", "year") if key in source)]
        for name, rows in make_task_tables(found).items():
            write_table(to.results, " ".join([name, *beside]), command, rows)
        _print_line(f"wrote {to.results}")
    write_html(to.html, lambda: render_report(found))


def _make_rolling_arguments(task: str, windows: int, forecaster: list[str] | None) -> dict[str, Any]:
    """Return the keyword arguments of evaluations over rolling windows.

    Raises ConfigError if another task has such options.
    """
    from fleetcast.fleet.errors import ConfigError

    if windows and task not in ROLLING:
        raise ConfigError(f"--windows {windows}: {task} has none; {', '.join(sorted(ROLLING))} does")
    own = load_own_forecasters(forecaster, task, "evaluate")
    return {**({"windows": windows} if windows else {}), **({"own": own} if own else {})}


def _make_queue_arguments(task: str, capacity: int | None, max_wait_h: float | None) -> dict[str, Any]:
    """Return the keyword arguments of the evaluation of queues.

    Raises ConfigError if another task has such options.
    """
    from fleetcast.fleet.errors import ConfigError

    given = {"capacity": capacity, "max_wait_h": max_wait_h}
    given = {name: value for name, value in given.items() if value is not None}
    if given and task not in QUEUES:
        raise ConfigError(f"--{next(iter(given)).replace('_', '-')}: {task} plays no queue; queue does")
    return given


def _format_repeated_option(option: str, values: list[str] | None) -> list[str]:
    """Return the command-line words of an option that is repeated for each of its values."""
    return [f"--{option}={value}" for value in values or ()]


def _choose_evaluation(
    task: str,
    folders: tuple[Path | None, Path | None],
    log: tuple[Path | None, int | None, bool],
    drop: list[str],
    rolling: dict[str, Any],
) -> "tuple[Judge, dict[str, str]]":
    """Return the evaluation that the options select, and the options that name its data.

    The data are two folders, a log of faults, or a simulated year.
    """
    faults, nodes, year = log
    if faults is not None or nodes is not None or year:
        return _choose_log_evaluation(task, *folders, faults, nodes, year)
    return _choose_folder_evaluation(task, *folders, drop, rolling)


def _choose_folder_evaluation(
    task: str, train: Path | None, test: Path | None, drop: list[str], rolling: dict[str, Any]
) -> "tuple[Judge, dict[str, str]]":
    """Return the evaluation of a task on data folders, and the options that name them.

    Raises ConfigError if a folder is missing.
    """
    from importlib import import_module

    from fleetcast.fleet.errors import ConfigError

    if test is None:
        log = "; risk takes a log of faults, too: --faults faults.csv --nodes 400" if task == "risk" else ""
        raise ConfigError(f"--test: {task} needs a data folder to judge on{log}")
    if train is None and task not in FIT_NOTHING:
        raise ConfigError(f"--train: {task} needs a data folder to fit on; `fleetcast data split` makes a pair")
    folders = test if train is None else train, test
    for option, folder in zip(("--train", "--test"), folders, strict=True):
        check_folder(option, folder)
    evaluate_folders = import_module(f"fleetcast.training.judges.{task}").evaluate
    without = {**rolling, **({"drop": drop} if drop else {})}
    source = {"train": str(folders[0]), "test": str(folders[1])}
    return (lambda seed: evaluate_folders(*folders, seed, _print_line, **without)), source


def _choose_log_evaluation(
    task: str, train: Path | None, test: Path | None, faults: Path | None, nodes: int | None, year: bool
) -> "tuple[Judge, dict[str, str]]":
    """Return the evaluation of a log of faults or of a simulated year, and the options that name it.

    Raises ConfigError for options that cannot be combined.
    """
    from fleetcast.fleet.errors import ConfigError

    if task != "risk":
        raise ConfigError(f"--faults, --nodes and --year are of `evaluate risk`; {task} judges data folders")
    if (faults is None) is not year or train is not None or test is not None:
        raise ConfigError(
            "name one of a log (--faults FILE --nodes N), a simulated year (--year), two data folders (--train, --test)"
        )
    if faults is None:
        from fleetcast.training.judges.site_year import evaluate_year

        size = nodes or YEAR_NODES
        return (lambda seed: evaluate_year(size, seed, _print_line)), {"year": "", "nodes": str(size)}
    from fleetcast.training.judges.risk import evaluate_fault_log

    if not faults.is_file():
        raise ConfigError(f"--faults {faults}: no such file; expected a CSV with node,start,end,kind")
    if nodes is None:
        raise ConfigError(
            f"--nodes: how many nodes has the fleet? {faults} names those that failed, and says nothing of the others"
        )
    return (lambda seed: evaluate_fault_log(faults, nodes, seed, _print_line)), {
        "faults": str(faults),
        "nodes": str(nodes),
    }


def _print_line(line: str) -> None:
    echo(line, err=True)
