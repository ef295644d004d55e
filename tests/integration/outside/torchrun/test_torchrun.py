"""Real torchrun agents answer actions: they end at a checkpoint, and shrink, grow and replace members."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from fleetcast.placement.actions.action import ActionKind
from tests.dashboards.grafana import ROOT
from tests.integration.action_scene import DONE, Launched, Scene, open_scene
from tests.integration.built import needed
from tests.integration.outside.torchrun.build import build
from tests.ports import free_port

pytestmark = [pytest.mark.outside, pytest.mark.timeout(1800)]

LAUNCHER = ROOT / "examples/elastic_launcher.py"


@pytest.fixture
def scene(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Scene]:
    with open_scene(tmp_path, needed(build, request)) as made:
        yield made


def launch(scene: Scene, *more: str, attempt: int = 1, steps: int = 100_000) -> Launched:
    """Start one attempt of the job `run`."""
    options = ["--job", "run", "--attempt", str(attempt), "--folder", str(scene.folder), "--steps", str(steps)]
    return scene.launch("run", LAUNCHER, *options, "--rendezvous", f"127.0.0.1:{free_port()}", *more, attempt=attempt)


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
