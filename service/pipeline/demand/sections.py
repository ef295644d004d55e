"""The board sections of demand, encoded once for each forecast.

The sections include keys and offsets, so a reader decodes only the rows that it needs.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from fleetcast.models.demand.rows import DemandRow
from fleetcast.service.board.board import BYTES, Board, Section

SECTIONS = (
    *("doc.demand", "demand.keys", "demand.offsets"),
    *("doc.demand_record", "demand_record.keys", "demand_record.offsets", "doc.demand_model"),
)
KEYS = ("queue", "class", "group", "target", "pool")

encode = msgspec.json.Encoder().encode
Key = tuple[str, str, str, str, str]


def make_demand_sections(
    rows: Sequence[DemandRow],
    record: Mapping[str, Any],
    model: Sequence[Mapping[str, Any]],
    as_of_ms: int,
) -> list[Section]:
    """Return the board sections of one forecast.

    rows: the rows of `/v1/demand`. record: as `DemandForecaster.record`. model: the rows of
    `/v1/demand/model`.
    """
    head = b'{"as_of_ms":%d,"series":[' % as_of_ms
    body, offsets = _join_parts(head, [encode(row) for row in rows], b"]}")
    names = [(row.queue, row.class_, row.group, row.target, row.pool) for row in rows]
    fans, places = _join_parts(b"{", [encode(name) + b":" + encode(fan) for name, fan in record.items()], b"}")
    data: dict[str, NDArray[Any] | bytes] = {
        "doc.demand": body,
        "demand.keys": encode(names),
        "demand.offsets": offsets,
        "doc.demand_record": fans,
        "demand_record.keys": encode(list(record)),
        "demand_record.offsets": places,
        "doc.demand_model": encode({"as_of_ms": as_of_ms, "rows": model}),
    }
    return [Section(name, part, as_of_ms) for name, part in data.items()]


def copy_demand_sections(board: Board) -> list[Section]:
    """Return the demand sections of an older board, with their original times.

    Returns [] if the board lacks one of them, or was written before demand had pools.
    """
    if not all(name in board for name in SECTIONS):
        return []
    if any(len(key) != len(KEYS) for key in msgspec.json.decode(board.raw("demand.keys"))):
        return []
    found = []
    for name in SECTIONS:
        row = board.meta(name)
        data = board.text(name) if row["dtype"] == BYTES else board.array(name).copy()
        found.append(Section(name, data, row["as_of_ms"], row["model"]))
    return found


def _join_parts(head: bytes, parts: Sequence[bytes], tail: bytes) -> tuple[bytes, NDArray[np.int64]]:
    """Join parts with commas between `head` and `tail`.

    Returns the text, and the begin and end offset of each part: (part, 2) int64.
    """
    sizes = np.array([len(part) for part in parts], np.int64)
    begins = len(head) + np.concatenate([[0], np.cumsum(sizes + 1)[:-1]]) if len(parts) else sizes
    return head + b",".join(parts) + tail, np.stack([begins, begins + sizes], axis=1).astype(np.int64)


@dataclass(frozen=True, slots=True)
class DemandKeys:
    """The keys of all demand rows, with indexes.

    rows: the key (queue, class, group, target, pool) of each row. by_queue: queue → its rows. groups, pools:
    all names of groups and pools.
    """

    rows: list[Key]
    by_queue: dict[str, list[int]]
    groups: frozenset[str]
    pools: frozenset[str]

    def find_matching_rows(self, wanted: Mapping[str, str]) -> list[int]:
        """Return the indices of the rows with all the wanted values. wanted: name in KEYS → value."""
        values = [(KEYS.index(name), value) for name, value in wanted.items()]
        among: Iterable[int] = self.by_queue.get(wanted["queue"], ()) if "queue" in wanted else range(len(self.rows))
        return [row for row in among if all(self.rows[row][at] == value for at, value in values)]


def read_demand_keys(board: Board) -> DemandKeys:
    """Return the keys of the demand rows on a board. Raises KeyError if the board has no forecast.

    Boards with the same keys share one result.
    """
    return _decode_keys(bytes(board.raw("demand.keys")))


@lru_cache(2)
def _decode_keys(encoded: bytes) -> DemandKeys:
    rows = [_complete_key(key) for key in msgspec.json.decode(encoded, type=list[list[str]])]
    by_queue: dict[str, list[int]] = {}
    for row, key in enumerate(rows):
        by_queue.setdefault(key[0], []).append(row)
    return DemandKeys(rows, by_queue, frozenset(key[2] for key in rows), frozenset(key[4] for key in rows))


def _complete_key(key: Sequence[str]) -> Key:
    """Return a row's key with its pool. A key of an older version has no pool, and gets the pool "all"."""
    queue, class_, group, target, pool = (*key, "all")[: len(KEYS)]
    return queue, class_, group, target, pool


def read_demand_rows(board: Board, at: Iterable[int]) -> list[msgspec.Raw]:
    """Return the demand rows at the given indices, still encoded."""
    return _read_parts(board, "doc.demand", "demand.offsets", at)


def read_demand_record(board: Board, name: str) -> dict[str, msgspec.Raw] | None:
    """Return the record of a series for `/v1/demand/record`, or None if the series has none.

    name: the name of the series from `format_series_name`.
    """
    names = msgspec.json.decode(board.raw("demand_record.keys"), type=list[str])
    if name not in names:
        return None
    (part,) = _read_parts(board, "doc.demand_record", "demand_record.offsets", [names.index(name)])
    return msgspec.json.decode(b"{%b}" % bytes(part), type=dict[str, dict[str, msgspec.Raw]])[name]


def _read_parts(board: Board, section: str, offsets: str, at: Iterable[int]) -> list[msgspec.Raw]:
    body, places = board.raw(section), board.raw(offsets).cast("q")  # in place: an array costs more than one row
    return [msgspec.Raw(body[places[2 * row] : places[2 * row + 1]]) for row in at]
