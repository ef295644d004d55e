"""Exposition text → samples, with a cache per target: labels are parsed once in the life of a series.

Two scrapes of a target differ in their numbers and hardly ever in anything else. So the decoder keeps the shape of the
last clean page as a template, and a page that fits it costs a handful of C-level passes:

    lines = page.split("\\n")                        every line starts with the prefix of its line in the template
    tails = line[len(prefix):] for sample lines      → floats → scale, missing → columns that are known already

A page that does not fit (a GPU vanished, a pod moved, a line is broken) takes the line path: look every prefix up in a
dict, parse the ones that are new, count what is bad, and learn a new template when nothing was.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import compress
from operator import getitem
from typing import cast

import msgspec
import numpy as np
from numpy.typing import NDArray

from fleet.errors import RecordError
from fleet.samples import EntityKind, SampleBatch
from ingest.exposition import parse_line, parse_timestamp, parse_value
from ingest.series import Conversion, Series
from ingest.source import Batch

MAX_SERIES = 50_000
MAX_BAD_LINES = 1000
_UNAME = b"node_uname_info{"


@dataclass(slots=True)
class Target:
    """Where a page comes from. `node` owns the series that name none; all of them where configuration `fixed` it."""

    node: str
    fixed: bool = False


Resolve = Callable[[str, Mapping[str, str], Target], Series | None]
"""What (metric name, labels, target) stands for; None to ignore the line. Raises RecordError on bad labels."""


@dataclass(frozen=True, slots=True)
class Reported:
    """How many devices of a node were on a page."""

    gpus: int = 0
    ports: int = 0


@dataclass(frozen=True, slots=True)
class _Columns:
    """What samples need besides numbers, for n series in page order."""

    series: tuple[Series, ...]
    conversion: Conversion
    kinds: tuple[tuple[EntityKind, NDArray[np.intp], NDArray[np.int16], NDArray[np.int32]], ...]
    reported: dict[int, Reported]  # node row -> devices

    @classmethod
    def of(cls, series: Sequence[Series]) -> "_Columns":
        kinds = []
        for kind in dict.fromkeys(one.kind for one in series):
            rows = np.array([row for row, one in enumerate(series) if one.kind is kind], np.intp)
            metric = np.array([one.metric for one in series], np.int16)[rows]
            entity = np.array([one.entity for one in series], np.int32)[rows]
            kinds.append((kind, rows, metric, entity))
        return cls(tuple(series), Conversion.of(series), tuple(kinds), _count_devices(series))


def _count_devices(series: Sequence[Series]) -> dict[int, Reported]:
    devices: dict[int, tuple[set[int], set[int]]] = {}
    for one in series:
        gpus, ports = devices.setdefault(one.node, (set(), set()))
        if one.device >= 0:
            (ports if one.kind is EntityKind.PORT else gpus).add(one.device)
    return {node: Reported(len(gpus), len(ports)) for node, (gpus, ports) in devices.items()}


@dataclass(frozen=True, slots=True)
class _Template:
    """The last clean page: a prefix for each line (a whole line where it is no sample), and the sample columns."""

    prefixes: tuple[bytes, ...]
    wanted: tuple[bool, ...]  # which lines are samples of the catalogue
    slices: tuple[slice, ...]  # of the wanted lines: where the value begins
    columns: _Columns

    def read(self, lines: list[bytes]) -> NDArray[np.float64] | None:
        """(n,) raw numbers when the page fits, else None."""
        if len(lines) != len(self.prefixes) or not all(map(bytes.startswith, lines, self.prefixes)):
            return None
        tails = cast(list[bytes], list(map(getitem, compress(lines, self.wanted), self.slices)))
        return _numbers(tails)


_JSON_NUMBERS = msgspec.json.Decoder(list[float])


def _numbers(tokens: list[bytes]) -> NDArray[np.float64] | None:
    """(n,) numbers, None when one is broken or has a timestamp behind it.

    Exporters print JSON's numbers but for NaN and infinities, and a JSON decoder reads them thrice as fast as `float`.
    """
    try:
        numbers = _JSON_NUMBERS.decode(b"[" + b",".join(tokens) + b"]")
    except msgspec.DecodeError:
        try:
            numbers = [parse_value(token) for token in tokens]
        except RecordError:
            return None
    return np.array(numbers, np.float64) if len(numbers) == len(tokens) else None


@dataclass(slots=True)
class _Page:
    """A page on the line path: what was read so far."""

    arrival_ms: int
    prefixes: list[bytes] = field(default_factory=list)
    wanted: list[bool] = field(default_factory=list)
    slices: list[slice] = field(default_factory=list)
    series: list[Series] = field(default_factory=list)
    raw: list[float] = field(default_factory=list)
    time_ms: list[int] = field(default_factory=list)
    bad: list[RecordError] = field(default_factory=list)
    keys: set[bytes] = field(default_factory=set)
    entities: set[tuple[EntityKind, int, int]] = field(default_factory=set)
    repeatable: bool = True

    def skip(self, line: bytes) -> None:
        self.prefixes.append(line)
        self.wanted.append(False)
        self.repeatable = self.repeatable and bool(line.strip())  # every line starts with a blank one


class PageDecoder:
    """Decodes the pages of one target. `noted` counts by reason what is neither good nor bad (blank, saturated, …)."""

    def __init__(
        self,
        resolve: Resolve,
        target: Target,
        *,
        noted: Counter[str] | None = None,
        max_series: int = MAX_SERIES,
        future_limit_ms: int = 60_000,
    ) -> None:
        self.target = target
        self.noted: Counter[str] = Counter() if noted is None else noted
        self.reported: dict[int, Reported] = {}  # of the last page
        self._resolve = resolve
        self._max_series = max_series
        self._future_limit_ms = future_limit_ms
        self._cache: dict[bytes, Series | None] = {}
        self._template: _Template | None = None

    def decode(self, page: bytes, arrival_ms: int) -> Batch:
        """Samples at `arrival_ms` (fleet time) unless a line carries a timestamp. Never raises on what a page holds."""
        lines = page.split(b"\n")
        rest = lines.pop()
        if self._template is not None and not rest:
            raw = self._template.read(lines)
            if raw is not None:
                columns = self._template.columns
                return self._batch(columns, raw, np.full(len(raw), arrival_ms, np.int64), [])
        return self._decode_lines(page, lines, rest, arrival_ms)

    def _decode_lines(self, page: bytes, lines: list[bytes], rest: bytes, arrival_ms: int) -> Batch:
        self._learn_node(page)
        state = _Page(arrival_ms)
        for line in lines:
            try:
                self._read_line(line, state)
            except RecordError as error:
                state.bad.append(error.with_traceback(None))  # a traceback would keep the page alive
                if len(state.bad) >= MAX_BAD_LINES:
                    state.bad.append(RecordError("page_abandoned", f"after {MAX_BAD_LINES} bad lines"))
                    break
        if rest.strip():
            state.bad.append(RecordError("truncated", repr(rest[:80])))
        columns = _Columns.of(state.series)
        self._remember(state, columns, len(lines))
        raw = np.array(state.raw, np.float64)
        return self._batch(columns, raw, np.array(state.time_ms, np.int64), state.bad)

    def _read_line(self, line: bytes, page: _Page) -> None:
        key, _, value = line.rpartition(b" ")
        timestamp = b""
        found = self._cache.get(key, _NEW)
        if found is _NEW and line.lstrip(b" \t\r")[:1] in (b"", b"#"):
            page.skip(line)
            return
        if found is _NEW:
            head, _, middle = key.rpartition(b" ")
            if head in self._cache:
                found, key, value, timestamp = self._cache[head], head, middle, value
        prefix = key + b" "
        if found is _NEW:
            found, prefix, value, timestamp = self._parse(line)
            key = prefix[:-1]
        assert not isinstance(found, _New)
        if found is None:
            page.skip(prefix)
            return
        if key in page.keys:
            raise RecordError("duplicate", repr(line[:80]))
        page.keys.add(key)
        self._add(found, prefix, value, timestamp, page)

    def _parse(self, line: bytes) -> tuple[Series | None, bytes, bytes, bytes]:
        """(series, prefix, value, timestamp) of a line that the cache does not hold."""
        parsed = parse_line(line)
        parse_value(parsed.value)
        if len(self._cache) >= self._max_series:
            raise RecordError("too_many_series", f"more than {self._max_series:,}: {line[:60]!r}")
        series = self._resolve(parsed.name, parsed.labels, self.target)
        if parsed.prefix.endswith(b" "):  # else rpartition would not find it again
            self._cache[parsed.prefix[:-1]] = series
        return series, parsed.prefix, parsed.value, parsed.timestamp

    def _add(self, series: Series, prefix: bytes, value: bytes, timestamp: bytes, page: _Page) -> None:
        raw = parse_value(value)
        time_ms = parse_timestamp(timestamp.strip()) if timestamp else page.arrival_ms
        if time_ms > page.arrival_ms + self._future_limit_ms:
            raise RecordError("future", f"{(time_ms - page.arrival_ms) / 1000:.0f} s ahead: {prefix[:60]!r}")
        identity = (series.kind, series.metric, series.entity)
        if identity in page.entities:  # one GPU under several pods: the same number under other labels
            self.noted["folded"] += 1
            page.skip(prefix)
            return
        page.entities.add(identity)
        page.prefixes.append(prefix)
        page.wanted.append(True)
        page.slices.append(slice(len(prefix), None))
        page.series.append(series)
        page.raw.append(raw)
        page.time_ms.append(time_ms)
        page.repeatable = page.repeatable and not timestamp

    def _learn_node(self, page: bytes) -> None:
        """Name the target after `node_uname_info`, which node_exporter prints, unless configuration named it."""
        at = -1 if self.target.fixed else page.find(_UNAME)
        if at < 0 or (at > 0 and page[at - 1 : at] != b"\n"):
            return
        try:
            node = parse_line(page[at:].split(b"\n", 1)[0]).labels.get("nodename", "")
        except RecordError:
            return  # counted when the line itself is read
        if node and node != self.target.node:
            self.target.node = node
            self._cache.clear()

    def _remember(self, page: _Page, columns: _Columns, lines: int) -> None:
        """Learn the page's shape if it was clean, and forget series of long ago."""
        clean = not page.bad and page.repeatable
        self._template = (
            _Template(tuple(page.prefixes), tuple(page.wanted), tuple(page.slices), columns) if clean else None
        )
        if len(self._cache) > 2 * lines + 256:
            kept = {prefix[:-1] for prefix in page.prefixes}
            self._cache = {key: series for key, series in self._cache.items() if key in kept}

    def _batch(
        self, columns: _Columns, raw: NDArray[np.float64], time_ms: NDArray[np.int64], bad: list[RecordError]
    ) -> Batch:
        self.reported = columns.reported
        missing = columns.conversion.missing(raw)
        infinite = ~np.isfinite(raw)
        if infinite.any():
            errors = [RecordError("not_finite", str(columns.series[row])) for row in np.flatnonzero(infinite)[:1]]
            bad = bad + errors * int(np.count_nonzero(infinite))
        if missing.any():
            self.noted["blank"] += int(np.count_nonzero(missing))
        good = ~(missing | infinite)
        every = bool(good.all())
        value = columns.conversion.values(raw)
        samples = []
        for kind, rows, metric, entity in columns.kinds:
            if every:
                samples.append(SampleBatch(kind, metric, entity, time_ms[rows], value[rows]))
            elif (keep := good[rows]).any():
                picked = rows[keep]
                samples.append(SampleBatch(kind, metric[keep], entity[keep], time_ms[picked], value[picked]))
        return Batch(samples=tuple(samples), bad=tuple(bad))


class _New:
    """Marks a prefix that the cache does not hold (None marks one to ignore)."""


_NEW = _New()
