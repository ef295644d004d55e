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


def test_kinds_count_a_level_once_its_time_has_passed_and_cap_losses_at_the_end() -> None:
    found, end_ms = FirstAnswerTally(), NOW_MS + 10 * MINUTE_MS
    issued = {"early": 8, "late": 2, "waits": 4, "unknown": 20}  # minutes, at p10, p50 and p90
    starts = {name: (NOW_MS + at * MINUTE_MS,) * 3 for name, at in issued.items()}
    found.record_answers(dict.fromkeys(issued, NOW_MS), starts, NOW_MS)
    found.record_start("early", NOW_MS, NOW_MS + 5 * MINUTE_MS)
    found.record_start("late", NOW_MS, NOW_MS + 8 * MINUTE_MS)
    kinds = found.summarize_kinds({"early": "payer"}, end_ms)
    assert (kinds["payer"]["n_p50"], kinds["payer"]["by_p50"], kinds["payer"]["pinball_min"]) == (1, 1.0, 1.5)
    other = kinds["other"]  # the one that is due after the end counts at no level, and has lost nothing by then
    assert (other["n"], other["n_p90"], other["by_p90"]) == (3, 2, 0.0)
    assert other["pinball_min"] == pytest.approx((3.0 + 3.0 + 0.0) / 3)  # capped: one that waits lost six minutes
    assert kinds["all"]["n"] == 4
