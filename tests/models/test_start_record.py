"""What became of start times, and how the next ones are corrected."""

from collections.abc import Iterator
from statistics import NormalDist
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleetcast.models.start_answers import LEVELS, StartShares
from fleetcast.models.start_record import StartRecord

NOW_MS = 1_760_000_000_000
MINUTE_MS = 60_000
HOUR_MS = 60 * MINUTE_MS
PERIOD_MS = 10 * MINUTE_MS
TOLD = {"x": (NOW_MS + 10 * MINUTE_MS, NOW_MS + 20 * MINUTE_MS, NOW_MS + 60 * MINUTE_MS)}
LATER_MS = NOW_MS + 1000 * HOUR_MS  # every issued time has passed


def judged(record: StartRecord, now_ms: int = LATER_MS) -> tuple[list[int], list[float]]:
    """Return how many requests are judged at each level, and their shares, over the answers at all ages."""
    return rounded(record, now_ms, None)


def judged_at(record: StartRecord, age: int, now_ms: int = LATER_MS) -> tuple[list[int], list[float]]:
    return rounded(record, now_ms, age)


def rounded(record: StartRecord, now_ms: int, age: int | None) -> tuple[list[int], list[float]]:
    record.advance_to(now_ms)
    found = record.evaluate_answers()
    shares = found.all_ages if age is None else found.by_age[age]
    return shares.requests.tolist(), shares.shares.round(3).tolist()


def first_answers(record: StartRecord) -> StartShares:
    return record.evaluate_answers().by_age[0]


def calibrated_stream(
    record: StartRecord, every_ms: int, spread: float, requests: int = 300
) -> Iterator[tuple[int, int]]:
    """Requests that come steadily and start by each level of their first answer as often as it says.

    Yields the number of requests so far, and the time.
    """
    draw, starts = NormalDist(), dict[str, int]()
    wait_low, wait_middle, wait_high = (round(HOUR_MS * np.exp(spread * draw.inv_cdf(level))) for level in LEVELS)
    for number in range(requests):
        now_ms = NOW_MS + number * every_ms
        for name in [name for name, start_ms in starts.items() if start_ms <= now_ms]:
            record.record_start(name, starts.pop(name))
        record.advance_to(now_ms)
        yield number, now_ms
        level = (0.5 + number * 0.6180339887498949) % 1  # evenly spread over all levels
        record.issue_starts({f"q{number}": (now_ms + wait_low, now_ms + wait_middle, now_ms + wait_high)}, now_ms)
        starts[f"q{number}"] = now_ms + round(HOUR_MS * np.exp(spread * draw.inv_cdf(level)))


@pytest.mark.parametrize(("minutes", "spread"), [(3, 1.5), (1, 0.8), (12, 2.0)])
def test_early_starts_do_not_count_before_late_ones(minutes: int, spread: float) -> None:
    """Half of the requests start by their p50. The record says so at every moment of the stream."""
    record, looks = StartRecord(), 0
    for number, _ in calibrated_stream(record, minutes * MINUTE_MS, spread):
        found = first_answers(record)
        for requests, share, level in zip(found.requests, found.shares, LEVELS, strict=True):
            if requests >= 40:
                looks += 1
                assert share == pytest.approx(level, abs=0.12), (number, requests)
    assert looks > 200


def test_each_level_is_judged_when_its_time_has_passed() -> None:
    record = StartRecord()
    assert record.issue_starts(TOLD, NOW_MS) == TOLD
    record.record_start("x", NOW_MS + 15 * MINUTE_MS)
    for minute, counts in [(9, [0, 0, 0]), (11, [1, 0, 0]), (21, [1, 1, 0]), (61, [1, 1, 1])]:
        found, shares = judged(record, NOW_MS + minute * MINUTE_MS)
        assert (found, shares[: sum(found)]) == (counts, [0.0, 1.0, 1.0][: sum(found)])
    assert record.evaluate_answers().since_ms == NOW_MS


def test_a_request_that_waits_is_judged_at_the_levels_whose_time_has_passed() -> None:
    record = StartRecord()
    record.issue_starts(TOLD, NOW_MS)
    for minute, counts in [(10, [0, 0, 0]), (11, [1, 0, 0]), (20, [1, 0, 0]), (60, [1, 1, 0]), (61, [1, 1, 1])]:
        found, shares = judged(record, NOW_MS + minute * MINUTE_MS)
        assert (found, shares[: sum(found)]) == (counts, [0.0] * sum(found))
    record.record_start("x", NOW_MS + 90 * MINUTE_MS)
    assert judged(record) == ([1, 1, 1], [0.0, 0.0, 0.0])


def test_a_start_that_becomes_known_late_still_counts() -> None:
    """A scheduler is polled: the p50 passes before the record hears of the start."""
    record = StartRecord()
    record.issue_starts(TOLD, NOW_MS)
    assert judged(record, NOW_MS + 21 * MINUTE_MS)[1][:2] == [0.0, 0.0]
    record.record_start("x", NOW_MS + 19 * MINUTE_MS)
    assert judged(record, NOW_MS + 22 * MINUTE_MS)[1][:2] == [0.0, 1.0]


def test_a_request_weighs_one_however_often_it_was_told() -> None:
    record = StartRecord()
    for minute in range(200):
        now_ms = NOW_MS + minute * MINUTE_MS
        record.issue_starts({"long": (now_ms, now_ms, now_ms + 500 * MINUTE_MS)}, now_ms)
    record.record_start("long", NOW_MS + 200 * MINUTE_MS)
    record.issue_starts(TOLD, NOW_MS)
    record.record_start("x", NOW_MS + 5 * MINUTE_MS)
    assert judged(record) == ([2, 2, 2], [0.5, 0.5, 1.0])


def test_the_first_answer_is_judged_apart_from_later_ones() -> None:
    """An hour was first issued, and the request started within 20 minutes: later answers do not repair the first."""
    record = StartRecord()
    hour = (NOW_MS + 40 * MINUTE_MS, NOW_MS + 60 * MINUTE_MS, NOW_MS + 90 * MINUTE_MS)
    record.issue_starts({"x": hour}, NOW_MS)
    for minute in (1, 5, 15):
        now_ms = NOW_MS + minute * MINUTE_MS
        record.issue_starts({"x": (now_ms, now_ms + MINUTE_MS, NOW_MS + 20 * MINUTE_MS)}, now_ms)
    record.record_start("x", NOW_MS + 19 * MINUTE_MS)
    assert judged_at(record, 0) == ([1, 1, 1], [1.0, 1.0, 1.0])
    assert judged_at(record, 3) == ([1, 1, 1], [0.0, 0.0, 1.0])
    assert judged_at(record, 4)[0] == [0, 0, 0]
    assert judged(record) == ([1, 1, 1], [0.25, 0.25, 1.0])


def test_a_request_without_a_first_answer_counts_as_unanswered_once_it_starts() -> None:
    record = StartRecord()
    record.issue_starts({}, NOW_MS, ["x", "gone"])
    record.issue_starts({"x": (NOW_MS, NOW_MS, NOW_MS + 5 * MINUTE_MS)}, NOW_MS + MINUTE_MS)
    assert first_answers(record).unanswered == 0
    record.record_start("x", NOW_MS + 2 * MINUTE_MS)
    record.record_withdrawal("gone", NOW_MS + 2 * MINUTE_MS)
    assert (judged_at(record, 0)[0], judged_at(record, 1)[0]) == ([0, 0, 0], [1, 1, 1])
    found = record.evaluate_answers()
    assert (found.by_age[0].unanswered, found.by_age[1].unanswered) == (1, 0)
    assert judged(record) == ([1, 1, 1], [0.0, 0.0, 1.0])


@given(
    st.lists(
        st.tuples(st.lists(st.integers(0, 90), min_size=3, max_size=3).map(sorted), st.integers(0, 120)), max_size=20
    )
)
def test_shares_rise_with_the_level_at_each_age(rows: list[tuple[list[int], int]]) -> None:
    record = StartRecord()
    for number, (minutes, start) in enumerate(rows):
        low, middle, high = (NOW_MS + one * MINUTE_MS for one in minutes)
        record.issue_starts({str(number): (low, middle, high)}, NOW_MS)
        record.record_start(str(number), NOW_MS + start * MINUTE_MS)
    record.advance_to(LATER_MS)
    first = first_answers(record)
    assert first.requests.tolist() == [len(rows)] * 3
    if rows:
        assert (np.diff(first.shares) >= 0).all()
        np.testing.assert_allclose(first.shares, record.evaluate_answers().all_ages.shares)


@given(
    st.lists(
        st.tuples(
            st.lists(st.integers(0, 90), min_size=3, max_size=3).map(sorted),
            st.none() | st.integers(0, 120),
            st.none() | st.integers(0, 120),
        ),
        max_size=20,
    ),
    st.integers(0, 130),
)
def test_a_level_counts_by_its_own_time_alone(
    rows: list[tuple[list[int], int | None, int | None]], minute: int
) -> None:
    """Requests start, are withdrawn or wait. Those judged are those whose issued time has passed while they stood."""
    record, now_ms = StartRecord(), NOW_MS + minute * MINUTE_MS
    counts, hits = np.zeros(3, int), np.zeros(3)
    for number, ((low, middle, high), _, _) in enumerate(rows):
        issued_ms = NOW_MS + low * MINUTE_MS, NOW_MS + middle * MINUTE_MS, NOW_MS + high * MINUTE_MS
        record.issue_starts({str(number): issued_ms}, NOW_MS)
    for number, (issued, start, gone) in enumerate(rows):
        has_started = start is not None and start <= minute and (gone is None or start <= gone)
        if start is not None and has_started:
            record.record_start(str(number), NOW_MS + start * MINUTE_MS)
        elif gone is not None and gone <= minute:
            record.record_withdrawal(str(number), NOW_MS + gone * MINUTE_MS)
        until = minute if has_started or gone is None else min(minute, gone)
        counts += [one < until for one in issued]
        hits += [one < until and has_started and start is not None and start <= one for one in issued]
    record.advance_to(now_ms)
    record.advance_to(now_ms)
    found = first_answers(record)
    assert found.requests.tolist() == counts.tolist()
    np.testing.assert_allclose(found.shares[counts > 0], (hits / counts.clip(1))[counts > 0])
    other = StartRecord()
    other.load(record.dump())
    np.testing.assert_array_equal(first_answers(other).shares, found.shares)


def test_a_dump_of_mixed_ages_leaves_its_cursor_alone() -> None:
    old = {"offset": [0.1, 0.2, 0.3], "cursor": 7, "outcomes": [[0.5, 0.5, 1.0]], "since_ms": [NOW_MS]}
    record = StartRecord()
    record.load(old | {"open": [["x", NOW_MS, [[[1, 2, 3], False]], None, 0, [0, 0, 0]]], "pushed": [[0] * 3, 0, None]})
    assert (record.offset.tolist(), record.cursor, judged(record)[0]) == ([0.0] * 3, 7, [0, 0, 0])


def test_a_dump_that_judged_early_starts_first_leaves_its_offsets() -> None:
    """The requests that waited then are not judged: their like that started early have left no issued times."""
    old: dict[str, Any] = {
        **{"version": 2, "offset": [0.1, 0.2, 0.3], "cursor": 7, "outcomes": [[NOW_MS, [3, 1]]]},
        "open": [["x", NOW_MS, [[[*TOLD["x"]], -1], [None, -2]], None, [600.0, 1200.0, 3600.0]]],
        "residuals": [[NOW_MS - HOUR_MS, [0.5, 0.5, 0.5]]] * 30,
    }
    record = StartRecord()
    record.load(old)
    assert (record.offset.tolist(), record.cursor, [*record.waiting]) == ([0.1, 0.2, 0.3], 7, ["x"])
    record.issue_starts(TOLD | {"new": TOLD["x"]}, NOW_MS + 5 * MINUTE_MS)
    record.record_start("x", NOW_MS + 15 * MINUTE_MS)
    record.record_start("new", NOW_MS + 15 * MINUTE_MS)
    assert judged_at(record, 0)[0] == judged(record)[0] == [1, 1, 1]
    assert first_answers(record).unanswered == 0
    assert len(record._residuals) == 32
    other = StartRecord()
    other.load(record.dump())
    assert other.dump() == record.dump()


def test_coverage_does_not_swing_where_outcomes_come_hours_later() -> None:
    """Futures say six hours, requests wait three. Each answer matures hours later, and fifty are issued until then."""
    record, rng = StartRecord(), np.random.default_rng(5)
    waiting: list[tuple[int, str]] = []
    offsets, hits = [], {}
    issued: dict[str, tuple[int, int, int]] = {}
    for number in range(600):
        now_ms = NOW_MS + number * 4 * MINUTE_MS
        for start_ms, name in [one for one in waiting if one[0] <= now_ms]:
            record.record_start(name, start_ms)
            hits[name] = [start_ms <= ms for ms in issued[name]]
        waiting = [one for one in waiting if one[0] > now_ms]
        record.advance_to(now_ms)
        name = f"q{number}"
        low, middle, high = (now_ms + round(hours * 60 * MINUTE_MS) for hours in (3.0, 6.0, 12.0))
        issued |= record.issue_starts({name: (low, middle, high)}, now_ms)
        waiting.append((now_ms + round(180 * MINUTE_MS * float(np.exp(0.5 * rng.normal()))), name))
        offsets.append(record.offset[1])
    assert min(offsets) > -1.0
    assert max(offsets[200:]) < -0.3
    settled = [row for name, row in hits.items() if int(name[1:]) > 150]
    np.testing.assert_allclose(np.mean(settled, axis=0), [0.1, 0.5, 0.9], atol=0.1)


def test_a_cancelled_request_counts_at_the_levels_whose_time_had_passed() -> None:
    record = StartRecord()
    record.issue_starts(TOLD | {"late": (NOW_MS, NOW_MS, NOW_MS)}, NOW_MS)
    record.advance_to(NOW_MS + MINUTE_MS)
    record.record_withdrawal("x", NOW_MS + 15 * MINUTE_MS)
    record.record_withdrawal("late", NOW_MS + MINUTE_MS)
    assert judged(record) == ([2, 1, 1], [0.0, 0.0, 0.0])


def test_a_request_that_was_to_start_at_once_and_does_not_is_told_later_and_later() -> None:
    record = StartRecord()
    told = []
    for minute in range(16):
        now_ms = NOW_MS + minute * MINUTE_MS
        (row,) = record.issue_starts({"x": (now_ms, now_ms, now_ms)}, now_ms).values()
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
        told = record.issue_starts(raw, now_ms)["x"]  # type: ignore[arg-type]
        start_ms = now_ms + round(30 * MINUTE_MS * float(np.exp(rng.normal())))
        hits.append([start_ms <= ms for ms in told])
        record.record_start("x", start_ms)
        record.advance_to(now_ms + PERIOD_MS)
    late = np.mean(hits[100:], axis=0)
    np.testing.assert_allclose(late, [0.1, 0.5, 0.9], atol=0.08)


@pytest.mark.parametrize("factor", [0.2, 1.0, 5.0])
def test_coverage_converges_where_many_requests_come_while_one_waits(factor: float) -> None:
    """Three requests a minute wait half an hour and longer. The newest that started are the ones with short waits."""
    record, rng, draw = StartRecord(), np.random.default_rng(1), NormalDist()
    waits_ms = [round(30 * MINUTE_MS * np.exp(1.2 * draw.inv_cdf(level))) for level in LEVELS]
    starts, hits = dict[str, int](), []
    for number in range(1500):
        now_ms, name = NOW_MS + number * MINUTE_MS // 3, f"q{number}"
        for started in [one for one, start_ms in starts.items() if start_ms <= now_ms]:
            record.record_start(started, starts.pop(started))
        record.advance_to(now_ms)
        low, middle, high = (now_ms + round(factor * wait_ms) for wait_ms in waits_ms)
        issued = record.issue_starts({name: (low, middle, high)}, now_ms)[name]
        starts[name] = now_ms + round(30 * MINUTE_MS * float(np.exp(1.2 * rng.normal())))
        hits.append([starts[name] <= ms for ms in issued])
    np.testing.assert_allclose(np.mean(hits[500:], axis=0), [0.1, 0.5, 0.9], atol=0.06)


@given(
    st.lists(st.tuples(*[st.integers(-1000, 10**8)] * 3).map(sorted), min_size=1, max_size=5),
    st.lists(st.integers(0, 10**7), max_size=8),
)
def test_what_is_told_is_in_order_and_never_past(starts: list[list[int]], passes_ms: list[int]) -> None:
    record, now_ms = StartRecord(), NOW_MS
    for pass_ms in (0, *passes_ms):
        now_ms += pass_ms
        raw = {str(at): (NOW_MS + row[0], NOW_MS + row[1], NOW_MS + row[2]) for at, row in enumerate(starts)}
        for low, middle, high in record.issue_starts(raw, now_ms).values():
            assert now_ms <= low <= middle <= high
        record.advance_to(now_ms)
    record.record_start("0", now_ms)


def test_a_dump_goes_on_where_it_stopped() -> None:
    record = StartRecord()
    record.issue_starts(TOLD, NOW_MS)
    record.record_start("x", NOW_MS)
    record.advance_to(NOW_MS)
    record.issue_starts({"y": TOLD["x"]}, NOW_MS)
    record.advance_to(NOW_MS + 2 * PERIOD_MS)
    other = StartRecord()
    other.load(record.dump())
    assert other.dump() == record.dump()
    assert (other.offset == record.offset).all()
    for one in (record, other):
        one.record_start("y", NOW_MS + 15 * MINUTE_MS)
    assert judged(other) == judged(record) == ([2, 2, 2], [0.5, 1.0, 1.0])
