"""The ledger's charges and credits: two tables of its file.

They are written in the same transactions as the changes that cause them.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import astuple, dataclass, replace
from typing import Any

import msgspec

from fleetcast.placement.ledger.chain import compute_charge_checksum, compute_credit_checksum, encode
from fleetcast.placement.ledger.file import LedgerFile
from fleetcast.placement.ledger.rows import convert_row
from fleetcast.placement.queues.charges import Charge, PastUse
from fleetcast.placement.queues.credits import Bank

HELD_AT = 7  # the column of `held`
MARKS = "?," * 16 + "?"


@dataclass(slots=True)
class _CachedRows:
    """The rows that are cached in memory. Between two transactions they are equal to the file."""

    open: dict[tuple[str, int], Charge]
    banks: dict[str, Bank]
    past: PastUse | None = None
    last: int = 0  # the number of the newest charge


class ChargeTable:
    """The charges and credits of one open ledger file.

    It drops its cached rows if a write fails.
    """

    def __init__(self, ledger: LedgerFile) -> None:
        self._ledger = ledger
        self._cached: _CachedRows | None = None
        self.before_change: Callable[[], None] = lambda: None  # anybody's hold; in the same transaction

    def clear_cache(self) -> None:
        self._cached = None

    def reload_rows(self) -> None:
        """Read the rows from the file into memory again. Raises LedgerError if a row is corrupt."""
        self._cached = self._read_rows()

    @property
    def _cached_rows(self) -> _CachedRows:
        if self._cached is None:
            self._cached = self._read_rows()
        return self._cached

    def _read_rows(self) -> _CachedRows:
        rows = self._ledger.read_rows("SELECT * FROM charges WHERE ended_ms IS NULL ORDER BY charge_id")
        found = [self._decode_charge(row) for row in rows]
        last = self._ledger.read_rows("SELECT coalesce(max(seq), 0) FROM sqlite_sequence WHERE name = 'charges'")
        with self._ledger.translate_decode_errors():
            credits = self._ledger.read_rows("SELECT * FROM credits")
            banks = {
                row[0]: convert_row(Bank, self._check_unchanged("credits", row, compute_credit_checksum)[1:])
                for row in credits
            }
        return _CachedRows({(row.job, row.attempt): row for row in found}, banks, None, int(last[0][0]))

    def _decode_charge(self, row: Sequence[Any]) -> Charge:
        with self._ledger.translate_decode_errors():
            values = list(self._check_unchanged(f"charge {row[0]}", row, compute_charge_checksum))
            values[HELD_AT] = msgspec.json.decode(values[HELD_AT])
            return convert_row(Charge, values)

    def _check_unchanged(
        self, what: str, row: Sequence[Any], checksum: Callable[[Sequence[Any]], str]
    ) -> Sequence[Any]:
        return self._ledger.check_row(what, row, checksum)

    # -- charges

    def list_open_charges(self) -> Mapping[tuple[str, int], Charge]:
        """Return (job, attempt) → its open charge."""
        return self._cached_rows.open

    def open_charge(self, charge: Charge) -> Charge:
        """Write a new charge under the next free number, and return it with that number."""
        with self._open_transaction() as totals:
            self.before_change()
            charge = replace(charge, charge_id=totals.last + 1)
            self._write_charge(charge)
            totals.last = charge.charge_id
            totals.open[charge.job, charge.attempt] = charge
        return charge

    def replace_charge(self, charge: Charge) -> None:
        """Replace a stored charge with a new version of it. A charge with an end is closed."""
        with self._open_transaction() as totals:
            self.before_change()
            self._write_charge(charge)
            if charge.ended_ms is None:
                totals.open[charge.job, charge.attempt] = charge
                return
            if totals.open.pop((charge.job, charge.attempt), None) is not None and totals.past is not None:
                totals.past.add(charge)

    def close_charge(self, job: str, attempt: int, ended_ms: int, outcome: str) -> None:
        """Close the charge of an attempt, if one is open."""
        charge = self._cached_rows.open.get((job, attempt))
        if charge is not None:
            self.replace_charge(replace(charge, ended_ms=max(ended_ms, charge.held_ms), outcome=outcome))

    def _write_charge(self, charge: Charge) -> None:
        row = list(astuple(replace(charge, held=())))
        row[HELD_AT] = encode(charge.held)
        row = [value + 0.0 if isinstance(value, float) else value for value in row]
        self._ledger.execute_in_transaction(
            f"INSERT OR REPLACE INTO charges VALUES ({MARKS})", [*row, compute_charge_checksum(row)]
        )

    @contextmanager
    def _open_transaction(self) -> Iterator[_CachedRows]:
        with self._ledger.transaction():
            yield self._cached_rows

    def read_past_use(self, half_life_s: float, now_ms: int) -> PastUse:
        """Return the decayed use of closed charges.

        Charges that ended more than twenty half-lives ago are not read.
        """
        totals = self._cached_rows
        if totals.past is None or totals.past.half_life_s != half_life_s:
            totals.past = PastUse(half_life_s)
            since_ms = now_ms - round(20_000 * half_life_s)
            query = "SELECT * FROM charges WHERE ended_ms >= ? ORDER BY ended_ms, charge_id"
            for row in self._ledger.read_rows(query, [since_ms]):
                totals.past.add(self._decode_charge(row))
        return totals.past

    def read_charges_between(self, from_ms: int, to_ms: int) -> list[Charge]:
        """Return the charges that were held at some moment between two times, in the order of their numbers."""
        query = "SELECT * FROM charges WHERE (ended_ms IS NULL OR ended_ms > ?) AND held_ms < ? ORDER BY charge_id"
        return [self._decode_charge(row) for row in self._ledger.read_rows(query, [from_ms, to_ms])]

    def has_closed_charge(self, job: str, attempt: int) -> bool:
        """Return whether an attempt has a closed charge."""
        query = "SELECT 1 FROM charges WHERE ended_ms IS NOT NULL AND job = ? AND attempt = ? LIMIT 1"
        return bool(self._ledger.read_rows(query, [job, attempt]))

    # -- credits

    def get_banks(self) -> Mapping[str, Bank]:
        return self._cached_rows.banks

    def write_banks(self, banks: Iterable[tuple[str, Bank]]) -> None:
        """Write the banked credits of some queues."""
        with self._open_transaction() as totals:
            for queue, bank in banks:
                row = [queue, *astuple(bank)]
                row = [value + 0.0 if isinstance(value, float) else value for value in row]
                self._ledger.execute_in_transaction(
                    "INSERT OR REPLACE INTO credits VALUES (?,?,?,?,?,?)", [*row, compute_credit_checksum(row)]
                )
                totals.banks[queue] = bank
