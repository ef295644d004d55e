"""Defects that the simulation must find: for each law at least one, made by hand in the product's own code.

A law that no defect breaks is no law: `python -m tests.simulation --mutation no-fsync --seed 6`.
"""

import contextlib
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

from fleetcast.fleet import files
from fleetcast.fleet.sequences import SeenSequences
from fleetcast.ingest.archive.events import KnownEvents
from fleetcast.placement.ledger.file import LedgerFile
from fleetcast.placement.ledger.promised import PromiseReader
from fleetcast.service.board import expiry
from fleetcast.service.board.board import BoardWriter
from fleetcast.service.board.expiry import IntentExpiry
from fleetcast.service.listening import ListeningStatement
from fleetcast.service.pipeline import pipeline
from fleetcast.service.pipeline.state import FleetState
from fleetcast.service.placer import promised_view


@dataclass(frozen=True, slots=True)
class Mutation:
    """`laws`: the ones that it may break, whichever shows first; `target.name` becomes `defect`.

    `seed` shows it within a few thousand steps; another one may take some ten thousands.
    """

    seed: int
    laws: tuple[str, ...]
    target: Any
    name: str
    defect: Callable[..., Any]

    def made(self) -> Any:
        return patch.object(self.target, self.name, self.defect)


def _by_the_clock(self: IntentExpiry, intents: Any, board: Any, now_ms: int) -> set[str]:
    """As it was: a promise is over when the clock says so, whatever the board knows."""
    self.paused.clear()
    return {intent.request_id for intent in intents if now_ms >= intent.expires_ms}


_sync = files.File.sync
_add = SeenSequences.add
_caught_up = pipeline.wait_for_backlog
_first = BoardWriter.__init__


def _no_sync(self: files.File) -> None:
    if self._area != "inbox":
        _sync(self)


def _always_new(self: SeenSequences, sequence: int) -> bool:
    _add(self, sequence)
    return True


def _numbered_anew(self: BoardWriter, folder: Any) -> None:
    _first(self, folder)
    self._numbers = itertools.count(1)


def _made_in_passing(folder: Any, area: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)


async def _impatient(sources: Any, held_up: Any) -> None:
    """As it was: a source that the archive holds up for a second counts as read."""
    await _caught_up(sources, lambda: False)


async def _at_once(*_: Any) -> None:
    """The first board does not wait for what is on disk."""


@contextlib.contextmanager
def _commits_seldom(self: LedgerFile) -> Iterator[None]:
    """One transaction in eight reaches the disk, with those before it."""
    if self._writing:
        yield
        return
    self._writing = True
    try:
        with self._translate_errors():
            if not self._db.in_transaction:
                self._db.execute("BEGIN IMMEDIATE")
            yield
            if self.version % 8 == 7:
                self._db.execute("COMMIT")
    finally:
        self._writing = False


def _if_room(self: FleetState, event: Any, _: bool) -> bool:
    """As it was: the fold applies its own bound to what the api has acknowledged."""
    return self.jobs.has_room(event, self.limits.live_jobs)


MUTATIONS = {
    "expire-by-the-clock": Mutation(1, ("given once", "waits"), IntentExpiry, "find_expired", _by_the_clock),
    "forget-promises": Mutation(1, ("given once",), promised_view, "add_intents", lambda observed, intents: observed),
    "no-fsync": Mutation(6, ("found once",), files.File, "sync", _no_sync),
    "folders-not-synced": Mutation(17, ("found once", "progress"), files, "make_folder", _made_in_passing),
    "fold-twice": Mutation(1, ("found once",), SeenSequences, "add", _always_new),
    "board-too-early": Mutation(3, ("found once", "never back", "given once"), pipeline, "wait_for_backlog", _at_once),
    "board-while-held-up": Mutation(8, ("found once", "given once"), pipeline, "wait_for_backlog", _impatient),
    "number-boards-anew": Mutation(3, ("never back",), BoardWriter, "__init__", _numbered_anew),
    "commit-seldom": Mutation(3, ("same bytes", "given once"), LedgerFile, "transaction", _commits_seldom),
    "die-of-a-full-disk": Mutation(1, ("no end",), pipeline, "log_disk_errors", lambda *_: contextlib.nullcontext()),
    "archive-unread": Mutation(1, ("archived once",), KnownEvents, "_find_stored_events", lambda *_: set()),
    "limits-refuse-what-was-placed": Mutation(1, ("passes",), PromiseReader, "admits", lambda *_: False),
    "the-fold-has-a-bound-of-its-own": Mutation(5, ("found once", "never back"), FleetState, "_has_room", _if_room),
    "outages-stop-no-clock": Mutation(1, ("waits",), ListeningStatement, "covers_expiry", lambda *_: True),
    "refused-starts-leave-no-mark": Mutation(1, ("waits",), expiry, "find_marked_requests", lambda *_: set()),
    "never-expire": Mutation(2, ("progress",), IntentExpiry, "find_expired", lambda *_: set()),
}
