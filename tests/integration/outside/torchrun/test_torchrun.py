"""Real torchrun agents answer actions: they end at a checkpoint, and shrink, grow and replace members."""

import json
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from fleetcast.placement.actions.action import ActionKind
from tests.dashboards.grafana import ROOT
from tests.integration.action_scene import ACT, DONE, HOLDS_ALL, QUEUE, Launched, Scene, open_scene
from tests.integration.built import needed
from tests.integration.outside.torchrun.build import build
from tests.ports import free_port

pytestmark = [pytest.mark.outside, pytest.mark.timeout(1800)]

LAUNCHER = ROOT / "examples/elastic_launcher.py"

OWES = f"""{ACT}
[queue.owed]
guaranteed = {{gpu = 2}}
[queue.{QUEUE}]
guaranteed = {{gpu = 2}}
"""


@pytest.fixture
def owing_scene(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Scene]:
    """The job's queue borrows a GPU of another one."""
    with open_scene(tmp_path, needed(build, request), OWES) as made:
        yield made


@pytest.fixture
def scene(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Scene]:
    with open_scene(tmp_path, needed(build, request), HOLDS_ALL) as made:
        yield made


def launch(scene: Scene, attempt: int = 1, steps: int = 100_000) -> Launched:
    """Start one attempt of the job `run`."""
    options = ["--job", "run", "--attempt", str(attempt), "--folder", str(scene.folder), "--steps", str(steps)]
    options += ["--request", json.dumps({"queue": QUEUE})]
    return scene.launch("run", LAUNCHER, *options, "--rendezvous", f"127.0.0.1:{free_port()}", attempt=attempt)


def begins(launched: Launched) -> list[tuple[int, int]]:
    """Return (step, world size) of each begin of a rank."""
    words = [line.split() for line in launched.lines("begins at step")]
    return [(int(row[row.index("step") + 1]), int(row[row.index("with") + 1])) for row in words]


def wait_for_size(scene: Scene, launched: Launched, size: int, after: int = 0) -> int:
    """Wait until all ranks begin with a world of this size. Returns the step at which they begin."""

    def find() -> list[tuple[int, int]]:
        found = [row for row in begins(launched)[after:] if row[1] == size]
        return found if len(found) >= size else []

    return scene.until(f"{size} ranks", find)[-1][0]


def test_a_job_ends_at_its_checkpoint_and_its_next_attempt_goes_on_from_there(scene: Scene) -> None:
    first = launch(scene)
    assert wait_for_size(scene, first, 3) == 0
    assert scene.until("it runs on the board", lambda: scene.nodes("run")) == ["n1", "n2", "n3"]
    action_id = scene.send(ActionKind.PREEMPT, "run", 1, ["n1", "n2", "n3"])
    scene.until("the launcher ends", lambda: first.process.poll() is not None)
    assert first.process.returncode == 0
    assert first.lines("attempt 1: preempted")
    scene.until("the stop is seen", lambda: scene.life(action_id) == DONE)
    (ended, *others) = [int(line.split()[-4]) for line in first.lines("ends at step")]
    assert others == [ended, ended], "all ranks end after the same step"
    second = launch(scene, attempt=2, steps=ended + 10)
    assert wait_for_size(scene, second, 3) == ended
    scene.until("the launcher ends", lambda: second.process.poll() is not None)
    assert second.lines("attempt 2: finished")


def test_a_job_shrinks_grows_and_replaces_a_member_and_its_steps_go_on(scene: Scene) -> None:
    job = launch(scene)
    wait_for_size(scene, job, 3)
    scene.until("it runs on the board", lambda: scene.nodes("run"))
    steps = []
    for kind, ranks, places, nodes in [
        (ActionKind.SHRINK, ["n1"], [], ["n2", "n3"]),
        (ActionKind.GROW, [], ["n4"], ["n2", "n3", "n4"]),
        (ActionKind.REPLACE, ["n3"], ["n1"], ["n1", "n2", "n4"]),
    ]:
        began = len(begins(job))
        action_id = scene.send(kind, "run", 1, ranks, places)
        steps.append(wait_for_size(scene, job, len(nodes), began))
        scene.until(f"{kind} is seen", lambda action_id=action_id: scene.life(action_id) == DONE)
        assert scene.nodes("run") == nodes
    assert 0 < steps[0] < steps[1] < steps[2], "each goes on from a later checkpoint"
    assert job.process.poll() is None


def test_the_placer_shrinks_a_job_for_a_request_and_replaces_its_lost_node(owing_scene: Scene) -> None:
    scene, service = owing_scene, owing_scene.roles
    job = launch(scene)
    wait_for_size(scene, job, 3)
    scene.until("it runs on the board", lambda: scene.nodes("run"))
    lost = {"node": "n1", "source": "site", "sequence": 1, "time_ms": time.time_ns() // 1_000_000, "type": "lost"}
    assert service.request("POST", "/v1/events", lost)[0] == 202
    began, action = len(begins(job)), scene.until("an action is sent", lambda: scene.find_action("run"))
    assert (action["kind"], action["executor"]) == ("replace", "agents")
    replaced = wait_for_size(scene, job, 3, began)
    scene.until("the replacement is seen", lambda: scene.life(action["action_id"]) == DONE)
    assert scene.nodes("run") == ["n2", "n3", "n4"]

    owed = {"request_id": "owed-1", "queue": "owed", "gang": 1, "gpus_per_node": 1}
    assert service.request("POST", "/v1/queue", owed)[0] == 202
    began = len(begins(job))
    action = scene.until("a shrink is sent", lambda: (row := scene.find_action("run"))["kind"] == "shrink" and row)
    assert action["payer"] == "owed-1"
    assert wait_for_size(scene, job, 2, began) > replaced > 0
    scene.until("the shrink is seen", lambda: scene.life(action["action_id"]) == DONE)
    (left,) = action["ranks"]
    placed = scene.until("its payer is placed", lambda: service.get("/v1/placements/owed-1"))
    assert [rank["node"] for rank in placed["ranks"]] == [left["node"]]
    assert left["node"] not in scene.nodes("run")
