"""A reader of Prometheus' remote-write messages: 1.0 (`WriteRequest`) and 2.0 (`io.….v2.Request`).

Nearly every series of a request holds one sample with a time of six bytes, so its last bytes have one of two
forms:

    1.0   0A len ┌ label label … ┐ 12 10 09 ┌ value ┐ 10 ┌ time ┐             12 07 10 ┌ time ┐    (no value: 0)
    2.0   2A len  0A n ┌ refs ┐    12 10 09 ┌ value ┐ 10 ┌ time ┐ 2A n …      refs: numbers of symbols, packed

A loop over lengths finds the series. Then numpy compares those bytes of all series at once and extracts
the numbers. Other series (several samples, histograms, exemplars) are read field by field. In 1.0, other
bytes may have this form by chance. The parser of labels then finds invalid labels and asks for an exact
reading. Specifications: prometheus.io/docs/specs/prw/remote_write_spec and …/remote_write_spec_2_0.
"""

import struct
from dataclasses import dataclass, field
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

from fleetcast.fleet.errors import RecordError
from fleetcast.ingest.remote_write.protobuf import BYTES, FIXED64, VARINT, read_fields, read_packed_varints, read_varint

MAX_FIELDS = 200_000  # series and symbols of a request; senders pack some thousand
MAX_SAMPLES = 500_000
MAX_FIELDS_READ = 1_000_000  # of series that are read field by field
LONGEST_SAMPLE = 64  # bytes; a value and two times take 31
_SERIES: dict[int, int] = {1: 0x0A, 2: 0x2A}
_OTHERS, _SYMBOL, _NO_TAG = {0x0A, 0x22, 0x2A}, 0x22, -1
_WINDOW = 24
_TAIL, _ZERO_TAIL = 18, 9
_SEVENS = (1 << (7 * np.arange(6))).astype(np.int64)


@dataclass(frozen=True, slots=True)
class _Form:
    """A pattern of 24 bytes as three words, each with a mask of the bits that must match."""

    mask: tuple[int, int, int]
    want: tuple[int, int, int]

    @classmethod
    def parse(cls, pattern: str) -> "_Form":
        """Parse a pattern. Two hex digits match exactly this byte, and '..' matches any byte.

        '-.' matches the last byte of a varint, and '+.' any byte before the last.
        """
        words = pattern.split()
        mask = bytes({"..": 0, "+.": 0x80, "-.": 0x80}.get(word, 0xFF) for word in words)
        want = bytes({"..": 0, "+.": 0x80, "-.": 0}.get(word, 0) if word[1] == "." else int(word, 16) for word in words)
        return cls(struct.unpack("<3Q", mask), struct.unpack("<3Q", want))

    def fits(self, text: NDArray[np.uint64]) -> NDArray[np.bool_]:
        """Return (s,) bool, true for rows of (s, 3) words that match the pattern."""
        answer = np.ones(len(text), np.bool_)
        for word, (mask, want) in enumerate(zip(self.mask, self.want, strict=True)):
            if mask:
                answer &= (text[:, word] & np.uint64(mask)) == np.uint64(want)
        return answer


_VALUE, _TIME, _ANY = ".. " * 8, "+. +. +. +. +. -. ", ".. "
_SAMPLE, _ZERO = f"12 10 09 {_VALUE} 10 {_TIME}", f"12 07 10 {_TIME}"
_LAST_SAMPLE, _LAST_ZERO = _Form.parse(_ANY * 6 + _SAMPLE), _Form.parse(_ANY * 15 + _ZERO)
_NEXT_SAMPLE, _NEXT_ZERO = _Form.parse(_SAMPLE + _ANY * 6), _Form.parse(_ZERO + _ANY * 15)


class Version(IntEnum):
    V1 = 1
    V2 = 2


@dataclass(frozen=True, slots=True)
class WriteRequest:
    """A remote-write request with s series and n samples, without parsed labels.

    `of`: (n,) the series of each sample, in the order sent. 1.0: `labels`, (s,) the label fields of each series as
    sent. 2.0: series i has the labels `symbols[refs[begin[i]]], symbols[refs[begin[i] + 1]], …` up to
    `refs[end[i]]`, names and values in turn.
    """

    of: NDArray[np.intp]
    time_ms: NDArray[np.int64]
    value: NDArray[np.float64]
    labels: list[bytes] = field(default_factory=list)
    symbols: list[bytes] = field(default_factory=list)
    refs: NDArray[np.uint32] = field(default_factory=lambda: np.zeros(0, np.uint32))
    begin: NDArray[np.intp] = field(default_factory=lambda: np.zeros(0, np.intp))
    end: NDArray[np.intp] = field(default_factory=lambda: np.zeros(0, np.intp))
    histograms: int = 0
    exemplars: int = 0


def parse_write_request(message: bytes, version: Version, *, exact: bool = False) -> WriteRequest:
    r"""Read an unpacked message without parsing labels. exact: read every series of 1.0 field by field.

    Raises RecordError `bad_protobuf`, `too_many_series` or `too_many_samples`.

    >>> one = parse_write_request(bytes.fromhex("0A0C 0A05 0A0161 1200 1203 10E807".replace(" ", "")), Version.V1)
    >>> one.labels, one.time_ms.tolist(), one.value.tolist()
    ([b'\n\x05\n\x01a\x12\x00'], [1000], [0.0])
    """
    try:
        begin, end, symbols = _find_series_spans(
            message, _SERIES[version], _SYMBOL if version is Version.V2 else _NO_TAG
        )
        spans = _Spans(message, begin, end)
        return _read_label_message(spans, exact) if version is Version.V1 else _read_symbol_message(spans, symbols)
    except (IndexError, struct.error):
        raise RecordError("bad_protobuf", "the message ends in the middle of a field") from None


def _find_series_spans(data: bytes, series: int, symbol: int) -> tuple[NDArray[np.intp], NDArray[np.intp], list[bytes]]:
    """Return (s,) the begins of a message's series, (s,) their ends, and the symbols.

    `series`, `symbol`: the tag bytes of these fields.
    """
    begins: list[int] = []
    ends: list[int] = []
    symbols: list[bytes] = []
    at, size = 0, len(data)
    for _ in range(MAX_FIELDS):
        if at >= size:
            break
        tag, length = data[at], data[at + 1]
        if tag == series and not begins and (regular := _find_regular_series(data, at, series)) is not None:
            return (*regular, symbols)
        if length < 0x80:
            begin = at + 2
        else:
            more = data[at + 2]
            length, begin = (length + ((more - 1) << 7), at + 3) if more < 0x80 else read_varint(data, at + 1)
        if tag == series:
            at = begin + length
            begins.append(begin)
            ends.append(at)
        elif tag == symbol:
            at = begin + length
            symbols.append(data[begin:at])
        elif tag in _OTHERS:
            raise RecordError("bad_protobuf", f"field {tag >> 3} belongs to another version of the protocol")
        else:
            at = _skip_field(data, at)
    else:
        raise RecordError("too_many_series", f"more than {MAX_FIELDS:,} series and symbols in one request")
    if at != size:
        raise IndexError
    return np.array(begins, np.intp), np.array(ends, np.intp), symbols


def _find_regular_series(data: bytes, first: int, tag: int) -> tuple[NDArray[np.intp], NDArray[np.intp]] | None:
    """Return (s,) begins and ends of the series from `first` on, or None if one has an unusual end."""
    byte, size = np.frombuffer(data, np.uint8), len(data)
    follows = byte[1:]
    place = np.flatnonzero((byte[:-1] == 0x12) & ((follows == 0x10) | (follows == 0x07)))
    place = place[(place >= first) & (place <= size - _ZERO_TAIL)]
    zero = byte[place + 1] == 0x07
    place = place[byte[place + 2] == np.where(zero, 0x10, 0x09)]
    after = place + np.where(byte[place + 1] == 0x07, _ZERO_TAIL, _TAIL)
    after = after[after <= size]  # in no order if samples overlap: then they make no chain
    last = np.minimum(after, size - 1)
    described = after + 2 + byte[np.minimum(after + 1, size - 1)]  # behind the metadata of 2.0
    behind = described[(byte[last] == tag) & (described <= size)]
    for end in (behind, after) if tag == _SERIES[Version.V2] else (after,):
        spans = _find_consecutive_series(
            byte, first, tag, end[(end == size) | (byte[np.minimum(end, size - 1)] == tag)]
        )
        if spans is not None:
            return spans
    return None


def _find_consecutive_series(
    byte: NDArray[np.uint8], first: int, tag: int, end: NDArray[np.intp]
) -> tuple[NDArray[np.intp], NDArray[np.intp]] | None:
    """Return (s,) begins and ends of consecutive series, the first at `first`.

    end: candidates for their ends. Returns None if the series do not follow each other without gaps.
    """
    if not 0 < len(end) <= MAX_FIELDS or end[-1] != len(byte):
        return None
    head = np.concatenate([[first], end[:-1]])
    length, more = byte[head + 1].astype(np.intp), byte[np.minimum(head + 2, len(byte) - 1)].astype(np.intp)
    short = length < 0x80
    begin = head + np.where(short, 2, 3)
    length = np.where(short, length, length - 0x80 + (more << 7))
    fits = (byte[head] == tag) & (short | (more < 0x80)) & (begin + length == end)
    return (begin, end) if fits.all() else None


def _skip_field(data: bytes, at: int) -> int:
    """Return the index after the field at index `at`."""
    for _, _, _, end in read_fields(data, at, len(data)):
        return end
    raise IndexError


class _Spans:
    """The places of a message's series, with access to bytes of all series at once."""

    def __init__(self, message: bytes, begin: NDArray[np.intp], end: NDArray[np.intp]) -> None:
        self.message = message
        self.begin = begin
        self.end = end
        self._padded = message + bytes(_WINDOW)
        self.byte = np.frombuffer(self._padded, np.uint8)

    def gather_windows(self, place: NDArray[np.intp]) -> NDArray[np.uint64]:
        """Return (s, 3) uint64: for each series, the 24 bytes from `place` (s,) on.

        No place may lie after the message.
        """
        text = np.dtype(f"V{_WINDOW}")
        windows = np.ndarray((len(self._padded) - _WINDOW + 1,), text, self._padded, strides=(1,))
        return windows[place].view("<u8").reshape(-1, 3)


def _decode_times(text: NDArray[np.uint8]) -> NDArray[np.int64]:
    """Decode (s, 6) bytes, each row a varint of six bytes, into (s,) int64 times in Unix ms."""
    return (text & 0x7F).astype(np.int64) @ _SEVENS


def _decode_doubles(text: NDArray[np.uint8]) -> NDArray[np.float64]:
    """Decode (s, 8) bytes into (s,) float64."""
    return np.ascontiguousarray(text).view("<f8").reshape(-1)


@dataclass(slots=True)
class _SlowSeries:
    """The contents of one series that was read field by field."""

    labels: list[bytes] = field(default_factory=list)
    refs: list[int] = field(default_factory=list)
    samples: list[tuple[int, float]] = field(default_factory=list)  # (time_ms, value)
    histograms: int = 0
    exemplars: int = 0
    fields: int = 0


def _read_series(data: bytes, begin: int, end: int, version: Version, room: int) -> _SlowSeries:
    """Read a series field by field. Raises RecordError if it has more than `room` fields or references."""
    found = _SlowSeries()
    begins = begin
    for number, kind, first, last in read_fields(data, begin, end):
        found.fields += max(1, last - first) if number == 1 and version is Version.V2 else 1
        if found.fields > room:
            raise RecordError("too_many_samples", f"more than {MAX_FIELDS_READ:,} fields in one request")
        if number == 1 and version is Version.V1:
            found.labels.append(data[begins:last])
        elif number == 1:
            found.refs += read_packed_varints(data, first, last) if kind == BYTES else [read_varint(data, first)[0]]
        elif number == 2 and kind == BYTES:
            found.samples.append(_read_sample(data, first, last))
        elif number == (4 if version is Version.V1 else 3):
            found.histograms += 1
        elif number == (3 if version is Version.V1 else 4):
            found.exemplars += 1
        begins = last
    return found


def _read_sample(data: bytes, begin: int, end: int) -> tuple[int, float]:
    if end - begin > LONGEST_SAMPLE:
        raise RecordError("bad_protobuf", f"a sample of {end - begin} bytes")
    time_ms, value = 0, 0.0
    for number, kind, first, _ in read_fields(data, begin, end):
        if number == 1 and kind == FIXED64:
            (value,) = struct.unpack_from("<d", data, first)
        elif number == 2 and kind == VARINT:
            time_ms, _ = read_varint(data, first)
    return (time_ms if time_ms < 2**63 else time_ms - 2**64), value


class _Samples:
    """The samples of all series. Samples in a common form are stored as columns, all others by series."""

    def __init__(self, spans: _Spans, sample: NDArray[np.bool_], zero: NDArray[np.bool_], text: NDArray[np.uint8]):
        """Decode the samples in a common form.

        sample, zero: (s,) whether each series has this form. text: (s, 18) the bytes of each sample. A sample in the
        form `zero` uses only the last nine.
        """
        self._fast = sample | zero
        self._value = np.where(sample, _decode_doubles(text[:, 3:11]), 0.0)
        self._time_ms = _decode_times(text[:, 12:])
        self.slow: dict[int, _SlowSeries] = {}
        self._spans = spans

    def read_slow_series(self, version: Version) -> None:
        begin, end, total, room = self._spans.begin, self._spans.end, 0, MAX_FIELDS_READ
        for row in np.flatnonzero(~self._fast & (end > begin)).tolist():
            found = _read_series(self._spans.message, int(begin[row]), int(end[row]), version, room)
            self.slow[row] = found
            total += len(found.samples)
            room -= found.fields
            if total > MAX_SAMPLES:
                raise RecordError("too_many_samples", f"more than {MAX_SAMPLES:,} in one request")

    def make_columns(self) -> tuple[NDArray[np.intp], NDArray[np.int64], NDArray[np.float64]]:
        """Return (n,) the series of each sample, (n,) its time in Unix ms and (n,) its value."""
        fast = np.flatnonzero(self._fast)
        if len(fast) == len(self._fast):
            return fast, self._time_ms, self._value
        rows = [row for row, found in self.slow.items() for _ in found.samples]
        samples = [sample for found in self.slow.values() for sample in found.samples]
        of = np.concatenate([fast, np.array(rows, np.intp)])
        time_ms = np.concatenate([self._time_ms[fast], np.array([at for at, _ in samples], np.int64)])
        value = np.concatenate([self._value[fast], np.array([one for _, one in samples], np.float64)])
        order = np.argsort(of, kind="stable")
        return of[order], time_ms[order], value[order]

    def count_in_slow_series(self, what: str) -> int:
        return sum(getattr(found, what) for found in self.slow.values())


def _read_label_message(spans: _Spans, exact: bool) -> WriteRequest:
    """Read a 1.0 message. Each of its series ends in its sample, and all bytes before the sample are labels."""
    words = spans.gather_windows(np.maximum(spans.end - _WINDOW, 0))
    size = np.where(spans.end >= _WINDOW, spans.end - spans.begin, 0)
    sample = _LAST_SAMPLE.fits(words) & (size >= _TAIL)
    zero = _LAST_ZERO.fits(words) & (size >= _ZERO_TAIL) & ~sample
    cut = spans.end - np.where(sample, _TAIL, _ZERO_TAIL)
    alone = ~_ends_in_sample(spans.byte, np.maximum(cut, 0)) & (not exact)
    text = words.view(np.uint8)[:, _WINDOW - _TAIL :]
    samples = _Samples(spans, sample & alone, zero & alone, text)
    samples.read_slow_series(Version.V1)
    message = spans.message
    labels = [message[begin:end] for begin, end in zip(spans.begin.tolist(), cut.tolist(), strict=True)]
    for row, found in samples.slow.items():
        labels[row] = b"".join(found.labels)
    of, time_ms, value = samples.make_columns()
    counts = samples.count_in_slow_series("histograms"), samples.count_in_slow_series("exemplars")
    return WriteRequest(of, time_ms, value, labels, histograms=counts[0], exemplars=counts[1])


def _ends_in_sample(byte: NDArray[np.uint8], at: NDArray[np.intp]) -> NDArray[np.bool_]:
    """Return (s,) bool, true where the bytes before index `at` (s,) look like another sample.

    A series with two samples is read field by field.
    """
    whole, zero = np.maximum(at - _TAIL, 0), np.maximum(at - _ZERO_TAIL, 0)
    answer: NDArray[np.bool_] = (byte[whole] == 0x12) & (byte[whole + 1] == 0x10) & (byte[whole + 2] == 0x09)
    answer |= (byte[zero] == 0x12) & (byte[zero + 1] == 0x07) & (byte[zero + 2] == 0x10)
    return answer


def _read_symbol_message(spans: _Spans, symbols: list[bytes]) -> WriteRequest:
    """Read a 2.0 message. Each of its series has references to symbols, one sample, and unused metadata."""
    byte, size = spans.byte, len(spans.message)
    length = byte[np.minimum(spans.begin + 1, size)].astype(np.intp)
    after = np.minimum(spans.begin + 2 + length, size)
    head = (byte[spans.begin] == 0x0A) & (length < 0x80) & (after < spans.end)
    words = spans.gather_windows(after)
    sample, zero = _NEXT_SAMPLE.fits(words), _NEXT_ZERO.fits(words)
    text = words.view(np.uint8)[:, :_TAIL]
    rest = np.minimum(after + np.where(sample, _TAIL, _ZERO_TAIL), size)
    described = (byte[rest] == 0x2A) & (byte[np.minimum(rest + 1, size)] < 0x80)
    described &= rest + 2 + byte[np.minimum(rest + 1, size)] == spans.end
    head &= (rest == spans.end) | described
    text[zero, _ZERO_TAIL:] = text[zero, :_ZERO_TAIL]
    samples = _Samples(spans, sample & head, zero & head, text)
    samples.read_slow_series(Version.V2)
    refs, begin, end = _read_references(spans, head & (sample | zero), length, samples.slow)
    if len(refs) and int(refs.max()) >= len(symbols):
        raise RecordError("bad_protobuf", f"symbol {int(refs.max())} of {len(symbols)}")
    counts = samples.count_in_slow_series("histograms"), samples.count_in_slow_series("exemplars")
    of, time_ms, value = samples.make_columns()
    return WriteRequest(of, time_ms, value, [], symbols, refs, begin, end, counts[0], counts[1])


def _read_references(
    spans: _Spans, fast: NDArray[np.bool_], length: NDArray[np.intp], slow: dict[int, _SlowSeries]
) -> tuple[NDArray[np.uint32], NDArray[np.intp], NDArray[np.intp]]:
    """Return all references to symbols, and (s,) the begin and (s,) the end of each series' references.

    fast: (s,) whether a series has the common form. length: (s,) bytes of its references.
    """
    rows = np.flatnonzero(fast)
    size = length[rows]
    stop = np.cumsum(size)
    index = np.repeat(spans.begin[rows] + 2 - stop + size, size) + np.arange(int(size.sum()))
    text = spans.byte[index]
    ends = np.flatnonzero(text < 0x80)
    if (text[stop[size > 0] - 1] >= 0x80).any():
        raise RecordError("bad_protobuf", "a reference goes beyond its series")
    begin, end = np.zeros(len(fast), np.intp), np.zeros(len(fast), np.intp)
    end[rows] = np.searchsorted(ends, stop)  # references whose last byte lies before `stop`
    begin[rows] = np.searchsorted(ends, stop - size)
    refs = [_decode_varints(text, ends)]
    at = len(ends)
    for row, found in slow.items():
        begin[row], end[row] = at, at + len(found.refs)
        at = int(end[row])
        if max(found.refs, default=0) >= 2**32:
            raise RecordError("bad_protobuf", f"symbol {max(found.refs)}")
        refs.append(np.array(found.refs, np.uint32))
    return np.concatenate(refs), begin, end


def _decode_varints(text: NDArray[np.uint8], ends: NDArray[np.intp]) -> NDArray[np.uint32]:
    """Return (k,) uint32, the varints in `text`. ends: (k,) the index of the last byte of each.

    Raises RecordError `bad_protobuf` if a number has more than 32 bits.
    """
    width = np.diff(ends, prepend=-1)
    if len(width) and int(width.max()) > 5:
        raise RecordError("bad_protobuf", "a reference of more than 32 bits")
    number = (text[ends] & 0x7F).astype(np.uint64)
    for more in range(1, int(width.max(initial=1))):
        longer = np.flatnonzero(width > more)
        number[longer] = (number[longer] << np.uint64(7)) | (text[ends[longer] - more] & 0x7F)
    if len(number) and int(number.max()) >= 2**32:
        raise RecordError("bad_protobuf", "a reference of more than 32 bits")
    return number.astype(np.uint32)
