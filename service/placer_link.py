"""The way from the API to the placer: loopback HTTP, bytes and status verbatim."""

from collections.abc import Mapping
from dataclasses import dataclass

import aiohttp
from yarl import URL

from fleet.errors import SourceError

TIMEOUT_S = 15.0
RETRY_AFTER_S = 2.0
KEPT_HEADERS = frozenset({"content-type", "retry-after", "age", "allow", "etag", "location"})


@dataclass(frozen=True, slots=True)
class Forwarded:
    """The placer's answer as it came."""

    status: int
    headers: dict[str, str]
    body: bytes


class PlacerLink:
    """One pooled connection to the placer's port on loopback. Times are wall time."""

    def __init__(self, port: int) -> None:
        self.port = port
        self._session: aiohttp.ClientSession | None = None

    async def forward(
        self,
        method: str,
        path: str,
        body: bytes | None = None,
        headers: Mapping[str, str] | None = None,
        timeout_s: float = TIMEOUT_S,
    ) -> Forwarded:
        """Ask the placer; `path` is already encoded. Raises SourceError when it does not answer."""
        if self._session is None:
            self._session = aiohttp.ClientSession(auto_decompress=False)
        url = URL(f"http://127.0.0.1:{self.port}{path}", encoded=True)
        timeout = aiohttp.ClientTimeout(total=timeout_s)
        try:
            async with self._session.request(
                method, url, data=body, headers=headers, timeout=timeout, allow_redirects=False
            ) as response:
                kept = {name.lower(): value for name, value in response.headers.items()}
                kept = {name: value for name, value in kept.items() if name in KEPT_HEADERS}
                return Forwarded(response.status, kept, await response.read())
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            why = str(error) or type(error).__name__
            raise SourceError(f"the placer does not answer ({why}); asking again is safe", RETRY_AFTER_S) from None

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()
            self._session = None
