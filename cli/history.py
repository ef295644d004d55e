"""`fleetcast history`: shows the contents of the archive, compacts its files, and deletes old days."""

import json
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fleetcast.cli.backfill import parse_time_ms
from fleetcast.cli.kit.options import ConfigOption, load_site_config
from fleetcast.cli.kit.screen import echo
from fleetcast.fleet.redaction import redact_secrets

if TYPE_CHECKING:
    from fleetcast.ingest.archive.files import ArchiveFiles, FileName
    from fleetcast.ingest.archive.read import ArchiveSpan
    from fleetcast.ingest.archive.series import ArchivedSeries

MANY_SERIES = 40
PLOT_COLUMNS, PLOT_LINES = 96, 8
BLOCKS = " ▁▂▃▄▅▆▇█"

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode=None,
    help="The archive of every accepted sample and event: Parquet files, by day and block.\n\n"
    "Example:  fleetcast history show",
)

StateOption = Annotated[str | None, typer.Option("--state", help="State folder that it lies in [var].")]
UrlOption = Annotated[str | None, typer.Option("--url", help="The archive itself: a folder or an fsspec URL.")]


LAST_MS = 2**53  # beyond any clock


@app.command("show")
def show_archive(
    config: ConfigOption = None,
    state: StateOption = None,
    url: UrlOption = None,
    from_: Annotated[str, typer.Option("--from", help="From this time: 2026-11-21T13:00 (UTC), or 2h for ago.")] = "",
    to: Annotated[str, typer.Option("--to", help="Up to this time [the newest].")] = "",
    metric: Annotated[str, typer.Option(help="Series of this metric, e.g. power_w.")] = "",
    entity: Annotated[str, typer.Option(help="Series of this GPU, node, port …, e.g. n001/3.")] = "",
    block: Annotated[str, typer.Option(help="Only this block of the topology.")] = "",
    json_path: Annotated[str | None, typer.Option("--json", help="Write it as JSON here; - is stdout.")] = None,
) -> None:
    """Show the contents of the archive by day. With --metric or --entity, show the series.

    A single series is also plotted.

    Examples:

      fleetcast history show

      fleetcast history show --metric power_w --from 2h

      fleetcast history show --metric power_w --entity n001/3
    """
    from fleetcast.ingest.archive.read import ArchiveSpan
    from fleetcast.ingest.archive.series import read_series

    files = _open_archive_files(config, state, url)
    now_ms = _read_now_ms()
    first_ms = parse_time_ms("--from", from_, now_ms) if from_ else 0
    span = ArchiveSpan(first_ms, parse_time_ms("--to", to, now_ms) if to else LAST_MS, block or None)
    if metric or entity:
        series = read_series(files, span, metric, entity, _make_progress_iterator("reading"))
        _write_output(
            json_path,
            [_make_series_row(one) for one in series],
            lambda: _echo_series(series, redact_secrets(files.url)),
        )
        return
    rows = _make_day_rows(files, span)
    _write_output(json_path, rows, lambda: _echo_days(rows, redact_secrets(files.url)))


@app.command("compact")
def compact_files(
    config: ConfigOption = None,
    state: StateOption = None,
    url: UrlOption = None,
    file_rows: Annotated[int, typer.Option(help="The most rows of a file that is made.", min=1000)] = 8_000_000,
) -> None:
    """Merge the files of each closed hour into one. A pipeline merges the files of its own days by itself.

    Files to which a pipeline still writes are left alone. The command may be stopped at any time: no row is
    lost or duplicated.

    Example:  fleetcast history compact
    """
    from fleetcast.fleet.errors import FleetcastError
    from fleetcast.ingest.archive.compact import compact, find_compaction_runs
    from fleetcast.ingest.archive.files import DATASETS

    files = _open_archive_files(config, state, url)
    now_ms = _read_now_ms()
    writers = sorted({name.writer for dataset in DATASETS for name in files.list_files(dataset)})
    done: Counter[str] = Counter()
    for writer in writers:
        try:
            give_back = files.claim_writer_name(writer)
        except OSError as error:
            echo(f"files of writer {writer} are left alone: {error.strerror}", err=True)
            continue
        try:
            files.finish_ready_files(writer)
            for run in _make_progress_iterator(f"writer {writer}")(
                find_compaction_runs(files, writer, now_ms, most_rows=file_rows)
            ):
                try:
                    compact(files, run)
                except ValueError as error:
                    echo(f"{run.names[0].path} and others stay as they are: {error}", err=True)
                    continue
                done.update(was=len(run.names), rows=run.rows, made=1)
        except OSError as error:
            raise FleetcastError(f"{files.url}: {error}; what was not done yet stays as it was") from None
        finally:
            give_back()
    if done["made"]:
        echo(f"{redact_secrets(files.url)}: {done['was']:,} files with {done['rows']:,} rows are {done['made']:,} now")
    else:
        echo(f"{redact_secrets(files.url)}: nothing to compact, no hour that is over has several files")


@app.command("prune")
def prune_days(
    keep_days: Annotated[int, typer.Option(help="Delete whole days that ended longer ago than this.", min=1)],
    config: ConfigOption = None,
    state: StateOption = None,
    url: UrlOption = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would go, and delete nothing.")] = False,
) -> None:
    """Delete days that ended longer ago than --keep-days.

    Examples:

      fleetcast history prune --keep-days 30 --dry-run

      fleetcast history prune --keep-days 30
    """
    from fleetcast.ingest.archive.compact import delete_days, list_old_days

    files = _open_archive_files(config, state, url)
    days = list_old_days(files, _read_now_ms(), keep_days)
    for day in days:
        echo(f"{'would delete' if dry_run else 'deleting'} {day}")
    if not dry_run:
        for day in _make_progress_iterator("deleting")(days):
            delete_days(files, [day])
    echo(f"{redact_secrets(files.url)}: {len(days)} days {'would be' if dry_run else 'were'} deleted")


# -- reading --------------------------------------------------------------------------------------------------------


def _open_archive_files(config: Path | None, state: str | None, url: str | None) -> "ArchiveFiles":
    from fleetcast.ingest.archive.files import ArchiveFiles

    return ArchiveFiles(url or load_site_config(config, state).archive_url)


def _read_now_ms() -> int:
    return time.time_ns() // 1_000_000


def _make_day_rows(files: "ArchiveFiles", span: "ArchiveSpan") -> list[dict[str, Any]]:
    """Return a row for each day and data set of the archive."""
    from fleetcast.ingest.archive.files import DATASETS

    counts: dict[tuple[str, str], Counter[str]] = {}
    blocks: dict[tuple[str, str], set[str]] = {}
    names = [name for dataset in DATASETS for name in span.list_files(files, dataset)]
    for name in _make_progress_iterator("reading")(names):
        key = (name.day, name.dataset)
        size, rows = _read_size(files, name)
        counts.setdefault(key, Counter()).update(files=1, rows=rows, bytes=size)
        blocks.setdefault(key, set()).add(name.block)
    return [
        {
            "day": day,
            "dataset": dataset,
            "blocks": len(blocks[day, dataset] - {""}),
            "files": count["files"],
            "rows": count["rows"],
            "bytes": count["bytes"],
            "bytes_per_row": round(count["bytes"] / max(1, count["rows"]), 3),
        }
        for (day, dataset), count in sorted(counts.items())
    ]


def _read_size(files: "ArchiveFiles", name: "FileName") -> tuple[int, int]:
    """Return the bytes and rows of a file. Both are 0 if it is damaged, or was compacted in the meantime."""
    import pyarrow.parquet as pq

    from fleetcast.ingest.archive.read import log_damaged_file

    try:
        with log_damaged_file(name), files.open(name) as file:
            return files.read_size(name), int(pq.read_metadata(file).num_rows)
    except FileNotFoundError:
        pass
    return 0, 0


# -- showing --------------------------------------------------------------------------------------------------------


def _make_progress_iterator(label: str) -> Callable[[Iterable[Any]], Iterator[Any]]:
    """Return a function that yields items, with a progress bar on stderr if that is a terminal."""

    def iterate_with_progress(items: Iterable[Any]) -> Iterator[Any]:
        known = list(items)
        if not sys.stderr.isatty() or len(known) < 2:
            yield from known
            return
        with typer.progressbar(known, label=label, file=sys.stderr, show_pos=True) as bar:
            yield from bar

    return iterate_with_progress


def _write_output(json_path: str | None, document: Any, otherwise: Callable[[], None]) -> None:
    if json_path is None:
        otherwise()
        return
    with _open_output(json_path) as file:
        file.write(json.dumps(document) + "\n")


@contextmanager
def _open_output(path: str) -> Iterator[Any]:
    if path == "-":
        yield sys.stdout
        return
    with open(path, "w", encoding="utf-8") as file:
        yield file


def _echo_days(rows: list[dict[str, Any]], url: str) -> None:
    echo(url if rows else f"{url}: nothing there in that span")
    if not rows:
        return
    echo(f"{'day':<12}{'dataset':<10}{'blocks':>7}{'files':>8}{'rows':>16}{'MiB':>10}{'bytes a row':>13}")
    for row in rows:
        echo(
            f"{row['day']:<12}{row['dataset']:<10}{row['blocks']:>7,}{row['files']:>8,}{row['rows']:>16,}"
            f"{row['bytes'] / 2**20:>10,.1f}{row['bytes_per_row']:>13.2f}"
        )


def _make_series_row(series: "ArchivedSeries") -> dict[str, Any]:
    return {
        "kind": series.kind,
        "metric": series.metric,
        "entity": series.entity,
        "samples": len(series.time_ms),
        "first_ms": int(series.time_ms[0]),
        "last_ms": int(series.time_ms[-1]),
        "min": float(series.value.min()),
        "mean": float(series.value.mean()),
        "max": float(series.value.max()),
    }


def _echo_series(series: list["ArchivedSeries"], url: str) -> None:
    if not series:
        echo(f"{url}: no such series in that span")
        return
    head = f"{'metric':<26}{'entity':<28}{'samples':>9}  {'first':<20}{'last':<20}"
    echo(f"{head}{'min':>12}{'mean':>12}{'max':>12}")
    for row in map(_make_series_row, series[:MANY_SERIES]):
        first, last = (
            f"{datetime.fromtimestamp(row[key] / 1000, UTC):%Y-%m-%d %H:%M:%S}" for key in ("first_ms", "last_ms")
        )
        echo(
            f"{row['metric']:<26}{row['entity']:<28}{row['samples']:>9,}  {first:<20}{last:<20}"
            f"{row['min']:>12.6g}{row['mean']:>12.6g}{row['max']:>12.6g}"
        )
    if len(series) > MANY_SERIES:
        echo(f"… and {len(series) - MANY_SERIES:,} more: name one with --entity or --metric")
    if len(series) == 1:
        for line in plot_series(series[0]):
            echo(line)


def plot_series(series: "ArchivedSeries") -> list[str]:
    """Plot a series as lines of block characters. Each column is the mean of an equal part of the time span.

    The axis reaches from the smallest to the largest mean.
    """
    import numpy as np

    from fleetcast.features.sums import divide

    first, last = series.time_ms[0], series.time_ms[-1]
    columns = min(PLOT_COLUMNS, len(series.time_ms))
    at = ((series.time_ms - first) * columns // (last - first + 1)).astype(int)
    count = np.bincount(at, minlength=columns)
    means = divide(np.bincount(at, series.value, columns), count)
    low, high = float(np.nanmin(means)), float(np.nanmax(means))
    filled = (means - low) / (high - low or 1.0) * (PLOT_LINES * 8 - 1) + 1
    lines = []
    for line in range(PLOT_LINES - 1, -1, -1):
        steps = np.clip(np.nan_to_num(filled) - line * 8, 0, 8).astype(int)
        mark = {PLOT_LINES - 1: f"{high:.6g}", 0: f"{low:.6g}"}.get(line, "")
        lines.append(f"{mark:>12} {''.join(BLOCKS[step] for step in steps.tolist())}".rstrip())
    return lines
