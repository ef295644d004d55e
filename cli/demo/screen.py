"""The terminal output of `fleetcast demo`: one live status line, and events above it as they happen."""

import math
import sys
import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from types import TracebackType
from typing import TYPE_CHECKING, Any

from fleetcast.fleet.printable import escape_unprintable
from fleetcast.fleet.process import TOKEN_VARIABLE, make_token_headers

if TYPE_CHECKING:
    from rich.console import Console
    from rich.status import Status

PLAIN_EVERY_S = 10.0
LOG_WIDTH = 240  # of a file or a pipe: nothing is wrapped there


class DemoScreen:
    """The output of a demo on stderr: a live status line, or plain lines if stderr is no terminal."""

    def __init__(self, port: int) -> None:
        from rich.console import Console

        self.console = Console(
            stderr=True, highlight=False, width=None if sys.stderr.isatty() else LOG_WIDTH, markup=False
        )
        self.url = f"http://127.0.0.1:{port}"
        self._status: Status | None = None
        self._last_plain = -math.inf

    def __enter__(self) -> "DemoScreen":
        if self.console.is_terminal:
            self._status = self.console.status("starting", spinner="dots")
            self._status.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._status is not None:
            self._status.stop()

    def print_sentence(self, sentence: str) -> None:
        self.console.print(f"{datetime.now(UTC):%H:%M:%S}  ", end="", style="dim")
        self.console.print(escape_unprintable(sentence))

    def print_ready(self) -> None:
        """Print the console's address and three example requests."""
        self.console.print(f"\n  Console   [bold]{self.url}/[/bold]", markup=True)
        for path in ("/v1/risk/nodes?limit=3", "/v1/demand?target=wanted", "/v1/queue"):
            token = f'-H "Authorization: Bearer ${TOKEN_VARIABLE}" ' if make_token_headers() else ""
            self.console.print(f"  Try       curl -s {token}'{self.url}{path}'")
        self.console.print("  End with Ctrl-C\n")

    def show_status(
        self,
        fleet: Mapping[str, Any],
        ingestion: Mapping[str, Any],
        placements: Mapping[str, int],
        elapsed_s: float,
        seconds: float | None,
    ) -> None:
        if not fleet:
            return
        at = datetime.fromtimestamp(fleet["as_of_ms"] / 1000, UTC)
        gpus = fleet["gpus"]
        left = f"{elapsed_s:.0f}/{seconds:.0f} s" if seconds is not None else f"{elapsed_s:.0f} s"
        line = (
            f"{left} · fleet time {at:%a %H:%M:%S} · {gpus['running']:,} of {gpus['total']:,} GPUs busy · "
            f"{fleet['queued_gpus']:,} GPUs queued · {_format_count(fleet['at_risk'], 'node')} at risk · "
            f"{fleet['samples_per_s']:,.0f} samples/s · {_format_count(ingestion.get('bad_total', 0), 'bad record')} · "
            f"{placements['placed']} placed"
        )
        if self._status is not None:
            self._status.update(line)
        elif time.monotonic() - self._last_plain >= PLAIN_EVERY_S:
            self._last_plain = time.monotonic()
            self.console.print(line, soft_wrap=True)

    def print_report(self, report: Mapping[str, Any], problems: Sequence[str]) -> None:
        """Print when faults were detected, the comparison with a risk-blind engine, and the verdict."""
        from rich.table import Table

        if self._status is not None:
            self._status.stop()
        table = Table(title="Faults that were injected", title_justify="left", box=None, pad_edge=False)
        for column in ("fault", "where", "found after (fleet time)", "reason"):
            table.add_column(column)
        for row in report["faults"]:
            table.add_row(
                *map(
                    escape_unprintable,
                    (row["kind"], _describe_place(row), _describe_detection(row), row["reason"] or ""),
                )
            )
        self.console.print(table)
        self.console.print(f"falsely flagged nodes: {escape_unprintable(', '.join(report['false_nodes'])) or 'none'}")
        _print_worth(self.console, report["worth"])
        self.console.print("\n".join(map(escape_unprintable, problems)) if problems else "no promise was broken")


def _format_count(number: int, noun: str) -> str:
    """Format a number with its noun, in the singular or plural.

    >>> _format_count(1, "node"), _format_count(2, "node")
    ('1 node', '2 nodes')
    """
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def _describe_place(row: Mapping[str, Any]) -> str:
    """Describe the place of a fault: the node, and the GPU or port if it has one.

    >>> _describe_place({"node": "n001", "gpu": None, "port": 3})
    'n001 port mlx5_3'
    """
    if row["port"] is not None:
        return f"{row['node']} port mlx5_{row['port']}"
    return str(row["node"]) if row["gpu"] is None else f"{row['node']} GPU {row['gpu']}"


def _describe_detection(row: Mapping[str, Any]) -> str:
    if row["detected_ms"] is not None:
        return f"{(row['detected_ms'] - row['start_ms']) / 1000:.0f} s"
    return "missed" if row["visible"] else "not visible (idle)"


def _print_worth(console: "Console", worth: Mapping[str, Any] | None) -> None:
    if not worth:
        return
    if "error" in worth:
        console.print(f"the comparison with a risk-blind engine failed: {escape_unprintable(worth['error'])}")
        return
    rows = (
        ("risk-blind engine", "risk_blind"),
        ("Fleetcast, at placement alone", "ours"),
        ("  saved", "saved"),
        ("Fleetcast, and owners act on flags", "ours_acting"),
        ("  saved", "saved_acting"),
    )
    lines = [f"\nA day of the same jobs and faults, {worth['seeds']} seeds: GPU-hours lost to faults and stragglers"]
    for label, key in rows:
        arm = worth[key]
        lines.append(f"  {label:<35}{arm['mean']:7.1f}  (95 %: {arm['low']:.1f} to {arm['high']:.1f})")
    console.print("\n".join(lines), soft_wrap=True)
