"""The mirror of a board. It copies the board of another host's api into a folder.

While that api sends no whole board, the last copy remains.
"""

import asyncio
import contextlib
import logging
import os
from pathlib import Path

import aiohttp

from fleetcast.fleet import files
from fleetcast.fleet.decode_faults import explain_json_error
from fleetcast.fleet.errors import SourceError
from fleetcast.service.board.board import Board, BoardError

logger = logging.getLogger(__name__)

TOKEN = "FLEETCAST_BOARD_TOKEN"  # in the environment: with the scope read
PARTS = ("urgent", "board")
POLL_S = 0.5  # wall, as all times here
ANSWER_S = 5.0  # at most this long between two pieces of an answer
MAX_BYTES = 2**32
CHUNK_BYTES = 2**18


class BoardMirror:
    """A mirror of another host's board.

    `problem` says why the newest board is missing. It is empty while the board is present.
    """

    def __init__(self, url: str, folder: Path, token: str = "") -> None:
        self.url = url
        self.folder = folder
        self.problem = f"{url} was not asked yet"
        self._token = token
        self._tags: dict[str, str] = {}

    async def run(self) -> None:
        """Copy the board repeatedly until the task is cancelled."""
        self.folder.mkdir(parents=True, exist_ok=True)
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=ANSWER_S, sock_read=ANSWER_S)
        async with aiohttp.ClientSession(timeout=timeout) as session:
            while True:
                self._report_problem(await self._poll(session))
                await asyncio.sleep(POLL_S)

    async def _poll(self, session: aiohttp.ClientSession) -> str:
        """Poll both files once. Returns why this failed, or ""."""
        try:
            for part in PARTS:
                await self._fetch_part(session, part)
        except SourceError as error:
            return str(error)
        except (aiohttp.ClientError, TimeoutError) as error:
            return f"{self.url} does not answer ({str(error) or type(error).__name__})"
        except OSError as error:
            return f"cannot write {self.folder}: {error.strerror}"
        return ""

    def _report_problem(self, problem: str) -> None:
        if problem and not self.problem:
            logger.warning("%s; the last board stays", problem)
        elif self.problem and not problem:
            logger.info("the board of %s is here", self.url)
        self.problem = problem

    async def _fetch_part(self, session: aiohttp.ClientSession, part: str) -> None:
        """Fetch one file if it is new. Raises SourceError if the answer is not a board."""
        headers = {"authorization": f"Bearer {self._token}"} if self._token else {}
        if part in self._tags:
            headers["if-none-match"] = self._tags[part]
        async with session.get(self.url, params={"part": part}, headers=headers, allow_redirects=False) as answer:
            if answer.status == 200:
                await self._replace_part(answer, part)
                self._tags[part] = answer.headers.get("etag", "")
            elif answer.status == 204:
                (self.folder / part).unlink(missing_ok=True)
            elif answer.status in (401, 403):
                raise SourceError(f"{self.url} answers {answer.status}: {TOKEN} must hold a token with the scope read")
            elif answer.status != 304:
                raise SourceError(f"{self.url} answers {answer.status}")

    async def _replace_part(self, answer: aiohttp.ClientResponse, part: str) -> None:
        beside = self.folder / f".{part}.{os.getpid()}.tmp"
        size = 0
        try:
            file = files.create_file(beside, "mirror")
            with contextlib.closing(file):
                async for chunk in answer.content.iter_chunked(CHUNK_BYTES):
                    size += len(chunk)
                    if size > MAX_BYTES:
                        raise SourceError(f"{self.url} sends more than {MAX_BYTES:,} bytes")
                    file.write(chunk)
            self._check_board(beside)
            files.rename(beside, self.folder / part, "mirror")
        finally:
            with contextlib.suppress(OSError):
                beside.unlink()

    def _check_board(self, path: Path) -> None:
        try:
            Board(files.map_file(path))
        except (ValueError, BoardError) as error:
            raise SourceError(f"{self.url} sends what is no board: {explain_json_error(error)}") from None
