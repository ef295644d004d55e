"""A law: whatever runs, waits, is promised or kept, all answers give the same sums."""

import math
from collections import Counter
from collections.abc import Iterator

import msgspec
import numpy as np
import pytest
from hypothesis import example, given

from fleetcast.placement.ahead.reservation import find_free_windows
from fleetcast.placement.fragmentation import measure_fragmentation
from fleetcast.service.api.routes import drain
from fleetcast.service.board.board import Board
from fleetcast.service.board.free import describe_window
from fleetcast.service.pipeline.unknown_use import UnknownUse
from fleetcast.service.placer.queue_desk import QueueAdmin
from fleetcast.service.placer.view import read_waiting_jobs
from tests.fuzz.bounds import EFFORT, examples
from tests.service.pipeline.fleet_scenes import GPUS, NODES, QUEUES, JobScene, Scene, Site, scenes

QUEUE_GPUS = "fleetcast_queue_gpus{"


@pytest.fixture(scope="module", params=["", QUEUES], ids=["one line", "queues with windows"])
def site(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    with pytest.MonkeyPatch.context() as patch:
        made = Site(tmp_path_factory.mktemp("site"), request.param)
        patch.setattr(
            UnknownUse, "update_verdicts", lambda _, names, frame, rows, held, now_ms: made.unknown_gpus & ~held
        )
        yield made
        made.placer.ledger.close()


@given(scenes)
@example(
    Scene(
        (
            JobScene("part_nodes", 2, 1),
            JobScene("queue_part", 1, 0),
            JobScene("queue_part", 2, 0),
            *(JobScene("promise_part", 1, 0),) * 3,
        ),
        (0,) * NODES,
        ("maintenance",) + ("",) * (NODES - 1),
    )
)
@example(Scene((JobScene("promise_taken", 4, 0),), (0,) * NODES, ("",) * NODES))
@example(Scene((JobScene("event_part", 1, 0), JobScene("queue_part", 1, 0)), (0,) * NODES, ("",) * NODES))
@example(Scene((JobScene("part", 1, 0), JobScene("beside", 2, 0)), (0,) * NODES, ("",) * NODES))
@examples(500 if EFFORT >= 1 else 250)
def test_all_answers_give_the_same_sums(site: Site, scene: Scene) -> None:
    """Fleet, map, nodes, drains, jobs, fragmentation, room, queue, metrics and demand agree."""
    try:
        board = site.play(scene)
        _check_gpus(site, board)
        _check_waiting(site, board)
    finally:
        site.end()


def _check_gpus(site: Site, board: Board) -> None:
    fleet = board.json("doc.fleet")
    gpus = {name: count for name, count in fleet["gpus"].items() if name not in ("total", "unknown_use")}
    assert sum(gpus.values()) == fleet["gpus"]["total"] == GPUS * NODES
    page = bytes(board.raw("metrics.fleet")).decode()
    for state, count in gpus.items():
        assert f'fleetcast_gpus{{state="{state}"}} {count}\n' in page
    on_map = [[gpu.get("held_by") or ("job" if gpu["job"] else "") for gpu in node["gpus"]] for node in fleet["nodes"]]
    uses = Counter(use for node in on_map for use in node)
    assert uses["job"] + uses["unknown"] == gpus["running"]
    assert uses["unknown"] == fleet["gpus"]["unknown_use"]
    assert (uses["promise"], uses["window"], uses["reservation"]) == tuple(
        gpus[name] for name in ("promised", "window", "reservation")
    )
    free = 0
    answers = site.cache.get_node_answers(board)
    for row, node in enumerate(fleet["nodes"]):
        answer = msgspec.json.decode(answers.read_scored_body(row))
        assert [gpu.get("held_by") or ("job" if gpu["job"] else "") for gpu in answer["gpus"]] == on_map[row]
        unknown, promised = drain._find_non_job_use(board, row)
        assert (unknown, sum(promised.values())) == (on_map[row].count("unknown"), on_map[row].count("promise"))
        assert sum(drain._count_gpus_by_job(site.cache, board, row).values()) == on_map[row].count("job")
        is_kept = any(use in ("window", "reservation") for use in on_map[row])
        assert not is_kept or describe_window(board, node["node"])
        assert bool(describe_window(board, node["node"])) == bool(answer["withheld"])
        free += drain._count_pool_gpus(site.cache, board, row, site.config.placer).gpus_free_here
    nodes = site.station.make_weather(board).nodes  # type: ignore[union-attr]
    assert nodes is not None
    assert nodes.free.sum() == free
    closed = {node["node"] for node, uses in zip(fleet["nodes"], on_map, strict=True) if "window" in uses}
    assert closed <= nodes.in_window.keys()
    view = site.placer.view.observe_fleet().view
    _check_queues(site, board, page)
    fragments = sum(row.free_gpus for row in measure_fragmentation(view, site.placer.make_options()))
    assert free == gpus["free"] == sum(window.gpus for window in find_free_windows(view, ()))
    taken = np.zeros((NODES, GPUS))
    np.add.at(taken, tuple(board.array("gpu.parts")[:, 1:3].T), board.array("gpu.parts")[:, 3])
    running = {row["job"] for row in board.json("doc.jobs") if row["state"] == "running"}
    for intent in site.placer.ledger.list_active_intents():
        for rank in intent.ranks if intent.job not in running else ():
            taken[int(rank.node[1:]), list(rank.gpus)] += rank.milli if rank.milli < 1000 else 0
    left = np.maximum(1000 - taken, 0)[(taken > 0) & view.is_open[:, None]].sum() / 1000  # strangers take promises
    assert fragments == pytest.approx(free + left), "fragments include what is left of shared GPUs"


def _check_queues(site: Site, board: Board, page: str) -> None:
    """Check that queues hold, by their metrics and by open charges, what jobs hold on the map."""
    gpus, parts = board.json("doc.fleet")["gpus"], board.array("gpu.parts")
    shared = {(row, gpu) for _, row, gpu, _ in parts.tolist()}
    milli = 1000 * (gpus["running"] - gpus["unknown_use"] - len(shared)) + int(parts[:, 3].sum())
    by_queue = {
        state: sum(
            float(line.split()[-1]) for line in page.splitlines() if line.startswith(QUEUE_GPUS) and state in line
        )
        for state in ("running", "promised", "queued")
    }
    assert by_queue["running"] == pytest.approx(milli / 1000)
    opened = site.placer.ledger.charges.list_open_charges().values()
    active = {row.request_id for row in site.placer.ledger.list_active_intents()}
    given = (
        sum(rank.milli * len(rank.gpus) for row in site.placer.ledger.list_active_intents() for rank in row.ranks)
        / 1000
    )
    promised = {name for name in site.shares if f"r-{name}" in active}
    assert promised or by_queue["promised"] == gpus["promised"] <= given
    assert by_queue["promised"] <= given
    running = milli / 1000 + gpus["unknown_use"] + by_queue["promised"]
    assert site.demand("running") == pytest.approx(running, abs=1e-9)
    charged, held = sum(charge.gpus for charge in opened), by_queue["running"] + given
    if any(row["displaced"] for row in board.json("jobs.running")):
        assert charged >= held - 1e-6, "a charge does not shrink when an end is reported late"
    else:
        assert charged == pytest.approx(held)


def _check_waiting(site: Site, board: Board) -> None:
    fleet, rows = board.json("doc.fleet"), board.json("doc.jobs")
    waiting = {row["job"]: row["gpus"] for row in rows if row["state"] == "queued"}
    milli = sum(gpus * site.shares.get(job, 1000) for job, gpus in waiting.items())
    assert (len(waiting), math.ceil(milli / 1000)) == (fleet["queued_jobs"], fleet["queued_gpus"])
    page = bytes(board.raw("metrics.fleet")).decode()
    assert f'fleetcast_jobs{{state="queued"}} {fleet["queued_jobs"]}\n' in page
    assert f"fleetcast_queued_gpus {fleet['queued_gpus']}\n" in page
    assert site.demand("queued") == milli / 1000
    own = {entry.request.job for entry in site.placer.ledger.list_queue_entries()}
    promised = {row.job for row in site.placer.ledger.list_active_intents()}
    others = {entry.request.job for entry in read_waiting_jobs(board, own | promised)}
    assert own | others == waiting.keys()
    if site.queue:
        states = QueueAdmin(site.placer).answer_queues().rows
        assert sum(row.waiting_gpus for row in states) == pytest.approx(milli / 1000)
        assert sum(row.waiting for row in states) == fleet["queued_jobs"]
        opened = site.placer.ledger.charges.list_open_charges().values()
        held = sum(row.held.get("gpu", 0.0) for row in states)
        assert held == pytest.approx(sum(row.gpus for row in opened if row.leaf))
    running = sum(row["gpus"] for row in rows if row["state"] == "running" and row["job"] not in site.shares)
    shared = {(row, gpu) for _, row, gpu, _ in board.array("gpu.parts").tolist()}
    assert running + len(shared) == fleet["gpus"]["running"] - fleet["gpus"]["unknown_use"]
