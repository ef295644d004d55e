"""Port counters from the output of `perfquery -x` and `ibqueryerrors`, as files or as commands to run.

    # Port extended counters: Lid 647 port 1 (CapMask: 0x5300 …)       a port, by LID
    PortXmitData:....................178791657177235                   4-byte words
    Errors for "n001 mlx5_0"                                           an adapter, by its description
       GUID 0x7cfe900300179b31 port 1: [SymbolErrorCounter == 14] [PortXmitWait == 4294967295]

Only the fabric's topology maps a LID or GUID to a node. So set `fabric` to a file with the output of
ibnetdiscover, or name the owner: "NODE/DEVICE=…". The samples of a file have its time of change, so reading
it again adds nothing. Switch ports are only counted.
"""

import asyncio
import glob
import logging
import re
import shlex
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from fleetcast.fleet.clock import Clock
from fleetcast.fleet.entities import Entities
from fleetcast.fleet.errors import ConfigError, RecordError, SourceError
from fleetcast.ingest.node_names import check_name, check_name_part
from fleetcast.ingest.ports.rows import PortSource
from fleetcast.ingest.source import Batch, read_options
from fleetcast.ingest.tally import SkipRule
from fleetcast.ingest.topology.ibnetdiscover import Fabric, parse_adapter, parse_ibnetdiscover

logger = logging.getLogger(__name__)

MAX_TEXT_BYTES = 64 * 2**20
MAX_BAD = 1000
AWAY_S = 30.0
_PORT = re.compile(r"# Port (?:extended )?counters: (?:Lid (\d{1,5}) |.{0,80}?)port (\d{1,3})\b")
_VALUE = re.compile(r"(\w{1,40}):\.*(\d{1,20})\s*$")
_OWNER = re.compile(r'\s*Errors for (?:0x[0-9a-f]{1,16} )?"([^"]{0,256})"')
_ERRORS = re.compile(r"\s*GUID 0x([0-9a-f]{1,16}) port (\d{1,3}|ALL): ")
_ERROR = re.compile(r"\[(\w{1,40}) == (\d{1,20})(?: \([^)\]]{1,20}\))?\]")


@dataclass(slots=True)
class PortText:
    """The counters and names of one port in a text. A name is None or empty if the text does not have it."""

    port: int
    lid: int | None = None
    guid: str = ""
    description: str = ""
    readings: dict[str, float] = field(default_factory=dict)


def parse_counters(text: str, bad: list[RecordError]) -> Iterator[PortText]:
    """Yield the counters of every port in a text.

    Lines that look like counters but are invalid are added to `bad` as errors, at most MAX_BAD.
    """
    current: PortText | None = None
    description = ""
    for line in text.splitlines():
        if line.startswith("#"):
            yield from () if current is None else (current,)
            match = _PORT.match(line)
            current = PortText(int(match.group(2)), int(match.group(1)) if match.group(1) else None) if match else None
        elif owner := _OWNER.match(line):
            yield from () if current is None else (current,)
            current, description = None, owner.group(1)
        elif errors := _ERRORS.match(line):
            yield from _parse_error_line(errors, description, line, bad)
        elif current is not None and ":." in line:
            _parse_value_line(line, current, bad)
    if current is not None:
        yield current


def _parse_value_line(line: str, current: PortText, bad: list[RecordError]) -> None:
    if match := _VALUE.match(line):
        current.readings[match.group(1)] = float(match.group(2))
    elif "0x" not in line and len(bad) < MAX_BAD:
        bad.append(RecordError("bad_value", line[:80]))


def _parse_error_line(match: re.Match[str], description: str, line: str, bad: list[RecordError]) -> Iterator[PortText]:
    if match.group(2) == "ALL":
        return  # the sum over a switch
    rest = line[match.end() :]
    readings = {name: float(value) for name, value in _ERROR.findall(rest)}
    if len(readings) != rest.count("[") and len(bad) < MAX_BAD:
        bad.append(RecordError("bad_value", line.strip()[:80]))
    yield PortText(int(match.group(2)), None, match.group(1), description, readings)


class PerfqueryOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The options of the source `perfquery`.

    `files`: globs. `commands`: command lines, run without a shell. "NODE/DEVICE=" before either names the
    port's owner.
    """

    files: tuple[str, ...] = ()
    commands: tuple[str, ...] = ()
    fabric: str = ""
    interval_s: float = 60.0
    timeout_s: float = 30.0
    name: str = "perfquery"


@dataclass(frozen=True, slots=True)
class _Entry:
    node: str
    device: str
    what: str


class PerfquerySource(PortSource):
    """The source `perfquery`, which reads the output of perfquery and ibqueryerrors."""

    kind = "perfquery"

    def __init__(self, entities: Entities, clock: Clock, options: Mapping[str, Any]) -> None:
        self._options = read_options("perfquery", options, PerfqueryOptions)
        chosen = self._options
        if not (1 <= chosen.interval_s <= 86_400 and 0.1 <= chosen.timeout_s <= 3600 and chosen.name):
            raise ConfigError("pipeline.sources perfquery: expected interval_s of 1 to 86400, timeout_s of 0.1 to 3600")
        if not chosen.files and not chosen.commands:
            raise ConfigError("pipeline.sources perfquery: expected files or commands")
        super().__init__(chosen.name, chosen.interval_s, entities, clock)
        self.noted: Counter[str] = Counter()  # ports that are no node's, by reason
        self._files = [_parse_entry(text) for text in chosen.files]
        self._commands = [_parse_entry(text) for text in chosen.commands]
        self._fabric = (0.0, Fabric())
        self._changed: dict[str, float] = {}  # file -> its time of change when it was last read
        self._answering = 0

    async def next(self) -> Batch:
        while True:
            await self._wait_for_round()
            self._answering = 0
            failures = [failure for entry in self._commands if (failure := await self._run_command(entry))]
            await asyncio.to_thread(self._read_changed_files)
            self._up = self._answering  # at once: somebody may ask meanwhile
            batch = self._rows.pop_batch()
            if batch.samples or batch.bad:
                self._bad += len(batch.bad)
                self._last = (self._clock.now_ms(), len(batch))
                return batch
            if not self._up:
                self._due_ms = 0
                raise SourceError("; ".join(failures)[:400] or "no such file yet", AWAY_S)

    def health(self) -> dict[str, Any]:
        return {**self._make_health(len(self._files) + len(self._commands)), "noted": dict(self.noted)}

    async def _run_command(self, entry: _Entry) -> str:
        """Run one command and add its output. Returns the reason why the command failed, or ""."""
        try:
            process = await asyncio.create_subprocess_exec(
                *shlex.split(entry.what), stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE
            )
        except OSError as error:
            return f"{entry.what}: {error}"
        try:
            out, _ = await asyncio.wait_for(process.communicate(), self._options.timeout_s)
        except TimeoutError:
            process.kill()
            await process.wait()
            return f"{entry.what}: no answer within {self._options.timeout_s:.0f} s"
        self._answering += 1
        self.add_text(out.decode(errors="replace")[:MAX_TEXT_BYTES], self._clock.now_ms(), entry.node, entry.device)
        return ""

    def _read_changed_files(self) -> None:
        """Read the files that have changed since they were last read. Runs in a thread."""
        self._reload_fabric()
        for entry in self._files:
            paths = sorted(glob.glob(entry.what))
            self._answering += bool(paths)
            for path in paths:
                try:
                    changed = Path(path).stat().st_mtime
                    if changed != self._changed.get(path):
                        with Path(path).open("rb") as file:
                            text = file.read(MAX_TEXT_BYTES).decode(errors="replace")
                        self.add_text(text, min(round(changed * 1000), self._clock.now_ms()), entry.node, entry.device)
                        self._changed[path] = changed
                except OSError as error:
                    logger.warning("%s: %s, trying again at the next round", path, error)

    def _reload_fabric(self) -> None:
        if not self._options.fabric:
            return
        try:
            changed = Path(self._options.fabric).stat().st_mtime
            if changed != self._fabric[0]:
                text = Path(self._options.fabric).read_text(errors="replace")
                self._fabric = (changed, parse_ibnetdiscover(text))
        except (OSError, ConfigError) as error:
            logger.warning("%s: %s, going on with the fabric as it was", self._options.fabric, error)

    def add_text(self, text: str, time_ms: int, node: str = "", device: str = "") -> None:
        """Add all counters of a text. `node`, `device`: the owner of ports that the text does not name."""
        bad: list[RecordError] = []
        for port in parse_counters(text, bad):
            owner, name = self._find_port_owner(port)
            if owner or node:
                self._rows.add_port(owner or node, name or device, port.port, port.readings, time_ms)
            else:
                self.noted["not_of_a_node"] += 1
                self._rows.count_skipped(SkipRule.OTHER_PART, len(port.readings))
        for error in bad:
            self._rows.record_error(error)

    def _find_port_owner(self, port: PortText) -> tuple[str, str]:
        """Return the (node, device) of a port, both empty if neither the text nor the fabric names them."""
        adapter = parse_adapter(port.description)
        if not adapter.host:
            fabric = self._fabric[1]
            guid = port.guid or (fabric.lids.get((port.lid, port.port), ("", 0))[0] if port.lid is not None else "")
            adapter = fabric.adapters.get(guid, adapter)
        return adapter.host, adapter.device


def _parse_entry(text: str) -> _Entry:
    """Parse an entry of `files` or `commands`. Raises ConfigError if it is invalid."""
    head, equals, what = text.partition("=")
    if not equals or " " in head.strip():
        head, what = "", text
    node, _, device = head.strip().partition("/")
    if not what.strip() or (head and not device):
        raise ConfigError(f"pipeline.sources perfquery: {text!r}: expected PATH or NODE/DEVICE=PATH")
    try:
        shlex.split(what)
    except ValueError as error:
        raise ConfigError(f"pipeline.sources perfquery: {text!r}: {error}") from None
    return _Entry(check_name(node) if node else "", check_name_part(device) if device else "", what.strip())
