"""Prometheus exposition text, made from plain strings in one or two microseconds a sample."""

import hashlib
import math
from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import Literal

Rows = Iterable[tuple[Mapping[str, str], float | None]]

LABEL_CHARS = 120
STEPS = ((86400, "d"), (3600, "h"), (60, "m"))
ESCAPES = str.maketrans({"\\": "\\\\", '"': '\\"', "\n": "\\n"})


class Page:
    """A page of exposition text: metric families in the order in which they were added."""

    def __init__(self) -> None:
        self._lines: list[str] = []

    def add_family(self, kind: Literal["gauge", "summary"], name: str, text: str, rows: Rows) -> None:
        """Add one metric family. Rows with an unknown value (None, NaN, infinite) are left out."""
        self._lines += [f"# HELP fleetcast_{name} {text}", f"# TYPE fleetcast_{name} {kind}"]
        series: dict[str, float] = {}  # a series may come only once
        for labels, value in rows:
            if value is not None and math.isfinite(value):
                pairs = ",".join([f'{key}="{_escape_label(word)}"' for key, word in labels.items()])
                series[f"{{{pairs}}}" if pairs else ""] = value
        self._lines += [f"fleetcast_{name}{labels} {value:.10g}" for labels, value in series.items()]

    def add_gauge(self, name: str, text: str, rows: Rows) -> None:
        self.add_family("gauge", name, text, rows)

    def add_number(self, name: str, text: str, value: float | None) -> None:
        """Add a gauge without labels."""
        self.add_family("gauge", name, text, [({}, value)])

    def encode(self) -> bytes:
        return ("\n".join(self._lines) + "\n").encode("utf-8", "replace")


@lru_cache(maxsize=4096)
def _escape_label(word: str) -> str:
    """Escape the value of a label, and shorten it if it is too long.

    A shortened value ends in a digest, so that two names stay different.
    """
    if len(word) > LABEL_CHARS:
        digest = hashlib.blake2s(word.encode("utf-8", "replace"), digest_size=4).hexdigest()
        word = f"{word[: LABEL_CHARS - 9]}~{digest}"
    return word.translate(ESCAPES)


def format_horizon(seconds: int) -> str:
    """Format a horizon in seconds as the value of a label.

    >>> format_horizon(600), format_horizon(3600), format_horizon(604800), format_horizon(90)
    ('10m', '1h', '7d', '90s')
    """
    return next((f"{seconds // step}{unit}" for step, unit in STEPS if seconds % step == 0), f"{seconds}s")
