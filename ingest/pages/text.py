"""A decoder of exposition text with a cache for each target: it parses the labels of a series once.

The decoder caches the shape of the last page (`page_shape`) and the columns of its samples. So a page of this shape
costs only some numpy calls. The first page of a target has a reader of its own (`gpu_page`). Any other page is read
line by line, for example after a GPU vanished or if a line is broken. The decoder then looks every prefix up in a
dict, parses new ones, counts bad ones, and learns the new shape. It then frees the dict, which is four times as
large. Refused lines are part of the shape (`refusals`).
"""

from collections import Counter
from collections.abc import Hashable, Mapping
from dataclasses import replace
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from fleetcast.fleet.entities import Entities
from fleetcast.fleet.errors import RecordError
from fleetcast.fleet.samples import EntityKind, SampleBatch
from fleetcast.ingest.gpu_labels import ObservedJobLabels
from fleetcast.ingest.machines import MachineNames, is_generic_name
from fleetcast.ingest.machines import Target as Target  # noqa: PLC0414  # exported
from fleetcast.ingest.pages.exposition import (
    cut_exemplar,
    is_open_metrics,
    is_sample_line,
    parse_line,
    parse_value,
    read_kernel_start_s,
)
from fleetcast.ingest.pages.gpu_page import GpuResolver, read_gpu_page
from fleetcast.ingest.pages.page_columns import DeviceCounts, PageColumns
from fleetcast.ingest.pages.page_order import PageOrder
from fleetcast.ingest.pages.page_shape import LineRole, PageShape
from fleetcast.ingest.pages.page_state import PageState
from fleetcast.ingest.pages.parts import CounterRates
from fleetcast.ingest.pages.refusals import RememberedRefusals
from fleetcast.ingest.series import Fold, Series
from fleetcast.ingest.source import Batch
from fleetcast.ingest.tally import RecordTally, SkipRule

MAX_SERIES = 50_000
MAX_BAD_LINES = 1000  # that no earlier page had
MAX_BROKEN_BYTES = 65_536  # of lines that a shape remembers as they stand
MAX_LINES = 250_000
_UNAME = b"node_uname_info{"


Found = Series | SkipRule | None
Known = Found | RecordError


class LineResolver(GpuResolver, Protocol):
    """The interface of a function that converts lines of pages into series."""

    def __call__(self, name: str, labels: Mapping[str, str], target: Target, /) -> Found:
        """Return a series, the rule that skips the line, or None if the metric is unknown.

        Raises RecordError if the labels are bad.
        """

    def get_refusal_version(self) -> Hashable:
        """Return a value that changes whenever a refused line may have become acceptable.

        Until it changes, a refused prefix is refused again without being resolved.
        """


class PageDecoder:
    """The decoder of one target's pages.

    `noted`: counts, by reason (blank, saturated, …), of lines that were skipped without an error.
    """

    def __init__(
        self,
        resolve: LineResolver,
        target: Target,
        *,
        noted: Counter[str] | None = None,
        max_series: int = MAX_SERIES,
        future_limit_ms: int = 60_000,
        machines: MachineNames | None = None,
    ) -> None:
        self.target = target
        self.noted: Counter[str] = Counter() if noted is None else noted
        self.reported: dict[int, DeviceCounts] = {}  # of the last page
        self.why_unread = ""  # a sentence, if the last page held samples of which nothing reads any
        self._resolve = resolve
        self._machines = machines or MachineNames(Entities())
        self._names_host = False  # the last page that was read line by line named its kernel
        self._max_series = max_series
        self._future_limit_ms = future_limit_ms
        self._cache: dict[bytes, Known] = {}  # by prefix, less its last blank; empty while there is a shape
        self._shape: PageShape | None = None  # of the last page, if it may come again
        self._order: PageOrder | None = None  # of its lines, once a page had them in another order
        self._may_be_reordered = True  # the last page that was read line by line had no new lines
        self._refusals = RememberedRefusals()  # of that page
        self._refused: dict[str, RecordError] = {}  # reason → the error that all prefixes refused for it share
        self._epoch: Hashable = None  # of these refusals
        self._was_refused: set[bytes] = set()  # prefixes that are resolved again, until a page was read whole
        self._partial = 0  # sums that were left out of the last page
        self._beside_rivals = 0  # the lines that were read on a page of several boards in one slot
        self._broken = hash(())  # of the broken lines on the last page that was read line by line
        self._columns = PageColumns.from_series(())  # of the last page
        self._tally = RecordTally()  # of the last page, if all its numbers are good
        self._was_read = False  # a line of some page stood for a series
        self._parts: Counter[tuple[EntityKind, int, int]] = Counter()  # of each sum or mean, on the last clean page
        self._growth = CounterRates()

    def decode(self, page: bytes, arrival_ms: int, *, open_metrics: bool = False) -> Batch:
        """Decode a page into samples. Never raises, whatever the page contains.

        Samples get the fleet time `arrival_ms`, or the timestamps of their lines. open_metrics: whether the page's
        content type is OpenMetrics. A page that ends in `# EOF` is OpenMetrics as well.
        """
        self.target.last_page_ms, self.target.pages = arrival_ms, self.target.pages + 1
        self._machines.separate_clashing_targets(page, self.target)
        if self.target.forgets:
            self._forget_all_prefixes()
        if self._refused and self._epoch != self._resolve.get_refusal_version():
            self._forget_refusals()
        if self._shape is not None:
            raw = self._shape.read_values(page)
            if raw is None:
                raw = self._read_reordered_page(page, self._shape)
            elif self._order is not None:
                self._order.forget_order()
            if raw is not None and self._names_host:
                self._learn_node_name(page)
            if raw is not None and not self.target.forgets:
                time_ms = np.empty(len(raw), np.int64)
                time_ms.fill(arrival_ms)
                if self._partial:
                    self.noted["partial"] += self._partial
                return self._make_batch(raw, time_ms, list(self._refusals.errors))
            self._restore_cache(self._shape)
        return self._decode_lines(page, arrival_ms, open_metrics or is_open_metrics(page))

    def _read_reordered_page(self, page: bytes, shape: PageShape) -> NDArray[np.float64] | None:
        """Return (n,) float64, the wanted values of a page that has the shape's lines in another order.

        Returns None if the page has other lines.
        """
        if not self._may_be_reordered or page.count(b"\n") != shape.lines:
            return None
        if self._order is None:
            self._order = PageOrder(shape)
        return self._order.read_values(page)

    def _restore_cache(self, shape: PageShape) -> None:
        """Restore the cache of prefixes and series from the shape, because the new page does not fit it."""
        series, errors = iter(self._columns.make_series()), self._refusals.list_prefix_errors()
        for prefix, role in shape.list_prefixes():
            key = prefix[:-1]
            if role is LineRole.WANTED:
                self._cache[key] = next(series)
            elif role is LineRole.REFUSED:
                if (error := next(errors)) is not None:
                    self._cache[key] = error
            elif role not in (SkipRule.REPEATED, SkipRule.INCOMPLETE):  # those may stand for a series
                self._cache[key] = role if isinstance(role, SkipRule) else None
        self._shape = self._order = None

    def _forget_refusals(self) -> None:
        """Remove refused prefixes from the cache, so that they are resolved again.

        For example, there may be room for them now.
        """
        if self._shape is not None:
            self._restore_cache(self._shape)
        refused = {key for key, found in self._cache.items() if isinstance(found, RecordError)}
        self._cache = {key: found for key, found in self._cache.items() if key not in refused}
        is_small = len(self._was_refused) + len(refused) <= self._max_series
        self._was_refused = self._was_refused | refused if is_small else refused
        self._refused = {}

    def _forget_all_prefixes(self) -> None:
        """Clear the cache, so that all prefixes are resolved again.

        Call it when the node of the target or the board in a slot has changed.
        """
        self._forget_refusals()
        self._cache = {}
        self.target.record_full_resolution()

    def _decode_lines(self, page: bytes, arrival_ms: int, open_metrics: bool) -> Batch:
        *lines, rest = page.split(b"\n", MAX_LINES)
        self._learn_node_name(page)
        if self.target.forgets:
            self._forget_all_prefixes()
        self._epoch = self._resolve.get_refusal_version()  # before the page itself adds to what is known
        state, known = PageState(arrival_ms, open_metrics), len(self._cache)
        is_first = not (known or rest or open_metrics) and len(lines) < self._max_series
        is_read = is_first and read_gpu_page(lines, self._resolve, self.target, state)
        for number, line in enumerate(() if is_read else lines, 1):
            try:
                self._decode_page_line(line, state)
            except RecordError as error:
                state.refuse_line(line, LineRole.BROKEN, error)
            if state.fresh >= MAX_BAD_LINES:
                abandoned = RecordError("page_abandoned", f"after {MAX_BAD_LINES} bad lines")
                state.refuse_rest_of_page(abandoned, sum(map(is_sample_line, lines[number:])))
                self.target.whole_page = 0
                break
        else:
            self._was_refused = set()
        if b"\n" in rest:
            too_many = RecordError("too_many_lines", f"the rest after {MAX_LINES:,} lines was not read")
            state.refuse_rest_of_page(too_many, sum(map(is_sample_line, rest.split(b"\n"))))
        elif rest.strip() not in (b"", b"# EOF"):
            state.refuse_rest_of_page(RecordError("truncated", repr(rest[:80])), int(is_sample_line(rest)))
        self._recheck_second_boards(state)
        self._drop_partial_sums(state)
        self._columns = PageColumns.from_series(state.series, state.shared)
        self._was_read = self._was_read or LineRole.WANTED in state.roles
        self._tally, self.why_unread = state.make_tally(), state.explain_unread(self._was_read)
        self._may_be_reordered = known in (0, len(self._cache))
        self._learn_shape(state, len(lines))
        return self._make_batch(np.array(state.raw, np.float64), np.array(state.time_ms, np.int64), state.bad)

    def _decode_page_line(self, line: bytes, page: PageState) -> None:
        if page.open_metrics and (cut := cut_exemplar(line)) is not line:
            line, page.repeatable = cut, False
        if line.startswith(b"#"):
            page.record_line(line, LineRole.NOTHING)
            return
        page.line = line
        key, _, value = line.rpartition(b" ")
        found = self._cache.get(key, _NEW)
        if found is _NEW and (combined := page.parser.combine(key, value)) is not None:
            raw = parse_value(value)
            self._assign_role(self._resolve_new_line(*combined, key, page), key, key + b" ", raw, page, is_new=True)
            return
        timestamp = b""
        if found is _NEW:
            if line.lstrip(b" \t\r")[:1] in (b"", b"#"):
                page.record_line(line, LineRole.NOTHING)
                return
            head, _, middle = key.rpartition(b" ")
            if middle and head in self._cache:
                found, key, value, timestamp = self._cache[head], head, middle, value
        if b"\t" in value and not timestamp:  # of a known series: a tab may stand before the timestamp, too
            value, _, timestamp = value.strip().partition(b"\t")
        if not isinstance(found, _NewPrefix):
            self._assign_role(found, key, key + b" ", value, page, timestamp)
            return
        new = page.parser.parse(line)
        raw, key = parse_value(new.value), new.prefix[:-1]
        known = self._resolve_new_line(new.name, new.labels, key if new.prefix.endswith(b" ") else None, page)
        self._assign_role(known, key, new.prefix, raw, page, new.timestamp, is_new=True)

    def _resolve_new_line(self, name: str, labels: Mapping[str, str], key: bytes | None, page: PageState) -> Known:
        """Resolve a line that is not in the cache, and cache the result.

        key: the key for the cache, or None if the key cannot find later lines.
        """
        found: Known
        cached: Known
        if len(self._cache) >= self._max_series:
            return RecordError("too_many_series", f"more than {self._max_series:,}: {page.line[:60]!r}")
        try:
            found = cached = self._resolve(name, labels, self.target)
        except RecordError as error:
            found, cached = error, self._refused.setdefault(error.reason, error.with_traceback(None))
        if key is not None:
            self._cache[key] = cached
        return found

    def _assign_role(
        self,
        found: Known,
        key: bytes,
        prefix: bytes,
        value: bytes | float,
        page: PageState,
        timestamp: bytes = b"",
        *,
        is_new: bool = False,
    ) -> None:
        """Record the role of a line on its page, and its sample if it has one. Raises RecordError."""
        if isinstance(found, Series):
            if key in page.keys:
                page.refuse_line(prefix, LineRole.REFUSED, RecordError("duplicate", repr(page.line[:80])))
                return
            self._add_sample(found, prefix, value if isinstance(value, float) else parse_value(value), timestamp, page)
            page.keys.add(key)
        elif isinstance(found, RecordError):
            page.refuse_line(prefix, LineRole.REFUSED, found, is_fresh=is_new and key not in self._was_refused)
        else:
            page.record_line(prefix, LineRole.UNREAD if found is None else found)

    def _add_sample(self, series: Series, prefix: bytes, raw: float, timestamp: bytes, page: PageState) -> None:
        time_ms = page.parse_stated_time_ms(timestamp, prefix, self._future_limit_ms) if timestamp else page.arrival_ms
        identity = (series.kind, series.metric, series.entity, series.part)
        if identity in page.entities and (
            series.part or series.fold is Fold.WHOLE
        ):  # one GPU under several pods: the same number under other labels
            self.noted["folded"] += 1
            page.record_line(prefix, SkipRule.REPEATED)
            if series.label is not None:
                page.shared.append(series)
            return
        page.entities.add(identity)
        page.record_line(prefix, LineRole.WANTED)
        page.series.append(series)
        page.raw.append(raw)
        page.time_ms.append(time_ms)

    def _drop_partial_sums(self, page: PageState) -> None:
        """Remove sums that lack a part because the part's line is broken.

        Such sums would look like counters that fell.
        """
        identities = [(one.kind, one.metric, one.entity) if one.fold else None for one in page.series]
        parts = Counter(identity for identity in identities if identity is not None)
        self._partial = 0
        if not page.bad:
            self._parts = parts
            return
        partial = {identity for identity, count in parts.items() if count < self._parts[identity]}
        if partial:
            self._partial = len(partial)
            self.noted["partial"] += len(partial)
            page.remove_series({row for row, identity in enumerate(identities) if identity in partial})

    def _recheck_second_boards(self, page: PageState) -> None:
        """Resolve the next page completely if second boards are refused and the readable lines have changed.

        The lines are compared with those of the previous page, if that page had refused second boards too.
        If the first board of a slot has left the page, the second board can get the slot.
        """
        before, self._beside_rivals = self._beside_rivals, 0
        if any(error.reason == "two_boards" for error in page.bad):
            roles = zip(page.prefixes, page.roles, strict=True)
            self._beside_rivals = hash(tuple(prefix for prefix, role in roles if role is LineRole.WANTED))
            self.target.forgets = self.target.forgets or self._beside_rivals != before

    def _learn_node_name(self, page: bytes) -> None:
        """Name the target after the page's `node_uname_info`, unless the configuration names it."""
        at = -1 if self.target.fixed else page.find(_UNAME)
        if at < 0 or (at > 0 and page[at - 1 : at] != b"\n"):
            return
        try:
            node = parse_line(page[at:].split(b"\n", 1)[0]).labels.get("nodename", "")
        except RecordError:
            return  # counted when the line itself is read
        self._names_host = not is_generic_name(node)
        if self._names_host:
            self._machines.name_target_after_host(node, read_kernel_start_s(page), self.target)

    def _learn_shape(self, page: PageState, lines: int) -> None:
        """Learn the page's shape if it may repeat. Otherwise forget series that are long gone.

        A broken line that differs from page to page would make every shape useless. So a shape with broken lines is
        learnt only after two pages had the same lines.
        """
        broken = page.list_broken_lines()
        before, self._broken = self._broken, hash(broken)
        has_value = any(role not in (LineRole.NOTHING, LineRole.BROKEN) for role in page.roles)
        is_lasting = not broken or (before == self._broken and sum(map(len, broken)) <= MAX_BROKEN_BYTES)
        if has_value and page.repeatable and is_lasting:
            self._shape, self._refusals = PageShape(page.prefixes, page.roles), RememberedRefusals.from_page(page)
            self._cache = {}
        elif len(self._cache) > 2 * lines + 256:
            prefixes = {prefix[:-1] for prefix in page.prefixes}
            self._cache = {key: series for key, series in self._cache.items() if key in prefixes}

    def _make_batch(self, raw: NDArray[np.float64], time_ms: NDArray[np.int64], bad: list[RecordError]) -> Batch:
        columns = self._columns
        self.reported = columns.reported
        value = columns.conversion.convert(raw)
        missing = columns.conversion.find_missing(raw)
        tally = self._tally
        good: NDArray[np.bool_] | slice = slice(None)
        finite = np.isfinite(raw)
        if len(missing) or np.count_nonzero(finite) < len(raw):
            infinite = np.flatnonzero(~finite).tolist()
            bad = bad + [RecordError("not_finite", columns.describe_row(row)) for row in infinite[:1]] * len(infinite)
            self.noted["blank"] += len(missing)
            finite[missing] = False
            good = finite
            tally = _subtract_missing_values(tally, len(raw) - int(np.count_nonzero(finite)), len(infinite))
        samples = []
        for (kind, rows, metric, entity), fold in zip(columns.kinds, columns.folds, strict=True):
            keep = good if isinstance(good, slice) else good[rows]
            if fold is not None:
                whole = fold.fold_values(
                    value[rows] if isinstance(keep, slice) else np.where(keep, value[rows], np.nan)
                )
                if len(fold.grows):
                    whole = self._growth.compute_rates(fold.grows, fold.identity, time_ms[rows][fold.first], whole)
                at = fold.first[np.isfinite(whole)]
                if len(at):
                    whole = whole[np.isfinite(whole)]
                    samples.append(SampleBatch(kind, metric[at], entity[at], time_ms[rows][at], whole))
            elif isinstance(keep, slice) or keep.any():
                samples.append(SampleBatch(kind, metric[keep], entity[keep], time_ms[rows][keep], value[rows][keep]))
        labels: tuple[ObservedJobLabels, ...] = ()
        if columns.sight.gpus:
            seen = columns.sight
            labels = (ObservedJobLabels(int(time_ms[-1]), seen.gpus, seen.jobs, seen.divided),)
        return Batch(samples=tuple(samples), bad=tuple(bad), labels=labels, tally=tally)


def _subtract_missing_values(tally: RecordTally, missing: int, infinite: int) -> RecordTally:
    """Return the tally without `missing` lines that were read but have no usable value.

    infinite: how many of them have an infinite value or NaN.
    """
    ignored = {**tally.ignored, SkipRule.NO_DATA: missing - infinite} if missing > infinite else tally.ignored
    return replace(tally, read=tally.read - missing, refused=tally.refused + infinite, ignored=ignored)


class _NewPrefix:
    """A marker for a prefix that is not in the cache. In the cache, None marks an unknown metric."""


_NEW = _NewPrefix()
