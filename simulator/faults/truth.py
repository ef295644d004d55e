"""The file truth.jsonl with the truth about the simulator's faults. No service reads it.

A fault may have several lines. The last line of a fault_id counts.
"""

from pathlib import Path

import msgspec


class FaultRecord(msgspec.Struct, frozen=True):
    """The truth about one fault or decoy.

    `end_ms`: null while it lasts. `visible`: whether the work there has shown the fault for some time.
    """

    fault_id: str
    kind: str
    node: str
    gpu: int | None
    port: int | None
    start_ms: int
    end_ms: int | None
    visible: bool
    benign: bool
    visible_ms: int | None = None


class FaultTruth(FaultRecord, frozen=True):
    """The truth about one fault or decoy after the run.

    `slowdown`: the largest step factor of its job. `lead_s`: the length of the precursor. `magnitude`: the
    drawn numbers by name.
    """

    job: str | None = None
    precursor: bool = False
    lead_s: float = 0.0
    magnitude: dict[str, float] = {}
    slowdown: float = 1.0


def append_truth(path: Path, records: list[FaultRecord]) -> None:
    """Append one line for each record to the file."""
    if records:
        with path.open("ab") as file:
            file.writelines(msgspec.json.encode(record) + b"\n" for record in records)


def read_truth(path: Path) -> list[FaultRecord]:
    """Return the last complete record of each fault, in order of the faults' first lines.

    Returns an empty list if there is no file yet.
    """
    if not path.exists():
        return []
    whole, _, _ = path.read_bytes().rpartition(b"\n")
    records = [msgspec.json.decode(line, type=FaultRecord) for line in whole.splitlines()]
    return list({record.fault_id: record for record in records}.values())
