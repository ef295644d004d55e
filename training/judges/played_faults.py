"""Node faults from a file, for `fleetcast play --faults`."""

import math
from pathlib import Path

import pandas as pd

from fleetcast.fleet.errors import ConfigError
from fleetcast.placement.play.faults import NodeFault

COLUMNS = ("node", "start", "end", "kind")


def read_node_faults(path: Path, nodes: int) -> list[NodeFault]:
    """Read a CSV with the columns `COLUMNS`, sorted by start. Nodes count from 1. Times are seconds of the trace.

    Raises ConfigError for a file that cannot be read, a missing column, an unknown node, or a fault without a length.
    """
    try:
        table = pd.read_csv(path, dtype={"kind": str}, keep_default_na=False)
    except (OSError, ValueError) as error:
        raise ConfigError(f"--faults {path}: cannot be read: {error}") from None
    if missing := [name for name in COLUMNS if name not in table.columns]:
        raise ConfigError(f"--faults {path}: no column {missing[0]!r}; write {','.join(COLUMNS)}")
    return sorted(
        (_parse_fault(path, line, row, nodes) for line, row in enumerate(table[[*COLUMNS]].to_numpy().tolist(), 2)),
        key=lambda fault: (fault.start_s, fault.node),
    )


def _parse_fault(path: Path, line: int, row: list[object], nodes: int) -> NodeFault:
    try:
        node, start_s, end_s = int(str(row[0])), float(str(row[1])), float(str(row[2]))
    except ValueError:
        raise ConfigError(f"--faults {path}: line {line}: node, start and end must be numbers") from None
    if not 1 <= node <= nodes:
        raise ConfigError(f"--faults {path}: line {line}: node {node}: the fleet has nodes 1 to {nodes}")
    if not (math.isfinite(start_s) and start_s < end_s < math.inf):
        raise ConfigError(f"--faults {path}: line {line}: the end must be after the start, and both finite")
    return NodeFault(node - 1, start_s, end_s, str(row[3]))
