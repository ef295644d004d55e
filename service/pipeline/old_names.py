"""The names in snapshots of version 3 and on boards of that time, with the present names.

A snapshot of version 3 is loaded under the present names. The next save writes the present names.
"""

import zlib
from collections.abc import Callable, Mapping
from typing import Any, Final

import msgspec

from fleetcast.fleet.stateful import Dump

VERSION: Final = 3
FILES: Final = {"forecaster": "desk", "run_times": "told"}  # part -> the name of its file then
FIELDS: Final[Mapping[str, Mapping[str, str]]] = {  # part -> path of a field or array then -> its present name
    "memory": {"rate/heard_ms": "telemetry_ms", "record/told": "predicted", "shadow/told": "predicted"},
    "run_times": {"told": "issued"},
    "label_jobs": {"told": "explained"},
}
ATTEMPT: Final = {"steps_told": "reported_steps", "heard_ms": "last_sign_ms"}  # fields of JobAttempt
SECTIONS: Final = {"local.newest_sample_ms": "local.heard_ms"}  # section of a board -> its name then


def rename_fields(part: str, dump: Dump) -> Dump:
    """Return a part's dump of version 3 with the present names."""
    about, arrays = dump
    for path, name in FIELDS.get(part, {}).items():
        owner, _, old = path.rpartition("/")
        _rename_key(about.get(owner, about), old, name)
        _rename_key(arrays, path, f"{owner}/{name}" if owner else name)
    return about, arrays


def rename_attempts(encoded: bytes, resting: bool) -> bytes:
    """Return the encoded attempts of a job of version 3 with the present names.

    Attempts at rest are compressed.
    """
    decode: Callable[[bytes], list[dict[str, Any]]] = msgspec.msgpack.decode
    attempts = decode(zlib.decompress(encoded) if resting else encoded)
    for attempt in attempts:
        for old, name in ATTEMPT.items():
            _rename_key(attempt, old, name)
    renamed = msgspec.msgpack.encode(attempts)
    return zlib.compress(renamed, 1) if resting else renamed


def _rename_key(values: dict[str, Any], old: str, name: str) -> None:
    if old in values:
        values[name] = values.pop(old)
