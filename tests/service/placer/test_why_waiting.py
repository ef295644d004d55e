"""The ladder of a request that waits says what the order, the windows and the futures say."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from fleetcast.service.http.access import Access, parse_tokens
from fleetcast.service.placer.http import make_app
from tests.service.placer.test_own_queues import ACCESS, LEAD
from tests.service.placer.test_queues import FILE, HOUR_MS, QueueWorld
from tests.service.placer_world import World

SEVERAL = """
[policy]
order = "{order}"
[queue.a]
[queue.b]
[[reservation]]
name = "mlperf"
queue = "b"
nodes = {{rack = "r02"}}
from = 2020-05-12T18:00:00Z
to = 2020-05-13T00:00:00Z
"""


def ladder(world: QueueWorld, request_id: str, **more: Any) -> dict[str, str]:
    """Step → its sentence, in the order in which they stand."""
    return {step["code"]: step["sentence"] for step in world.ask("GET", f"/queue/{request_id}/why", **more)["ladder"]}


@pytest.mark.parametrize(
    ("order", "said"), [("shortest", "of fewer GPU-seconds by their limits"), ("fifo", "longer there")]
)
def test_who_is_before_it_is_said_as_its_queue_orders(tmp_path: Path, order: str, said: str) -> None:
    world = QueueWorld(tmp_path, FILE.replace('"fifo"', f'"{order}"'))
    world.board.jobs = {"old": range(16)}
    world.board.publish()
    world.wait("first", "a", limit_s=60)
    world.wait("second", "a", limit_s=HOUR_MS / 1000)
    world.pass_()
    assert (
        ladder(world, "second")["before"] == f"1 request before it in queue 'a': overdue, of higher priority, or {said}"
    )
    world.close()


NESTED = """
[class.urgent]
priority = 5
[queue.urgent]
[queue.p]
[queue.r]
weight = 100
[queue."r/x"]
[queue."r/y"]
"""


def test_shares_are_compared_at_the_level_that_decided(tmp_path: Path) -> None:
    """`r` has the smaller share of the fleet, although its only leaf that waits has a larger one of its own."""
    world = QueueWorld(tmp_path, NESTED)
    world.board.publish()
    for number, (queue, gang) in enumerate([("r/x", 4), ("p", 2), ("urgent", 10)]):
        world.wait(f"held{number}", queue, gang=gang)
    world.pass_()
    for name, queue in (("x1", "r/x"), ("x2", "r/x"), ("p1", "p"), ("y1", "r/y"), ("u1", "urgent")):
        world.wait(name, queue)
    world.pass_()
    steps = [one for one in world.ask("GET", "/queue/p1/why")["ladder"] if one["code"] == "before"]
    assert [one["sentence"] for one in steps] == [
        "1 request before it from queues of a higher class: 'urgent'",
        "3 requests before it from queues with no larger share: 'r' (share 0.0025); its own, 'p', has 0.13 with it",
    ]
    (step,) = [one for one in world.ask("GET", "/queue/x1/why")["ladder"] if "share" in one["sentence"]]
    assert step["sentence"].endswith("'r/y' (share 0.062); its own, 'r/x', has 0.25 with it")
    world.close()


def test_nodes_that_are_kept_for_others_are_named(tmp_path: Path) -> None:
    world = QueueWorld(tmp_path, SEVERAL.format(order="fifo"))
    world.board.publish()
    world.wait("large", "a", gang=9, limit_s=HOUR_MS / 1000)
    world.wait("own", "b", gang=17, limit_s=HOUR_MS / 1000)
    world.pass_()
    kept = "'mlperf' keeps 8 nodes for queue 'b' from 2020-05-12 18:00 until 2020-05-13 00:00 UTC"
    steps = [step["sentence"] for step in world.ask("GET", "/queue/large/why")["ladder"] if step["code"] == "window"]
    assert steps[0] == kept
    assert steps[1].endswith("it is next, when reservation 'mlperf' ends at 2020-05-13 00:00 UTC")
    assert "window" not in ladder(world, "own")
    world.app = make_app(world.service, access=ACCESS)
    bound = world.ask("GET", "/queue/large/why", headers=LEAD)
    assert "mlperf" not in str(bound)
    world.close()


def test_the_jobs_that_must_end_are_named_with_when(tmp_path: Path) -> None:
    world = QueueWorld(tmp_path)
    world.board.publish()
    world.wait("train-7", "a", gang=15)
    world.wait("train-8", "a")
    world.pass_()
    world.beat(jobs={"train-7": range(15), "train-8": [15]})
    world.wait("next", "a", gang=2)
    world.pass_()
    assert "ends" not in ladder(world, "next")  # no future has been sampled yet
    asyncio.run(world.starts.refresh())
    found = ladder(world, "next")
    assert list(found)[-2:] == ["ends", "start"]
    assert found["ends"].startswith("starts once 'train-")
    assert "' on n" in found["ends"]
    assert found["ends"].partition(" ended: ")[2].startswith("in ")
    world.close()


def test_a_request_for_more_gpus_than_the_queues_have_says_so(tmp_path: Path) -> None:
    world = QueueWorld(tmp_path, "[queue.a]\nguaranteed = {gpu = 64}\n[queue.b]\nguaranteed = {gpu = 64}\n")
    world.board.publish()
    world.wait("most", "b", gang=16)
    world.wait("more", "a", gang=17)
    world.pass_()
    assert ladder(world, "more")["room"] == "needs 136 GPUs, and all queues share 128 now"
    world.wait("all", "a", gang=16)
    world.pass_()
    assert "share 128" not in ladder(world, "all").get("room", "")
    world.close()


def test_what_a_queue_above_holds_is_told_to_nobody_who_is_bound_below(tmp_path: Path) -> None:
    world = QueueWorld(tmp_path, '[queue.c]\nlimit = {gpu = 16}\n[queue."c/x"]\nlimit = {gpu = 8}\n[queue."c/y"]\n')
    world.board.publish()
    world.wait("y0", "c/y", gang=2)
    world.pass_()
    world.wait("x0", "c/x")
    world.pass_()
    assert "16 of 16 GPUs held" in ladder(world, "x0")["limit"]
    bound = Access(parse_tokens("mine read 123456789abcdefghi queues=c/x\nboss admin 0123456789abcdefgh", "test"))
    world.app = make_app(world.service, access=bound)
    assert ladder(world, "x0", headers=LEAD)["limit"] == "a queue above its own is at its limit"
    world.close()


def test_without_a_file_all_stand_in_one_line(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.board.jobs = {"old": range(16)}
    world.board.publish()
    for name in ("first", "second"):
        assert world.ask("POST", "/queue", {"request_id": name, "queue": name}).status_code == 202
    world.service.backlog.run_pass()
    why = world.ask("GET", "/queue/second/why").json()
    assert why["ladder"][0]["sentence"] == "1 request before it: of higher priority, or longer there"
    assert (why["queue"], why["position"], why["position_in_queue"]) == ("second", 2, 2)
    world.close()
