"""A window or a reservation is a use of a GPU: every answer names it, and counts no free GPU there."""

import asyncio
from pathlib import Path

import msgspec
import pytest

from fleetcast.fleet.events import Finished, NodeEvent, Started
from fleetcast.fleet.requests import PlacementRequest, RankPlacement
from fleetcast.ingest.source import Batch
from fleetcast.service.api.routes import drain
from fleetcast.service.board.board import Board
from fleetcast.service.board.cache import BoardCache
from fleetcast.service.board.free import describe_window
from tests.service.pipeline.fleet_scenes import GPUS, QUEUES, Site

FANS = "held free by maintenance 'fans' until 2066-01-01 00:00 UTC"
MLPERF = "held by reservation 'mlperf' for queue 'b' until 2066-01-01 00:00 UTC"


def gpus_of(board: Board) -> dict[str, int]:
    counts: dict[str, int] = board.json("doc.fleet")["gpus"]
    return counts


def uses_of(board: Board, row: int) -> list[str]:
    return [gpu.get("held_by", "") for gpu in board.json("doc.fleet")["nodes"][row]["gpus"]]


def withhold(site: Site, node: str, check: str, message: str) -> None:
    about = NodeEvent(node=node, source="slurm", sequence=1, time_ms=site.clock.now_ms(), type="withhold")
    event = msgspec.structs.replace(about, check=check, message=message)
    site.pipeline.apply_batch(Batch(node_events=(event,)))


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return Site(tmp_path, QUEUES)


def test_windows_of_the_file_of_queues_are_no_free_gpus(site: Site) -> None:
    board = site.tick()
    gpus = gpus_of(board)
    assert (gpus["free"], gpus["window"], gpus["reservation"]) == (2 * GPUS, GPUS, GPUS)
    assert uses_of(board, 2) == ["reservation"] * GPUS
    assert uses_of(board, 3) == ["window"] * GPUS
    assert (describe_window(board, "n2"), describe_window(board, "n3")) == (MLPERF, FANS)
    assert describe_window(board, "n1") == ""


def test_a_job_on_a_reserved_node_counts_as_the_job(site: Site) -> None:
    ranks = (RankPlacement(0, "n2", (0, 1)),)
    site.report(Started(job="a", sequence=1, time_ms=site.clock.now_ms(), ranks=ranks))
    board = site.tick()
    assert (gpus_of(board)["running"], gpus_of(board)["reservation"]) == (2, GPUS - 2)


@pytest.mark.parametrize(("check", "state"), [("maintenance", "window"), ("reserved", "reservation")])
def test_a_scheduler_that_withholds_a_node_is_a_use_of_its_gpus(tmp_path: Path, check: str, state: str) -> None:
    site = Site(tmp_path, "")
    withhold(site, "n0", check, f"Slurm: {check}")
    board = site.tick()
    assert (gpus_of(board)["free"], gpus_of(board)[state]) == (3 * GPUS, GPUS)
    assert describe_window(board, "n0") == f"Slurm: {check}"


def test_a_node_that_is_powered_down_is_out_of_service_and_no_window(tmp_path: Path) -> None:
    site = Site(tmp_path, "")
    withhold(site, "n0", "powered_down", "Slurm: POWERED_DOWN")
    gpus = gpus_of(site.tick())
    assert (gpus["window"], gpus["reservation"], gpus["out_of_service"]) == (0, 0, GPUS)


def test_a_drain_preview_names_the_window_that_keeps_the_node(site: Site) -> None:
    site.tick()
    cache = BoardCache(site.config.board, hold_s=0.0)
    board = cache.get_board()
    about = drain._count_pool_gpus(cache, board, 3, site.config.placer)
    said = drain._describe_effects("n3", about, [], "", describe_window(board, "n3"))
    assert said.startswith(f"Nothing runs here, and the node is {FANS}: draining n3 interrupts no job")
    assert (about.gpus_free_here, about.gpus_free_now) == (0, 2 * GPUS)


def test_windows_end_when_the_placer_serves_another_file(site: Site) -> None:
    site.tick()
    Path(site.config.placer.queues).write_text("[queue.a]\n[queue.b]\n")
    site.placer.view.refresh()
    site.placer.view.observe_fleet()
    assert gpus_of(site.tick())["free"] == 4 * GPUS


def test_windows_of_a_file_that_the_placer_withdraws_keep_nothing(site: Site) -> None:
    site.tick()
    site.placer.queues.file.withdraw_tree(site.clock.now_ms(), "a test")
    assert site.placer.queues.file.tree is None
    assert gpus_of(site.tick())["free"] == 4 * GPUS


def test_windows_survive_a_restart_of_the_pipeline(site: Site) -> None:
    site.tick()
    asyncio.run(site.pipeline.save())
    site.restart_pipeline()
    assert gpus_of(site.tick())["window"] == GPUS


@pytest.mark.parametrize("misnamed", [(70, 71), ()])
def test_a_placed_job_that_misnames_its_gpus_holds_those_given(tmp_path: Path, misnamed: tuple[int, ...]) -> None:
    """Otherwise the GPUs that it runs on look free, and another request is placed there."""
    site = Site(tmp_path, "")
    ranks = (RankPlacement(0, "n0", (0, 1)),)
    site.report(Started(job="first", sequence=1, time_ms=site.clock.now_ms(), ranks=ranks))
    site.tick()
    site.placer.view.refresh()
    request = PlacementRequest(request_id="r", job="second", gpus_per_node=2, avoid_nodes=("n1", "n2", "n3"))
    given = msgspec.json.decode(site.placer.place(request, "test"))["ranks"][0]
    ranks = (RankPlacement(0, "n0", misnamed),)
    site.report(Started(job="second", sequence=1, time_ms=site.clock.now_ms(), ranks=ranks))
    site.tick()
    site.report(Finished(job="first", sequence=9, time_ms=site.clock.now_ms()))
    site.tick()
    site.placer.view.refresh()
    board = site.tick()
    held = [at for at, gpu in enumerate(board.json("doc.fleet")["nodes"][0]["gpus"]) if gpu["job"] == "second"]
    assert held == given["gpus"]
    row = next(row for row in board.json("doc.jobs") if row["job"] == "second")
    assert row["gpus"] == 2
    assert site.demand("running") == 2


def test_a_start_that_names_a_node_alone_counts_the_same_in_every_answer(tmp_path: Path) -> None:
    site = Site(tmp_path, "")
    site.report(Started(job="whole", sequence=1, time_ms=site.clock.now_ms(), nodes=("n0",)))
    board = site.tick()
    assert gpus_of(board)["running"] == GPUS
    assert board.json("doc.jobs")[0]["gpus"] == GPUS
    assert site.demand("running") == GPUS
    site.report(Started(job="whole", sequence=2, time_ms=site.clock.now_ms(), ranks=(RankPlacement(0, "n0", (0,)),)))
    site.tick()
    assert site.demand("running") == 1
