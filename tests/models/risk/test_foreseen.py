"""The record of foreseen failures: each advice counts once, with what came of it."""

import msgspec
import pytest

from fleetcast.models.risk.foreseen import MOST_WAITING, ForeseenFailure, ForeseenRecord

HOUR_MS = 3_600_000


def advise(node: str, p: float = 0.5, at_ms: int = 1000) -> ForeseenFailure:
    return ForeseenFailure("a", 1, (node,), p, 3600.0, at_ms)


def watch(record: ForeseenRecord, until_ms: int, lost: tuple[str, ...] = (), away: tuple[str, ...] = ()) -> None:
    """Score every five minutes."""
    for now_ms in range(record.now_ms + 300_000, until_ms + 300_000, 300_000):
        record.score_due(set(lost), set(lost) | set(away), now_ms)


def test_advice_matures_when_a_node_is_lost_or_its_horizon_is_over() -> None:
    record = ForeseenRecord()
    assert record.record_advice(advise("n1", 0.8))
    assert record.record_advice(advise("n2", 0.4))
    assert not record.record_advice(advise("n1", 0.9, 5000)), "a repeated advice counts once"
    assert (record.make_calibration().matured, record.make_calibration().mean_p) == (0, None)
    assert record.score_due({"n1"}, {"n1"}, 60_000)
    found = record.make_calibration()
    assert (found.matured, found.faults, found.mean_p, found.observed) == (1, 1, 0.8, 1.0)
    watch(record, HOUR_MS)
    found = record.make_calibration()
    assert (found.matured, found.faults, found.horizon_s, found.since_ms) == (2, 1, 3600, 1000)
    assert (found.mean_p, found.observed) == (pytest.approx(0.6), 0.5)
    assert found.brier_skill == pytest.approx(1 - (0.2**2 + 0.4**2) / 2 / 0.25)
    assert [(row.n, row.p, row.observed) for row in found.bins] == [(1, 0.4, 0.0), (1, 0.8, 1.0)]
    assert record.waiting == []


def test_advice_on_a_node_that_leaves_service_otherwise_does_not_count() -> None:
    record = ForeseenRecord()
    record.record_advice(advise("n1"))
    watch(record, 300_000, away=("n1",))
    assert (record.waiting, record.make_calibration().matured) == ([], 0)


@pytest.mark.parametrize(("down_ms", "matured"), [(300_000, 1), (1_200_000, 0)])
def test_advice_does_not_count_if_we_were_down_for_long(down_ms: int, matured: int) -> None:
    record = ForeseenRecord()
    record.record_advice(advise("n1"))
    watch(record, 600_000)
    record.score_due((), (), record.now_ms + down_ms)
    watch(record, HOUR_MS)
    assert (record.waiting, record.make_calibration().matured) == ([], matured)


def test_the_record_survives_a_restart_and_is_bounded() -> None:
    record = ForeseenRecord()
    for number in range(MOST_WAITING):
        record.record_advice(advise(f"n{number}"))
    assert not record.record_advice(advise("one more"))
    record.score_due({"n0"}, {"n0"}, 60_000)
    again = ForeseenRecord.load(msgspec.json.decode(msgspec.json.encode(record)))
    assert again == record
    assert ForeseenRecord.load(None) == ForeseenRecord()
    assert not record.score_due((), (), 61_000), "nothing is known, so nothing is stored"
