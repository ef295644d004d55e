"""Advice on elastic gangs: they give members to the next request, and grow where no request waits."""

from pathlib import Path
from typing import Any

import pytest

from tests.service.placer.test_reclaim import OLD_S, AdvisedBoard, AdvisedWorld
from tests.service.placer_world import GPUS

GANG = {"gang": {"min": 2, "desired": 12, "step": 1}, "gpus_per_member": GPUS}


def make_elastic(world: AdvisedWorld) -> None:
    assert isinstance(world.board, AdvisedBoard)
    world.board.more = {"wide": GANG}


@pytest.fixture
def world(tmp_path: Path) -> Any:
    world = AdvisedWorld(tmp_path)
    yield world
    world.close()


def test_a_gang_is_advised_to_shrink_for_a_request_and_no_job_stops(world: AdvisedWorld) -> None:
    make_elastic(world)
    world.fill(own=("owed", 4), wide=("lender", 12))
    world.wait_for("p", "owed", 4)
    world.pass_at(OLD_S)
    (record,) = world.service.actions.list_open()
    assert (record.action.kind, record.action.job, record.action.payer) == ("shrink", "wide", "p")
    assert (record.action.gpus, len(record.action.ranks)) == (4 * GPUS, 4)
    assert record.action.cost.restart == 120 * 12 * GPUS


def test_a_gang_is_advised_to_grow_until_a_request_waits_for_the_gpus(world: AdvisedWorld) -> None:
    make_elastic(world)
    world.fill(own=("owed", 4), wide=("lender", 8), gone=("batch", 4))
    del world.board.jobs["gone"]
    world.pass_at(OLD_S)
    (record,) = world.service.actions.list_open()
    assert (record.action.kind, record.action.job, record.action.payer) == ("grow", "wide", "")
    assert (record.action.gpus, len(record.action.places)) == (4 * GPUS, 4)
    assert record.action.cost.gain < 0
    world.pass_at(30)
    assert [row.action_id for row in world.service.actions.list_open()] == [record.action_id]
    world.wait_for("p", "lender", 4)
    world.pass_at(30)
    assert "grow" not in {row.action.kind for row in world.service.actions.list_open()}


def test_a_gang_that_should_grow_shrinks_for_a_request_that_is_owed_its_gpus(world: AdvisedWorld) -> None:
    make_elastic(world)
    world.fill(own=("owed", 2), wide=("lender", 9), gone=("batch", 5))
    del world.board.jobs["gone"]
    world.pass_at(OLD_S)
    (grow,) = world.service.actions.list_open()
    assert grow.action.kind == "grow"
    world.wait_for("p", "owed", 6)
    world.pass_at(400)
    assert [(row.action.kind, row.action.payer) for row in world.service.actions.list_open()] == [("shrink", "p")]
    assert world.service.actions.get_action(grow.action_id).state == "withdrawn"
