"""Replica groups join and leave TorchFT's own lighthouse as accepted actions say."""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from fleetcast.placement.actions.action import ActionKind
from tests.integration.action_scene import DONE, HOLDS_ALL, Scene, open_scene
from tests.integration.built import needed
from tests.integration.outside.torchft.build import build

pytestmark = [pytest.mark.outside, pytest.mark.timeout(1800)]

LAUNCHER = Path(__file__).with_name("launcher.py")


@pytest.fixture
def scene(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Scene]:
    needed(build, request)
    with open_scene(tmp_path, Path(sys.executable), HOLDS_ALL) as made:
        yield made


def test_replica_groups_leave_and_join_the_quorum_and_its_steps_go_on(scene: Scene) -> None:
    job = scene.launch("groups", LAUNCHER, "--job", "groups")

    def last_quorum_is(nodes: list[str]) -> Callable[[], bool]:
        return lambda: job.lines(" step ")[-1:] != [] and job.lines(" step ")[-1].endswith(f"with {','.join(nodes)}")

    scene.until("three groups", last_quorum_is(["n1", "n2", "n3"]))
    assert scene.until("it runs on the board", lambda: scene.nodes("groups")) == ["n1", "n2", "n3"]
    for kind, ranks, places, nodes in [
        (ActionKind.SHRINK, ["n1"], [], ["n2", "n3"]),
        (ActionKind.GROW, [], ["n4"], ["n2", "n3", "n4"]),
    ]:
        action_id = scene.send(kind, "groups", 1, ranks, places)
        scene.until(f"{kind}: its quorum", last_quorum_is(nodes))
        scene.until(f"{kind} is seen", lambda action_id=action_id: scene.life(action_id) == DONE)
        assert scene.nodes("groups") == nodes
    steps = [int(line.split()[2]) for line in job.lines("n2 step ")]
    assert steps == sorted(set(steps)), "the group that stays takes each step once"
    action_id = scene.send(ActionKind.PREEMPT, "groups", 1, ["n2", "n3", "n4"])
    scene.until("the launcher ends", lambda: job.process.poll() is not None)
    assert job.lines("groups: preempted")
    scene.until("the stop is seen", lambda: scene.life(action_id) == DONE)
