"""The answer to Trimaran, as load-watcher's decoder wants it: each node once, percent, nothing that is no number."""

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleetcast.schedulers.adapter import NotKnown
from fleetcast.schedulers.trimaran import TrimaranAdapter
from fleetcast.schedulers.weather import Load, Weather
from tests.fuzz.bounds import examples
from tests.schedulers.small_fleet import NOW_MS, load

NAMES = b"n1\nn2\nn3\nnew"
GOLDEN = {
    "timestamp": 1_760_000_000,
    "window": {"duration": "15m", "start": 1_759_999_100, "end": 1_760_000_000},
    "source": "fleetcast",
    "data": {
        "NodeMetricsMap": {
            "n1": {
                "metrics": [
                    {"name": "cpu", "type": "CPU", "operator": "AVG", "value": 90.0, "rollup": "15m"},
                    {"name": "cpu", "type": "CPU", "operator": "STD", "value": 3.9, "rollup": "15m"},
                    {"name": "memory", "type": "Memory", "operator": "AVG", "value": 25.0, "rollup": "15m"},
                    {"name": "memory", "type": "Memory", "operator": "STD", "value": 0.0, "rollup": "15m"},
                ],
                "tags": {},
                "metadata": {"dataCenter": ""},
            }
        }
    },
}


def told(body: bytes) -> dict[str, dict[str, float]]:
    """By node, "CPU AVG" and so on."""
    rows = json.loads(body)["data"]["NodeMetricsMap"]
    return {
        node: {f"{metric['type']} {metric['operator']}": metric["value"] for metric in row["metrics"]}
        for node, row in rows.items()
    }


def answer(busy: Load | None, names: bytes) -> bytes:
    return TrimaranAdapter().verbs["watcher"].answer(Weather(1, NOW_MS, NOW_MS, load=busy), names)


def test_a_node_reads_as_load_watcher_would_write_it() -> None:
    busy = load({"n1": (0.9, 0.95)}, cpu={"n1": 0.1}, memory={"n1": 0.25})
    assert json.loads(answer(busy, b"n1")) == GOLDEN


def test_a_node_without_gpus_is_as_busy_as_its_cpus_and_one_of_which_nothing_is_known_is_neutral() -> None:
    busy = load({"n1": (0.2, 0.2), "n2": (np.nan, np.nan), "n3": (np.nan, np.nan)}, cpu={"n1": 0.9, "n2": 0.4})
    rows = told(answer(busy, NAMES))
    assert {node: row["CPU AVG"] for node, row in rows.items()} == {"n1": 20.0, "n2": 40.0, "n3": 50.0, "new": 50.0}
    assert not any("Memory AVG" in row for row in rows.values())


def test_without_a_forecast_all_nodes_are_alike() -> None:
    rows = told(TrimaranAdapter().verbs["watcher"].stale(NAMES) or b"")
    assert list(rows) == ["n1", "n2", "n3", "new"]
    assert all(row == {"CPU AVG": 50.0, "CPU STD": 0.0} for row in rows.values())
    assert told(TrimaranAdapter().verbs["watcher"].stale(b"") or b"") == {}


def test_a_board_without_load_is_not_answered_from() -> None:
    with pytest.raises(NotKnown):
        answer(None, NAMES)


def test_a_body_is_made_once_a_board() -> None:
    verb, weather = TrimaranAdapter().verbs["watcher"], Weather(1, NOW_MS, NOW_MS, load=load({"n1": (0.1, 0.2)}))
    assert verb.answer(weather, b"n1") is verb.answer(weather, b"n1")
    assert told(verb.answer(weather, b"n1\nn2")).keys() == {"n1", "n2"}
    later = Weather(2, NOW_MS, NOW_MS, load=load({"n1": (0.8, 0.8)}))
    assert told(verb.answer(later, b"n1"))["n1"]["CPU AVG"] == 80.0


SHARES = st.floats(0, 1) | st.just(np.nan)


@examples(125)
@given(st.dictionaries(st.sampled_from(["a", "b", 'q"\\', "ü"]), st.tuples(SHARES, SHARES), min_size=1), SHARES)
def test_every_value_is_a_percentage_whatever_the_forecast(gpu: dict[str, tuple[float, float]], memory: float) -> None:
    busy = load(gpu, memory=dict.fromkeys(gpu, memory))
    rows = told(answer(busy, "\n".join([*gpu, "new"]).encode()))
    assert list(rows) == [*gpu, "new"]
    assert all(0 <= value <= 100 for row in rows.values() for value in row.values())
