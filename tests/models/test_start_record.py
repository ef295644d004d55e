"""What became of start times, and how the next ones are corrected."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from models.start_record import LOOKS_S, PERIOD_S, StartRecord

NOW_MS = 1_760_000_000_000
MINUTE_MS = 60_000
TOLD = {"x": (NOW_MS + 10 * MINUTE_MS, NOW_MS + 20 * MINUTE_MS, NOW_MS + 60 * MINUTE_MS)}


def shares(record: StartRecord) -> tuple[int, list[float]]:
    requests, found, _ = record.shares()
    return requests, found.round(3).tolist()


def test_a_start_matures_what_was_told_of_it() -> None:
    record = StartRecord()
    assert record.tell(TOLD, NOW_MS) == TOLD
    record.started("x", NOW_MS + 30 * MINUTE_MS)
    assert shares(record) == (1, [0.0, 0.0, 1.0])
    assert record.shares()[2] == NOW_MS


def test_what_has_not_started_by_its_p90_is_a_miss_at_once_and_once() -> None:
    record = StartRecord()
    record.tell(TOLD, NOW_MS)
    record.look(NOW_MS + 60 * MINUTE_MS)
    assert shares(record)[0] == 0
    record.look(NOW_MS + 61 * MINUTE_MS)
    assert shares(record) == (1, [0.0, 0.0, 0.0])
    record.started("x", NOW_MS + 90 * MINUTE_MS)
    assert shares(record) == (1, [0.0, 0.0, 0.0])


def test_a_request_weighs_one_however_often_it_was_told() -> None:
    record = StartRecord()
    for minute in range(200):
        now_ms = NOW_MS + minute * MINUTE_MS
        record.tell({"long": (now_ms, now_ms, now_ms + 500 * MINUTE_MS)}, now_ms)
    assert len(record._open["long"].notes) < len(LOOKS_S)
    record.started("long", NOW_MS + 200 * MINUTE_MS)
    record.tell(TOLD, NOW_MS)
    record.started("x", NOW_MS + 5 * MINUTE_MS)
    assert shares(record) == (2, [0.5, 0.5, 1.0])


def test_a_cancelled_request_is_left_out_unless_it_was_late() -> None:
    record = StartRecord()
    record.tell(TOLD | {"late": (NOW_MS, NOW_MS, NOW_MS)}, NOW_MS)
    record.look(NOW_MS + MINUTE_MS)
    record.left("x")
    record.left("late")
    assert shares(record) == (1, [0.0, 0.0, 0.0])


def test_a_request_that_was_to_start_at_once_and_does_not_is_told_later_and_later() -> None:
    record = StartRecord()
    told = []
    for minute in range(16):
        now_ms = NOW_MS + minute * MINUTE_MS
        (row,) = record.tell({"x": (now_ms, now_ms, now_ms)}, now_ms).values()
        told.append([(ms - now_ms) / MINUTE_MS for ms in row])
    assert told[0] == [0, 0, 0]
    assert told[15][1] > 4
    assert told[15][2] > 25


def test_coverage_converges_where_futures_are_far_too_early() -> None:
    """Requests wait six times as long as their futures say, with a spread of their own."""
    record, rng = StartRecord(), np.random.default_rng(3)
    hits = []
    for number in range(300):
        now_ms = NOW_MS + number * round(PERIOD_S * 1000)
        raw = {"x": tuple(now_ms + minutes * MINUTE_MS for minutes in (2, 5, 12))}
        told = record.tell(raw, now_ms)["x"]  # type: ignore[arg-type]
        start_ms = now_ms + round(30 * MINUTE_MS * float(np.exp(rng.normal())))
        hits.append([start_ms <= ms for ms in told])
        record.started("x", start_ms)
        record.look(now_ms + round(PERIOD_S * 1000))
    late = np.mean(hits[100:], axis=0)
    np.testing.assert_allclose(late, [0.1, 0.5, 0.9], atol=0.08)


@given(
    st.lists(st.tuples(*[st.integers(-1000, 10**8)] * 3).map(sorted), min_size=1, max_size=5),
    st.lists(st.integers(0, 10**7), max_size=8),
)
def test_what_is_told_is_in_order_and_never_past(starts: list[list[int]], passes_ms: list[int]) -> None:
    record, now_ms = StartRecord(), NOW_MS
    for pass_ms in (0, *passes_ms):
        now_ms += pass_ms
        raw = {str(at): (NOW_MS + row[0], NOW_MS + row[1], NOW_MS + row[2]) for at, row in enumerate(starts)}
        for low, middle, high in record.tell(raw, now_ms).values():
            assert now_ms <= low <= middle <= high
        record.look(now_ms)
    record.started("0", now_ms)


def test_a_dump_goes_on_where_it_stopped() -> None:
    record = StartRecord()
    record.tell(TOLD, NOW_MS)
    record.started("x", NOW_MS)
    record.look(NOW_MS)
    record.tell({"y": TOLD["x"]}, NOW_MS)
    record.look(NOW_MS + 2 * round(PERIOD_S * 1000))
    other = StartRecord()
    other.load(record.dump())
    assert other.dump() == record.dump()
    assert (other.offset == record.offset).all()
    for one in (record, other):
        one.started("y", NOW_MS + 15 * MINUTE_MS)
    assert shares(other) == shares(record)
