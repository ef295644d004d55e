"""truth.jsonl: what the simulator knows of its faults. The last line of a fault_id counts; no service reads it."""

from pathlib import Path

import msgspec


class FaultRecord(msgspec.Struct, frozen=True):
    """One fault or decoy. `end_ms` is null while it lasts; `visible`: what runs there has shown it for a while."""

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


def append_truth(path: Path, records: list[FaultRecord]) -> None:
    """Add a line per record."""
    if records:
        with path.open("ab") as file:
            file.writelines(msgspec.json.encode(record) + b"\n" for record in records)


def read_truth(path: Path) -> list[FaultRecord]:
    """The last line of each fault, in order of first mention; an empty list when there is no file yet."""
    if not path.exists():
        return []
    latest: dict[str, FaultRecord] = {}
    for line in path.read_bytes().splitlines():
        if line.strip():
            record = msgspec.json.decode(line, type=FaultRecord)
            latest[record.fault_id] = record
    return list(latest.values())
