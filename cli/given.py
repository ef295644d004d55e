"""What `train`, `backtest` and `drift` have in common: the history that they read, and how they tell of progress."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from service.config import Config
    from training.histories import Given

DataOption = Annotated[Path | None, typer.Option("--data", help="Folder of data sets (`fleetcast data list`).")]
ArchiveOption = Annotated[
    str | None, typer.Option("--archive", help="What a site has archived: a folder or URL [the configuration's].")
]
SetOption = Annotated[list[str] | None, typer.Option("--set", help="Only these sets of --data. Repeat for more.")]
UntilOption = Annotated[str | None, typer.Option("--until", help="Read nothing later: a date, or seconds.")]
ConfigOption = Annotated[Path | None, typer.Option("--config", help="The file that `fleetcast run` reads.")]
StateOption = Annotated[
    str | None, typer.Option("--state", help="The folder `fleetcast run` keeps its state in [var].")
]
SeedOption = Annotated[int, typer.Option(help="Same seed, same numbers.")]
DaskOption = Annotated[
    str | None, typer.Option("--dask", help="Address of a Dask scheduler, tcp://host:8786; else it is done here.")
]
ProcessesOption = Annotated[int, typer.Option(min=1, max=64, help="Processes of this machine, without --dask.")]

Say = Callable[[str], None]


def configured(config: Path | None, state: str | None) -> "Config":
    """The configuration that says where archive and models are."""
    from service.config import load_config, override

    return override(load_config(config), state=state)


def given(
    config: "Config", data: Path | None, archive: str | None, sets: list[str] | None, until: str | None, say: Say
) -> "Given":
    """The history that is named; with neither --data nor --archive what this site's own pipeline has archived."""
    from training.histories import Given, moment_ms

    if data is None and archive is None:
        archive = config.archive_url
    return Given(data, archive, tuple(sets or ()), moment_ms("--until", until), capacities(config), say)


def capacities(config: "Config") -> dict[str, int]:
    """Pool -> GPUs, and "all", where a topology says so."""
    if not config.fleet.topology:
        return {}
    from ingest.topology import load_topology

    topology = load_topology(Path(config.fleet.topology))
    pools: dict[str, int] = {}
    for node in topology.nodes:
        pools[node.pool] = pools.get(node.pool, 0) + node.gpus
    return {**pools, "all": int(topology.gpus.sum())}


@contextmanager
def telling(label: str) -> Iterator[Say]:
    """Lines on stderr; on a terminal what was said last, beside a clock, and all that was skipped."""
    from rich.console import Console

    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda line: typer.echo(line, err=True)
        return
    from rich.markup import escape
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task(label)

        def say(line: str) -> None:
            if line.startswith("skipped "):  # stays to be read
                progress.console.print(escape(line), highlight=False)
            else:
                progress.update(task, description=f"{label}: {escape(line)}")

        yield say
