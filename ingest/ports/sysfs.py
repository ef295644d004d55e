"""Port counters from trees like /sys/class/infiniband: of this host, or copied from other hosts.

    mlx5_0/ports/1/state                     4: ACTIVE
    mlx5_0/ports/1/rate                      400 Gb/sec (4X NDR)
    mlx5_0/ports/1/counters/port_rcv_data    4-byte words; 32 bits on older adapters, where counters_ext has 64
    mlx5_0/ports/1/hw_counters/np_cnp_sent   refreshed every `lifespan` ms

A counter that the driver does not have ("N/A (no PMA)") is missing, not bad.
"""

import asyncio
import logging
import os
import socket
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from fleetcast.fleet.clock import Clock
from fleetcast.fleet.entities import Entities
from fleetcast.fleet.errors import ConfigError, RecordError, SourceError
from fleetcast.ingest.node_names import check_name
from fleetcast.ingest.pages.infiniband import PORT_READINGS
from fleetcast.ingest.ports.rows import PortRows, PortSource
from fleetcast.ingest.source import Batch, read_options
from fleetcast.ingest.tally import SkipRule

logger = logging.getLogger(__name__)

MAX_DEVICES, MAX_PORTS = 64, 256
MAX_FILE_BYTES = 4096
AWAY_S = 60.0
_FOLDERS = ("counters_ext", "counters", "hw_counters")  # the first that has a counter counts
LAYERS = ("InfiniBand", "Ethernet")
_GAUGES = ("state", "phys_state", "rate")
_TREES = ("sys/class/infiniband", "class/infiniband")


class SysfsOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The options of the source `sysfs`.

    `paths`: counter trees, or root folders that hold one. "NODE=PATH" is the tree of another host.
    """

    paths: tuple[str, ...] = ("/sys/class/infiniband",)
    interval_s: float = 15.0
    name: str = "sysfs"


class SysfsSource(PortSource):
    """The source `sysfs`, which reads trees of counter files."""

    kind = "sysfs"

    def __init__(self, entities: Entities, clock: Clock, options: Mapping[str, Any]) -> None:
        chosen = read_options("sysfs", options, SysfsOptions)
        if not 0.1 <= chosen.interval_s <= 3600 or not chosen.paths or not chosen.name:
            raise ConfigError("pipeline.sources sysfs: expected interval_s of 0.1 to 3600, a path and a name")
        super().__init__(chosen.name, chosen.interval_s, entities, clock)
        self._trees = [_parse_path_entry(text) for text in chosen.paths]
        self._absent: set[Path] = set()

    async def next(self) -> Batch:
        await self._wait_for_round()
        batch = await asyncio.to_thread(self._read_trees)
        if not batch.samples and not batch.bad:
            self._due_ms = 0
            raise SourceError(f"no port in {', '.join(str(path) for _, path in self._trees)}", AWAY_S)
        self._bad += len(batch.bad)
        self._last = (self._clock.now_ms(), len(batch))
        return batch

    def health(self) -> dict[str, Any]:
        return self._make_health(len(self._trees))

    def _read_trees(self) -> Batch:
        """Read all trees once. Runs in a thread."""
        up = 0
        for node, path in self._trees:
            found = False
            try:
                for device, port, readings in read_tree(path, self._rows):
                    found = True
                    self._rows.add_port(node, device, port, readings, self._clock.now_ms())
                    self._rows.record_link_layer(node, device, port, read_link_layer(path, device, port))
            except OSError as error:
                if path not in self._absent:
                    logger.warning("%s: %s, reading on where I can", path, error)
                    self._absent.add(path)
            up += found
        self._up = up  # at once: somebody may ask meanwhile
        return self._rows.pop_batch()


def _parse_path_entry(text: str) -> tuple[str, Path]:
    """Split an entry of `paths` into (node, path). Without a node, the tree belongs to this host.

    Raises ConfigError if the path is empty or the node's name is invalid.
    """
    node, equals, path = text.partition("=")
    if not equals:
        node, path = socket.gethostname(), text
    if not path:
        raise ConfigError(f"pipeline.sources sysfs: {text!r}: expected PATH or NODE=PATH")
    return check_name(node.strip()), Path(path.strip())


def read_tree(path: Path, rows: PortRows) -> Iterator[tuple[str, int, dict[str, float]]]:
    """Yield (device, port, {file name: number}) for each port of a tree. Raises OSError.

    Bad and unused files are counted in `rows`.
    """
    tree = next((path / inner for inner in _TREES if (path / inner).is_dir()), path)
    for device in sorted(os.listdir(tree))[:MAX_DEVICES]:
        ports = tree / device / "ports"
        for port in sorted(os.listdir(ports))[:MAX_PORTS] if ports.is_dir() else ():
            if port.isascii() and port.isdecimal() and len(port) <= 3:
                yield device, int(port), _read_port(ports / port, rows)


def read_link_layer(path: Path, device: str, port: int) -> str:
    """Return a port's link layer, `InfiniBand` or `Ethernet`, or "" if its file is missing or invalid."""
    tree = next((path / inner for inner in _TREES if (path / inner).is_dir()), path)
    try:
        with (tree / device / "ports" / str(port) / "link_layer").open("rb") as file:
            text = file.read(64).decode("ascii", "replace").strip()
    except OSError:
        return ""
    return text if text in LAYERS else ""


def _read_port(port: Path, rows: PortRows) -> dict[str, float]:
    readings: dict[str, float] = {}
    paths = [(name, port / name) for name in _GAUGES]
    for folder in _FOLDERS:
        try:
            names = sorted(os.listdir(port / folder))
        except OSError:
            continue  # an adapter without such counters
        paths += [(name.removesuffix("_64"), port / folder / name) for name in names]
    for name, path in paths:
        metric = f"infiniband_{name}" if name in _GAUGES else name
        if metric not in PORT_READINGS:
            rows.count_unused(name)
        elif metric in readings:
            rows.count_skipped(SkipRule.REPEATED)
        elif (value := _read_number(path, rows)) is not None:
            readings[metric] = value
    return readings


def _read_number(path: Path, rows: PortRows) -> float | None:
    """Return the number at the beginning of a file, or None if the driver provides none.

    Bad files are counted in `rows`.
    """
    try:
        with path.open("rb") as file:
            text = file.read(MAX_FILE_BYTES)
    except OSError:
        rows.count_skipped(SkipRule.NO_DATA)  # the device went away, or its driver refuses: EINVAL
        return None
    try:
        number = parse_leading_number(text)
        if number is None:
            rows.count_skipped(SkipRule.NO_DATA)
        return number
    except RecordError as error:
        rows.record_error(RecordError(error.reason, f"{path.name}: {error.detail}"))
        return None


def parse_leading_number(text: bytes) -> float | None:
    """Return the first word of a sysfs file as a number, or None for "N/A". Raises RecordError("bad_value").

    >>> [parse_leading_number(text) for text in (b"4: ACTIVE", b"2.5 Gb/sec (1X SDR)", b"N/A (no PMA)")]
    [4.0, 2.5, None]
    """
    words = text[:64].split()
    word = words[0].rstrip(b":") if words else b""
    if word.startswith(b"N/A"):
        return None
    digits = word.replace(b".", b"", 1)
    if not digits.isdigit() or len(digits) > 20:
        raise RecordError("bad_value", repr(text[:40]))
    return float(word)
