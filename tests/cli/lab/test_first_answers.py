"""The first start time of each request, beside the average of the queue's last waits."""

import pytest

from fleetcast.cli.lab.first_answers import FirstAnswerTally

NOW_MS = 1_760_000_000_000
MINUTE_MS = 60_000


def test_the_first_answer_counts_and_no_later_one() -> None:
    found = FirstAnswerTally()
    found.record_answers({"a": NOW_MS}, {"a": (NOW_MS, NOW_MS, NOW_MS)}, NOW_MS)
    found.record_start("a", NOW_MS, NOW_MS + 10 * MINUTE_MS)
    at = NOW_MS + 20 * MINUTE_MS
    ten = at + 10 * MINUTE_MS
    found.record_answers({"b": at, "unknown": at}, {"b": (ten, ten, ten)}, at)
    found.record_answers({"b": at, "unknown": at}, {"b": (at, at, at), "unknown": (at, at, at)}, at + MINUTE_MS)
    found.record_start("b", at, at + 20 * MINUTE_MS)
    summary = found.make_summary()
    assert (summary["asked"], summary["given"], summary["scored"]) == (3, pytest.approx(2 / 3, abs=1e-4), 1)
    assert summary["pinball_min"] == summary["pinball_min_average"] == 5.0  # ten minutes short, at p10, p50 and p90


def test_without_an_outcome_there_is_no_loss() -> None:
    assert FirstAnswerTally().make_summary() == {
        **{"asked": 0, "given": None, "scored": 0, "pinball_min": None, "pinball_min_average": None}
    }
