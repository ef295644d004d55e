"""`POST /v1/jobs/estimate` and the start of a waiting job, over a hand-made board and a placer that answers as told."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fleetcast.features.past_runs import make_request_shape
from fleetcast.features.run_past import LEVELS
from fleetcast.features.similarity import make_kind_keys
from fleetcast.fleet.clock import ManualClock
from fleetcast.fleet.requests import PlacementRequest
from fleetcast.service.api.app import create_app
from fleetcast.service.api.estimates import NO_READINGS, NO_RUNS, PlacerEstimate, describe_estimate, format_duration
from fleetcast.service.board.board import BoardWriter, Section
from fleetcast.service.board.kind_tables import PEAK, RUN, RUNS_SEEN, RunTime, make_table_sections
from tests.service.api_world import NOW_MS, Client, FakePlacer, config, job_row, running, sections

REQUEST = {"request_id": "train-7", "user": "ada", "queue": "train", "gang": 2, "gpus_per_node": 8}
RUN_S = (300.0, 600.0, 1800.0, 5400.0, 9000.0, 31_000.0, 40_000.0, 52_000.0)
START_MS = {"p10": NOW_MS + 1_200_000, "p50": NOW_MS + 2_400_000, "p90": NOW_MS + 3_900_000}
START = {
    "start_ms": START_MS,
    "blocked_by": [{"job": "4711", "node": "n001", "ends_ms": START_MS}],
    "constraint": "topology",
    "sentence": "needs 16 GPUs; the earliest such block is in 40 min (p90 65 min), when job 4711 ends",
    "as_of_ms": NOW_MS,
}


def tables(memory_gib: float = 71.26, power_w: float = 590.4) -> list[Any]:
    """What is known of ada's runs called train, and of nothing else."""
    key = make_kind_keys(make_request_shape(PlacementRequest(request_id="train-7", user="ada", queue="train")))[
        "user and name"
    ]
    keys = np.array([key], np.uint64)
    return [
        *make_table_sections(RUN, keys, np.array([RUN_S], np.float32), NOW_MS, "duration-0003"),
        Section(RUNS_SEEN, np.array([40], np.uint32), NOW_MS),
        *make_table_sections(PEAK, keys, np.array([[memory_gib, power_w, 12]], np.float32), NOW_MS),
    ]


def board(folder: Path, *more: Any) -> None:
    writer = BoardWriter(folder / "board")
    writer.publish([*sections(), *more], NOW_MS)


@pytest.fixture
def placer() -> Iterator[FakePlacer]:
    with running(FakePlacer(body=json.dumps(START).encode())) as fake:
        yield fake


def asked(folder: Path, port: int, body: Any = REQUEST) -> Any:
    with Client(create_app(config(folder, port), ManualClock(NOW_MS + 7900))) as client:
        return client.post("/v1/jobs/estimate", content=body if isinstance(body, bytes) else json.dumps(body).encode())


def test_an_estimate_tells_run_time_needs_and_start(tmp_path: Path, placer: FakePlacer) -> None:
    board(tmp_path, *tables())
    response = asked(tmp_path, placer.port)
    assert response.status_code == 200
    assert response.headers["age"] == "7"
    assert response.json() == {
        "as_of_ms": NOW_MS,
        "request_id": "train-7",
        "run_s": {"p50": 5400, "p90": 31_000, "p99": 52_000},
        "peak_gpu_memory_gib": 71.3,
        "power_w": 9446,  # sixteen GPUs
        "start_ms": START_MS,
        "blocked_by": START["blocked_by"],
        "constraint": "topology",
        "sentence": f"{START['sentence']}. It should run 1 h 30 min (p90 8 h 37 min).",
        "model": "duration-0003",
        "similar": {"run_s": "user and name", "needs": "user and name", "runs_seen": 40},
        "reasons": {},
        "ignored": [],
        "start_as_of_ms": NOW_MS,
        "by": None,
    }
    method, path, body = placer.asked[0]
    assert (method, path, json.loads(body)) == ("POST", "/estimate", REQUEST)


def test_an_estimate_names_the_facts_that_it_did_not_use(tmp_path: Path, placer: FakePlacer) -> None:
    board(tmp_path, *tables())
    facts = {"preemptible": True, "tenant": "research", "class": "batch", "checkpoint_cost_s": 30}
    told = asked(tmp_path, placer.port, REQUEST | facts).json()
    assert told["ignored"] == ["checkpoint_cost_s", "class", "preemptible", "tenant"]  # the queue is compared by


def test_a_limit_bounds_the_run_time(tmp_path: Path, placer: FakePlacer) -> None:
    board(tmp_path, *tables())
    answer = asked(tmp_path, placer.port, {**REQUEST, "limit_s": 3600}).json()
    assert answer["run_s"] == {"p50": 3600, "p90": 3600, "p99": 3600}
    assert answer["sentence"].endswith("It should run 1 h, its limit.")
    alike = RunTime((300.0,) * len(LEVELS), "user", "m")
    assert describe_estimate(PlacerEstimate(None, "?"), alike).endswith("It should run 5 min.")
    assert describe_estimate(PlacerEstimate(None, "?"), alike, 3600.0).endswith("It should run 5 min.")


def test_what_nobody_knows_is_null_with_the_reason(tmp_path: Path, placer: FakePlacer) -> None:
    board(tmp_path)
    answer = asked(tmp_path, placer.port).json()
    assert answer["run_s"] is answer["peak_gpu_memory_gib"] is answer["power_w"] is answer["model"] is None
    assert answer["reasons"] == {"run_s": NO_RUNS, "peak_gpu_memory_gib": NO_READINGS, "power_w": NO_READINGS}
    assert answer["start_ms"] == START_MS
    assert answer["sentence"].endswith("Nothing is known yet of how long such a job runs.")


def test_what_telemetry_did_not_tell_of_similar_jobs_is_null_with_the_reason(
    tmp_path: Path, placer: FakePlacer
) -> None:
    board(tmp_path, *tables(power_w=np.nan))
    answer = asked(tmp_path, placer.port).json()
    assert answer["peak_gpu_memory_gib"] == 71.3
    assert answer["power_w"] is None
    assert answer["reasons"] == {"power_w": "telemetry reported no power of the 12 finished jobs like it"}


def test_while_the_placer_is_away_the_run_time_is_told_all_the_same(tmp_path: Path) -> None:
    board(tmp_path, *tables())
    answer = asked(tmp_path, 9).json()
    assert answer["run_s"]["p50"] == 5400
    assert answer["start_ms"] is None
    assert answer["blocked_by"] == []
    assert "the placer does not answer" in answer["reasons"]["start_ms"]
    assert answer["sentence"].startswith("when it starts is not known: the placer does not answer")


def test_a_placer_that_has_no_answer_now_says_why(tmp_path: Path) -> None:
    board(tmp_path, *tables())
    stale = FakePlacer(503, b'{"detail": "the board is 90 s old, at most 60 s is decided upon"}')
    with running(stale) as fake:
        answer = asked(tmp_path, fake.port).json()
    assert answer["reasons"]["start_ms"] == "the board is 90 s old, at most 60 s is decided upon"


def test_what_never_fits_says_so(tmp_path: Path) -> None:
    board(tmp_path, *tables())
    never = {**START, "start_ms": None, "blocked_by": [], "sentence": "does not fit even when all jobs have ended"}
    with running(FakePlacer(body=json.dumps(never).encode())) as fake:
        answer = asked(tmp_path, fake.port).json()
    assert answer["start_ms"] is None
    assert answer["reasons"]["start_ms"] == "does not fit even when all jobs have ended"


@pytest.mark.parametrize(
    ("body", "status", "field"),
    [
        (b"{", 400, None),
        (b"[]", 422, None),
        ({**REQUEST, "colour": "red"}, 422, "colour"),
        ({**REQUEST, "gang": 0}, 422, "gang"),
        ({**REQUEST, "gpus_per_node": 4000}, 422, "gpus_per_node"),
        ({**REQUEST, "limit_s": -1}, 422, "limit_s"),
        ({**REQUEST, "mig_profile": "1g.10gb"}, 422, "mig_profile"),
        ({"user": "ada"}, 422, "request_id"),
        (b" " * (2**20 + 1), 413, None),
    ],
)
def test_nonsense_is_refused_with_the_reason_even_without_a_placer(
    tmp_path: Path, body: Any, status: int, field: str | None
) -> None:
    board(tmp_path, *tables())
    response = asked(tmp_path, 9, body)
    assert response.status_code == status
    assert response.json()["detail"]
    if field is not None:
        assert response.json()["errors"][0]["field"] == field


def test_without_a_board_the_answer_is_warming(tmp_path: Path) -> None:
    response = asked(tmp_path, 9)
    assert response.status_code == 503
    assert response.json()["type"].endswith("warming")


def test_a_waiting_job_says_when_it_should_start(tmp_path: Path, placer: FakePlacer) -> None:
    detail = {"placement": [], "events": [], "asks": {"gang": 4, "gpus_per_node": 8, "gpu_model": "H100"}}
    parts = {"doc.jobs": [job_row("b", "queued")], "doc.job": {"b": detail}}
    known = [section for section in sections() if section.name not in parts]
    own = [type(known[0])(name, json.dumps(part).encode(), NOW_MS) for name, part in parts.items()]
    BoardWriter(tmp_path / "board").publish([*known, *own], NOW_MS)
    for port, start_ms, why in ((placer.port, START_MS, None), (9, None, "the placer does not answer")):
        with Client(create_app(config(tmp_path, port), ManualClock(NOW_MS))) as client:
            answer = client.get("/v1/jobs/b").json()
        assert answer["start_ms"] == start_ms
        assert why in answer["reasons"]["start_ms"] if why else "start_ms" not in answer["reasons"]
        assert answer["reasons"]["remaining_s"] == "it waits"
        assert "asks" not in answer
    sent = json.loads(placer.asked[0][2])
    assert (sent["request_id"], sent["gang"], sent["gpu_model"], sent["user"]) == ("b", 4, "H100", "ada")


def test_quantiles_are_in_the_order_of_their_levels() -> None:
    assert len(RUN_S) == len(LEVELS)
    assert format_duration(86_400 * 2.5) == "2 days 12 h"
    assert format_duration(100) == "100 s"
