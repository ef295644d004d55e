"""The file of the adapter `band_file`, with one `node band` pair in each line. It is replaced atomically.

A file without pairs is removed. The port never writes a name that no node can have. It does read such
lines, so that the adapter can withdraw them.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from fleetcast.fleet import files
from fleetcast.fleet.node_names import is_node_name
from fleetcast.schedulers.adapter import Door, Write, WriteOutcome
from fleetcast.schedulers.band_file import BAND, BandFile
from fleetcast.service.plugins import read_options
from fleetcast.service.ports.keyed_files import KeyedFilePort, apply_write


class BandFileOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The options of the adapter. `path`: the file. Its folder must exist."""

    path: str


def make_band_file_door(options: Mapping[str, Any]) -> Door:
    """Make the built-in adapter `band_file`. Raises ConfigError."""
    return Door(BandFile(), BandFilePort(Path(read_options(options, BandFileOptions).path)))


class BandFilePort(KeyedFilePort):
    """The port that reads and writes the file of node bands."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def _read(self) -> dict[str, dict[str, str]]:
        try:
            lines = self.path.read_text(encoding="utf-8", errors="replace").split("\n")
        except FileNotFoundError:
            return {}
        pairs = (line.rpartition(" ") for line in lines)
        return {node: {BAND: band} for node, space, band in pairs if space}

    def _write(self, batch: Sequence[Write]) -> list[WriteOutcome]:
        bands = {node: values[BAND] for node, values in self._read().items()}
        outcomes = [apply_write(bands, write, _has_bad_name) for write in batch]
        if bands:
            text = "".join(f"{node} {band}\n" for node, band in sorted(bands.items()))
            files.replace_file(self.path, [text.encode()], "bands")
        else:
            self.path.unlink(missing_ok=True)
        return outcomes


def _has_bad_name(write: Write) -> bool:
    return write.value is not None and not is_node_name(write.key)
