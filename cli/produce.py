"""`fleetcast produce`: writes telemetry and events to Kafka.

The command is for exporters that no other program reads, and for tests.
"""

import asyncio
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, BinaryIO

import typer

from fleetcast.cli.kit.screen import echo
from fleetcast.fleet.errors import ConfigError

if TYPE_CHECKING:
    from fleetcast.clients.kafka import KafkaWriter
    from fleetcast.fleet.clock import Clock
    from fleetcast.fleet.entities import Entities
    from fleetcast.ingest.kafka.output import Output, OutputCounts
    from fleetcast.ingest.kafka.source import KafkaOptions
    from fleetcast.ingest.source import Source
    from fleetcast.service.config import Config

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode=None,
    help="Write telemetry and events to Kafka, where `fleetcast run` reads them.\n\n"
    "  fleetcast produce topics    --brokers kafka-1:9092 --partitions 8\n\n"
    "  fleetcast produce telemetry --brokers kafka-1:9092 --target http://n001:9400/metrics\n\n"
    "  tail -F events.jsonl | fleetcast produce events --brokers kafka-1:9092\n\n"
    "Topics, TLS and SASL are those of the `kafka` source in --config FILE, the file that `fleetcast run` reads; "
    "passwords come from FLEETCAST_KAFKA_PASSWORD and FLEETCAST_KAFKA_KEY_PASSWORD.",
)

Brokers = Annotated[str, typer.Option(help="HOST:PORT of some brokers, separated by commas [as --config says].")]
ConfigFile = Annotated[Path | None, typer.Option("--config", help="A configuration with a source `kafka`.")]
CHUNK_BYTES = 1_048_576
STATUS_S = 5.0


@app.command("topics")
def create_topics(
    brokers: Brokers = "",
    config: ConfigFile = None,
    partitions: Annotated[int, typer.Option(min=1, help="Partitions of the telemetry topic.")] = 8,
) -> None:
    """Create the missing topics: telemetry, events and dead letters.

    The brokers' own settings decide how they are replicated. A pipeline reads whole partitions, and a
    block lies in one partition. So a good number of partitions is the number of blocks.

    Example:  fleetcast produce topics --brokers kafka-1:9092 --partitions 8
    """
    _, options = _read_options(config, brokers)
    writer = _connect_writer(options)
    wanted = {options.telemetry: partitions, options.events: 1, options.dead_letters: 1}
    wanted = {topic: number for topic, number in wanted.items() if topic}
    made = writer.create_missing_topics(wanted)
    writer.close()
    for topic, number in wanted.items():
        echo(f"{topic}: {f'created, partitions: {number}' if topic in made else 'is there'}")


@app.command("telemetry")
def produce_telemetry(
    brokers: Brokers = "",
    config: ConfigFile = None,
    target: Annotated[
        list[str] | None, typer.Option(help="Exporter URL or file:PATH; repeat it [scrape.targets of --config].")
    ] = None,
    replay: Annotated[Path | None, typer.Option(help="A folder of recorded pages instead of exporters.")] = None,
    topology: Annotated[str, typer.Option(help="A topology file: records are keyed by block [of --config].")] = "",
    form: Annotated[str, typer.Option(help="binary or json.")] = "binary",
    interval_s: Annotated[float, typer.Option(min=1.0, help="Between two scrapes of a target.")] = 15.0,
    seconds: Annotated[float | None, typer.Option(help="Stop after this long [until Ctrl-C].")] = None,
) -> None:
    """Scrape exporters and write one columnar record for each node and scrape.

    Examples:

      fleetcast produce telemetry --brokers kafka-1:9092 --target http://n001:9400/metrics --target file:targets.txt

      fleetcast produce telemetry --config config.toml           targets, topology and topics as in the file

      fleetcast produce telemetry --brokers kafka-1:9092 --replay pages/ --form json
    """
    from fleetcast.clients.kafka import KafkaWriter
    from fleetcast.fleet.entities import Entities
    from fleetcast.ingest.kafka.output import FORMS, find_node_blocks, forward_batches
    from fleetcast.ingest.topology.load import load_topology

    if form not in FORMS:
        raise typer.BadParameter(f"{form!r}: must be one of {', '.join(FORMS)}", param_hint="--form")
    loaded, options = _read_options(config, brokers)
    path = topology or loaded.fleet.topology
    blocks = find_node_blocks(load_topology(Path(path))) if path else {}
    entities, clock = Entities(), loaded.make_clock()
    source = _make_source(loaded, target, replay, interval_s, (entities, clock))
    writer: KafkaWriter = _connect_writer(options, options.telemetry)
    output = _make_output(writer, options.telemetry)

    async def send_all() -> None:
        try:
            await forward_batches(source, entities, output, blocks, form)
        finally:
            await source.close()

    _run_with_progress(send_all, output.sent, seconds, writer)


@app.command("events")
def produce_events(
    file: Annotated[Path | None, typer.Argument(help="JSON lines, an array, or CloudEvents [stdin].")] = None,
    brokers: Brokers = "",
    config: ConfigFile = None,
) -> None:
    """Write job and node events, line by line as they arrive.

    Lines that are not events are reported and left out. In that case the exit code is 1.

    Examples:

      fleetcast produce events events.jsonl --brokers kafka-1:9092

      tail -F events.jsonl | fleetcast produce events --brokers kafka-1:9092
    """
    from fleetcast.ingest.inbox.event_body import decode_body
    from fleetcast.ingest.kafka.output import send_events

    _, options = _read_options(config, brokers)
    writer = _connect_writer(options, options.events)
    output = _make_output(writer, options.events)

    async def send_all() -> None:
        chunks = iter(_read_chunks(file))
        while (found := await asyncio.to_thread(next, chunks, None)) is not None:
            first, chunk = found
            body = decode_body(chunk, time.time_ns() // 1_000_000)
            await send_events(body, output)
            for index, error in body.rejected:
                echo(f"record {first + index + 1}: {error}", err=True)

    _run_with_progress(send_all, output.sent, None, writer)


@app.command("page")
def produce_page(
    file: Annotated[Path, typer.Argument(help="A page of exposition text, as an exporter answers.")],
    node: Annotated[str, typer.Option(help="The node it comes from [as the page says].")] = "",
    brokers: Brokers = "",
    config: ConfigFile = None,
) -> None:
    """Write one recorded page unchanged, with the current time.

    Example:  curl -s http://n001:9400/metrics > n001.prom; fleetcast produce page n001.prom --brokers kafka-1:9092
    """
    from fleetcast.clients.kafka_records import OutgoingRecord

    _, options = _read_options(config, brokers)
    try:
        value = file.read_bytes()
    except OSError as error:
        raise ConfigError(f"cannot read {file}: {error.strerror}") from None
    headers = [("content-type", b"text/plain; version=0.0.4")] + ([("node", node.encode())] if node else [])
    writer = _connect_writer(options, options.telemetry)
    writer.write([OutgoingRecord(options.telemetry, (node or file.stem).encode(), value, tuple(headers))])
    writer.close()
    echo(f"{len(value):,} bytes to {options.telemetry}", err=True)


def _read_options(path: Path | None, brokers: str) -> "tuple[Config, KafkaOptions]":
    """Return the configuration, and the options of its first Kafka source.

    Brokers on the command line take priority.
    """
    from fleetcast.ingest.kafka.source import read_kafka_options
    from fleetcast.service.config import load_config

    config = load_config(path)
    given = next((dict(row.options) for row in config.pipeline.sources if row.use == "kafka"), {})
    if brokers:
        given["brokers"] = brokers
    if "brokers" not in given:
        raise ConfigError("where is Kafka? give --brokers HOST:PORT, or --config FILE with a source `kafka`")
    return config, read_kafka_options(given)


def _connect_writer(options: "KafkaOptions", topic: str | None = None) -> "KafkaWriter":
    """Return a writer that is connected to the brokers.

    Raises SourceError if no broker answers, and ConfigError if the topic does not exist.
    """
    from fleetcast.clients.kafka import KafkaWriter

    writer = KafkaWriter(options)
    if topic is not None and topic not in writer.list_topics():
        writer.close()
        raise ConfigError(f"Kafka has no topic {topic!r}: `fleetcast produce topics` makes it")
    return writer


def _make_output(writer: "KafkaWriter", topic: str) -> "Output":
    from fleetcast.ingest.kafka.output import Output

    return Output(writer, topic)


def _make_source(
    config: "Config",
    targets: list[str] | None,
    replay: Path | None,
    interval_s: float,
    world: "tuple[Entities, Clock]",
) -> "Source":
    import msgspec

    from fleetcast.ingest.pages.recorded import PageReplay, ReplaySpeed
    from fleetcast.ingest.pages.scrape import Scraper

    entities, clock = world
    if replay is not None:
        return PageReplay(entities, replay, clock, ReplaySpeed(start_ms=clock.now_ms()))
    named = tuple(targets or config.scrape.targets)
    if not named:
        raise ConfigError("which exporters? give --target URL, or --config FILE with scrape.targets")
    options = config.scrape if targets is None else msgspec.structs.replace(config.scrape, interval_s=interval_s)
    return Scraper(entities, named, options, clock)


def _read_chunks(file: Path | None) -> "list[tuple[int, bytes]] | Iterator[tuple[int, bytes]]":
    """Return the chunks of a file or of stdin: (number of lines before the chunk, its bytes).

    A file is one chunk. A chunk of stdin is the data that have arrived so far, up to the end of a line.
    """
    if file is not None and str(file) != "-":
        try:
            return [(0, file.read_bytes())]
        except OSError as error:
            raise ConfigError(f"cannot read {file}: {error.strerror}") from None
    return _read_stdin_chunks(sys.stdin.buffer)


def _read_stdin_chunks(stream: BinaryIO) -> Iterator[tuple[int, bytes]]:
    rest, count = b"", 0
    read = getattr(stream, "read1", stream.read)
    while part := read(CHUNK_BYTES):
        whole, end, rest = (rest + part).rpartition(b"\n")
        if end:
            yield count, whole
            count += sum(1 for line in whole.split(b"\n") if line.strip())
    if rest.strip():
        yield count, rest


def _run_with_progress(work: "object", sent: "OutputCounts", seconds: float | None, writer: "KafkaWriter") -> None:
    """Run until the work is done, the time is over or Ctrl-C. Prints the progress from time to time.

    Raises Exit with code 1 if there were bad records and no samples.
    """
    assert callable(work)

    async def watch_work() -> None:
        task = asyncio.ensure_future(work())
        began = time.monotonic()
        while not task.done() and (seconds is None or time.monotonic() < began + seconds):
            left_s = STATUS_S if seconds is None else min(STATUS_S, began + seconds - time.monotonic())
            await asyncio.wait([task], timeout=max(0.01, left_s))
            echo(f"{time.monotonic() - began:.0f} s: {_describe_progress(sent)}", err=True)
        if task.done():
            await task
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    try:
        asyncio.run(watch_work())
    except KeyboardInterrupt:
        echo(_describe_progress(sent), err=True)
    writer.close()
    if sent.bad and not sent.samples:
        raise typer.Exit(1)


def _describe_progress(sent: "OutputCounts") -> str:
    bad = sum(sent.bad.values())
    what = f"{sent.events:,} events" if sent.events or not sent.samples else f"{sent.samples:,} samples"
    return f"{sent.records:,} records sent, {what}" + (f", {bad:,} bad: {sent.bad}" if bad else "")
