"""A decoder of remote writes with a cache: it parses the labels of a series once.

1.0 sends all labels with each series, and their bytes are the key of the cache. 2.0 sends indices
into a request's table of symbols. The decoder gives each symbol a stable number, and the numbers of
a series' symbols are its key. A series belongs to the node that its label `node` (or
`kubernetes_node`) names, else to the exporter's `Hostname`. Without either, it belongs to the host
of `instance`, or to the `nodename` that node_exporter reported for this host.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from itertools import islice
from urllib.parse import urlsplit

import numpy as np
from numpy.typing import NDArray

from fleetcast.fleet.entities import Entities
from fleetcast.fleet.errors import RecordError
from fleetcast.fleet.metrics import METRICS
from fleetcast.fleet.node_names import is_node_name
from fleetcast.fleet.samples import EntityKind, SampleBatch
from fleetcast.ingest.gpu_labels import JobLabel, ObservedJobLabels
from fleetcast.ingest.machines import MachineNames
from fleetcast.ingest.pages.page_state import YEAR_2000_MS
from fleetcast.ingest.pages.parts import CounterRates, PartRows, PartSums
from fleetcast.ingest.pages.text import LineResolver, Target
from fleetcast.ingest.remote_write.instances import InstanceTargets
from fleetcast.ingest.remote_write.protobuf import BYTES, read_fields
from fleetcast.ingest.remote_write.request import Version, WriteRequest, parse_write_request
from fleetcast.ingest.remote_write.series_table import COLUMNS, GPU, KINDS, SeriesTable
from fleetcast.ingest.remote_write.snappy import unpack
from fleetcast.ingest.series import Conversion, Fold, Series
from fleetcast.ingest.source import Batch
from fleetcast.ingest.tally import MAX_UNREAD_NAMES, RecordTally, SkipRule

MAX_UNPACKED_BYTES = 2**26
MAX_SERIES = 1_000_000
MAX_UNWANTED = 250_000
MAX_SYMBOLS = 1_000_000
MAX_HELD_BYTES = 2**29  # of labels and symbols
MAX_LABEL_BYTES = 65_536  # of one series
NODE_LABELS = ("node", "kubernetes_node")
_STALE = 0x7FF0000000000002  # the NaN that says: this series has ended
_UNREAD, _NEW, _BAD = -1, -2, -3  # a rule that leaves a series out is its number below 0


@dataclass(slots=True)
class _RequestSeries:
    """The series of a request: their keys, their rows in the table, and the labels of new series."""

    keys: list[bytes]
    rows: NDArray[np.int64]
    labels: dict[int, dict[str, str]] = field(default_factory=dict)
    unread: dict[str, None] = field(default_factory=dict)  # names of series that are new and that nothing reads
    bad: list[RecordError] = field(default_factory=list)


class WriteDecoder:
    """The decoder of all senders' requests.

    `noted`: counts, by reason, of samples that were skipped without an error.
    """

    def __init__(
        self,
        resolve: LineResolver,
        *,
        future_limit_ms: int = 60_000,
        models: Callable[[], dict[str, str]] = dict,
        machines: MachineNames | None = None,
    ) -> None:
        """Create the decoder.

        `models`: returns node → GPU model, from labels. machines: the resolver's machine names.
        """
        self.noted: Counter[str] = Counter()
        self._machines = machines or MachineNames(Entities())
        self._machines.noted = self.noted
        self.models = models
        self._resolve = resolve
        self._future_limit_ms = future_limit_ms
        self._table = SeriesTable()
        self._rows: dict[bytes, int] = {}  # by labels, as 1.0 sends them or as our numbers of symbols
        self._unwanted = 0
        self._held = 0  # bytes of the keys of `_rows` and `_symbols`
        self._symbols: dict[bytes, int] = {}
        self._nodes: dict[str, str] = {}  # `instance` -> what node_exporter calls its host
        self._of_instance: dict[str, list[bytes]] = {}  # keys of series that belong to the host of an `instance`
        self._instances = InstanceTargets()
        self._sums = PartSums()
        self._growth = CounterRates()
        self._grows: set[int] = set()  # identities of Fold.RATE
        self._new_gpus: set[int] = set()  # of which nobody was told yet that they are heard of

    def decode(self, body: bytes, version: Version, received_ms: int) -> Batch:
        """Decode the samples of one request body.

        Raises RecordError if the body as a whole is unreadable: `bad_snappy`, `too_large`, `bad_protobuf`, …
        """
        message = unpack(body, MAX_UNPACKED_BYTES)
        write = parse_write_request(message, version)
        found = self._find_series(write)
        if found.bad and version is Version.V1:
            write = parse_write_request(message, version, exact=True)
            found = self._find_series(write)
        return self._decode_found_series(write, found, received_ms)

    def decode_request(self, write: WriteRequest, received_ms: int) -> Batch:
        """Decode the samples of a request that has already been split into series."""
        return self._decode_found_series(write, self._find_series(write), received_ms)

    def _decode_found_series(self, write: WriteRequest, found: "_RequestSeries", received_ms: int) -> Batch:
        for target in self._instances.record_arrival(found.rows, received_ms):
            self._machines.separate_clashing_targets(b"", target)
        self._resolve_new_series(found)
        self._add_noted_counts(histogram=write.histograms, exemplar=write.exemplars)
        return self._make_batch(write, found, received_ms)

    def _make_tally(self, write: WriteRequest, at: NDArray[np.int64], names: Iterable[str]) -> RecordTally:
        """Return the tally of a request before its values are checked.

        at: (n,) the row of each sample's series, negative if the series is not read. names: unread names.
        """
        codes, counts = np.unique(at[at < 0], return_counts=True)
        left_out = dict(zip(codes.tolist(), counts.tolist(), strict=True))
        unread, refused = left_out.pop(_UNREAD, 0), left_out.pop(_BAD, 0)
        self._add_noted_counts(unknown_metric=unread + sum(left_out.values()))
        ignored = Counter({SkipRule(-code): count for code, count in left_out.items()})
        ignored[SkipRule.NOT_USED] += write.histograms + write.exemplars
        return RecordTally(int(np.count_nonzero(at >= 0)), refused, ignored, unread, tuple(names))

    def _clear_if_too_large(self) -> None:
        """Clear all tables once one is too large, so that memory stays bounded."""
        many = len(self._symbols) > MAX_SYMBOLS or len(self._rows) > MAX_SERIES or self._unwanted > MAX_UNWANTED
        if many or len(self._nodes) > MAX_SERIES or self._held > MAX_HELD_BYTES:
            self._table = SeriesTable()
            self._rows, self._symbols, self._of_instance, self._nodes = {}, {}, {}, {}
            self._instances = InstanceTargets()
            self._unwanted = self._held = 0

    def _make_symbol_keys(self, write: WriteRequest) -> list[bytes]:
        """Return a key for each series of a 2.0 request: the stable numbers of its symbols, as bytes."""
        numbers, known = self._symbols, len(self._symbols)
        own = np.array([numbers.setdefault(symbol, len(numbers)) for symbol in write.symbols], "<u4")
        self._held += sum(map(len, islice(reversed(numbers), len(numbers) - known)))
        text = own[write.refs].tobytes() if len(write.refs) else b""
        begin, end = (write.begin * 4).tolist(), (write.end * 4).tolist()
        return [text[first:last] for first, last in zip(begin, end, strict=True)]

    def _find_series(self, write: WriteRequest) -> "_RequestSeries":
        """Return the rows of a request's known series, and the labels of its new series."""
        self._clear_if_too_large()
        keys = self._make_symbol_keys(write) if len(write.begin) else write.labels
        get = self._rows.get
        found = _RequestSeries(keys, np.array([get(key, _NEW) for key in keys], np.int64))
        for row in np.flatnonzero(found.rows == _NEW).tolist():
            try:
                if len(keys[row]) > MAX_LABEL_BYTES:
                    raise RecordError("bad_label", f"labels of {len(keys[row]):,} bytes: {keys[row][:80]!r}")
                found.labels[row] = _decode_symbol_labels(write, row) if len(write.begin) else parse_labels(keys[row])
            except RecordError as error:
                found.rows[row] = _BAD
                found.bad.append(error.with_traceback(None))
        return found

    def _resolve_new_series(self, found: "_RequestSeries") -> None:
        """Resolve new series after all host names in the request are known.

        Adds their rows and errors to `found`.
        """
        for labels in found.labels.values():
            self._learn_host_name(labels)
        for row, labels in found.labels.items():
            try:
                found.rows[row] = self._find_or_add_row(found.keys[row], labels)
                if found.rows[row] == _UNREAD and len(found.unread) < MAX_UNREAD_NAMES:
                    found.unread[labels["__name__"][:80]] = None
            except RecordError as error:
                found.rows[row] = _BAD
                found.bad.append(error.with_traceback(None))
        for instance in self._instances.pop_renamed_instances():
            self._forget_host_series(instance)

    def _forget_host_series(self, instance: str) -> None:
        """Forget the series of an `instance`, so that they are resolved again when they next arrive."""
        for key in self._of_instance.pop(instance, ()):
            self._rows.pop(key, None)

    def _learn_host_name(self, labels: Mapping[str, str]) -> None:
        """Record the host name of an `instance` if these are labels of `node_uname_info`.

        If the name is new, the instance's series are resolved again.
        """
        instance, node = labels.get("instance", ""), labels.get("nodename", "")
        if labels["__name__"] == "node_uname_info" and instance and node and self._nodes.get(instance) != node:
            self._nodes[instance] = node
            self._forget_host_series(instance)

    def _find_or_add_row(self, key: bytes, labels: Mapping[str, str]) -> int:
        """Return the row of a series in the table, and add an unknown series.

        The result is negative if the series is not read. Raises RecordError if the labels are bad.
        """
        known = self._rows.get(key)
        if known is not None:
            return known
        self._held += len(key)
        target = self._find_target(labels)
        series = self._resolve(labels["__name__"], labels, target)
        if not isinstance(series, Series):
            self._unwanted += 1
            self._rows[key] = code = _UNREAD if series is None else -int(series)
            return code
        self._rows[key] = row = self._table.add_series(series)
        if series.kind is EntityKind.GPU:
            self._new_gpus.add(series.entity)
        if not target.fixed and "instance" in labels:
            self._of_instance.setdefault(labels["instance"], []).append(key)
            self._instances.assign_row(row, labels["instance"])
        return row

    def _find_target(self, labels: Mapping[str, str]) -> Target:
        address = labels.get("instance", "")
        for label in NODE_LABELS:
            if is_node_name(stated := labels.get(label, "")):
                return Target(stated, fixed=True, address=address)
            self._add_noted_counts(bad_node_labels=bool(stated))
        node = self._nodes.get(address) or parse_host(address)
        return self._instances.find_or_add_target(address, node) if address else Target(node)

    def _add_noted_counts(self, **counts: int) -> None:
        self.noted.update({reason: count for reason, count in counts.items() if count})

    def _make_batch(self, write: WriteRequest, found: "_RequestSeries", received_ms: int) -> Batch:
        at, bad = found.rows[write.of], found.bad
        tally = self._make_tally(write, at, found.unread)
        wanted = np.flatnonzero(at >= 0)
        finite = np.isfinite(write.value[wanted])
        odd, wanted = wanted[~finite], wanted[finite]
        stale = write.value[odd].view(np.uint64) == _STALE
        bad = bad + _make_errors("not_finite", self._table.columns[at[odd[~stale]]])
        columns = self._table.columns[at[wanted]]
        raw, time_ms = write.value[wanted], write.time_ms[wanted]
        conversion = Conversion.from_columns(
            np.ascontiguousarray(columns["scale"]), columns["form"], columns["ceiling"]
        )
        value, missing = conversion.convert(raw), conversion.find_missing(raw)
        future = time_ms > received_ms + self._future_limit_ms
        absurd = (time_ms < YEAR_2000_MS) & (received_ms >= YEAR_2000_MS)
        good = ~(future | absurd)
        bad += _make_errors("future", columns[future]) + _make_errors("absurd_time", columns[absurd])
        refused = len(time_ms) - int(np.count_nonzero(good)) + len(odd) - int(np.count_nonzero(stale))
        good[missing] = False
        left_out = len(at[at >= 0]) - int(np.count_nonzero(good))
        if left_out:
            ignored = {**tally.ignored, SkipRule.NO_DATA: left_out - refused}
            tally = replace(tally, read=tally.read - left_out, refused=tally.refused + refused, ignored=ignored)
        self._add_noted_counts(stale=int(np.count_nonzero(stale)), blank=len(missing))
        parts = good & (columns["fold"] != Fold.WHOLE)
        samples = _split_by_kind(columns[good & ~parts], time_ms[good & ~parts], value[good & ~parts])
        if parts.any():
            samples += self._sum_parts(columns[parts], at[wanted][parts], time_ms[parts], value[parts])
        labels = self._collect_job_labels(columns[good], time_ms[good]) if self._new_gpus or self._table.labels else ()
        return Batch(samples=tuple(samples), bad=tuple(bad), labels=labels, tally=tally)

    def _collect_job_labels(
        self, columns: NDArray[np.void], time_ms: NDArray[np.int64]
    ) -> tuple[ObservedJobLabels, ...]:
        """Return the job labels of a request's GPUs, one set for each sample time.

        Until the first label arrives, only new GPUs are included.
        """
        is_labelled = (columns["kind"] == GPU) | columns["divided"]
        columns, time_ms = columns[is_labelled], time_ms[is_labelled]
        if not self._table.labels:
            fresh = np.isin(columns["entity"], list(self._new_gpus))
            columns, time_ms = columns[fresh], time_ms[fresh]
        self._new_gpus = set()
        rows = np.unique(np.column_stack([time_ms, columns["device"], columns["label"], columns["divided"]]), axis=0)
        moments: dict[int, _JobLabelsBuilder] = {}
        for moment_ms, gpu, label, divided in rows.tolist():
            sight = moments.setdefault(moment_ms, _JobLabelsBuilder())
            sight.add_label(gpu, self._table.labels[label - 1] if label else None, bool(divided))
        return tuple(sight.make_job_labels(moment_ms) for moment_ms, sight in moments.items())

    def _sum_parts(
        self,
        columns: NDArray[np.void],
        row: NDArray[np.int64],
        time_ms: NDArray[np.int64],
        value: NDArray[np.float64],
    ) -> list[SampleBatch]:
        """Add parts of sums, and return the samples whose parts have all arrived.

        columns: (n,) rows of the table of series. row: (n,) their indices in the table.
        """
        identity = (columns["kind"].astype(np.int64) << 48) | (columns["metric"].astype(np.int64) << 32)
        identity |= columns["entity"]
        part = np.where(columns["part"] != 0, columns["part"], row)
        rows = PartRows(identity, part, time_ms, value, columns["fold"] == Fold.MEAN)
        dropped = self._sums.dropped
        self._grows.update(identity[columns["fold"] == Fold.RATE].tolist())
        identity, time_ms, value = self._sums.add_parts(rows)
        self._add_noted_counts(incomplete_sum=self._sums.dropped - dropped)
        if self._grows:
            grows = np.flatnonzero(np.isin(identity, list(self._grows)))
            value = self._growth.compute_rates(grows, identity, time_ms, value)
            known = np.isfinite(value)
            identity, time_ms, value = identity[known], time_ms[known], value[known]
        whole = np.zeros(len(identity), COLUMNS)
        whole["kind"], whole["metric"], whole["entity"] = (
            identity >> 48,
            (identity >> 32) & 0xFFFF,
            identity & 0xFFFFFFFF,
        )
        return _split_by_kind(whole, time_ms, value)


def _split_by_kind(
    columns: NDArray[np.void], time_ms: NDArray[np.int64], value: NDArray[np.float64]
) -> list[SampleBatch]:
    samples = []
    for kind in np.unique(columns["kind"]).tolist():
        keep = columns["kind"] == kind
        part = columns[keep]
        metric, entity = np.ascontiguousarray(part["metric"]), np.ascontiguousarray(part["entity"])
        samples.append(SampleBatch(KINDS[kind], metric, entity, time_ms[keep], value[keep]))
    return samples


def _make_errors(reason: str, columns: NDArray[np.void]) -> list[RecordError]:
    """Return one error for each row of the table. All are the same object, which names the series in the first row."""
    if not len(columns):
        return []
    kind = KINDS[int(columns["kind"][0])]
    name = METRICS[kind][int(columns["metric"][0])].name
    return [RecordError(reason, f"{name} of {kind} {int(columns['entity'][0])}")] * len(columns)


@dataclass(slots=True)
class _JobLabelsBuilder:
    """A builder of the job labels at one sample time of a request."""

    gpus: dict[int, None] = field(default_factory=dict)
    jobs: dict[int, list[JobLabel]] = field(default_factory=dict)
    divided: dict[int, None] = field(default_factory=dict)

    def add_label(self, gpu: int, label: JobLabel | None, divided: bool) -> None:
        (self.divided if divided else self.gpus)[gpu] = None
        if label is not None and not divided:
            self.jobs.setdefault(gpu, []).append(label)

    def make_job_labels(self, time_ms: int) -> ObservedJobLabels:
        return ObservedJobLabels(time_ms, tuple(self.gpus), self.jobs, tuple(self.divided))


def parse_labels(text: bytes) -> dict[str, str]:
    """Parse the consecutive label fields of a 1.0 series.

    Raises RecordError `bad_label` if there are other fields, text that is not UTF-8, or no metric name.

    >>> parse_labels(bytes.fromhex("0A0D 0A08 5F5F6E616D655F5F 1201 61".replace(" ", "")))
    {'__name__': 'a'}
    """
    labels: dict[str, str] = {}
    at = 0
    try:
        while at < len(text):
            name, value, at = _parse_short_label(text, at) or _parse_any_label(text, at)
            labels[name.decode()] = value.decode()
    except (IndexError, UnicodeDecodeError):
        raise RecordError("bad_label", repr(text[:80])) from None
    return _require_name(labels)


def _parse_short_label(text: bytes, at: int) -> tuple[bytes, bytes, int] | None:
    """Return (name, value, end) of a label in the common form, or None if it has another form.

    The common form is 0A len 0A n name 12 n value, with each length below 128.
    """
    end = at + 2 + text[at + 1]
    name_end = at + 4 + text[at + 3]
    if text[at] != 0x0A or text[at + 2] != 0x0A or end >= at + 130 or name_end + 2 > end or text[name_end] != 0x12:
        return None
    if name_end + 2 + text[name_end + 1] != end or end > len(text):
        return None
    return text[at + 4 : name_end], text[name_end + 2 : end], end


def _parse_any_label(text: bytes, at: int) -> tuple[bytes, bytes, int]:
    """Return (name, value, end) of a label in any valid form.

    If a name or value occurs twice, the last one counts.

    Raises RecordError `bad_label`.
    """
    for number, kind, begin, end in read_fields(text, at, len(text)):
        if number != 1 or kind != BYTES:
            break
        parts = {1: b"", 2: b""}
        for part, wire, first, last in read_fields(text, begin, end):
            if part in parts and wire == BYTES:
                parts[part] = text[first:last]
        return parts[1], parts[2], end
    raise RecordError("bad_label", f"no label at byte {at} of {text[:80]!r}")


def _decode_symbol_labels(write: WriteRequest, row: int) -> dict[str, str]:
    """Return the labels of a series of a 2.0 request. Raises RecordError `bad_label`."""
    refs = write.refs[write.begin[row] : write.end[row]].tolist()
    try:
        words = [write.symbols[ref].decode() for ref in refs]
    except UnicodeDecodeError:
        raise RecordError("bad_label", "a symbol that is no UTF-8") from None
    if len(words) % 2:
        raise RecordError("bad_label", f"a name without a value: {words[-1][:80]!r}")
    return _require_name(dict(zip(words[::2], words[1::2], strict=True)))


def _require_name(labels: dict[str, str]) -> dict[str, str]:
    if not labels.get("__name__"):
        raise RecordError("bad_label", f"a series without __name__: {str(labels)[:80]}")
    return labels


def parse_host(instance: str) -> str:
    """Return the host name in a label `instance`.

    >>> parse_host("n001:9400"), parse_host("http://n001:9400/metrics"), parse_host("[::1]:9100"), parse_host("n001")
    ('n001', 'n001', '::1', 'n001')
    """
    try:
        return urlsplit(instance if "://" in instance else f"//{instance}").hostname or instance
    except ValueError:
        return instance
