"""`fleetcast backfill`: copies samples from a Prometheus into the archive."""

import contextlib
import re
import sys
import threading
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fleetcast.cli.kit.options import ConfigOption, StateOption, load_site_config
from fleetcast.cli.kit.screen import echo
from fleetcast.fleet.errors import ConfigError, SourceError

if TYPE_CHECKING:
    from fleetcast.clients.prometheus import MatrixRow
    from fleetcast.ingest.archive.archive import Archive
    from fleetcast.ingest.remote_write.backfill import BackfillCounts, BackfillRequest, RangeClient
    from fleetcast.service.config import Config

DURATION = re.compile(r"([0-9]+(?:\.[0-9]+)?)(s|m|h|d|w)")
SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86_400, "w": 604_800}
DONE = "backfill.json"
WRITER = "backfill"
SAY_EVERY_S = 5.0


def backfill(
    url: Annotated[str, typer.Argument(help="A Prometheus (or what answers like one), e.g. http://prometheus:9090.")],
    begin: Annotated[str, typer.Option("--from", help="From when: 2026-11-01, 2026-11-01T08:00, or 30d for ago.")],
    end: Annotated[str, typer.Option("--to", help="Up to when, in the same words [now].")] = "now",
    step: Annotated[str, typer.Option(help="Resample to this step, e.g. 60s; without, samples as recorded.")] = "",
    match: Annotated[str, typer.Option(help="Only series with these labels, e.g. 'cluster=\"a\"'.")] = "",
    window: Annotated[str, typer.Option(help="How much is asked for at once, of each metric.")] = "1h",
    config: ConfigOption = None,
    state: StateOption = None,
    timeout: Annotated[str, typer.Option(help="How long the server may be silent before its answer.")] = "120s",
    ca: Annotated[Path | None, typer.Option(help="Certificates to trust instead of the system's.")] = None,
) -> None:
    """Copy the samples of GPUs, ports, hosts and served models from a Prometheus into the archive.

    A run that was interrupted continues where it stopped, and does not read a finished hour again. Rows
    that are already in the archive are not written twice. `fleetcast run` may be running at the same
    time.

    Secrets come from the environment: FLEETCAST_PROMETHEUS_TOKEN, or FLEETCAST_PROMETHEUS_USER and
    _PASSWORD.

    Examples:

      fleetcast backfill http://prometheus:9090 --from 30d

      fleetcast backfill http://prometheus:9090 --from 2026-11-01 --to 2026-11-08 --step 60s --match 'cluster="a"'
    """
    from fleetcast.clients.prometheus import SilentServer
    from fleetcast.ingest.remote_write.backfill import BackfillRequest

    loaded = load_site_config(config, state)
    if not loaded.archive.enabled:
        raise ConfigError("archive.enabled = false: there is nothing to write into")
    now_ms = time.time_ns() // 1_000_000
    step_ms = round(parse_seconds("--step", step) * 1000) if step else 0
    window_ms = round(parse_seconds("--window", window) * 1000)
    span = parse_time_ms("--from", begin, now_ms), parse_time_ms("--to", end, now_ms)
    wish = BackfillRequest(
        url.rstrip("/"), *span, match.strip().removeprefix("{").removesuffix("}"), step_ms, window_ms
    )
    if wish.first_ms >= wish.end_ms:
        raise ConfigError(f"--from {begin} is not before --to {end}")
    _warn_of_retention(loaded, wish, now_ms)
    timeout_s = parse_seconds("--timeout", timeout)
    try:
        taken, archive = _run_backfill(loaded, wish, ca, now_ms, timeout_s)
    except SilentServer as error:
        longer = f"ask for less at once (--window 10m), or wait longer (--timeout {2 * timeout_s:g}s)"
        raise SourceError(
            f"{error}: see that it is a Prometheus and not overloaded, then {longer}; the next run goes on there"
        ) from None
    except OSError as error:
        raise SourceError(f"cannot write the archive: {error}; the next run goes on there") from None
    written = archive.counts
    bad = ", ".join(f"{count} {reason}" for reason, count in taken.bad.most_common()) or "none"
    echo(
        f"{taken.samples:,} samples read, {written.rows:,} written, {written.repeats:,} were there, "
        f"{written.too_old:,} too old to keep; bad series: {bad}"
    )


class WaitReportingClient:
    """A wrapper of the Prometheus client. While it waits for an answer, it prints that every few seconds."""

    def __init__(self, client: "RangeClient", url: str, timeout_s: float) -> None:
        self._client = client
        self._url = url
        self._timeout_s = timeout_s

    def list_metric_names(self, match: str, first_ms: int, end_ms: int) -> list[str]:
        with self._report_wait("names of metrics"):
            return self._client.list_metric_names(match, first_ms, end_ms)

    def fetch_recorded_samples(self, selector: str, first_ms: int, end_ms: int) -> "list[MatrixRow]":
        with self._report_wait(selector):
            return self._client.fetch_recorded_samples(selector, first_ms, end_ms)

    def fetch_resampled_samples(self, selector: str, first_ms: int, end_ms: int, step_ms: int) -> "list[MatrixRow]":
        with self._report_wait(selector):
            return self._client.fetch_resampled_samples(selector, first_ms, end_ms, step_ms)

    @contextlib.contextmanager
    def _report_wait(self, what: str) -> Iterator[None]:
        answered = threading.Event()
        teller = threading.Thread(target=self._print_waits, args=(what, answered), daemon=True)
        teller.start()
        try:
            yield
        finally:
            answered.set()
            teller.join()

    def _print_waits(self, what: str, answered: threading.Event) -> None:
        began = time.monotonic()
        while not answered.wait(SAY_EVERY_S):
            waited_s = time.monotonic() - began
            behind_bar = "\n" if sys.stderr.isatty() else ""
            sentence = f"waiting for {self._url}: {what}, {waited_s:.0f} s of {self._timeout_s:g} s"
            echo(behind_bar + sentence, err=True)


def _run_backfill(
    config: "Config", wish: "BackfillRequest", ca: Path | None, now_ms: int, timeout_s: float
) -> "tuple[BackfillCounts, Archive]":
    from fleetcast.clients.prometheus import PrometheusClient
    from fleetcast.fleet.decode_faults import explain_json_error
    from fleetcast.fleet.entities import Entities
    from fleetcast.fleet.topology import Topology
    from fleetcast.ingest.archive.archive import Archive, ArchiveLimits
    from fleetcast.ingest.archive.files import ArchiveFiles
    from fleetcast.ingest.remote_write.backfill import Progress, PrometheusBackfill
    from fleetcast.ingest.topology.load import load_topology
    from fleetcast.service.pipeline.state import align_topology

    entities = Entities()
    named = load_topology(Path(config.fleet.topology)) if config.fleet.topology else Topology.build([])
    limits = ArchiveLimits(config.archive.buffer_bytes, config.archive.file_rows, config.archive.keep_days)
    archive = Archive(ArchiveFiles(config.archive_url), entities, writer=WRITER, limits=limits)
    client = PrometheusClient(wish.url, verify=str(ca) if ca else True, timeout_s=timeout_s)
    try:
        progress = Progress(config.folder / DONE, wish.key)
    except ValueError as error:
        raise ConfigError(
            f"{config.folder / DONE} is not ours: {explain_json_error(error)}; delete it to start over"
        ) from None
    work = PrometheusBackfill(
        WaitReportingClient(client, wish.url, timeout_s), archive, entities, align_topology(named, entities)
    )
    windows = wish.list_windows()
    label = f"backfill (an answer may take {timeout_s:g} s)"
    try:
        with typer.progressbar(length=len(windows), label=label, file=sys.stderr, show_pos=True) as bar:
            for _ in work.run(wish, progress, now_ms):
                bar.update(1)
    finally:
        archive.close()
        client.close()
    if work.taken.skipped:
        echo(f"{work.taken.skipped} of {len(windows)} windows were done before", err=True)
    return work.taken, archive


def _warn_of_retention(config: "Config", wish: "BackfillRequest", now_ms: int) -> None:
    days = config.archive.keep_days
    if days and wish.first_ms < now_ms - days * 86_400_000:
        echo(f"archive.keep_days = {days}: what is older is read, but not stored", err=True)


def parse_seconds(option: str, text: str) -> float:
    """Convert a duration such as `60s` or `2h` to seconds. Raises ConfigError that names the option.

    >>> parse_seconds("--step", "1.5m")
    90.0
    """
    found = DURATION.fullmatch(text.strip())
    if found is None or float(found.group(1)) <= 0:
        raise ConfigError(f"{option} {text!r}: expected a number and s, m, h, d or w, such as 60s")
    return float(found.group(1)) * SECONDS[found.group(2)]


def parse_time_ms(option: str, text: str, now_ms: int) -> int:
    """Convert a date, seconds since 1970, or a span before now to Unix milliseconds.

    A date without a time zone is in UTC. Raises ConfigError that names the option.

    >>> parse_time_ms("--from", "2h", 7_200_000), parse_time_ms("--from", "1970-01-01T00:01", 0)
    (0, 60000)
    """
    if text == "now":
        return now_ms
    if DURATION.fullmatch(text):
        return now_ms - round(parse_seconds(option, text) * 1000)
    try:
        if re.fullmatch(r"[0-9]{9,11}(\.[0-9]+)?", text):
            return round(float(text) * 1000)
        moment = datetime.fromisoformat(text)
    except ValueError:
        raise ConfigError(f"{option} {text!r}: expected a date such as 2026-11-01T08:00, or 30d for ago") from None
    return round((moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp() * 1000)
