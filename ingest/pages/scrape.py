"""The scraper: it fetches exporter pages, each target at its own times, and measures the answers.

    target ── at once, then every interval_s (fleet time) in its burst (`bursts`) ── fetch ── decode ── pending
    next() ── waits for the first page, gathers until its burst ends ── one large Batch

A target has at most one request in flight. A burst does not wait for a target that hangs.
"""

import asyncio
import logging
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from fleetcast.fleet.clock import Clock
from fleetcast.fleet.entities import Entities
from fleetcast.fleet.errors import ConfigError
from fleetcast.fleet.event_wait import wait_for_event
from fleetcast.fleet.redaction import redact_secrets
from fleetcast.fleet.samples import EntityKind
from fleetcast.ingest.pages import bursts
from fleetcast.ingest.pages.bursts import FetchSlots, compute_burst_phase, compute_next_burst_ms
from fleetcast.ingest.pages.exporters import ExporterResolver
from fleetcast.ingest.pages.fetch import FetchedPage, FetchError
from fleetcast.ingest.pages.plain_http import PageClient
from fleetcast.ingest.pages.refusals import LastingRefusals
from fleetcast.ingest.pages.scrape_samples import PageTarget, ScrapeSamples, find_page_fault
from fleetcast.ingest.pages.target_groups import read_groups
from fleetcast.ingest.pages.target_spec import TargetSpec
from fleetcast.ingest.pages.targets import TargetList
from fleetcast.ingest.pages.text import PageDecoder, Target
from fleetcast.ingest.source import Batch, Source

logger = logging.getLogger(__name__)

GATHER_S = 0.05  # wall; how long pages of a burst are gathered at least
GATHER_MOST_S = 0.25  # wall; a burst that lasts longer is passed on in parts, so that a hard signal does not wait
RELOAD_S = 2.0  # wall; how often a target file is looked at, and a service that lists targets and is away is asked
ASK_S = 30.0  # wall; how often one that answers is asked
MAX_PENDING = 4096  # pages
MAX_FAILING = 20  # targets in the ingestion document
RATE_WINDOW_MS = 60_000


class ScrapeOptions(Protocol):
    """The section [scrape] of the configuration."""

    @property
    def interval_s(self) -> float: ...  # fleet time
    @property
    def timeout_s(self) -> float: ...  # wall time
    @property
    def max_body_bytes(self) -> int: ...
    @property
    def concurrency(self) -> int: ...


@dataclass(slots=True, eq=False, kw_only=True)
class ScrapeTarget(PageTarget):
    """One exporter, and the results of its latest scrapes."""

    spec: TargetSpec
    phase: float  # share of the interval
    is_slow: bool = False  # its last request took longer than bursts.SLOW_S
    up: bool | None = None  # None: not tried yet
    fault: str = ""  # why it is down


class Scraper(Source):
    """A source over all exporters of a configuration.

    Its position is empty, because missed pages are lost.
    """

    name = "scrape"
    misses = True  # what nobody scrapes is gone

    def __init__(
        self,
        entities: Entities,
        targets: Sequence[str],
        options: ScrapeOptions,
        clock: Clock,
        *,
        future_limit_s: float = 60.0,
    ) -> None:
        self.targets: dict[str, ScrapeTarget] = {}
        self.resolver = ExporterResolver(entities)
        self.failures: Counter[str] = Counter()  # scrapes without a page, by reason
        self.noted: Counter[str] = Counter()  # lines that are neither good nor bad, by reason
        self.resolver.inventory.machines.noted = self.noted
        self.skipped_rounds = 0
        self.choose: Callable[[TargetSpec], bool] = (
            _accept_any  # which targets of the list are this process's to scrape
        )
        self._list = TargetList(targets)
        self._options = options
        self._nodes = entities[EntityKind.NODE]
        self._renames = self._nodes.renames
        self._clock = clock
        self._future_limit_ms = round(future_limit_s * 1000)
        self._beside = ScrapeSamples(entities, self.failures)
        self._refusals = LastingRefusals()
        self._client: PageClient | None = None
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._slots = FetchSlots(options.concurrency)
        self._pending: list[Batch] = []
        self._wake = asyncio.Event()
        self._crash: BaseException | None = None
        self._taken: deque[tuple[int, int, int]] = deque()  # (fleet ms, samples, bad records)
        self._bad = 0

    async def next(self) -> Batch:
        if not self._tasks:
            self._start()
        await self._wake.wait()
        if self._crash is not None:
            raise self._crash
        await self._wait_for_burst()
        pages, self._pending = self._pending, []
        self._wake.clear()
        batch = Batch.merge(pages)
        self._count_batch(batch)
        return batch

    async def _wait_for_burst(self) -> None:
        """Wait until all quick targets of the burst have answered, for at most GATHER_MOST_S."""
        await asyncio.sleep(GATHER_S)
        await wait_for_event(self._slots.is_idle, GATHER_MOST_S - GATHER_S)

    def position(self) -> dict[str, Any]:
        return {}

    def seek(self, position: dict[str, Any]) -> None:
        """Do nothing, because a scraper always continues with the next scrape."""

    async def close(self) -> None:
        tasks, self._tasks = list(self._tasks.values()), {}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._client is not None:
            await self._client.close()
            self._client = None

    def models(self) -> dict[str, str]:
        """Return node → GPU model, from the labels on the pages."""
        return self.resolver.inventory.get_gpu_models()

    def health(self) -> dict[str, Any]:
        """Return the source's row of the ingestion document.

        Rates are per second of fleet time, over the last minute.
        """
        up = sum(target.up is True for target in self.targets.values())
        down = sum(target.up is False for target in self.targets.values())
        now_ms = self._clock.now_ms()
        newest_ms = self._taken[-1][0] if self._taken else None
        return {
            "name": self.name,
            "kind": "scrape",
            "rate_per_s": self._compute_rate(now_ms),
            "lag_s": None if newest_ms is None else round(max(0, now_ms - newest_ms) / 1000, 3),
            "bad": self._bad,
            "up": up,
            "down": down,
            "targets_up": up,
            "targets_down": down,
            "failures": dict(self.failures),
            "noted": dict(self.noted),
            "targets_unread": sum(bool(target.decoder.why_unread) for target in self.targets.values()),
            "targets_failing": self._list_failing_targets(),
            **self._refusals.health(),
            "skipped_rounds": self.skipped_rounds,
            "refused_lists": self._list.list_refusals(),
        }

    def _list_failing_targets(self) -> list[dict[str, str]]:
        """Return at most MAX_FAILING targets that are down, with the reason.

        Targets whose pages hold no known metric come first.
        """
        down = [target for target in self.targets.values() if target.up is False]
        down.sort(key=lambda target: not target.decoder.why_unread)
        return [{"target": redact_secrets(target.spec.url), "reason": target.fault} for target in down[:MAX_FAILING]]

    def _compute_rate(self, now_ms: int) -> float:
        recent = [samples for at_ms, samples, _ in self._taken if at_ms > now_ms - RATE_WINDOW_MS]
        span_ms = min(RATE_WINDOW_MS, now_ms - self._taken[0][0]) if self._taken else 0
        return round(sum(recent) / (span_ms / 1000), 1) if span_ms > 0 else 0.0

    def _count_batch(self, batch: Batch) -> None:
        now_ms = self._clock.now_ms()
        bad = sum(error.count for error in batch.bad)
        self._bad += bad
        if self._taken and self._taken[-1][0] > now_ms:  # the clock was set back
            self._taken.clear()
        self._taken.append((now_ms, len(batch), bad))
        while self._taken[0][0] < now_ms - RATE_WINDOW_MS:
            self._taken.popleft()

    def _start(self) -> None:
        interval_wall_s = self._clock.convert_to_wall_s(self._options.interval_s)
        self._client = PageClient(self._options.timeout_s, max(15.0, 2.5 * interval_wall_s))
        self._scrape_listed_targets(self._list.read_targets())
        self._start_task("", self._reload_targets_forever())
        for url in self._list.queried_urls:
            self._start_task(f"http_sd:{url}", self._poll_target_discovery(url))

    def _start_task(self, key: str, work: Any) -> None:
        task = asyncio.create_task(work)
        task.add_done_callback(self._record_crash)
        self._tasks[key] = task

    def _record_crash(self, task: "asyncio.Task[None]") -> None:
        """Record the exception of a task that ended by itself.

        `next` then raises the exception, because such an end is a bug.
        """
        if not task.cancelled() and task.exception() is not None:
            self._crash = task.exception()
            self._wake.set()

    async def _reload_targets_forever(self) -> None:
        while True:
            await asyncio.sleep(RELOAD_S)
            if self._list.has_changing_lists:
                self._scrape_listed_targets(await asyncio.to_thread(self._list.read_targets))

    async def _poll_target_discovery(self, url: str) -> None:
        """Poll an HTTP service discovery for ever. If an answer is bad, the last good answer stays in use."""
        while True:
            assert self._client is not None, "asked before next"
            wait_s = ASK_S
            try:
                page = await self._client.fetch(url, self._options.max_body_bytes)
                self._list.replace_targets(url, await asyncio.to_thread(read_groups, page.body, url))
            except Exception as error:
                wait_s = RELOAD_S
                is_bug = not isinstance(error, FetchError | ConfigError)
                why = redact_secrets(f"{type(error).__name__}: {error}") if is_bug else str(error)
                if self._list.refuse_answer(url, why):
                    trace = error if is_bug else None
                    logger.warning("cannot read targets from %s: %s, using the previous ones", url, why, exc_info=trace)
            await asyncio.sleep(wait_s)

    def _scrape_listed_targets(self, listed: dict[str, TargetSpec]) -> None:
        """Start scraping new targets in the list, and stop scraping targets that the list no longer names."""
        wanted = {url: spec for url, spec in listed.items() if self.choose(spec)}
        for url in [url for url, target in self.targets.items() if wanted.get(url) != target.spec]:
            self._tasks.pop(url).cancel()
            self._beside.forget_target(self.targets.pop(url))
            self._refusals.forget_target(url)
        for url, spec in wanted.items():
            if url not in self.targets:
                self.targets[url] = self.make_target(spec)
                self._start_task(url, self._scrape_forever(self.targets[url]))

    def make_target(self, spec: TargetSpec) -> ScrapeTarget:
        return ScrapeTarget(spec=spec, decoder=self._make_decoder(spec), phase=compute_burst_phase(spec.url))

    def _make_decoder(self, spec: TargetSpec) -> PageDecoder:
        return PageDecoder(
            self.resolver,
            Target(spec.node or spec.host, fixed=bool(spec.node), address=spec.address, is_listed=True),
            noted=self.noted,
            future_limit_ms=self._future_limit_ms,
            machines=self.resolver.inventory.machines,
        )

    async def _scrape_forever(self, target: ScrapeTarget) -> None:
        """Scrape a new target at once, and then once per interval.

        The later scrapes are in the target's burst (`fleetcast.ingest.pages.bursts`).
        """
        period_ms = self._options.interval_s * 1000
        await self._scrape_once(target)
        due_ms = self._find_next_burst_ms(target)
        while True:
            if due_ms > self._clock.now_ms() + 2 * period_ms:  # the clock was set back
                due_ms = self._find_next_burst_ms(target)
            await self._clock.sleep(max(0.0, due_ms - self._clock.now_ms()) / 1000)
            await self._scrape_once(target)
            late = max(0, int((self._clock.now_ms() - due_ms) // period_ms))
            self.skipped_rounds += late
            due_ms += (late + 1) * period_ms

    async def _scrape_once(self, target: ScrapeTarget) -> None:
        """Scrape a target and queue its page for `next`. Skips the round while too many pages wait."""
        if len(self._pending) >= MAX_PENDING:
            self.skipped_rounds += 1
            return
        batch = await self.scrape(target)
        self._pending.append(batch)  # not before the await: `next` takes the list away meanwhile
        self._wake.set()

    def _find_next_burst_ms(self, target: ScrapeTarget) -> float:
        return compute_next_burst_ms(self._clock.now_ms(), target.phase, self._options.interval_s * 1000)

    def _apply_scheduler_renames(self) -> None:
        """Make all decoders resolve their series again if a scheduler has reported another name for a machine."""
        if self._renames != self._nodes.renames:
            self._renames = self._nodes.renames
            for target in self.targets.values():
                target.decoder.target.forgets = True

    async def scrape(self, target: ScrapeTarget) -> Batch:
        """Scrape one target once. Never raises, whatever the exporter does."""
        assert self._client is not None, "scrape before next"
        self._apply_scheduler_renames()
        url = target.spec.url
        async with self._slots.hold_slot(is_slow=target.is_slow):
            began = time.perf_counter()
            page: FetchedPage | None = None
            why = ""
            try:
                page = await self._client.fetch(url, self._options.max_body_bytes)
            except FetchError as error:
                self.failures[error.reason] += 1
                why = str(error)
            except Exception as error:  # a bug, and that of one fetch: the other targets go on
                why = self._record_exception(target, "fetch_bug", "its page cannot be fetched", error)
            duration_s = time.perf_counter() - began
        target.is_slow = duration_s > bursts.SLOW_S
        if page is None:
            return self._add_node_samples(target, Batch(), False, duration_s, why)
        try:
            batch = target.decoder.decode(page.body, self._clock.now_ms(), open_metrics=page.is_open_metrics)
        except Exception as error:  # a bug, and that of one page: the other exporters go on
            target.decoder = self._make_decoder(target.spec)
            why = self._record_exception(target, "decoder_bug", "its page cannot be decoded", error)
            return self._add_node_samples(target, Batch(), False, duration_s, why)
        self._refusals.record_page(url, batch)
        reason, why = find_page_fault(batch, target.decoder) or ("", "")
        if reason:
            self.failures[reason] += 1
        return self._add_node_samples(target, batch, not reason, duration_s, why)

    def _record_exception(self, target: ScrapeTarget, reason: str, what: str, error: Exception) -> str:
        """Count an unexpected exception of one target, and log its traceback once. Returns its text."""
        self.failures[reason] += 1
        if target.up is not False:
            logger.error("%s: %s, a bug", target.spec.url, what, exc_info=error)
        return redact_secrets(f"{what}: {type(error).__name__}: {error}")

    def _add_node_samples(self, target: ScrapeTarget, batch: Batch, up: bool, duration_s: float, why: str) -> Batch:
        """Record whether the target is up. Return the batch with added samples about the scrape itself."""
        if up is not target.up and (not up or target.up is False):
            logger.warning("%s is %s", target.spec.url, "up again" if up else f"down, trying on: {why}")
        target.up, target.fault = up, why
        beside = self._beside.make_samples(target, up, duration_s, self._clock.now_ms())
        return replace(batch, samples=(*batch.samples, *beside), tally=batch.get_tally())


def _accept_any(target: TargetSpec) -> bool:
    return True
