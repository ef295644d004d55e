"""The feed of changed actions for event streams: one reader of the placer serves all clients of an api."""

import asyncio
from collections.abc import Mapping
from typing import Any

import msgspec

from fleetcast.fleet.errors import SourceError
from fleetcast.service.api.placer_link import PlacerLink

POLL_S = 0.5  # wall time between two reads
RETRY_S = 5.0  # after a read without an answer
PAGE = 1000


class _ActionPage(msgspec.Struct):
    cursor: int
    rows: list[dict[str, Any]]


class ActionFeed:
    """The newest action at the first read, then each that changes. The callers' own headers give access to the placer.

    Without the first one, a client that had read the actions before that would never learn of a change between.
    """

    def __init__(self, placer: PlacerLink) -> None:
        self._placer = placer
        self._cursor: int | None = None

    async def wait_for_rows(self, headers: Mapping[str, str]) -> list[dict[str, Any]]:
        """Wait until actions have changed, and return them in the order of their changes; the newest one at first.

        Returns an empty list after a read without an answer.
        """
        while True:
            await asyncio.sleep(POLL_S)
            query = "order=newest&limit=1" if self._cursor is None else f"after={self._cursor}&limit={PAGE}"
            body = await self._read(f"/actions?{query}", headers)
            if body is None:
                await asyncio.sleep(RETRY_S)
                return []
            self._cursor = body.cursor
            if body.rows:
                return body.rows

    def forget(self) -> None:
        """Begin again at the present end. Call it when the last client has gone."""
        self._cursor = None

    async def _read(self, path: str, headers: Mapping[str, str]) -> _ActionPage | None:
        try:
            answer = await self._placer.forward_request("GET", path, headers=headers)
            return msgspec.json.decode(answer.body, type=_ActionPage) if answer.status == 200 else None
        except (SourceError, msgspec.DecodeError):  # no placer, or a proxy that answers for it
            return None
