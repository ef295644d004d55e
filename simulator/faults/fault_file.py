"""The TOML file for `fleetcast simulate faults`: all settings of a run, with defaults.

Unknown keys are refused. The docstrings of its tables become comments in the file.
"""

import inspect
import math
import re
from pathlib import Path
from typing import Any

import msgspec

from fleetcast.fleet.decode_faults import find_first_fault
from fleetcast.fleet.errors import ConfigError
from fleetcast.fleet.toml_lines import find_key_lines, find_nearest_line
from fleetcast.fleet.toml_text import read_toml
from fleetcast.simulator.faults.faults import FaultSettings
from fleetcast.simulator.faults.magnitudes import DECOY_KINDS, FAULT_KINDS, FaultKind, Magnitudes, Span


class FleetTable(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The machines of the fleet.

    `lost_scrapes_share`: the share of all scrapes of a healthy exporter that get no answer.
    """

    nodes: int = 64
    rack_nodes: int = 16
    lost_scrapes_share: float = 0.0002


class JobsTable(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The jobs that run: `sizes` in whole nodes with their `weights` (none: no jobs).

    Run times are lognormal. `median_s`: their median. `gap_s`: how long nodes stay free on average.
    `avoid_s`: how long a node may show a fault before no further job is placed on it. `step_every_s`: how
    often each rank reports a step, 0 for never.
    """

    sizes: tuple[int, ...] = (1, 2, 4, 8)
    weights: tuple[float, ...] = (0.35, 0.25, 0.25, 0.15)
    median_s: float = 10_800.0
    sigma: float = 0.8
    gap_s: float = 120.0
    restart_s: float = 300.0
    inference_share: float = 0.1
    interactive_share: float = 0.05
    step_every_s: float = 15.0
    avoid_s: float = 600.0


class DrawTable(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The settings for drawing faults.

    `scale` multiplies the rates of faults, and `decoy_scale` those of decoys. 0 means none. A `precursor_share`
    that is not negative replaces the share of every kind. It does not apply to kinds that show nothing before
    they start (power_brake, slow_nic, cpu_contention). A precursor lasts for `precursor_s`. After `repeat_share`
    of the repairs, the fault occurs again within `repeat_within_s`. `repairs_told`: node events report the drain
    for a repair and the return from it.
    """

    scale: float = 100.0
    decoy_scale: float = 1.0
    precursor_share: float = -1.0
    precursor_s: Span = (600.0, 7200.0)
    shortest_s: float = 300.0
    limit_s: float = 7200.0
    only_busy: bool = True
    watchdog_s: float = 900.0
    repeat_share: float = 0.22
    repeat_within_s: float = 86_400.0
    repairs_told: bool = True


class RecordedTable(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The settings of --recorded: runs are played for `loops` times the length of the longest run.

    There is a fault every `every_s` (0: none). Faults last from `shortest_s` to `limit_s`.
    `communication_share`: the share of a step in which a rank communicates with the others.
    """

    interval_s: float = 1.0
    loops: int = 12
    every_s: float = 150.0
    decoy_every_s: float = 300.0
    shortest_s: float = 60.0
    limit_s: float = 180.0
    communication_share: float = 0.25


def _make_default_kinds() -> Magnitudes:
    """Return the default kinds. Decoys occur a few times per node-day, and losses may have precursors."""
    kinds = Magnitudes()
    decoys = dict.fromkeys(DECOY_KINDS, 500.0)
    lead = dict.fromkeys(("gpu_off_bus", "node_lost"), 0.3)
    change = {kind: {"rate": rate} for kind, rate in decoys.items()}
    change |= {kind: {"precursor_share": share} for kind, share in lead.items()}
    return msgspec.structs.replace(
        kinds, **{kind: msgspec.structs.replace(kinds.get_kind(kind), **fields) for kind, fields in change.items()}
    )


class FaultFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The settings of one simulated run.

    `start` is UTC. Each kind of fault or benign look-alike has its own table. `rate` counts per 1000
    node-days. The duration of a fault is lognormal around `median_s`. A value [low, high] is a range from which
    a number is drawn.
    """

    name: str = "default"
    seed: int = 1
    start: str = "2026-01-05T00:00"
    hours: float = 24.0
    interval_s: float = 15.0
    fleet: FleetTable = FleetTable()
    jobs: JobsTable = JobsTable()
    draw: DrawTable = DrawTable()
    recorded: RecordedTable = RecordedTable()
    kinds: Magnitudes = msgspec.field(default_factory=_make_default_kinds)

    def make_settings(self) -> FaultSettings:
        """Return the settings of a fault plan that has a Poisson process for each kind."""
        draw = self.draw
        faults = {kind: row for kind, row in self.kinds.items() if isinstance(row, FaultKind)}
        rates = {kind: row.rate * draw.scale for kind, row in faults.items()}
        rates |= {kind: self.kinds.get_kind(kind).rate * draw.decoy_scale for kind in DECOY_KINDS}
        own = draw.precursor_share
        return FaultSettings(
            rates=rates,
            median_s={kind: row.median_s for kind, row in faults.items()},
            shortest_s=draw.shortest_s,
            limit_s=draw.limit_s,
            precursor_shares={kind: row.precursor_share if own < 0 else own for kind, row in faults.items()},
            precursor_s=draw.precursor_s,
            only_busy=draw.only_busy,
            watchdog_s=draw.watchdog_s,
            repeat_share=draw.repeat_share,
            repeat_within_s=draw.repeat_within_s,
            magnitudes=self.kinds,
        )


def read_fault_file(path: Path) -> FaultFile:
    """Read a fault file. Raises ConfigError that names the file, the key and the fix."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}; `fleetcast simulate faults --print-config` shows one") from None
    except UnicodeDecodeError:
        why = "no text in UTF-8; `fleetcast simulate faults --print-config` shows a file of faults"
        raise ConfigError(f"{path}: {why}") from None
    return parse_fault_file(text, str(path))


def parse_fault_file(text: str, name: str = "the file") -> FaultFile:
    """Parse the text of a fault file. A missing key has its default. Raises ConfigError."""
    try:
        given = read_toml(text)
    except ValueError as error:
        raise ConfigError(f"{name}: no TOML: {error}") from None
    whole = _merge_tables(msgspec.to_builtins(FaultFile()), given)
    try:
        file = msgspec.convert(whole, FaultFile)
    except msgspec.ValidationError as error:
        fault = find_first_fault(error, FaultFile, whole, toml=True)
        line = f"line {find_nearest_line(find_key_lines(text), fault.path)}: "
        raise ConfigError(f"{name}: {line}{fault.sentence}; --print-config shows every key") from None
    problem = _find_problem(file)
    if problem:
        raise ConfigError(f"{name}: {problem}")
    return file


def _merge_tables(usual: Any, given: Any) -> Any:
    """Merge `given` into the defaults `usual`, table by table, and return the result."""
    if not (isinstance(usual, dict) and isinstance(given, dict)):
        return given
    return usual | {key: _merge_tables(usual.get(key), value) for key, value in given.items()}


def _find_problem(file: FaultFile) -> str:
    """Return a problem that the types of the settings cannot express, or "" if the file is valid."""
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", file.name):
        return f"name = {file.name!r}: letters, digits, dots, dashes; it names the folder"
    sizes, weights = file.jobs.sizes, file.jobs.weights
    if len(sizes) != len(weights) or (sizes and (sum(weights) <= 0 or min(weights) < 0)):
        return f"jobs.weights = {list(file.jobs.weights)}: one a size, {len(sizes)} of them, none below 0, some above"
    scales = {"draw.scale": file.draw.scale, "draw.decoy_scale": file.draw.decoy_scale}
    for key, value in scales.items():
        if not 0 <= value < math.inf:
            return f"{key} = {value:g}: a number of at least 0"
    positive = {
        "hours": file.hours,
        "interval_s": file.interval_s,
        "fleet.nodes": file.fleet.nodes,
        "fleet.rack_nodes": file.fleet.rack_nodes,
        "jobs.sizes": min(sizes, default=1),
        "jobs.median_s": file.jobs.median_s,
        "recorded.interval_s": file.recorded.interval_s,
        "recorded.loops": file.recorded.loops,
    }
    return next((f"{key} = {value:g}: must be greater than 0" for key, value in positive.items() if not value > 0), "")


def format_fault_file(file: FaultFile) -> str:
    """Return the file as TOML. `parse_fault_file` reads the same settings back."""
    tables = msgspec.to_builtins(file)
    kinds = tables.pop("kinds")
    head = [f"{key} = {_format_toml(value)}" for key, value in tables.items() if not isinstance(value, dict)]
    parts = ["\n".join([*_make_comment(file), *head])]
    named = {key: value for key, value in tables.items() if isinstance(value, dict)}
    named |= {f"kinds.{kind}": kinds[kind] for kind in (*FAULT_KINDS, *DECOY_KINDS)}
    for key, table in named.items():
        rows = [f"{name} = {_format_toml(value)}" for name, value in table.items()]
        parts.append("\n".join([*_make_comment(getattr(file, key, None)), f"[{key}]", *rows]))
    return "\n\n".join(parts) + "\n"


def _make_comment(table: object) -> list[str]:
    """Return the docstring of a table as lines of a TOML comment."""
    words = inspect.getdoc(table) if table is not None else None
    return [f"# {line}".rstrip() for line in words.splitlines()] if words else []


def _format_toml(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return f'"{value}"'
    if isinstance(value, list | tuple):
        return f"[{', '.join(_format_toml(item) for item in value)}]"
    return repr(value)
