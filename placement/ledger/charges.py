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
from fleetcast.placement.ledger.rows import typed
from fleetcast.placement.queues.charges import Charge, PastUse
from fleetcast.placement.queues.credits import Bank

HELD_AT = 7  # the column of `held`
MARKS = "?," * 16 + "?"


@dataclass(slots=True)
class _Totals:
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
        self._cached: _Totals | None = None
        self.before_change: Callable[[], None] = lambda: None  # anybody's hold; in the same transaction

    def forget(self) -> None:
        self._cached = None

    def load(self) -> None:
        """Read the rows from the file into memory again. Raises LedgerError if a row is corrupt."""
        self._cached = self._load()

    @property
    def _totals(self) -> _Totals:
        if self._cached is None:
            self._cached = self._load()
        return self._cached

    def _load(self) -> _Totals:
        rows = self._ledger.rows("SELECT * FROM charges WHERE ended_ms IS NULL ORDER BY charge_id")
        found = [self._decode_charge(row) for row in rows]
        last = self._ledger.rows("SELECT coalesce(max(seq), 0) FROM sqlite_sequence WHERE name = 'charges'")
        with self._ledger.readable():
            credits = self._ledger.rows("SELECT * FROM credits")
            banks = {
                row[0]: typed(Bank, self._check_unchanged("credits", row, compute_credit_checksum)[1:])
                for row in credits
            }
        return _Totals({(row.job, row.attempt): row for row in found}, banks, None, int(last[0][0]))

    def _decode_charge(self, row: Sequence[Any]) -> Charge:
        with self._ledger.readable():
            values = list(self._check_unchanged(f"charge {row[0]}", row, compute_charge_checksum))
            values[HELD_AT] = msgspec.json.decode(values[HELD_AT])
            return typed(Charge, values)

    def _check_unchanged(
        self, what: str, row: Sequence[Any], checksum: Callable[[Sequence[Any]], str]
    ) -> Sequence[Any]:
        return self._ledger.unchanged(what, row, checksum)

    # -- charges

    def opened(self) -> Mapping[tuple[str, int], Charge]:
        """Return (job, attempt) → its open charge."""
        return self._totals.open

    def open(self, charge: Charge) -> Charge:
        """Write a new charge, which gets the next number."""
        with self._writing() as totals:
            self.before_change()
            charge = replace(charge, charge_id=totals.last + 1)
            self._write(charge)
            totals.last = charge.charge_id
            totals.open[charge.job, charge.attempt] = charge
        return charge

    def change(self, charge: Charge) -> None:
        """Replace a stored charge. A charge that has an end is closed."""
        with self._writing() as totals:
            self.before_change()
            self._write(charge)
            if charge.ended_ms is None:
                totals.open[charge.job, charge.attempt] = charge
                return
            if totals.open.pop((charge.job, charge.attempt), None) is not None and totals.past is not None:
                totals.past.add(charge)

    def close(self, job: str, attempt: int, ended_ms: int, outcome: str) -> None:
        """Close the charge of an attempt, if one is open."""
        charge = self._totals.open.get((job, attempt))
        if charge is not None:
            self.change(replace(charge, ended_ms=max(ended_ms, charge.held_ms), outcome=outcome))

    def _write(self, charge: Charge) -> None:
        row = list(astuple(replace(charge, held=())))
        row[HELD_AT] = encode(charge.held)
        row = [value + 0.0 if isinstance(value, float) else value for value in row]
        self._ledger.write(f"INSERT OR REPLACE INTO charges VALUES ({MARKS})", [*row, compute_charge_checksum(row)])

    @contextmanager
    def _writing(self) -> Iterator[_Totals]:
        with self._ledger.transaction():
            yield self._totals

    def past(self, half_life_s: float, now_ms: int) -> PastUse:
        """Return the decayed use of closed charges.

        Charges that ended more than twenty half-lives ago are not read.
        """
        totals = self._totals
        if totals.past is None or totals.past.half_life_s != half_life_s:
            totals.past = PastUse(half_life_s)
            since_ms = now_ms - round(20_000 * half_life_s)
            query = "SELECT * FROM charges WHERE ended_ms >= ? ORDER BY ended_ms, charge_id"
            for row in self._ledger.rows(query, [since_ms]):
                totals.past.add(self._decode_charge(row))
        return totals.past

    def between(self, from_ms: int, to_ms: int) -> list[Charge]:
        """Return the charges that were held at some moment between two times, in the order of their numbers."""
        query = "SELECT * FROM charges WHERE (ended_ms IS NULL OR ended_ms > ?) AND held_ms < ? ORDER BY charge_id"
        return [self._decode_charge(row) for row in self._ledger.rows(query, [from_ms, to_ms])]

    def has_charged(self, job: str, attempt: int) -> bool:
        """Return whether an attempt has a closed charge."""
        query = "SELECT 1 FROM charges WHERE ended_ms IS NOT NULL AND job = ? AND attempt = ? LIMIT 1"
        return bool(self._ledger.rows(query, [job, attempt]))

    # -- credits

    def banks(self) -> Mapping[str, Bank]:
        return self._totals.banks

    def write_banks(self, banks: Iterable[tuple[str, Bank]]) -> None:
        """Write the banks of queues."""
        with self._writing() as totals:
            for queue, bank in banks:
                row = [queue, *astuple(bank)]
                row = [value + 0.0 if isinstance(value, float) else value for value in row]
                self._ledger.write(
                    "INSERT OR REPLACE INTO credits VALUES (?,?,?,?,?,?)", [*row, compute_credit_checksum(row)]
                )
                totals.banks[queue] = bank
