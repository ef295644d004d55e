"""Charges and credits in the ledger's file: kept whole over kills and damage."""

import os
import shutil
import signal
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from fleetcast.fleet import failpoints
from fleetcast.placement.ledger.ledger import Ledger, LedgerError
from fleetcast.placement.ledger.verify import verify_ledger
from fleetcast.placement.queues.charges import Charge, HeldGpus
from fleetcast.placement.queues.credits import Bank

WEEK_S = 168 * 3600.0


def charge(job: str, held_ms: int) -> Charge:
    return Charge(0, job, job, 1, "a", "ada", "batch", (HeldGpus("p", "H100", 2.5),), 60.0, 5, held_ms)


def changes(ledger: Ledger) -> Iterator[None]:
    """One transaction after the other; stops after each."""
    for number in range(4):
        ledger.charges.open_charge(charge(f"j{number}", 1000 * number))
        yield
    ledger.charges.close_charge("j1", 1, 50_000, "finished")
    yield
    with ledger.transaction():
        ledger.charges.write_banks([("a", Bank(7, 8.5, 1.25, 0.5))])
        ledger.charges.replace_charge(replace(ledger.charges.list_open_charges()["j2", 1], started_ms=3000))
    yield


def fill(ledger: Ledger) -> None:
    for _ in changes(ledger):
        pass


def usage(ledger: Ledger) -> tuple[object, ...]:
    book = ledger.charges
    return (
        dict(book.list_open_charges()),
        dict(book.get_banks()),
        book.read_past_use(WEEK_S, 10**7).compute_use_at(10**7),
        book.read_charges_between(0, 10**9),
    )


def test_what_was_written_is_read_again(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "l")
    fill(ledger)
    before = usage(ledger)
    ledger.close()
    again = Ledger(tmp_path / "l")
    assert usage(again) == before
    assert [row.charge_id for row in again.charges.read_charges_between(0, 10**9)] == [1, 2, 3, 4]
    assert again.charges.open_charge(charge("new", 9)).charge_id == 5
    again.close()
    assert verify_ledger(tmp_path / "l").is_intact


def test_a_write_that_fails_leaves_the_memory_as_the_file(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "l")
    fill(ledger)
    before = usage(ledger)

    def fail(point: str) -> float:
        if point == "ledger.before_commit":
            raise OSError(28, "No space left on device")
        return 1.0

    failpoints.set_hook(fail)
    try:
        with pytest.raises(OSError, match="No space"):
            ledger.charges.close_charge("j0", 1, 60_000, "failed")
    finally:
        failpoints.set_hook(None)
    assert usage(ledger) == before
    ledger.close()


def test_a_kill_at_any_write_leaves_a_usage_that_was_written(tmp_path: Path) -> None:
    """The usage after each transaction, and after a kill before or after each commit: always one of the first."""
    states = []
    for kills in range(15):
        path = tmp_path / f"l{kills}"
        child = os.fork()
        if not child:
            left = [kills]

            def hook(point: str, left: list[int] = left) -> float:
                if point.startswith("ledger."):
                    left[0] -= 1
                    if left[0] == 0:
                        os.kill(os.getpid(), signal.SIGKILL)
                return 1.0

            failpoints.set_hook(hook)
            fill(Ledger(path))
            os._exit(0)
        os.waitpid(child, 0)
        ledger = Ledger(path)
        states.append(usage(ledger))
        ledger.close()
        assert verify_ledger(path).is_intact
    written = []
    for state in states[1:]:
        if state not in written:
            written.append(state)
    assert len(written) == 7  # nothing, four charges, one closed, and the last two changes together
    assert states[0] == written[-1]


def test_a_file_cut_off_at_any_byte_has_a_usage_that_was_written(tmp_path: Path) -> None:
    """What a kill or a power cut leaves of the write-ahead log: the file itself changes only when that is folded in."""
    path = tmp_path / "l"
    ledger = Ledger(path)
    written = [usage(ledger), *(usage(ledger) for _ in changes(ledger))]
    log = path.with_name("l-wal").read_bytes()
    cuts = sorted({*range(0, len(log), len(log) // 80), *range(len(log) - 4200, len(log), 600), len(log)})
    found = []
    for cut in cuts:
        torn = tmp_path / f"cut{cut}" / "l"
        torn.parent.mkdir()
        shutil.copy(path, torn)
        torn.with_name("l-wal").write_bytes(log[:cut])
        again = Ledger(torn)
        found.append(written.index(usage(again)))
        again.close()
        assert verify_ledger(torn).is_intact
    ledger.close()
    assert found == sorted(found)
    assert (found[0], found[-1], len(set(found))) == (0, len(written) - 1, len(written))


@pytest.mark.parametrize("change", ["UPDATE charges SET leaf = 'b'", "UPDATE credits SET earned = 99"])
def test_what_somebody_changed_is_not_served(tmp_path: Path, change: str) -> None:
    ledger = Ledger(tmp_path / "l")
    fill(ledger)
    ledger.close()
    with closing(sqlite3.connect(tmp_path / "l", isolation_level=None)) as db:
        db.execute(change)
    assert {finding.kind for finding in verify_ledger(tmp_path / "l").findings} == {"charge"}
    with pytest.raises(LedgerError, match="is not what was written"):
        Ledger(tmp_path / "l")
