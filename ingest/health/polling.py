"""A poller of HTTP services, with one task for each target, and with TLS and login.

A target that hangs delays no other. A target that does not answer is polled again after `poll_s`. While no
target answers, `next` raises SourceError.
"""

import asyncio
import logging
import ssl
import time
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import aiohttp
import msgspec

from fleetcast.fleet.errors import ConfigError, RecordError, SourceError
from fleetcast.ingest.pages.fetch import FetchError, fetch
from fleetcast.ingest.source import Batch
from fleetcast.ingest.tally import RecordTally

logger = logging.getLogger(__name__)

CONCURRENCY = 64
LONGEST_S = 86_400.0


class PollOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The options of every polled source.

    Seconds are wall time. If `verify` is False, any certificate is accepted.
    """

    poll_s: float = 10.0
    timeout_s: float = 5.0
    max_body_bytes: int = 16 * 2**20
    verify: bool = True
    ca_file: str = ""
    cert_file: str = ""
    key_file: str = ""


def check_polling_options(name: str, options: PollOptions) -> "ssl.SSLContext | bool":
    """Check the options of a polled source, and return its TLS context.

    Returns False if certificates are not to be verified. Raises ConfigError that names the key.
    """
    for key, value in (("poll_s", options.poll_s), ("timeout_s", options.timeout_s)):
        if not 0 < value <= LONGEST_S:
            raise ConfigError(f"pipeline.sources {name}: {key} = {value}: expected more than 0, at most {LONGEST_S:g}")
    if options.max_body_bytes < 1:
        raise ConfigError(f"pipeline.sources {name}: max_body_bytes = {options.max_body_bytes}: expected at least 1")
    if not options.verify:
        return False
    try:
        context = ssl.create_default_context(cafile=options.ca_file or None)
        if options.cert_file:
            context.load_cert_chain(options.cert_file, options.key_file or None)
    except (OSError, ssl.SSLError) as error:
        files = ", ".join(file for file in (options.ca_file, options.cert_file, options.key_file) if file)
        raise ConfigError(f"pipeline.sources {name}: ca_file, cert_file, key_file = {files}: {error}") from None
    return context


@dataclass(slots=True)
class _Target:
    up: bool | None = None  # None: not asked yet
    why: str = ""


Ask = Callable[["Poller", str], Awaitable[Batch]]


class Poller:
    """A poller that polls each of several targets every `poll_s` seconds.

    `ask(poller, target)` fetches and decodes one target. It may raise FetchError.
    """

    def __init__(
        self,
        name: str,
        targets: Mapping[str, Ask],
        options: PollOptions,
        tls: "ssl.SSLContext | bool",
        headers: Mapping[str, str] | None = None,
    ) -> None:
        self.name = name
        self.bad = 0
        self.bugs = 0  # answers that ended in one
        self._asks = dict(targets)
        self._targets = {target: _Target() for target in targets}
        self._options = options
        self._tls = tls
        self._headers = dict(headers or {})
        self._session: aiohttp.ClientSession | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._pending: list[Batch] = []
        self.pending = RecordTally()  # of answers since the last batch
        self._wake = asyncio.Event()
        self._rates: deque[tuple[float, int]] = deque(maxlen=256)
        self._closed = False

    async def get(self, url: str) -> bytes:
        """Fetch the body of one URL. Raises FetchError."""
        assert self._session is not None
        return (await fetch(self._session, url, self._options.max_body_bytes)).body

    async def next(self) -> Batch:
        """Wait until a target has new or bad records. Return all records since the last call.

        Raises SourceError while no target answers.
        """
        if not self._tasks and not self._closed:
            self._start()
        while not self._closed:
            await self._wake.wait()
            self._wake.clear()
            for task in self._tasks:
                if task.done() and not task.cancelled() and task.exception() is not None:
                    raise task.exception() or AssertionError
            pending, self._pending = self._pending, []
            batch = Batch.merge(pending)
            self.pending = RecordTally.sum((self.pending, batch.get_tally()))
            if len(batch) or batch.bad:
                batch, self.pending = replace(batch, tally=self.pending), RecordTally()
                self.bad += len(batch.bad)
                self._rates.append((time.monotonic(), len(batch)))
                return batch
            if self._targets and all(target.up is False for target in self._targets.values()):
                why = next(iter(self._targets.values())).why
                raise SourceError(why, self._options.poll_s)
        raise StopAsyncIteration

    def health(self, kind: str) -> dict[str, Any]:
        """Return the source's row of the ingestion document.

        `targets_up`: the number of targets that answered their last poll.
        """
        recent = [count for at, count in self._rates if at > time.monotonic() - 60.0]
        up = sum(target.up is True for target in self._targets.values())
        return {
            "name": self.name,
            "kind": kind,
            "rate_per_s": round(sum(recent) / 60.0, 2),
            "lag_s": 0.0,
            "bad": self.bad,
            "bugs": self.bugs,
            "up": up > 0,
            "targets": len(self._targets),
            "targets_up": up,
        }

    async def close(self) -> None:
        """Stop the tasks and close the sockets. May be called twice."""
        self._closed = True
        self._wake.set()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks = []
        if self._session is not None:
            await self._session.close()
            self._session = None

    def _start(self) -> None:
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, ssl=self._tls, keepalive_timeout=2 * self._options.poll_s),
            timeout=aiohttp.ClientTimeout(total=self._options.timeout_s),
            headers=self._headers,
            auto_decompress=False,
            cookie_jar=aiohttp.DummyCookieJar(),
        )
        gate = asyncio.Semaphore(CONCURRENCY)
        number = max(1, len(self._asks))
        for at, target in enumerate(self._asks):
            wait_s = min(self._options.poll_s, 10.0) * at / number
            task = asyncio.ensure_future(self._poll_forever(target, wait_s, gate))
            task.add_done_callback(lambda _: self._wake.set())
            self._tasks.append(task)

    async def _poll_forever(self, target: str, wait_s: float, gate: asyncio.Semaphore) -> None:
        await asyncio.sleep(wait_s)
        while True:
            began = time.monotonic()
            async with gate:
                batch = await self._poll(target)
            if batch is not None:
                self._pending.append(batch)
            self._wake.set()
            await asyncio.sleep(max(0.05, self._options.poll_s - (time.monotonic() - began)))

    async def _poll(self, target: str) -> Batch | None:
        state = self._targets[target]
        try:
            batch = await self._asks[target](self, target)
        except FetchError as error:
            if state.up is not False:
                logger.warning("%s: %s, asking again every %.0f s", self.name, error, self._options.poll_s)
            state.up, state.why = False, str(error)
            return None
        except RecordError as error:
            if state.up is not False:
                logger.warning("%s: %s answers what cannot be read: %s", self.name, target, error)
            state.up, state.why = False, str(error)
            return Batch(bad=(error.with_traceback(None),))
        except Exception as error:  # a bug, and that of one answer: the other targets are asked on
            self.bugs += 1
            if state.up is not False:
                logger.error("%s: %s answers what cannot be read, a bug", self.name, target, exc_info=error)
            state.up, state.why = False, f"{type(error).__name__}: {error}"
            return None
        if state.up is False:
            logger.info("%s: %s answers again", self.name, target)
        state.up = True
        return batch
