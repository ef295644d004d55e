"""The client with the service itself: its answers have the keys that the client's types name, its README runs."""

import importlib
import json
import pkgutil
import runpy
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import is_typeddict

import msgspec
import pytest
import uvicorn

import fleetcast.service.answers as service_answers
from fleetcast.fleet.clock import ManualClock
from fleetcast.fleet.requests import RankPlacement
from fleetcast.models.risk.scores import Action
from fleetcast.placement.ahead.start_time import Blocker
from fleetcast.service.api.app import create_app
from fleetcast.service.api.routes.placements import AS_OF, DECISION, OUTLOOK, QUEUED
from tests.sdk.conftest import SDK
from tests.service.api_world import NOW_MS, FakePlacer, config, publish, running

from fleetcast_client import ApiError, Client, NotFound, answers  # isort: skip

REQUEST = {"request_id": "run-8", "user": "ada", "gang": 1, "gpus_per_node": 8}
START_MS = {"p10": NOW_MS, "p50": NOW_MS + 60_000, "p90": NOW_MS + 90_000}
START = {"start_ms": START_MS, "blocked_by": [], "constraint": None, "sentence": "needs 8 GPUs; free now", **AS_OF}


@pytest.fixture(scope="module")
def placer() -> Iterator[FakePlacer]:
    with running(FakePlacer()) as fake:
        yield fake


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory, placer: FakePlacer) -> Iterator[Client]:
    """A client of the application on a loopback port, with a board and a placer that answers what it is told."""
    folder = tmp_path_factory.mktemp("service")
    publish(folder)
    app = create_app(config(folder, placer.port), ManualClock(NOW_MS))
    server = uvicorn.Server(uvicorn.Config(app, log_config=None, timeout_graceful_shutdown=1))
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
        thread.start()
        while not server.started:
            time.sleep(0.005)
        yield Client(f"http://127.0.0.1:{listener.getsockname()[1]}", tries=1)
        server.should_exit = True
        thread.join(10)


def test_demand_and_models_are_asked_for_by_name(fleet: Client) -> None:
    (series,) = fleet.demand(pool="train", target="running", job_class="all", group="all", horizon_s=3600)["series"]
    assert (series["class"], series["horizons_s"], series["values"]) == ("all", [3600], [[6.0], [8.0], [10.0]])
    assert fleet.demand_record()["history"] == [[NOW_MS, 8.0]]
    assert fleet.demand_model(pool="serve", job_class="inference")["rows"][0]["floor_gpus"] == 48
    assert fleet.models() == {"as_of_ms": NOW_MS, "rows": [], "shadows": []}
    with pytest.raises(NotFound, match="no pool 'lost'"):
        fleet.demand(pool="lost")
    with pytest.raises(ApiError, match="horizon_s") as caught:
        fleet.demand(horizon_s=7)
    assert caught.value.status == 422


def test_an_estimate_and_the_queue(fleet: Client, placer: FakePlacer) -> None:
    placer.body = json.dumps(START).encode()
    told = fleet.estimate(REQUEST)
    assert (told["start_ms"], told["run_s"]) == (START_MS, None)
    assert told["reasons"]["run_s"]
    with pytest.raises(ApiError, match="gpus_per_nodes"):
        fleet.estimate({"request_id": "a", "gpus_per_nodes": 8})
    placer.body = json.dumps({**AS_OF, "rows": [QUEUED], **OUTLOOK}).encode()
    assert fleet.queue()["rows"][0]["start_ms"] == QUEUED["start_ms"]
    placer.body = json.dumps({**DECISION, "outcome": "queued"}).encode()
    assert fleet.wait(REQUEST)["outcome"] == "queued"
    assert (placer.asked[-1][:2], json.loads(placer.asked[-1][2])) == (("POST", "/queue"), REQUEST)
    fleet.leave("run-8")
    assert placer.asked[-1][:2] == ("DELETE", "/queue/run-8")


ANSWERS = {type_.__name__: type_ for type_ in [RankPlacement, Blocker, Action]}
for _, module, _ in pkgutil.iter_modules(service_answers.__path__, f"{service_answers.__name__}."):
    ANSWERS |= {name: kind for name, kind in vars(importlib.import_module(module)).items() if isinstance(kind, type)}
OTHER_NAMES = {
    "Decision": "PlacementAnswer",
    "DemandSeries": "DemandRow",
    "Job": "JobAnswer",
    "Node": "NodeAnswer",
    "Probability": "NodeRisk",
    "Rank": "RankPlacement",
    "Reason": "NodeReason",
    "Refusal": "RefusedRecord",
    "Risk": "RiskNodes",
    "Taken": "EventsAnswer",
}
TYPED = {name: kind for name, kind in vars(answers).items() if is_typeddict(kind) and name[0] != "_"}


@pytest.mark.parametrize("name", sorted(TYPED))
def test_every_key_that_the_service_answers_with_is_typed_and_no_other(name: str) -> None:
    answer = ANSWERS[OTHER_NAMES.get(name, name)]
    names = {field.encode_name for field in msgspec.structs.fields(answer)}
    assert names == set(TYPED[name].__annotations__)


def test_the_readme_s_questions_are_answered(
    fleet: Client, placer: FakePlacer, capsys: pytest.CaptureFixture[str]
) -> None:
    text = Path(SDK, "README.md").read_text(encoding="utf-8")
    (block,) = (part for part in text.split("```python\n")[1:] if part.startswith("estimate = fleet.estimate"))
    placer.body = json.dumps(START | {"rows": [QUEUED]}).encode()
    code = block.partition("```")[0].replace("wanted", "running")  # what this board has
    exec(compile(code, "README.md", "exec"), {"fleet": fleet})
    assert "needs 8 GPUs; free now" in capsys.readouterr().out


def test_the_example_for_schedulers_places_a_job(
    fleet: Client, placer: FakePlacer, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks = [{"rank": 0, "node": "n001", "gpus": [0, 1]}]
    placer.body = json.dumps({"outcome": "placed", "sentence": "Placed 2 GPUs on n001.", "ranks": ranks}).encode()
    monkeypatch.setattr("sys.argv", ["place_by_risk.py", "--url", fleet.url, "--job", "train-42", "--gpus", "2"])
    runpy.run_path(str(Path(SDK).parent / "examples/place_by_risk.py"), run_name="__main__")
    assert json.loads(placer.asked[-1][2])["dry_run"] is True
    told = capsys.readouterr().out
    assert "within a day." in told
    assert told.endswith("Placed 2 GPUs on n001.\nrank 0: n001 GPUs [0, 1]\n")
