"""The link to the placer on the loopback address. A replica has a link to the api with a placer instead.

It forwards HTTP requests and answers unchanged.
"""

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import aiohttp
from yarl import URL

from fleetcast.fleet.errors import SourceError

TIMEOUT_S = 15.0
RETRY_AFTER_S = 2.0
FORWARDED_HEADERS = frozenset({"content-type", "retry-after", "age", "allow", "etag", "location"})


@dataclass(frozen=True, slots=True)
class ForwardedAnswer:
    """The unchanged answer of the placer or of the other api."""

    status: int
    headers: dict[str, str]
    body: bytes


class PlacerLink:
    """A pool of connections to the placer, or from a replica to the other api. Times are wall time.

    Paths are those of the API without `/v1`, below `base`. `name`: the name of the other process in
    sentences. `exit_reason`: a function that returns why the other process ended, or "" if that is unknown
    here. It is called in a thread.
    """

    def __init__(self, base: str, name: str = "the placer", exit_reason: Callable[[], str] = lambda: "") -> None:
        self.name = name
        self._exit_reason = exit_reason
        self._base = base
        self._session: aiohttp.ClientSession | None = None

    async def forward_request(
        self,
        method: str,
        path: str,
        body: bytes | None = None,
        headers: Mapping[str, str] | None = None,
        timeout_s: float = TIMEOUT_S,
    ) -> ForwardedAnswer:
        """Forward a request, and return the answer. `path` must be URL-encoded.

        Raises SourceError if there is no answer, or if the other process refuses our token.
        """
        if self._session is None:
            self._session = aiohttp.ClientSession(auto_decompress=False)
        url = URL(self._base + path, encoded=True)
        timeout = aiohttp.ClientTimeout(total=timeout_s)
        try:
            async with self._session.request(
                method, url, data=body, headers=headers, timeout=timeout, allow_redirects=False
            ) as response:
                forwarded = {name.lower(): value for name, value in response.headers.items()}
                forwarded = {name: value for name, value in forwarded.items() if name in FORWARDED_HEADERS}
                answer = ForwardedAnswer(response.status, forwarded, await response.read())
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise SourceError(await self._describe_failure(error), RETRY_AFTER_S) from None
        if answer.status == 401:  # we let the caller in, so it is not the caller's fault
            raise SourceError(f"{self.name} knows other tokens than this api: start both with the same", RETRY_AFTER_S)
        return answer

    async def _describe_failure(self, error: Exception) -> str:
        if ended := await asyncio.to_thread(self._exit_reason):
            return f"{self.name} cannot start: {ended}"
        return f"{self.name} does not answer ({str(error) or type(error).__name__}); asking again is safe"

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()
            self._session = None
