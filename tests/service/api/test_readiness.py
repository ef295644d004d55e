"""Readiness: every condition by its name, with a sentence, and 503 until all are met."""

import json
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from fleetcast.cli.run import RoleName, _run_role
from fleetcast.fleet.clock import ManualClock, format_moment
from fleetcast.fleet.errors import StaleError
from fleetcast.placement.ledger.ledger import Ledger, LedgerError
from fleetcast.service.api.app import create_app
from fleetcast.service.board.board import BoardWriter, Section
from fleetcast.service.config import Config
from fleetcast.service.exit_reason import announce_ready, record_exit_reason
from fleetcast.service.placer.metrics import PlacerMetrics
from fleetcast.service.placer.service import PlacementService
from tests.service.api_world import NOW_MS, Client, FakePlacer, config, publish, running, sections
from tests.service.placer_world import HandBoard

READY_BODY = b'{"ok":true,"warming":false}'


class World:
    """An api whose surroundings can be made to fail."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self.folder = folder
        self.clock = ManualClock(NOW_MS)
        self.placer = stack.enter_context(running(FakePlacer(body=READY_BODY)))
        self.app = create_app(config(folder, self.placer.port), self.clock)
        self.client = stack.enter_context(Client(self.app))

    def asked(self) -> tuple[int, dict[str, str], dict[str, Any]]:
        """Status, the sentences of what is not ok by name, and the body."""
        response = self.client.get("/readyz")
        body = response.json()
        failing = {row["name"]: row["sentence"] for row in body["checks"] if not row["ok"]}
        assert body.get("missing", []) == list(failing.values())
        return response.status_code, failing, body


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    with ExitStack() as stack:
        yield World(tmp_path, stack)


def test_ready_with_all_checks_named(world: World) -> None:
    publish(world.folder)
    status, failing, body = world.asked()
    assert (status, failing, body["status"]) == (200, {}, "ready")
    assert {row["name"]: row["sentence"] for row in body["checks"]} == {
        "board": "the board is 0 s old",
        "occupancy": "what runs where is known",
        "sources": "no source fails",
        "history": "warming: 1 of 30 minutes of history",
        "placer": "the placer answers",
        "state": "the parts of the state agree",
        "inbox": "the inbox can be written",
    }


def test_no_board_is_not_ready(world: World) -> None:
    assert world.asked()[:2] == (503, {"board": "no board was published yet: the pipeline is starting or down"})


def test_an_old_board_is_not_ready(world: World) -> None:
    publish(world.folder)
    world.clock.advance(61)
    status, failing, _ = world.asked()
    assert status == 503
    assert failing["board"].startswith("the board is 61 s old, at most 60 s are fresh")


def test_a_clock_that_was_set_back_is_judged_as_the_placer_judges_it(world: World) -> None:
    HandBoard(config(world.folder).board, as_of_ms=NOW_MS).publish()
    world.clock.time_ms -= 86_400_000
    status, failing, _ = world.asked()
    ledger = Ledger(config(world.folder).ledger)
    service = PlacementService(config(world.folder), world.clock, ledger, PlacerMetrics())
    with pytest.raises(StaleError) as refused:
        service.view.observe_fleet()
    ledger.close()
    assert (status, failing["board"]) == (503, str(refused.value))
    assert failing["board"].startswith("the board is 86400 s ahead of the clock: the clock was set back")
    assert world.app.state.context.answerers.answer_verb("kube", "filter", b"{}")[1] is None


@pytest.mark.parametrize("damage", ["no SQLite", "a folder"])
def test_what_keeps_the_placer_from_starting_is_told_until_it_starts(tmp_path: Path, damage: str) -> None:
    with ExitStack() as stack:
        clock = ManualClock(NOW_MS)
        client = stack.enter_context(Client(create_app(config(tmp_path), clock)))
        publish(tmp_path)
        there = Config(state=str(tmp_path))
        there.ledger.write_bytes(b"no ledger" * 1000) if damage == "no SQLite" else there.ledger.mkdir()
        with pytest.raises(LedgerError) as ended:
            _run_role(RoleName.PLACER, there, 0)
        placer = {row["name"]: row for row in client.get("/readyz").json()["checks"]}["placer"]
        assert placer == {"name": "placer", "ok": False, "sentence": f"the placer cannot start: {ended.value}"}
        for answer in (client.post("/v1/placements", json={"request_id": "a"}), client.get("/v1/queue")):
            assert (answer.status_code, answer.json()["detail"]) == (503, placer["sentence"])
        announce_ready(tmp_path, "placer")
        for path in ("/readyz", "/v1/queue"):
            assert "does not answer" in client.get(path).text


def test_what_the_pipeline_ended_of_is_told_with_its_board(world: World) -> None:
    with pytest.raises(ExceptionGroup), record_exit_reason(world.folder, "pipeline"):
        raise ExceptionGroup("tasks", [ExceptionGroup("more", [ZeroDivisionError("by zero")])])
    assert world.asked()[1]["board"].endswith("down; pipeline ended: a bug, ZeroDivisionError: by zero")


@pytest.mark.parametrize(
    ("body", "sentence"),
    [(b'{"warming":true}', "the placer has seen no board yet"), (b"[", None), (b"{}", None)],
)
def test_a_placer_without_a_board_is_not_ready(world: World, body: bytes, sentence: str | None) -> None:
    publish(world.folder)
    world.placer.body = body
    assert world.asked()[1].get("placer") == sentence


def test_a_placer_that_fails_is_named(world: World) -> None:
    publish(world.folder)
    world.placer.status = 500
    assert world.asked()[:2] == (503, {"placer": "the placer answers 500: it does not say why"})


def test_why_a_placer_that_answers_does_not_trust_its_ledger_is_told(world: World) -> None:
    publish(world.folder)
    world.placer.status = 503
    world.placer.body = b'{"type": "urn:fleetcast:problem:unavailable", "detail": "ledger.sqlite is damaged (page 7)"}'
    told = {"placer": "the placer answers 503: ledger.sqlite is damaged (page 7)"}
    assert world.asked()[:2] == (503, told)


def test_a_part_of_the_state_in_doubt_is_named_with_the_time(world: World) -> None:
    publish(world.folder)
    doubt = {"part": "ledger", "what": "the ledger is new", "since_ms": NOW_MS}
    world.placer.body = json.dumps({"warming": True, "doubts": [doubt]}).encode()
    status, failing, _ = world.asked()
    assert status == 503
    assert list(failing) == ["placer", "state"]
    what_to_do = "nothing is placed until it is put back, or accepted: fleetcast state show"
    assert failing["state"] == f"the ledger is new (last whole at {format_moment(NOW_MS)}); {what_to_do}"


def test_occupancy_that_is_not_known_is_not_ready(world: World) -> None:
    meta = json.dumps({"warming": None, "occupancy_known": False, "occupancy_unknown": "lost"}).encode()
    rows = [section for section in sections() if section.name != "meta"]
    BoardWriter(world.folder / "board").publish([*rows, Section("meta", meta, NOW_MS)], NOW_MS)
    status, failing, _ = world.asked()
    assert status == 503
    assert failing == {"occupancy": "lost, so nothing is placed"}


def test_a_source_that_fails_is_told_and_the_others_go_on(world: World) -> None:
    row = {"name": "kafka", "failing": True, "last_error": "next(): KeyError: 'x'"}
    ingestion = json.dumps({"sources": [{"name": "inbox", "failing": False, "last_error": "old"}, row]}).encode()
    rows = [section for section in sections() if section.name != "doc.ingestion"]
    BoardWriter(world.folder / "board").publish([*rows, Section("doc.ingestion", ingestion, NOW_MS)], NOW_MS)
    status, failing, body = world.asked()
    assert (status, failing) == (200, {})
    told = {row["name"]: row["sentence"] for row in body["checks"]}
    assert told["sources"] == "kafka fails (next(): KeyError: 'x'): started again at most a minute later"


def test_an_inbox_that_cannot_be_written_is_not_ready(world: World) -> None:
    publish(world.folder)
    (world.folder / "inbox").rmdir() if (world.folder / "inbox").exists() else None
    (world.folder / "inbox").write_text("in the way")
    status, failing, _ = world.asked()
    assert status == 503
    assert failing["inbox"].startswith("the inbox cannot be written: ")


def test_alive_asks_for_nothing(world: World) -> None:
    world.placer.status = 500
    assert world.client.get("/healthz").json() == {"status": "ok"}
