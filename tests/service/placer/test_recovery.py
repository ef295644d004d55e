"""Advice on gangs whose nodes were lost: one action for each gang, and how it ends."""

from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from prometheus_client import generate_latest

from fleetcast.fleet.nodes import NodeState
from fleetcast.models.risk.rules import ACTIONS
from fleetcast.models.risk.scores import RISK_KINDS
from fleetcast.placement.actions.life import ActionRecord
from fleetcast.placement.actions.words import describe_action
from fleetcast.service.placer.broken_gangs import make_broken_gang
from tests.service.placer.test_reclaim import OLD_S, AdvisedBoard, AdvisedWorld
from tests.service.placer_world import GPUS, NODES

FILE = """
[policy]
reclaim = "advise"
[queue.q]
"""


class FaultyBoard(AdvisedBoard):
    """A board on which some nodes are lost, and others are advised to be drained."""

    lost: tuple[int, ...] = ()
    drained: tuple[int, ...] = ()
    whole: ClassVar[dict[int, tuple[int, int]]] = {}  # row of a job of one GPU → node, GPU

    def sections(self) -> dict[str, Any]:
        state = np.zeros(NODES, np.int8)
        state[list(self.lost)] = NodeState.LOST
        action = np.zeros(NODES, np.int8)
        action[list(self.drained)] = ACTIONS.index("drain_now")
        found = super().sections()
        for job, (node, gpu) in self.whole.items():
            found["gpu.job"][node, gpu] = job
        for row, (p, _) in self.risk.items():
            found["node.risk"][RISK_KINDS.index("fail"), :, row] = p
        return found | {"node.state": state, "node.action": action}


class FaultyWorld(AdvisedWorld):
    def __init__(self, folder: Path, text: str = FILE) -> None:
        super().__init__(folder, text)
        self.board = FaultyBoard(self.config.board)
        self.board.queue_of, self.board.more = {}, {}

    def run_jobs(self, **nodes: range) -> None:
        for name, rows in nodes.items():
            self.board.jobs[name], self.board.queue_of[name] = rows, "q"
        self.beat(0)

    def lose(self, *rows: int) -> list[ActionRecord]:
        """Let exactly these nodes be lost, and make a pass."""
        self.board.lost = rows  # type: ignore[attr-defined]
        self.pass_at(30)
        return self.service.actions.list_open()


@pytest.fixture
def world(tmp_path: Path) -> Any:
    world = FaultyWorld(tmp_path)
    world.run_jobs(big=range(4), other=range(4, NODES - 2))
    yield world
    world.close()


def test_lost_nodes_of_a_gang_are_replaced_by_free_ones_in_one_action(world: FaultyWorld) -> None:
    assert world.lose() == []
    (record,) = world.lose(0, 2)
    action = record.action
    assert (action.kind, action.job, action.executor, action.gpus) == ("replace", "big", "advice", 2 * GPUS)
    assert [rank.node for rank in action.ranks] == ["n01", "n03"]
    assert [rank.node for rank in action.places] == ["n15", "n16"]
    assert (action.reason.code, action.reason.numbers["nodes"]) == ("lost_free", 2)
    assert action.reason.numbers["wait_gpu_s"] > action.reason.numbers["free_gpu_s"]
    assert "nodes were lost, and free nodes join" in describe_action(action)


def test_a_gang_gets_no_node_of_another_pool(world: FaultyWorld) -> None:
    world.run_jobs(a=range(4))
    observed = world.service.view.observe_fleet()
    for pool, expected in (([0] * 4, "x"), ([1] * 4, "y"), ([0, 1, 1, 1], "")):
        column = np.array([*pool, *[0] * (NODES - 4)], np.int32)
        inventory = replace(observed.view.inventory, pool=column, pools=("x", "y"))
        gang = make_broken_gang(observed.jobs, observed.jobs.row["a"], replace(observed.view, inventory=inventory))
        assert gang.request.pool == expected


def test_a_repeated_pass_repeats_the_action_and_one_more_lost_node_joins_it(world: FaultyWorld) -> None:
    first = world.lose(0)
    assert world.lose(0) == first
    (joined,) = world.lose(0, 1)
    assert joined.action_id != first[0].action_id
    assert [rank.node for rank in joined.action.ranks] == ["n01", "n02"]
    assert world.service.actions.get_action(first[0].action_id).state == "withdrawn"


def test_the_action_is_withdrawn_once_the_node_is_back(world: FaultyWorld) -> None:
    (record,) = world.lose(0)
    assert world.lose() == []
    ended = world.service.actions.get_action(record.action_id)
    assert (ended.state, ended.why) == ("withdrawn", "its nodes are healthy, or the job has ended")


def test_a_gang_takes_nodes_only_from_jobs_that_its_class_may_stop(tmp_path: Path) -> None:
    classes = '[class.urgent]\npreempts = ["batch"]\n[class.batch]\n[queue.q]\nclass = "urgent"\n'
    world = FaultyWorld(tmp_path, FILE.replace("[queue.q]\n", classes + '[queue.lent]\nclass = "batch"\n'))
    world.run_jobs(big=range(4), other=range(4, NODES - 2))
    world.board.jobs["small"], world.board.queue_of["small"] = range(NODES - 2, NODES), "lent"
    world.board.more = {"small": {"preemptible": False}}
    world.beat(1000 * OLD_S)
    (record,) = world.lose(0)
    assert record.action.reason.code == "lost_wait", "all other jobs are of its own queue"
    world.board.more = {"small": {"checkpoint_ms": world.clock.now_ms()}}
    (record,) = world.lose(0)
    assert (record.action.reason.code, record.action.executor) == ("lost_borrow", "advice")
    assert [place.node for place in record.action.places] == ["n15"]
    assert world.lose(0) == [record]
    world.close()


def test_a_gang_that_waits_is_advised_to_use_a_node_that_becomes_free(world: FaultyWorld) -> None:
    world.run_jobs(small=range(NODES - 2, NODES))
    assert [row.action.reason.code for row in world.lose(0)] == ["lost_wait"]
    del world.board.jobs["small"]
    assert [row.action.reason.code for row in world.lose(0)] == ["lost_free"]


def test_a_gang_gets_a_node_that_is_held_ready_for_it(tmp_path: Path) -> None:
    world = FaultyWorld(tmp_path, FILE + "[spares]\nlevel = 'rack'\ncount = 1\n")
    world.run_jobs(big=range(NODES - 4, NODES - 1), other=range(NODES - 4))
    world.wait_for("p", "q", 1)
    (record,) = world.lose(NODES - 2)
    assert record.action.reason.code == "lost_spare"
    assert [place.node for place in record.action.places] == [f"n{NODES:02d}"]
    assert world.ask("GET", "/queue/p/why")["position"] == 1  # it waits beside the node, which is not for it
    world.close()


def test_a_waiting_request_does_not_end_the_action(world: FaultyWorld) -> None:
    first = world.lose(0)
    world.wait_for("p", "q", 16)
    assert world.lose(0) == first


@pytest.mark.parametrize(("p", "codes"), [(0.4, ["foreseen_free"]), (0.02, [])])
def test_a_node_that_is_likely_to_fail_is_replaced_early_where_that_pays(
    world: FaultyWorld, p: float, codes: list[str]
) -> None:
    world.beat(1000 * OLD_S)
    world.board.risk, world.board.drained = {0: (p, "it fails soon")}, (0,)  # type: ignore[attr-defined]
    found = world.lose()
    assert [row.action.reason.code for row in found] == codes
    assert all(row.action.reason.numbers["p"] == pytest.approx(p) for row in found)


def test_nothing_is_proposed_while_reclaim_is_off(tmp_path: Path) -> None:
    world = FaultyWorld(tmp_path, FILE.replace("advise", "off"))
    world.run_jobs(big=range(4))
    assert world.lose(0) == []
    world.close()


@pytest.mark.parametrize("is_lost", [True, False])
def test_the_calibration_of_foreseen_failures_is_published_and_survives_a_restart(
    world: FaultyWorld, is_lost: bool
) -> None:
    def read() -> dict[str, Any]:
        return dict(world.ask("GET", "/actions")["foreseen"])

    world.beat(1000 * OLD_S)
    world.board.risk, world.board.drained = {1: (0.4, "it fails soon")}, (1,)  # type: ignore[attr-defined]
    for _ in range(3):
        world.pass_at(30)
    assert (read()["matured"], read()["mean_p"]) == (0, None)
    world.restart()
    world.board.drained, world.board.lost = (), (1,) if is_lost else ()  # type: ignore[attr-defined]
    for _ in range(13):
        world.pass_at(300)
    found = read()
    assert (found["matured"], found["faults"], found["mean_p"]) == (1, int(is_lost), 0.4)
    world.service.actions.update_metrics(world.clock.now_ms())
    page = generate_latest(world.service.metrics.registry).decode()
    assert "fleetcast_foreseen_matured_swaps 1.0" in page
    assert f"fleetcast_foreseen_observed_ratio {float(is_lost)}" in page


class OneGpuWorld(FaultyWorld):
    """A fleet whose first node holds eight jobs of one GPU, and whose last two nodes other small jobs may use."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.run_jobs(other=range(1, NODES - 2))
        self.places: dict[str, tuple[int, int]] = {}
        for gpu in range(GPUS):
            self.start_small(f"s{gpu}", 0, gpu)
        self.beat(1000 * OLD_S)
        self.board.risk, self.board.drained = {0: (0.4, "it fails soon")}, (0,)  # type: ignore[attr-defined]

    def start_small(self, job: str, node: int, gpu: int) -> None:
        self.places[job] = node, gpu
        self.board.jobs[job], self.board.queue_of[job] = (), "q"
        self.board.more[job] = {"gpus": 1, "held": {f"n{node + 1:02d}": 1000}}
        self.board.whole = {list(self.board.jobs).index(name): at for name, at in self.places.items()}  # type: ignore[attr-defined]


def test_advice_on_jobs_of_one_gpu_stays_while_other_jobs_take_their_places(tmp_path: Path) -> None:
    world = OneGpuWorld(tmp_path)
    world.pass_at(30)
    first = world.service.actions.list_open()
    assert [row.action.reason.code for row in first] == ["foreseen_elsewhere"] * GPUS
    for gpu in range(GPUS):
        world.start_small(f"new{gpu}", NODES - 2, gpu)
        world.pass_at(30)
        assert world.service.actions.list_open() == first
    for gpu in range(GPUS):
        world.start_small(f"last{gpu}", NODES - 1, gpu)
    world.pass_at(30)
    assert world.service.actions.list_open() == first, "without room the advice stays, too"
    world.close()


def test_advice_to_wait_becomes_a_move_once_there_is_room(tmp_path: Path) -> None:
    world = OneGpuWorld(tmp_path)
    world.board.jobs["full"], world.board.queue_of["full"] = range(NODES - 2, NODES), "q"
    world.pass_at(30)
    assert {row.action.reason.code for row in world.service.actions.list_open()} == {"foreseen_wait"}
    world.board.jobs["full"] = [NODES - 1]
    world.pass_at(30)
    assert {row.action.reason.code for row in world.service.actions.list_open()} == {"foreseen_elsewhere"}
    world.close()


def test_a_gang_whose_place_is_gone_gets_no_place_of_another_gang(world: FaultyWorld) -> None:
    for name in ("big", "other"):
        del world.board.jobs[name]
    world.run_jobs(a=range(3), b=range(3, 6), full=range(6, NODES - 3))
    before = {row.action.job: row for row in world.lose(0, 3)}
    (taken,) = {place.node for place in before["a"].action.places}
    world.board.jobs["new"], world.board.queue_of["new"] = [int(taken[1:]) - 1], "q"
    after = {row.action.job: row for row in world.lose(0, 3)}
    assert after["b"] == before["b"]
    assert after["a"].action.places[0].node not in {taken, before["b"].action.places[0].node}


def test_a_gang_that_lost_nodes_comes_before_more_foreseen_failures_than_a_pass_searches(tmp_path: Path) -> None:
    world = OneGpuWorld(tmp_path)
    for gpu in range(GPUS):
        world.start_small(f"t{gpu}", NODES - 2, gpu)
    world.board.risk[NODES - 2] = world.board.risk[0]
    world.board.drained = (0, NODES - 2)  # type: ignore[attr-defined]
    world.pass_at(30)
    foreseen = {row.action_id for row in world.service.actions.list_open()}
    assert len(foreseen) == 2 * GPUS
    world.lose(5)
    found = world.service.actions.list_open()
    assert {row.action.reason.code for row in found if row.action.job == "other"} == {"lost_free"}
    assert foreseen < {row.action_id for row in found}, "advice that a pass did not reach stays"
    world.close()
