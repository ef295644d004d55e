"""`POST /v1/interference` and `POST /v1/isolation/verify`, from job events and telemetry to the answer."""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fleetcast.fleet.clock import ManualClock
from fleetcast.fleet.entities import MAX_NAME_LENGTH
from fleetcast.fleet.events import Finished, Started, Step, StepParts, Submitted
from fleetcast.fleet.metrics import find_metric_row
from fleetcast.fleet.requests import RankPlacement
from fleetcast.fleet.samples import EntityKind, SampleBatch
from fleetcast.ingest.source import Batch
from fleetcast.service.api.app import create_app
from fleetcast.service.pipeline.jobs.interference import CoRunTables, explain_by_co_run
from fleetcast.service.pipeline.jobs.isolation import (
    IsolationExpectation,
    ObservedGpu,
    check_isolation,
    combine_checks,
    parse_profile_gib,
)
from fleetcast.service.pipeline.pipeline import Pipeline
from tests.service.api_world import Client, config
from tests.service.runs_world import GIB, NOW_MS, pipeline_in

LOADS = {"n1/0": 0.6, "n1/1": 0.7}


class Fleet:
    """A pipeline of one node whose jobs begin, step and end, and the API over its board."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.now_ms = folder, NOW_MS
        self.pipeline: Pipeline = pipeline_in(folder)
        self.sequence = 0

    def take(self, **more: Any) -> None:
        self.pipeline.apply_batch(Batch(**more))

    def has_board(self, index: int) -> None:
        """Let n1 have a GPU of which nothing is heard."""
        self.pipeline.state.entities.add_to_node(EntityKind.GPU, "n1", index)
        self.tick()

    def event(self, kind: Any, job: str, **more: Any) -> Any:
        self.sequence += 1
        return kind(job=job, sequence=self.sequence, **({"time_ms": self.now_ms} | more))

    def start(self, job: str, gpu: int) -> None:
        ranks = (RankPlacement(0, "n1", (gpu,)),)
        self.take(events=(self.event(Submitted, job, user="ada", name=job), self.event(Started, job, ranks=ranks)))
        self.tick()

    def steps(self, times: int, **seconds: float) -> None:
        events = []
        for job, duration_s in seconds.items():
            parts = StepParts(compute=duration_s / 2, communication=duration_s / 2)
            for number in range(times):
                at_ms = self.now_ms + round((number + 1) * duration_s * 1000)
                told = {"time_ms": at_ms, "step": number, "duration_s": duration_s, "parts": parts}
                events.append(self.event(Step, job, **told))
        self.take(events=tuple(events))
        self.pass_s(times * max(seconds.values()))

    def pass_s(self, seconds: float) -> None:
        self.now_ms += round(seconds * 1000)
        self.pipeline.clock.advance(seconds)  # type: ignore[attr-defined]
        self.read()
        self.tick()

    def read(self, **more: float) -> None:
        entities, rows = self.pipeline.state.entities, []
        for name, load in LOADS.items():
            index = int(name[-1])
            values = {"sm_active": load, "fb_used_bytes": 20 * GIB, "fb_free_bytes": 60 * GIB, **more}
            row = entities.add_to_node(EntityKind.GPU, "n1", index)
            rows += [
                (find_metric_row(EntityKind.GPU, metric), row, self.now_ms, value) for metric, value in values.items()
            ]
        self.take(samples=(SampleBatch.from_rows(EntityKind.GPU, rows),))

    def slices(self, *memory_gib: float) -> None:
        entities, rows = self.pipeline.state.entities, []
        for number, gib in enumerate(memory_gib):
            row = entities.add_to_node(EntityKind.GPU_INSTANCE, "n1", 0, number)
            for name, value in (("fb_used_bytes", 0.0), ("fb_free_bytes", gib * GIB)):
                rows.append((find_metric_row(EntityKind.GPU_INSTANCE, name), row, self.now_ms, value))
        self.take(samples=(SampleBatch.from_rows(EntityKind.GPU_INSTANCE, rows),))

    def end(self, job: str) -> None:
        self.take(events=(self.event(Finished, job),))
        self.tick()

    def tick(self) -> None:
        asyncio.run(self.pipeline.tick())

    def restart(self) -> None:
        asyncio.run(self.pipeline.save())
        asyncio.run(self.pipeline.close())
        self.pipeline = pipeline_in(self.folder, self.now_ms)
        self.tick()

    def post(self, path: str, body: Any, status: int = 200) -> Any:
        with Client(create_app(config(self.folder), ManualClock(self.now_ms))) as client:
            answer = client.post(path, json=body)
        assert answer.status_code == status, answer.text
        return answer.json()

    def get(self, path: str) -> Any:
        with Client(create_app(config(self.folder), ManualClock(self.now_ms))) as client:
            return client.get(path).json()

    def ask(self, a: Any, b: Any, share: str = "gpu") -> Any:
        return self.post("/v1/interference", {"a": a, "b": b, "share": share})


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Fleet]:
    found = Fleet(tmp_path)
    found.read()
    found.tick()
    yield found
    asyncio.run(found.pipeline.close())


def test_of_jobs_that_nobody_knows_nothing_is_guessed(fleet: Fleet) -> None:
    told = fleet.ask("a", "b")
    assert not told["known"]
    assert told["speed_a"] == told["speed_b"] == {"p50": None, "lower_90": None}
    assert set(told["reasons"]) == {"a", "b"}


def test_jobs_that_ran_alone_are_told_by_the_rule_and_those_like_them(fleet: Fleet) -> None:
    fleet.start("a-1", 0)
    fleet.start("b-1", 1)
    fleet.steps(70, **{"a-1": 1.0, "b-1": 1.0})
    told = fleet.ask("a-1", {"user": "ada", "name": "b-7"})
    assert (told["known"], told["basis"], told["observed"]) == (True, "rule", 0)
    assert told["speed_a"]["p50"] == told["speed_b"]["p50"] == pytest.approx(1 - 0.42 / 2, abs=0.01)
    assert "nine co-runs" in told["reasons"]["lower_90"]
    half = fleet.ask("a-1", "stranger")
    assert half["speed_a"]["p50"] == pytest.approx(1 - 0.6 / 2, abs=0.01)
    assert (half["known"], half["known_a"], half["known_b"]) == (False, True, False)
    assert "no job of this name" in half["reasons"]["b"]
    assert "Nothing is known of b" in half["sentence"]
    unseen = fleet.ask({"user": "eve", "name": "new"}, "a-1")
    assert (unseen["known_a"], unseen["known_b"]) == (False, True)
    assert "use all" in unseen["reasons"]["a"]


def test_of_a_job_that_runs_nobody_says_that_there_is_none(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tables of co-runs are made beside the ticks: a job may be on the board before it is in them."""
    fleet.start("a-1", 0)
    monkeypatch.setattr(CoRunTables, "find_job_keys", lambda known, job: None)
    reasons = fleet.ask("a-1", "stranger")["reasons"]
    assert "not looked at yet" in reasons["a"]
    assert "no job of this name" in reasons["b"]


def test_a_co_run_that_was_observed_moves_the_answer_and_survives_a_restart(fleet: Fleet) -> None:
    fleet.start("a-1", 0)
    fleet.steps(70, **{"a-1": 1.0})
    fleet.start("b-1", 0)
    fleet.steps(20, **{"a-1": 2.5, "b-1": 2.5})
    before = fleet.ask("a-1", "b-1")
    assert (before["basis"], before["observed"]) == ("observed", 1)
    assert before["speed_a"]["p50"] < 1 - 0.6 / 2 - 0.05
    fleet.restart()
    after = fleet.ask("a-1", "b-1")
    assert {**after, "as_of_ms": 0} == {**before, "as_of_ms": 0}


def test_periodic_jobs_on_a_link_are_told_by_how_their_turns_meet(fleet: Fleet) -> None:
    fleet.start("a-1", 0)
    fleet.start("b-1", 1)
    fleet.steps(70, **{"a-1": 1.0, "b-1": 1.0})
    told = fleet.ask("a-1", "b-1", "nic")
    assert told["known"]
    assert told["compatibility"] == pytest.approx(1.0, abs=0.01)
    assert told["shifts_s"] == [0.0, 0.5]
    assert told["speed_a"]["p50"] < 1.0
    assert told["speed_a"]["lower_90"] is None
    assert "nine co-runs" in told["reasons"]["lower_90"]
    ask = {"a": "a-1", "b": "b-1", "share": "rail", "others": ["b-1"]}
    three = fleet.post("/v1/interference", ask)
    assert three["compatibility"] == pytest.approx(0.5, abs=0.01)
    assert len(three["shifts_s"]) == 3
    fleet.post("/v1/interference", {**ask, "share": "gpu"}, 422)
    strange = fleet.ask("a-1", "nobody", "nic")
    assert (strange["known_a"], strange["known_b"], strange["speed_b"]["p50"]) == (True, False, None)


def test_a_slow_job_that_nothing_else_explains_is_slowed_by_the_one_beside_it() -> None:
    row = {"beside": "b-1", "share": "gpu", "speed": 0.5, "lower_90": 0.7, "slower": True}
    score = {"slow": True, "culprit": {"kind": "nobody"}, "cause": "compute", "sentence": "x is slow"}
    assert explain_by_co_run(score, row)["cause"] == "interference"
    assert "next to b-1 on the same gpu it runs at 50%" in explain_by_co_run(score, row)["sentence"]
    assert explain_by_co_run(score, {**row, "slower": False}) == explain_by_co_run(score, None) == {}
    for other in ({"slow": False}, {"culprit": {"kind": "worker"}}, {"cause": "checkpoint"}):
        assert explain_by_co_run({**score, **other}, row) == {}


def test_a_pair_that_is_slower_than_its_bound_is_said_to_be(fleet: Fleet) -> None:
    for number in range(10):
        a, b = f"a-{number}", f"b-{number}"
        fleet.start(a, 0)
        fleet.steps(70, **{a: 1.0})
        fleet.start(b, 0)
        fleet.steps(10, **{a: 4.0 if number == 9 else 1.2, b: 1.2})
        if number in (0, 9):
            told = fleet.ask(a, b)
            assert told["now"]["a"]["beside"] == b
            assert (told["now"]["a"]["lower_90"] is None) is (number == 0)
            assert told["now"]["a"]["slower"] is ("part them" in told["sentence"]) is (number == 9)
            slow = fleet.get(f"/v1/jobs/{a}/stragglers")
            assert (slow["cause"] == "interference") is (number == 9), slow
        fleet.end(a)
        fleet.end(b)
    assert not fleet.ask(a, b)["now"]


@pytest.mark.parametrize(
    "body",
    [
        {"a": "x"},
        {"a": "x", "b": "y", "share": "disk"},
        {"a": "x", "b": "y", "c": 1},
        {"a": 3, "b": "y"},
        {"a": "x" * (MAX_NAME_LENGTH + 1), "b": "y"},
        {"a": "x", "b": {"user": "x" * (MAX_NAME_LENGTH + 1)}},
        {"a": "x", "b": {"name": "x" * (MAX_NAME_LENGTH + 1)}},
        {"a": {"gpus": 10**399}, "b": "y"},
        {"a": "x", "b": {"gpus": 0}},
    ],
)
def test_what_is_no_question_is_refused(fleet: Fleet, body: Any) -> None:
    assert fleet.post("/v1/interference", body, 422)["errors"]


@pytest.mark.parametrize(
    ("path", "body", "status", "field"),
    [
        ("interference", '{"a": NaN, "b": "y"}', 400, None),
        ("interference", '{"a": "x"}', 422, "b"),
        ("interference", '{"a": "x", "b": {"gpus": 1e30}}', 422, "b.gpus"),
        (
            "interference",
            '{"a": "x", "b": "y", "share": "nic", "others": [' + ",".join(['"x"'] * 10_000) + "]}",
            422,
            "others",
        ),
        (
            "interference",
            '{"a": "x", "b": "\\ud83d\\ude00 \\u0000 日本", "share": "rail", "others": ["x", "x"]}',
            200,
            None,
        ),
        (
            "isolation/verify",
            '{"node": "n1", "gpu": 0, "expected": {"power_max_w": 1e999}}',
            422,
            "expected.power_max_w",
        ),
        (
            "isolation/verify",
            '{"node": "n1", "gpu": 0, "expected": {"power_max_w": 1e300}}',
            422,
            "expected.power_max_w",
        ),
        ("isolation/verify", '{"node": "n1", "gpu": 0.5, "expected": {"mig": true}}', 422, "gpu"),
        ("isolation/verify", '{"gpu": 0, "expected": {"mig": true}}', 422, "node"),
    ],
)
def test_what_is_odd_is_answered_with_the_field_that_is(
    fleet: Fleet, path: str, body: str, status: int, field: str | None
) -> None:
    with Client(create_app(config(fleet.folder), ManualClock(fleet.now_ms))) as client:
        told = client.post(f"/v1/{path}", content=body.encode(), headers={"content-type": "application/json"})
    assert told.status_code == status, told.text
    assert field is None or told.json()["errors"][0]["field"] == field


def test_an_isolation_in_force_is_confirmed_and_what_says_otherwise_is_named(fleet: Fleet) -> None:
    fleet.start("a-1", 0)
    fleet.read(pcie_link_gen=3.0)
    fleet.slices(9.5, 9.5)
    fleet.tick()
    ask = {"node": "n1", "gpu": 0, "expected": {"mig_profile": "1g.10gb", "jobs": ["a-1"], "pcie_link_gen": 3}}
    told = fleet.post("/v1/isolation/verify", ask)
    assert (told["ok"], [row["ok"] for row in told["checks"]]) == (True, [True, True, True])
    ask["expected"] = {"mig_profile": "3g.40gb", "pcie_link_gen": 5, "jobs": ["a-1"]}
    told = fleet.post("/v1/isolation/verify", ask)
    assert told["ok"] is False
    assert {row["field"]: row["ok"] for row in told["checks"]} == {
        "mig_profile": False,
        "jobs": True,
        "pcie_link_gen": False,
    }
    assert "pcie_link_gen is 3.0, not 5" in told["sentence"]


def test_what_cannot_be_seen_is_neither_right_nor_wrong(fleet: Fleet) -> None:
    ask = {"node": "n1", "gpu": 1, "expected": {"network_max_bytes_per_s": 1e9, "mig": False}}
    told = fleet.post("/v1/isolation/verify", ask)
    assert told["ok"] is None
    assert "network_max_bytes_per_s" in told["sentence"]


def test_a_job_whose_gpus_no_event_names_may_hold_any_of_its_node(fleet: Fleet) -> None:
    fleet.start("a-1", 0)
    fleet.take(events=(fleet.event(Submitted, "b-1"), fleet.event(Started, "b-1", nodes=("n1",))))
    fleet.tick()

    def jobs(*wanted: str) -> Any:
        (row,) = fleet.post("/v1/isolation/verify", {"node": "n1", "gpu": 0, "expected": {"jobs": wanted}})["checks"]
        return row

    assert jobs("a-1")["ok"] is jobs("a-1", "b-1")["ok"] is None
    assert "names the GPUs of b-1" in jobs("a-1")["reason"]
    assert jobs("b-1")["ok"] is jobs("a-1", "c-1")["ok"] is False


def test_what_no_metric_tells_is_unknown_and_a_use_below_a_limit_is_no_proof_of_it(fleet: Fleet) -> None:
    fleet.start("a-1", 0)
    expected = {"cpu_pinning": "0-15", "sm_active_max": 0.9, "power_max_w": 300}
    told = fleet.post("/v1/isolation/verify", {"node": "n1", "gpu": 0, "expected": expected})
    rows = {row["field"]: (row["ok"], row["reason"]) for row in told["checks"]}
    assert told["ok"] is None
    assert rows["cpu_pinning"][0] is None
    assert "cpuset.cpus.effective" in rows["cpu_pinning"][1]
    assert "cpuset.cpus.effective" in told["sentence"]
    assert rows["power_max_w"] == (None, "not seen: DCGM_FI_DEV_POWER_USAGE would show it")
    assert rows["sm_active_max"][0] is True
    assert "not seen" in rows["sm_active_max"][1]
    held = fleet.post("/v1/isolation/verify", {"node": "n1", "gpu": 0, "expected": {"sm_active_max": 0.9}})
    assert held["sentence"] == "Nothing says otherwise now; of limits only their use is seen."


@pytest.mark.parametrize("expected", [{"mig": False}, {"mig": True}, {"jobs": []}, {"mig_profile": "1g.10gb"}])
def test_of_a_gpu_that_nothing_was_heard_of_nothing_is_confirmed(fleet: Fleet, expected: Any) -> None:
    fleet.has_board(7)
    told = fleet.post("/v1/isolation/verify", {"node": "n1", "gpu": 7, "expected": expected})
    assert told["ok"] is None
    assert "This GPU sent no telemetry" in told["sentence"]
    heard = fleet.post("/v1/isolation/verify", {"node": "n1", "gpu": 1, "expected": {"mig": False, "jobs": []}})
    assert heard["ok"] is True


@pytest.mark.parametrize("expected", [{"mig": False}, {"mig": True}, {"mig_profile": "1g.10gb"}])
def test_a_job_tells_nothing_of_the_division_of_a_gpu_that_is_silent(fleet: Fleet, expected: Any) -> None:
    fleet.has_board(7)
    fleet.start("a-1", 7)
    told = fleet.post("/v1/isolation/verify", {"node": "n1", "gpu": 7, "expected": {**expected, "jobs": ["a-1"]}})
    rows = {row["field"]: row for row in told["checks"]}
    (field,) = expected
    assert (told["ok"], rows["jobs"]["ok"]) == (None, True)
    assert (rows[field]["ok"], rows[field]["observed"]) == (None, None)
    assert "would show it" in rows[field]["reason"]


@pytest.mark.parametrize(
    ("body", "status"),
    [
        ({"node": "n9", "gpu": 0, "expected": {"mig": True}}, 404),
        ({"node": "n1", "gpu": 99, "expected": {"mig": True}}, 404),
        ({"node": "n1", "gpu": -1, "expected": {"mig": True}}, 404),
        ({"node": "n1", "gpu": 0, "expected": {"power_max_w": -1}}, 422),
        ({"node": "n1", "gpu": 0, "expected": {"jobs": ["x"] * 10_000}}, 422),
        ({"node": "n1", "gpu": 0, "expected": {}}, 422),
        ({"node": "n1", "gpu": 0, "expected": {"colour": 1}}, 422),
        ({"node": "n1", "gpu": 0, "expected": {"mig_profile": "1" * 65}}, 422),
        ({"node": "n1", "gpu": 0, "expected": {"pcie_link_gen": 10**30}}, 422),
        ({"node": "n1", "gpu": 10**399, "expected": {"mig": True}}, 404),
    ],
)
def test_an_isolation_of_nothing_known_is_refused(fleet: Fleet, body: Any, status: int) -> None:
    fleet.post("/v1/isolation/verify", body, status)


def test_a_gpu_beyond_those_of_its_node_is_not_there(fleet: Fleet) -> None:
    row = fleet.pipeline.state.entities.add_to_node(EntityKind.GPU, "n2", 3)
    told = [(find_metric_row(EntityKind.GPU, "sm_active"), row, fleet.now_ms, 0.5)]
    fleet.take(samples=(SampleBatch.from_rows(EntityKind.GPU, told),))
    fleet.tick()
    ask = {"node": "n2", "gpu": 4, "expected": {"mig": False}}
    assert "has 4 GPUs" in fleet.post("/v1/isolation/verify", ask, 404)["detail"]
    assert fleet.post("/v1/isolation/verify", {**ask, "gpu": 3})["ok"] is True


@pytest.mark.parametrize(
    ("profile", "gib"),
    [("1g.10gb", 10), ("MIG 3g.40gb", 40), ("1c.2g.20gb", 20), ("1g.5gb+me", 5), ("12.10gb", None), ("1" * 64, None)],
)
def test_the_memory_of_a_profile_is_read_from_its_name(profile: str, gib: float | None) -> None:
    assert parse_profile_gib(profile) == gib


def test_limits_hold_up_to_a_hundredth() -> None:
    readings = {"fb_used_bytes": 10 * GIB, "sm_active": 0.5, "power_w": float("nan")}
    sight = ObservedGpu(readings, 2e9, {}, ["a", "b"])
    expected = IsolationExpectation(gpu_memory_max_gib=10.0, sm_active_max=0.4, power_max_w=300.0, jobs=["b", "a"])
    rows = check_isolation(expected, sight, 0)
    assert {row.field: row.ok for row in rows} == {
        "jobs": True,
        "gpu_memory_max_gib": True,
        "sm_active_max": False,
        "power_max_w": None,
    }
    assert combine_checks(rows) is False
