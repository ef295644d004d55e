"""Which answers a full record of start times keeps."""

import math
from statistics import NormalDist

import pytest

from fleetcast.models.start_answers import LEVELS, MAX_REQUESTS, AnsweredRequest, AnsweredRequests, Times

NOW_MS = 1_760_000_000_000
MINUTE_MS = 60_000
TOLD = (NOW_MS + 10 * MINUTE_MS, NOW_MS + 20 * MINUTE_MS, NOW_MS + 60 * MINUTE_MS)


def wait_ms(level: float) -> int:
    """Return the quantile of the waits at a level: half an hour in the middle, 140 minutes at the p90."""
    return round(30 * MINUTE_MS * math.exp(1.2 * NormalDist().inv_cdf(level)))


def test_requests_leave_a_full_record_by_their_issued_times_alone() -> None:
    """Each level holds as often as it says. Neither an early start nor a late one lets a request leave sooner."""
    record, starts, judged = AnsweredRequests(), list[tuple[int, AnsweredRequest]](), 0
    issued = [wait_ms(level) for level in LEVELS]
    for number in range(4 * MAX_REQUESTS):
        now_ms = NOW_MS + number * MINUTE_MS // 8
        for start_ms, one in [row for row in starts if row[0] <= now_ms]:
            one.record_end(start_ms, has_started=True)
        starts = [row for row in starts if row[0] > now_ms]
        low, middle, high = (now_ms + wait for wait in issued)
        one_added = record.add_request((low, middle, high), now_ms)
        if one_added is not None:
            level = (0.5 + number * 0.6180339887498949) % 1  # evenly spread over all levels
            starts.append((now_ms + wait_ms(level), one_added))
        if number % 40 == 0:
            found = record.evaluate_answers(now_ms).by_age[0]
            assert found.requests[0] <= MAX_REQUESTS
            for requests, share, level in zip(found.requests, found.shares, LEVELS, strict=True):
                if requests >= 50:
                    judged += 1
                    assert share == pytest.approx(level, abs=0.06), (number, requests)
    assert judged > 150


def test_a_full_record_waits_for_a_p90_to_pass_before_it_adds_another_request() -> None:
    record = AnsweredRequests()
    added = [record.add_request(TOLD, NOW_MS) for _ in range(MAX_REQUESTS)]
    for one in added[:100]:
        assert one is not None
        one.record_end(NOW_MS + MINUTE_MS, has_started=True)
    assert record.add_request(TOLD, NOW_MS + 60 * MINUTE_MS) is None
    later: Times = (NOW_MS + 70 * MINUTE_MS,) * 3
    assert record.add_request(later, NOW_MS + 61 * MINUTE_MS) is not None
    found = record.evaluate_answers(NOW_MS + 71 * MINUTE_MS).by_age[0]
    assert found.requests.tolist() == [MAX_REQUESTS, MAX_REQUESTS, MAX_REQUESTS]
    assert found.shares[2] == pytest.approx(99 / MAX_REQUESTS)


def test_a_request_with_many_hours_to_its_p90_does_not_stop_a_full_record() -> None:
    record = AnsweredRequests()
    record.add_request((NOW_MS, NOW_MS, NOW_MS + 10**9), NOW_MS)
    for _ in range(MAX_REQUESTS - 1):
        record.add_request(TOLD, NOW_MS)
    assert record.add_request(TOLD, NOW_MS + 61 * MINUTE_MS) is not None
    assert record.evaluate_answers(NOW_MS + 61 * MINUTE_MS).by_age[0].requests.tolist() == [
        MAX_REQUESTS,
        MAX_REQUESTS,
        MAX_REQUESTS - 1,
    ]
