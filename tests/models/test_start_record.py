"""What became of start times, and how the next ones are corrected."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from models.start_record import LOOKS_S, StartRecord

NOW_MS = 1_760_000_000_000
MINUTE_MS = 60_000
PERIOD_MS = 10 * MINUTE_MS
TOLD = {"x": (NOW_MS + 10 * MINUTE_MS, NOW_MS + 20 * MINUTE_MS, NOW_MS + 60 * MINUTE_MS)}


def shares(record: StartRecord) -> tuple[int, list[float]]:
    found = record.shares()
    return found.requests, found.shares.round(3).tolist()


def test_a_start_matures_what_was_told_of_it() -> None:
    record = StartRecord()
    assert record.issue(TOLD, NOW_MS) == TOLD
    record.started("x", NOW_MS + 30 * MINUTE_MS)
    assert shares(record) == (1, [0.0, 0.0, 1.0])
    assert record.since_ms() == NOW_MS


def test_what_has_not_started_by_its_p90_is_a_miss_at_once_and_once() -> None:
    record = StartRecord()
    record.issue(TOLD, NOW_MS)
    record.advance(NOW_MS + 60 * MINUTE_MS)
    assert shares(record)[0] == 0
    record.advance(NOW_MS + 61 * MINUTE_MS)
    assert shares(record) == (1, [0.0, 0.0, 0.0])
    record.started("x", NOW_MS + 90 * MINUTE_MS)
    assert shares(record) == (1, [0.0, 0.0, 0.0])


def test_a_request_weighs_one_however_often_it_was_told() -> None:
    record = StartRecord()
    for minute in range(200):
        now_ms = NOW_MS + minute * MINUTE_MS
        record.issue({"long": (now_ms, now_ms, now_ms + 500 * MINUTE_MS)}, now_ms)
    assert len(record._open["long"].notes) < len(LOOKS_S)
    record.started("long", NOW_MS + 200 * MINUTE_MS)
    record.issue(TOLD, NOW_MS)
    record.started("x", NOW_MS + 5 * MINUTE_MS)
    assert shares(record) == (2, [0.5, 0.5, 1.0])


def test_the_first_answer_is_judged_apart_from_later_ones() -> None:
    """An hour was first issued, and the request started within 20 minutes: later answers do not repair the first."""
    record = StartRecord()
    hour = (NOW_MS + 40 * MINUTE_MS, NOW_MS + 60 * MINUTE_MS, NOW_MS + 90 * MINUTE_MS)
    record.issue({"x": hour}, NOW_MS)
    for minute in (1, 5, 15):
        now_ms = NOW_MS + minute * MINUTE_MS
        record.issue({"x": (now_ms, now_ms + MINUTE_MS, NOW_MS + 20 * MINUTE_MS)}, now_ms)
    record.started("x", NOW_MS + 19 * MINUTE_MS)
    first = record.shares_at(0)
    assert (first.requests, first.shares.tolist()) == (1, [1.0, 1.0, 1.0])
    assert record.shares_at(3).shares.tolist() == [0.0, 0.0, 1.0]
    assert record.shares_at(4).requests == 0
    assert shares(record) == (1, [0.25, 0.25, 1.0])


def test_a_request_without_a_first_answer_counts_as_unanswered_once_it_starts() -> None:
    record = StartRecord()
    record.issue({}, NOW_MS, ["x", "gone"])
    record.issue({"x": (NOW_MS, NOW_MS, NOW_MS + 5 * MINUTE_MS)}, NOW_MS + MINUTE_MS)
    assert record.shares_at(0).unanswered == 0
    record.started("x", NOW_MS + 2 * MINUTE_MS)
    record.withdrawn("gone")
    first, second = record.shares_at(0), record.shares_at(1)
    assert (first.requests, first.unanswered, second.requests, second.unanswered) == (0, 1, 1, 0)
    assert shares(record) == (1, [0.0, 0.0, 1.0])


@given(
    st.lists(
        st.tuples(st.lists(st.integers(0, 90), min_size=3, max_size=3).map(sorted), st.integers(0, 120)), max_size=20
    )
)
def test_shares_rise_with_the_level_at_each_age(rows: list[tuple[list[int], int]]) -> None:
    record = StartRecord()
    for number, (minutes, start) in enumerate(rows):
        low, middle, high = (NOW_MS + one * MINUTE_MS for one in minutes)
        record.issue({str(number): (low, middle, high)}, NOW_MS)
        record.started(str(number), NOW_MS + start * MINUTE_MS)
    first = record.shares_at(0)
    assert first.requests == len(rows)
    if rows:
        assert (np.diff(first.shares) >= 0).all()
        np.testing.assert_allclose(first.shares, record.shares().shares)


def test_a_dump_of_mixed_ages_leaves_its_cursor_alone() -> None:
    old = {"offset": [0.1, 0.2, 0.3], "cursor": 7, "outcomes": [[0.5, 0.5, 1.0]], "since_ms": [NOW_MS]}
    record = StartRecord()
    record.load(old | {"open": [["x", NOW_MS, [[[1, 2, 3], False]], None, 0, [0, 0, 0]]], "pushed": [[0] * 3, 0, None]})
    assert (record.offset.tolist(), record.cursor, record.shares().requests) == ([0.0] * 3, 7, 0)


def test_coverage_does_not_swing_where_outcomes_come_hours_later() -> None:
    """Futures say six hours, requests wait three. Each answer matures hours later, and fifty are issued until then."""
    record, rng = StartRecord(), np.random.default_rng(5)
    waiting: list[tuple[int, str]] = []
    offsets, hits = [], {}
    issued: dict[str, tuple[int, int, int]] = {}
    for number in range(600):
        now_ms = NOW_MS + number * 4 * MINUTE_MS
        for start_ms, name in [one for one in waiting if one[0] <= now_ms]:
            record.started(name, start_ms)
            hits[name] = [start_ms <= ms for ms in issued[name]]
        waiting = [one for one in waiting if one[0] > now_ms]
        record.advance(now_ms)
        name = f"q{number}"
        low, middle, high = (now_ms + round(hours * 60 * MINUTE_MS) for hours in (3.0, 6.0, 12.0))
        issued |= record.issue({name: (low, middle, high)}, now_ms)
        waiting.append((now_ms + round(180 * MINUTE_MS * float(np.exp(0.5 * rng.normal()))), name))
        offsets.append(record.offset[1])
    assert min(offsets) > -1.0
    assert max(offsets[200:]) < -0.3
    settled = [row for name, row in hits.items() if int(name[1:]) > 150]
    np.testing.assert_allclose(np.mean(settled, axis=0), [0.1, 0.5, 0.9], atol=0.1)


def test_a_cancelled_request_is_left_out_unless_it_was_late() -> None:
    record = StartRecord()
    record.issue(TOLD | {"late": (NOW_MS, NOW_MS, NOW_MS)}, NOW_MS)
    record.advance(NOW_MS + MINUTE_MS)
    record.withdrawn("x")
    record.withdrawn("late")
    assert shares(record) == (1, [0.0, 0.0, 0.0])


def test_a_request_that_was_to_start_at_once_and_does_not_is_told_later_and_later() -> None:
    record = StartRecord()
    told = []
    for minute in range(16):
        now_ms = NOW_MS + minute * MINUTE_MS
        (row,) = record.issue({"x": (now_ms, now_ms, now_ms)}, now_ms).values()
        told.append([(ms - now_ms) / MINUTE_MS for ms in row])
    assert told[0] == [0, 0, 0]
    assert told[15][1] > 4
    assert told[15][2] > 25


def test_coverage_converges_where_futures_are_far_too_early() -> None:
    """Requests wait six times as long as their futures say, with a spread of their own."""
    record, rng = StartRecord(), np.random.default_rng(3)
    hits = []
    for number in range(300):
        now_ms = NOW_MS + number * PERIOD_MS
        raw = {"x": tuple(now_ms + minutes * MINUTE_MS for minutes in (2, 5, 12))}
        told = record.issue(raw, now_ms)["x"]  # type: ignore[arg-type]
        start_ms = now_ms + round(30 * MINUTE_MS * float(np.exp(rng.normal())))
        hits.append([start_ms <= ms for ms in told])
        record.started("x", start_ms)
        record.advance(now_ms + PERIOD_MS)
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
        for low, middle, high in record.issue(raw, now_ms).values():
            assert now_ms <= low <= middle <= high
        record.advance(now_ms)
    record.started("0", now_ms)


def test_a_dump_goes_on_where_it_stopped() -> None:
    record = StartRecord()
    record.issue(TOLD, NOW_MS)
    record.started("x", NOW_MS)
    record.advance(NOW_MS)
    record.issue({"y": TOLD["x"]}, NOW_MS)
    record.advance(NOW_MS + 2 * PERIOD_MS)
    other = StartRecord()
    other.load(record.dump())
    assert other.dump() == record.dump()
    assert (other.offset == record.offset).all()
    for one in (record, other):
        one.started("y", NOW_MS + 15 * MINUTE_MS)
    assert shares(other) == shares(record)
