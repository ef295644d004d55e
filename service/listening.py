"""Statements of event sources about when they could receive job starts.

The api and the pipeline write them, and the placer reads them. The placer lets a promise of GPUs expire
only if every source could receive the start of its job. So a source states two times:

    since_ms    it has missed nothing since then; a restart or a refusal of its own resets this time
    until_ms    it has received everything before this time

The api writes its statement into a file every second. The statements of the pipeline's sources are a
section of the board.
"""

import asyncio
import contextlib
import itertools
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import msgspec

from fleetcast.fleet import files
from fleetcast.fleet.clock import Clock, ClockWatch
from fleetcast.fleet.errors import SourceError
from fleetcast.service.answers.fleet import SourceHealth
from fleetcast.service.board.board import Board

API = "api"
AREA = "listening"  # of failpoints
SECTION = "listening"  # of the board
BEAT_S = 1.0  # wall
GAP_S = 5.0  # wall, between two beats: the process stood still, and its callers may have given up
logger = logging.getLogger(__name__)


class ListeningStatement(msgspec.Struct, frozen=True):
    """A source's statement about when it could receive job starts, in Unix ms of fleet time."""

    since_ms: int
    until_ms: int

    def covers_expiry(self, expires_ms: int, grace_ms: int) -> bool:
        """Return whether the source could receive a job start until `expires_ms`.

        After an interruption, the source must also have listened for another `grace_ms`.
        """
        return self.until_ms >= max(expires_ms, self.since_ms + grace_ms)


_decode = msgspec.json.Decoder(ListeningStatement).decode
_decode_sources = msgspec.json.Decoder(dict[str, ListeningStatement]).decode
_encode = msgspec.json.encode


def get_api_file(state: Path) -> Path:
    return state / "api.listening"


class ListeningReader:
    """The placer's reader of the newest statements about when each source could receive job starts."""

    def __init__(self, state: Path) -> None:
        self._path = get_api_file(state)
        self._void = b""  # a statement by a clock that was set since

    def disregard_earlier_statement(self) -> None:
        """Disregard the api's statements up to now, because their times come from another clock."""
        with contextlib.suppress(OSError):
            self._void = self._path.read_bytes()

    def read_statements(self, board: Board) -> dict[str, ListeningStatement]:
        """Return source → its newest statement. If the api never ran in this state folder, it has none."""
        found = _decode_sources(board.raw(SECTION)) if SECTION in board else {}
        try:
            stated = self._path.read_bytes()
            found[API] = ListeningStatement(0, 0) if stated == self._void else _decode(stated)
        except FileNotFoundError:
            pass
        except (OSError, msgspec.MsgspecError):  # a power cut may have torn it: the api writes it again
            found[API] = ListeningStatement(0, 0)
        return found


class ApiListening:
    """The api's own statement about when it could receive job starts.

    Code that stores events must run inside `hold_listening_statement`.
    """

    def __init__(self, state: Path, clock: Clock) -> None:
        self._path = get_api_file(state)
        self._clock = clock
        self._watch = ClockWatch(clock)
        self._since_ms = 0
        self._is_interrupted = True  # until the first beat
        self._beat_steady_ms = clock.steady_ms()
        self._numbers = itertools.count()
        self._under_way: dict[int, int] = {}  # number -> when its storing began, steady

    @contextmanager
    def hold_listening_statement(self) -> Iterator[None]:
        """Hold the statement back while events are stored.

        Until the context ends, the statement covers only the time before the context began.
        """
        number = next(self._numbers)
        self._under_way[number] = self._clock.steady_ms()
        try:
            yield
        except (SourceError, OSError):
            self.record_interruption()
            raise
        finally:
            del self._under_way[number]

    def record_interruption(self) -> None:
        """Record that the api refused events that may be valid. A full disk or a lack of room causes this."""
        self._is_interrupted = True

    def write_statement(self) -> None:
        """Write the api's present statement to its file.

        If the disk refuses this file, it also refuses events. So a failed write counts as an interruption.
        """
        try:
            files.replace_file(self._path, [_encode(self._make_statement())], AREA, sync=False)
        except OSError as error:
            if not self._is_interrupted:
                logger.error("%s cannot be written (%s): promises wait for their starts meanwhile", self._path, error)
            self._is_interrupted = True

    def _make_statement(self) -> ListeningStatement:
        now_ms, steady_ms = self._clock.now_ms(), self._clock.steady_ms()
        self._since_ms += self._watch.pop_clock_step_ms()
        gap_s = self._clock.convert_to_wall_s((steady_ms - self._beat_steady_ms) / 1000)
        self._beat_steady_ms = steady_ms
        if self._is_interrupted or gap_s > GAP_S:
            self._since_ms, self._is_interrupted = now_ms, False
        return ListeningStatement(
            self._since_ms, now_ms - (steady_ms - min(self._under_way.values(), default=steady_ms))
        )

    async def run_statement_loop(self) -> None:
        while True:
            self.write_statement()
            await asyncio.sleep(BEAT_S)


class SourcesListening:
    """The statements of the pipeline's sources that report job starts. They are made from the sources' health."""

    def __init__(self, names: Sequence[str], clock: Clock) -> None:
        self._watch = ClockWatch(clock)
        self._stated = dict.fromkeys(names, ListeningStatement(0, 0))
        self._is_up = dict.fromkeys(names, False)

    def update_statements(self, rows: Sequence[SourceHealth], now_ms: int) -> Mapping[str, ListeningStatement]:
        """Return source → its statement at `now_ms`.

        rows: the health of the sources.
        """
        by_ms = self._watch.pop_clock_step_ms()
        health = {row["name"]: row for row in reversed(rows)}
        for name, before in self._stated.items():
            row = health.get(name, {})
            since_ms, was_up = before.since_ms + by_ms, self._is_up[name]
            self._is_up[name] = bool(row.get("up")) and row.get("lag_s") is not None
            if not self._is_up[name]:
                self._stated[name] = ListeningStatement(now_ms, before.until_ms + by_ms)
                continue
            behind_s = float(row["lag_s"] or 0) + float(row.get("answered_s") or 0)
            self._stated[name] = ListeningStatement(since_ms if was_up else now_ms, now_ms - round(behind_s * 1000))
        return dict(self._stated)
