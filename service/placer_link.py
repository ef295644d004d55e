"""The way to who decides: the placer on loopback, or, from a replica, the api that has one. HTTP, verbatim."""

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
    """The answer as it came."""

    status: int
    headers: dict[str, str]
    body: bytes


class PlacerLink:
    """A pool of connections. Paths are those of the API without `/v1`, below `base`. Times are wall time.

    `name` is what the other side is called in sentences.
    """

    def __init__(self, base: str, name: str = "the placer") -> None:
        self.name = name
        self._base = base
        self._session: aiohttp.ClientSession | None = None

    async def forward(
        self,
        method: str,
        path: str,
        body: bytes | None = None,
        headers: Mapping[str, str] | None = None,
        timeout_s: float = TIMEOUT_S,
    ) -> Forwarded:
        """Ask; `path` is already encoded. Raises SourceError when nobody answers, or one who knows other tokens."""
        if self._session is None:
            self._session = aiohttp.ClientSession(auto_decompress=False)
        url = URL(self._base + path, encoded=True)
        timeout = aiohttp.ClientTimeout(total=timeout_s)
        try:
            async with self._session.request(
                method, url, data=body, headers=headers, timeout=timeout, allow_redirects=False
            ) as response:
                kept = {name.lower(): value for name, value in response.headers.items()}
                kept = {name: value for name, value in kept.items() if name in KEPT_HEADERS}
                answer = Forwarded(response.status, kept, await response.read())
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            why = str(error) or type(error).__name__
            raise SourceError(f"{self.name} does not answer ({why}); asking again is safe", RETRY_AFTER_S) from None
        if answer.status == 401:  # we let the caller in, so it is not the caller's fault
            raise SourceError(f"{self.name} knows other tokens than this api: start both with the same", RETRY_AFTER_S)
        return answer

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()
            self._session = None
