"""Requests stored while `preemptible = false` was the default: their retries get their replies, others do not."""

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest
from msgspec import structs

from fleetcast.fleet.errors import RequestError
from fleetcast.fleet.requests import PlacementRequest
from fleetcast.placement.ledger.ledger import Ledger
from fleetcast.placement.ledger.old_bodies import SAID_AFTER
from fleetcast.placement.ledger.verify import verify_ledger
from tests.placement.ledger.ledger_world import MOVED, REFUSED, WAITING, decision, make

NEWER = PlacementRequest(request_id="newer")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A ledger as the version before left it."""
    path = tmp_path / "ledger.sqlite"
    make(path)
    with closing(sqlite3.connect(path, isolation_level=None)) as db:
        db.execute("DELETE FROM state WHERE key = ?", [SAID_AFTER])
    return path


def says_no(request: PlacementRequest) -> PlacementRequest:
    return structs.replace(request, preemptible=False)


def test_an_old_request_is_answered_again_with_its_false_written_out(path: Path) -> None:
    with closing(Ledger(path)) as ledger:
        for request in (REFUSED, MOVED, WAITING[0]):
            assert ledger.find_stored_reply(says_no(request)) == ledger.find_stored_reply(request)
            with pytest.raises(RequestError, match="another body"):
                ledger.find_stored_reply(structs.replace(request, preemptible=True))
        ledger.commit_decision(WAITING[0], decision(WAITING[0], "placed"), 9_000, "queue", "place")
        assert ledger.find_stored_reply(says_no(WAITING[0])) is not None
        with pytest.raises(RequestError, match="another body"):
            ledger.find_stored_reply(structs.replace(says_no(REFUSED), priority=9))


def test_a_request_of_today_that_says_no_is_another_than_one_that_says_nothing(path: Path) -> None:
    for _ in range(2):  # also after a restart
        with closing(Ledger(path)) as ledger:
            if ledger.find_stored_reply(NEWER) is None:
                ledger.commit_decision(NEWER, decision(NEWER, "placed"), 9_000, "ada", "place")
            with pytest.raises(RequestError, match="another body"):
                ledger.find_stored_reply(says_no(NEWER))
            assert ledger.find_stored_reply(says_no(REFUSED)) is not None
    assert verify_ledger(path).is_intact


def test_what_a_new_ledger_stores_is_of_today(tmp_path: Path) -> None:
    with closing(Ledger(tmp_path / "new.sqlite")) as ledger:
        ledger.commit_decision(NEWER, decision(NEWER, "placed"), 9_000, "ada", "place")
        with pytest.raises(RequestError, match="another body"):
            ledger.find_stored_reply(says_no(NEWER))
