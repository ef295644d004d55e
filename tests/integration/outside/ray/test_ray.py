"""Real Ray Serve and Ray's autoscaler act on forecasts, and on nothing else, whatever becomes of the service."""

import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.docs.pages import ROOT
from tests.docs.runner import Reader
from tests.integration.built import needed
from tests.integration.outside.namespace import Namespace
from tests.integration.outside.ray.build import build
from tests.integration.outside.ray.scene import PORT, SERIES, Scene

pytestmark = [pytest.mark.outside, pytest.mark.timeout(1800)]

URL = f"http://127.0.0.1:{PORT}"
OF_SERIES = {"queue": SERIES.queue, "job_class": SERIES.class_, "group": SERIES.group, "horizon_s": 60}
POLICY = "fleetcast_client.ray_serve:ForecastPolicy"
STALE_S = 6.0
ASKING = {"url": URL, "per_replica": 2, "every_s": 0.5, "stale_s": STALE_S, "timeout_s": 1, **OF_SERIES}


@pytest.fixture(scope="module")
def scene(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    """Two applications that differ in their policy alone: `ours` has the forecast's, `own` Serve's."""
    python, network = needed(build, request), needed(lambda say: Namespace(), request)
    made = Scene(python, network, tmp_path_factory.mktemp("ray"))
    try:
        made.ask("deploy", app="ours", policy={"policy_function": POLICY, "policy_kwargs": ASKING})
        made.ask("deploy", app="own")
        yield made
    finally:
        made.close()


def both_have(scene: Scene, ours: int, own: int) -> Callable[[], bool]:
    return lambda: (scene.replicas("ours"), scene.replicas("own")) == (ours, own)


def test_replicas_are_there_before_the_load_and_go_with_the_forecast(scene: Scene) -> None:
    scene.forecast.value = 8.0
    took_s = scene.until("four replicas for a forecast of 8 at 2 each, without a request", both_have(scene, 4, 1))
    print(f"\nforecast 8 at 2 a replica, no request: 4 replicas after {took_s:.1f} s")
    scene.forecast.value = 2.0
    scene.until("one replica for a forecast of 2", both_have(scene, 1, 1))


def test_a_forecast_of_nothing_takes_no_replica_away(scene: Scene) -> None:
    scene.forecast.value = 0.0
    for app in ("ours", "own"):
        scene.ask("load", app=app, requests=3)
    scene.until("as many as requests, in both", both_have(scene, 3, 3))
    for app in ("ours", "own"):
        scene.ask("load", app=app, requests=0)
    scene.until("one, in both", both_have(scene, 1, 1))


@contextmanager
def dead(scene: Scene) -> Iterator[None]:
    scene.end(scene.api)
    yield
    scene.api = scene.start_api()


@contextmanager
def hanging(scene: Scene) -> Iterator[None]:
    scene.api.send_signal(signal.SIGSTOP)
    yield
    scene.api.send_signal(signal.SIGCONT)


@contextmanager
def stale(scene: Scene) -> Iterator[None]:
    scene.forecast.is_published = False
    yield
    scene.forecast.is_published = True


def answering(what: str) -> Callable[[Scene], Any]:
    @contextmanager
    def fault(scene: Scene) -> Iterator[None]:
        with dead(scene):
            bad = scene.start_bad(what)
            yield
            scene.end(bad)

    return fault


FAULTS = {"dead": dead, "hanging": hanging, "stale": stale, "500": answering("500"), "garbage": answering("garbage")}


@pytest.mark.parametrize("fault", FAULTS)
def test_without_a_forecast_the_application_is_healthy_and_scales_as_serve_does(scene: Scene, fault: str) -> None:
    scene.forecast.value = 6.0
    scene.until("three for the forecast", both_have(scene, 3, 1))
    with FAULTS[fault](scene):
        took_s = scene.until("back to Serve's own rule", both_have(scene, 1, 1))
        print(f"\n{fault}: back to Serve's own rule after {took_s:.1f} s (stale_s {STALE_S:g})")
        for app in ("ours", "own"):
            scene.ask("load", app=app, requests=2)
        scene.until("as many as requests, in both", both_have(scene, 2, 2))
        assert {scene.ask("standing", app=app)["status"] for app in ("ours", "own")} == {"RUNNING"}
        for app in ("ours", "own"):
            scene.ask("load", app=app, requests=0)
        scene.until("one, in both", both_have(scene, 1, 1))
    scene.until("the forecast is back", both_have(scene, 3, 1))


def test_an_application_whose_policy_is_misconfigured_is_ready_and_scales_as_serve_does(scene: Scene) -> None:
    scene.forecast.value = 8.0
    scene.ask("deploy", app="odd", policy={"policy_function": POLICY, "policy_kwargs": {"url": URL, "typo": 1}})
    assert scene.ask("standing", app="odd") == {"replicas": 1, "status": "RUNNING"}
    scene.ask("load", app="odd", requests=2)
    scene.until("as many as requests", lambda: scene.replicas("odd") == 2)
    scene.ask("load", app="odd", requests=0)


def asking_for_bundles(scene: Scene) -> "subprocess.Popen[str]":
    words = {name.replace("_", "-"): value for name, value in OF_SERIES.items()}
    given = {**words, "target": "request_rate", "url": URL, "bundle": '{"CPU": 4}', "per-bundle": 2, "most": 3}
    timed = {"every-s": 0.5, "stale-s": STALE_S}
    options = [word for name, value in {**given, **timed}.items() for word in (f"--{name}", str(value))]
    return scene.start_ray(Path("-m"), "fleetcast_client.ray_resources", *options)


def test_the_autoscaler_sees_what_the_forecast_needs_until_there_is_none(scene: Scene) -> None:
    def wished(count: int) -> Callable[[], bool]:
        return lambda: scene.ask("wished")["bundles"] == [{"CPU": 4.0}] * count

    scene.forecast.value = 4.0
    asking = asking_for_bundles(scene)
    scene.until("two bundles", wished(2))
    scene.forecast.value = 100.0
    scene.until("as many as `most`", wished(3))
    with stale(scene):
        took_s = scene.until("taken back, since it is stale", wished(0))
        print(f"\nbundles are taken back {took_s:.1f} s after the last forecast (stale_s {STALE_S:g})")
    scene.until("asked for again", wished(3))
    scene.end(asking)
    assert wished(3)(), "what is killed cannot take back"
    scene.forecast.is_published = False
    asking = asking_for_bundles(scene)
    scene.until("taken back by the next one", wished(0))
    scene.forecast.is_published = True
    scene.until("asked for again", wished(3))
    scene.end(asking, signal.SIGTERM)
    assert asking.returncode == 0
    scene.until("taken back at the end", wished(0))


def test_every_command_of_the_page_works(scene: Scene, tmp_path: Path) -> None:
    """The series is that of this board. By hand goes what a killed program left."""
    series = {"queue": SERIES.queue, "job-class": SERIES.class_, "group": SERIES.group, "target": SERIES.target}
    series["horizon-s"] = "60"  # as far as the forecast of this board reaches
    words = " ".join(f"--{name} {value}" for name, value in series.items())
    scene.put_programs(tmp_path / "bin")
    places = {"http://fleetcast:8080": URL, "--pool a100 --target wanted --horizon-s 1800": words}
    reader = Reader(tmp_path, places, {**scene.variables, "RAY_AUTH_MODE": "token"})

    def wishes() -> list[dict[str, float]]:
        found: list[dict[str, float]] = scene.ask("wished")["bundles"]
        return found

    def ask_and_die() -> None:
        asking = asking_for_bundles(scene)
        scene.until("two bundles", lambda: wishes() == [{"CPU": 4.0}] * 2)
        scene.end(asking)

    scene.forecast.value = 4.0
    done = reader.run_page(ROOT / "docs/schedulers/ray.md", "run in ray", before={"ray status": ask_and_die})
    assert "{'CPU': 4}: 2 from request_resources()" in done[1].output
    scene.until("none", lambda: wishes() == [])
