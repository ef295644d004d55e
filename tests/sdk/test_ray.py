"""The policy and the wish for bundles beside small stand-ins of Ray; the suite outside/ray plays the real one."""

import gc
import sys
import threading
import types
from typing import Any

import pytest
from fleetcast_client import ray_resources, ray_serve
from fleetcast_client.ray_resources import Bundle, BundleWish
from fleetcast_client.ray_serve import ForecastPolicy

from tests.sdk.door import Door, opened
from tests.sdk.test_ahead import told, until

OWN = 2.5  # what Serve's rule wants below
OF_LLAMA: dict[str, Any] = {"queue": "serve", "job_class": "inference", "group": "llama-70b", "every_s": 0.01}


@pytest.fixture(autouse=True)
def serve(monkeypatch: pytest.MonkeyPatch) -> None:
    """`ray.serve` with a rule of its own that wants OWN replicas."""
    rule = types.ModuleType("ray.serve.autoscaling_policy")
    rule.default_autoscaling_policy = lambda context: (OWN, {"of": context})  # type: ignore[attr-defined]
    serve = types.ModuleType("ray.serve")
    serve.autoscaling_policy = rule  # type: ignore[attr-defined]
    for module in (types.ModuleType("ray"), serve, rule):
        monkeypatch.setitem(sys.modules, module.__name__, module)


def test_a_forecast_raises_and_never_lowers() -> None:
    with opened(Door([200] * 10_000, answer=told(issued_ms=1))) as door:
        policy = ForecastPolicy(door.url, 10.0, **OF_LLAMA)
        assert policy("c") == (OWN, {"of": "c"}), "nothing is known yet"
        until(lambda: policy("c")[0] == 8)
        door.answer = told(0.1, issued_ms=2)
        until(lambda: policy("c")[0] == OWN)
        door.answer = told(1e300, issued_ms=3)
        until(lambda: policy("c")[0] == ray_serve.MOST)


def test_without_a_fresh_forecast_it_is_the_rule_of_serve() -> None:
    with opened(Door([200] * 10_000, answer=told())) as door:
        policy = ForecastPolicy(door.url, 10.0, stale_s=0.2, **OF_LLAMA)
        until(lambda: policy("c")[0] == 8)
        until(lambda: policy("c") == (OWN, {"of": "c"}))


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"url": "fleetcast", "per_replica": 1},
        {"url": "http://127.0.0.1:1"},
        {"url": "http://127.0.0.1:1", "per_replica": -1},
        {"url": "http://127.0.0.1:1", "per_replica": 1, "quantile": "0.9"},
        {"url": "http://127.0.0.1:1", "per_replica": 1, "horizont_s": 5},
        {"url": None, "per_replica": None},
    ],
)
def test_arguments_that_cannot_be_used_make_it_the_rule_of_serve_and_are_logged(
    arguments: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    assert ForecastPolicy(**arguments)("c") == (OWN, {"of": "c"})
    assert "ForecastPolicy is Serve's own rule" in caplog.text


def test_a_policy_that_is_replaced_asks_no_more() -> None:
    before = set(threading.enumerate())

    def asking() -> int:
        return sum(thread.name == "fleetcast-demand" for thread in threading.enumerate() if thread not in before)

    with opened(Door([200] * 10_000, answer=told())) as door:
        policy = ForecastPolicy(door.url, 10.0, **OF_LLAMA)
        assert asking() == 0, "one that is never called asks nothing"
        policy("c")
        assert asking() == 1
        del policy
        gc.collect()
        until(lambda: asking() == 0)


def test_bundles_follow_the_forecast_up_to_a_bound_and_go_with_it() -> None:
    asked: list[list[Bundle]] = []
    wish = BundleWish(asked.append, {"GPU": 8}, 8.0, 3)
    for value in (9.0, 8.0, 1000.0, None, None, 0.0, 0.1):
        wish.update_request(value)
    assert list(map(len, asked)) == [2, 1, 3, 0, 1], "while nothing is held, others may ask"
    assert all(bundle == {"GPU": 8} for bundles in asked for bundle in bundles)


def test_what_a_process_before_left_is_taken_back_at_once() -> None:
    asked: list[list[Bundle]] = []
    BundleWish(asked.append, {"GPU": 8}, 8.0, 3).update_request(None)
    assert asked == [[]]


@pytest.mark.parametrize(
    ("more", "says"),
    [
        (["--bundle", "{}"], "bundle is {}"),
        (["--bundle", "[8]"], "bundle is"),
        (["--bundle", "GPU"], "Expecting value"),
        (["--bundle", '{"GPU": "8"}'], "expected resources above 0"),
        (["--per-bundle", "0"], "per_bundle is 0"),
        (["--most", "0"], "most is 0"),
        (["--url", "nowhere"], "URL is 'nowhere'"),
        (["--quantile", "2"], "quantile is 2"),
    ],
)
def test_a_command_line_that_cannot_be_used_is_refused_with_what_is_expected(
    more: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    right = ["--url", "http://127.0.0.1:1", "--bundle", '{"GPU": 8}', "--per-bundle", "8", "--most", "2"]
    with pytest.raises(SystemExit) as ended:
        ray_resources.main([*right, *more])
    assert ended.value.code == 2
    assert says in capsys.readouterr().err
