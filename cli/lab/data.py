"""`fleetcast data`: lists public data sets, splits them, and imports published layouts."""

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fleetcast.cli.kit.screen import echo

if TYPE_CHECKING:
    from fleetcast.ingest.job_tables import JobColumns

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode=None,
    help="Public data sets for measuring and for the demo.\n\n"
    "They lie in the folder that FLEETCAST_DATA names (else: shared/data next to this project); none of them ships.\n\n"
    "Example:  fleetcast data list",
)


def find_data_folder() -> Path:
    """Return the folder FLEETCAST_DATA, or else the folder `shared/data` next to the project."""
    named = os.environ.get("FLEETCAST_DATA")
    return Path(named) if named else Path(__file__).resolve().parents[3] / "shared" / "data"


DataOption = Annotated[Path | None, typer.Option("--data", help="Folder of the data sets [FLEETCAST_DATA].")]


@app.command("list")
def list_sets(data: DataOption = None) -> None:
    """List the data sets in FLEETCAST_DATA with rows and spans, and the sources of missing ones.

    Example:  fleetcast data list
    """
    from fleetcast.training.sets.data_folders import list_set_names
    from fleetcast.training.sets.public_sets import PUBLIC_SETS, find_public_set

    folder = data or find_data_folder()
    present = list_set_names(folder) if folder.is_dir() else ()
    echo(f"{folder}: {len(present)} sets" if present else f"{folder}: no data sets here")
    for name in present:
        known = find_public_set(name)
        echo()
        echo(name + (f"  {known.what} ({known.licence})" if known else ""))
        _echo_files(folder, name)
    missing = [row for row in PUBLIC_SETS if row.name not in present]
    if missing:
        echo()
        echo("missing, and where each is published:")
    for row in missing:
        echo(f"  {row.name:<32} {row.home or 'not published as a set'}  ({row.licence})")


def _echo_files(data: Path, name: str) -> None:
    from fleetcast.fleet.errors import FleetcastError
    from fleetcast.training.sets.data_folders import is_table, measure_file_span

    files = sorted(path for path in (data / name).rglob("*") if path.is_file())
    tables = [path for path in files if is_table(path)]
    for path in tables:
        try:
            span = measure_file_span(name, path)
        except FleetcastError as error:  # a table that pandas cannot read is still listed
            echo(f"  {path.name:<44} not a plain table ({error})")
            continue
        words = f"  {span.first} to {span.last}" if span.first else ""
        echo(f"  {path.name:<44} {span.rows:>9,} rows{words}")
    if len(files) > len(tables):
        echo(f"  {len(files) - len(tables)} other files")


@app.command("split")
def split_data_set(
    name: Annotated[str, typer.Argument(help="A set of `fleetcast data list`, e.g. jobs/venus or ricc.")],
    out: Annotated[Path, typer.Option(help="Folder that gets train/NAME and test/NAME.")],
    at: Annotated[
        str | None,
        typer.Option(help="T: rows before it train, the others test. A time, or a number where the clock is."),
    ] = None,
    hold_out: Annotated[
        list[str] | None, typer.Option(help="KEY=VALUE: these rows go to the test folder whole. Repeat for more.")
    ] = None,
    data: DataOption = None,
) -> None:
    """Split a data set into a train and a test folder of the same layout.

    Examples:

      fleetcast data split jobs/venus --at 2020-07-01 --out split

      fleetcast data split demand/earth --at 2020-05-18 --hold-out vc=vc3sl --out split

      fleetcast data split jobs/ricc --at 6000000 --out split      (its clock is seconds)
    """
    from fleetcast.fleet.errors import ConfigError
    from fleetcast.training.sets.data_folders import split_set

    pairs = [item.partition("=") for item in hold_out or []]
    bad = next((key for key, sign, value in pairs if not (key and sign and value)), None)
    if bad is not None:
        raise ConfigError(f"--hold-out {bad}: expected KEY=VALUE")
    report = split_set(data or find_data_folder(), name, at, [(key, value) for key, _, value in pairs], out)
    for row in report:
        counts = "copied to both" if row.train is None else f"train {row.train:,} rows, test {row.test:,} rows"
        echo(f"{row.file}: {counts}")
    echo(f"wrote {out / 'train'} and {out / 'test'}", err=True)


@app.command("import")
def import_set(
    kind: Annotated[str, typer.Argument(help="helios, swf or slurm.", metavar="helios|swf|slurm")],
    path: Annotated[Path, typer.Argument(help="The published file (.gz is fine), or for helios its folder.")],
    out: Annotated[Path, typer.Option(help="Data folder that gets jobs/NAME.")],
    name: Annotated[str | None, typer.Option(help="Name of the set [the kind].")] = None,
) -> None:
    """Convert a published job history to the layout that Fleetcast reads. All other columns are copied.

    Lines that cannot be read are skipped and counted by reason.

    Examples:

      fleetcast data import helios HeliosData/data/Venus --name venus --out ~/data

      fleetcast data import swf RICC-2010-2.swf.gz --name ricc --out ~/data

      sacct -aP -S 2026-01-01 -o ALL > jobs.txt; fleetcast data import slurm jobs.txt --out ~/data
    """
    from fleetcast.fleet.errors import FleetcastError
    from fleetcast.ingest.job_tables import read_gpu_numbers, read_job_table

    history = read_job_table(kind, path)
    if len(history) == 0:
        reasons = ", ".join(f"{reason} {count:,}" for reason, count in history.skipped.most_common())
        raise FleetcastError(f"{path}: no usable job ({reasons or 'the file is empty'})")
    name = name or kind
    folder = out / "jobs" / name
    _write_jobs(history, folder / (f"{name}.parquet" if kind == "swf" else f"{name}_gpu_jobs.parquet"))
    if history.header:
        (folder / "header.txt").write_text("\n".join(history.header) + "\n", encoding="utf-8")
    if kind == "helios" and len(numbers := read_gpu_numbers(path)):
        _write_jobs(numbers, folder / f"{name}_gpu_number.parquet")


def _write_jobs(history: "JobColumns", path: Path) -> None:
    """Write the columns as Parquet, and print the number of rows written and skipped.

    The file is complete or absent.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    pq.write_table(pa.table(history.columns), part)
    part.replace(path)
    echo(f"{path}: {len(history):,} rows")
    for reason, count in sorted(history.skipped.items()):
        echo(f"  skipped {count:,}: {reason}")
