"""Options that `train`, `evaluate`, `backtest` and `drift` share.

The module also loads the inputs that these options name, shows progress and writes the outputs.
"""

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fleetcast.cli.kit.screen import echo
from fleetcast.fleet.errors import ConfigError
from fleetcast.fleet.printable import escape_unprintable

if TYPE_CHECKING:
    from fleetcast.fleet.topology import Topology
    from fleetcast.service.config import Config
    from fleetcast.training.judges.own_forecasters import OwnForecaster
    from fleetcast.training.sites.histories import TrainingInputs

DataOption = Annotated[Path | None, typer.Option("--data", help="Folder of data sets (`fleetcast data list`).")]
ArchiveOption = Annotated[
    str | None, typer.Option("--archive", help="What a site has archived: a folder or URL [the configuration's].")
]
SetOption = Annotated[list[str] | None, typer.Option("--set", help="Only these sets of --data. Repeat for more.")]
UntilOption = Annotated[str | None, typer.Option("--until", help="Read nothing later: a date, or seconds.")]
ConfigOption = Annotated[
    Path | None, typer.Option("--config", help="The file that `fleetcast run` reads [what it saved in --state].")
]
StateOption = Annotated[
    str | None, typer.Option("--state", help="The folder `fleetcast run` keeps its state in [var].")
]
ModelsOption = Annotated[Path | None, typer.Option("--models", help="Folder of the versions [the configuration's].")]
SeedOption = Annotated[int, typer.Option(help="Same seed, same numbers.", min=0)]
DaskOption = Annotated[
    str | None, typer.Option("--dask", help="Address of a Dask scheduler, tcp://host:8786; else it is done here.")
]
ProcessesOption = Annotated[int, typer.Option(min=1, max=64, help="Processes of this machine, without --dask.")]
JsonOption = Annotated[Path | None, typer.Option("--json", help="Where to write the numbers; - is stdout.")]
HtmlOption = Annotated[Path | None, typer.Option("--html", help="A report with plots.")]
ForecasterOption = Annotated[
    list[str] | None,
    typer.Option(help="package.module:Class of your own, compared with the baselines of demand. Repeat for more."),
]


def _check_moment(text: str) -> str:
    """Return the text if it is a date and time. Raises BadParameter otherwise, before any data is loaded."""
    from fleetcast.simulator.days.traces import parse_time_ms

    try:
        parse_time_ms(text)
    except ValueError as error:
        raise typer.BadParameter(f"{text!r}: {error}; expected a date and time such as 2020-05-12T20:25") from None
    return text


AtOption = Annotated[str, typer.Option(help="Where in the job trace to begin (UTC).", callback=_check_moment)]
SpeedOption = Annotated[
    float, typer.Option(help="How much faster than real time the fleet runs.", min=0.001, max=1_000_000)
]

STDOUT = Path("-")

Say = Callable[[str], None]


def check_outputs(json: Path | None, **files: Path | None) -> None:
    """Check that each output file can be written, before any work begins. Raises ConfigError if one cannot.

    json: may be -, which is stdout.
    """
    for option, path in {"json": None if json == STDOUT else json, **files}.items():
        if path is None:
            continue
        folder = path.parent
        if not folder.is_dir():
            raise ConfigError(f"--{option} {path}: no folder {folder}; make it first: mkdir -p {folder}")
        if path.is_dir():
            raise ConfigError(f"--{option} {path}: is a folder; name a file in it")
        if not os.access(path if path.exists() else folder, os.W_OK):
            raise ConfigError(f"--{option} {path}: may not be written; choose another place")


def check_folder(option: str, folder: Path) -> None:
    """Check that a data folder exists and can be read. Raises ConfigError if it cannot."""
    if not folder.is_dir():
        what = "is a file, not a folder" if folder.exists() else "no such folder"
        raise ConfigError(f"{option} {folder}: {what}; `fleetcast data list` shows data folders")
    if not os.access(folder, os.R_OK | os.X_OK):
        raise ConfigError(f"{option} {folder}: may not be read; allow it (chmod) or name another")


def write_json(path: Path | None, body: dict[str, Any]) -> None:
    """Write the body to a file, or to stdout if the path is -. Does nothing without a path."""
    import msgspec

    if path is None:
        return
    text = msgspec.json.format(msgspec.json.encode(body), indent=1) + b"\n"
    if path == STDOUT:
        sys.stdout.buffer.write(text)
    else:
        path.write_bytes(text)
        echo(f"wrote {path}", err=True)


def write_html(path: Path | None, page: Callable[[], str]) -> None:
    """Write the page to a file. Without a path, the page is not even rendered."""
    if path is not None:
        path.write_text(page(), encoding="utf-8")
        echo(f"wrote {path}", err=True)


def load_site_config(config: Path | None, state: str | None) -> "Config":
    """Return the site's configuration.

    It comes from the file of --config. Without this option, it comes from the file that `fleetcast run` saved in the
    state folder. If neither file exists, the defaults apply.
    """
    from fleetcast.service.config import Config, load_config, override_config

    saved = Path(state or Config().state) / "config.toml"
    if config is None and os.access(saved, os.R_OK):
        config = saved
    return override_config(load_config(config), state=state)


def choose_training_inputs(
    config: "Config", data: Path | None, archive: str | None, sets: list[str] | None, until: str | None, say: Say
) -> "TrainingInputs":
    """Return the training data that the options name.

    Without --data and --archive, the data come from the archive of this site.
    """
    from fleetcast.training.sites.histories import TrainingInputs, parse_moment_ms

    if data is not None:
        check_folder("--data", data)
    if data is None and archive is None:
        archive = config.archive_url
    return TrainingInputs(
        data, archive, tuple(sets or ()), parse_moment_ms("--until", until), count_fleet_gpus(config), say
    )


def check_choice(name: str, value: str, choices: Sequence[str]) -> None:
    """Raise ConfigError if the value of an argument is none of the choices."""
    if value not in choices:
        raise ConfigError(f"{name} {value!r}: expected one of {', '.join(choices)}")


def load_own_forecasters(paths: list[str] | None, task: str, command: str) -> "list[OwnForecaster]":
    """Load the forecasters at these import paths, and check each with `check_forecaster`.

    Raises ConfigError if a path cannot be used, or if the task is not demand and there are any paths.
    """
    from fleetcast.training.judges.own_forecasters import OwnForecaster

    found: list[OwnForecaster] = []
    for path in dict.fromkeys(paths or ()):
        one = OwnForecaster.from_path(path)
        if one.name in (other.name for other in found):
            raise ConfigError(f"--forecaster {path}: another one is called {one.name!r}; rename one")
        _check_contract(one)
        found.append(one)
    if found and task != "demand":
        raise ConfigError(f"--forecaster {found[0].path}: forecasts demand, not {task}; {command} demand")
    return found


def _check_contract(one: "OwnForecaster") -> None:
    from fleetcast.checks import check_forecaster
    from fleetcast.training.judges.own_forecasters import call_with_limit, load_factory

    suite = "fleetcast.checks.check_forecaster"
    try:
        call_with_limit(lambda: check_forecaster(load_factory(one.path)), one.path, one.limit_s, suite)
    except AssertionError as error:
        said = " ".join(str(error).split()) or "wrong shape, or no name"
        raise ConfigError(f"--forecaster {one.path}: {suite} says: {said[:300]}") from None


def count_fleet_gpus(config: "Config") -> int:
    """Count the GPUs of the topology file. Returns 0 if there is no such file."""
    topology = load_site_topology(config)
    return 0 if topology is None else int(topology.gpus.sum())


def load_site_topology(config: "Config") -> "Topology | None":
    """Load the topology file of the configuration. Returns None if the configuration names no file."""
    if not config.fleet.topology:
        return None
    from fleetcast.ingest.topology.load import load_topology

    return load_topology(Path(config.fleet.topology))


@contextmanager
def print_progress(label: str) -> Iterator[Say]:
    """Yield a function that prints progress lines on stderr.

    On a terminal it shows only the newest line, with a clock. Lines that begin with `skipped` stay visible.
    """
    from rich.console import Console

    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda line: echo(line, err=True)
        return
    from rich.markup import escape
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task(label)

        def say(line: str) -> None:
            if line.startswith("skipped "):  # stays to be read
                progress.console.print(escape(escape_unprintable(line)), highlight=False)
            else:
                progress.update(task, description=f"{label}: {escape(escape_unprintable(line))}")

        yield say
