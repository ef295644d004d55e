import numpy as np

from fleetcast.schedulers.ratings import NEUTRAL, Ratings
from fleetcast.schedulers.weather import Outlook
from tests.schedulers.small_fleet import outlook


def seen(*outlooks: Outlook) -> Ratings:
    ratings = Ratings()
    for one in outlooks:
        ratings.use_outlook(one)
    return ratings


def test_the_riskier_a_band_the_lower_and_the_unknown_is_neither_worst_nor_best() -> None:
    ratings = seen(outlook({"low": 0.01, "elevated": 0.1, "high": 0.4, "above the limit": 0.6, "unknown": np.nan}))
    assert ratings.compute_scores(8).tolist() == [10, 4, 1, 0, NEUTRAL]
    assert ratings.compute_scores(1).tolist() == [6, 2, 0, 0, NEUTRAL]


def test_a_small_pod_fills_a_broken_node_before_it_breaks_a_whole_one() -> None:
    ratings = seen(outlook({"whole": 0.0, "broken": 0.0, "full": 0.0}, free=np.array([8, 2, 0])))  # type: ignore[arg-type]
    whole, broken, full = ratings.compute_scores(2).tolist()
    assert broken == 10
    assert broken > whole >= full == 6


def test_a_pod_without_gpus_goes_where_none_is_free() -> None:
    ratings = seen(outlook({"whole": 0.0, "full": 0.0}, free=np.array([8, 0])))  # type: ignore[arg-type]
    assert ratings.compute_scores(0).tolist() == [6, 10]


def test_the_reason_is_said_once() -> None:
    ratings = seen(
        outlook(
            {"a": 0.0, "b": 0.0, "c": 0.93, "d": 0.0, "e": 0.0},
            state=np.array([1, 2, 0, 1, 0], np.int8),
            reasons={"a": "drained since 14:02 UTC", "b": "had a fault 2 h ago", "c": "GPU 3: XID 79"},
            urgent={"e": "XID 79 on GPU 1 of e"},
        )
    )
    assert ratings.find_unusable_nodes().why == {
        "a": "drained since 14:02 UTC",
        "b": "lost; had a fault 2 h ago",
        "c": "risk 93 % within 1 h; GPU 3: XID 79",
        "d": "drained",
        "e": "XID 79 on GPU 1 of e",
    }
    assert ratings.compute_scores(8).tolist() == [0, 0, 0, 0, 0]


def test_risk_is_that_of_the_time_a_pod_will_run() -> None:
    ratings = seen(outlook({"a": 0.35, "b": 0.0}, max_risk=0.5))  # a: 0.35, 0.45, 0.55, 0.65 within 1 h, 5 h, 1 d, 7 d
    assert [sorted(ratings.find_unusable_nodes(limit_s).why) for limit_s in (None, 3600, 18_000, 18_001, 86_400)] == [
        [],
        [],
        [],
        ["a"],
        ["a"],
    ]
    assert ratings.find_unusable_nodes(10**9).why == {"a": "risk 65 % within 7 d"}


def test_who_has_seen_nothing_says_nothing() -> None:
    assert seen().find_unusable_nodes().why == {}
    assert seen().compute_scores(3).tolist() == []


def test_a_node_in_a_maintenance_window_is_refused_and_one_without_room_scores_least() -> None:
    ratings = Ratings()
    ratings.use_outlook(
        outlook({"a": 0.0, "b": 0.0, "c": 0.0}, in_window={"b": "in maintenance 'fans'"}, free=np.array([4, 8, 0]))
    )
    assert ratings.find_unusable_nodes().why == {"b": "in maintenance 'fans'"}
    low, window, full = ratings.compute_scores(1).tolist()
    assert window == 0 < full < low
