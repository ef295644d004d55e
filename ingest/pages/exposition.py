r"""A strict parser of single lines of the Prometheus text format, for the first line of each series.

    name{label="value",...} value [timestamp_ms]

Escapes in label values are \\, \" and \n. Blanks and tabs may stand between tokens. A comma may end the
labels.
"""

import re
from collections.abc import Mapping
from functools import lru_cache

import msgspec

from fleetcast.fleet.errors import RecordError

MAX_LINE_BYTES = 8192

_NAME = re.compile(r"[ \t]*([a-zA-Z_:][a-zA-Z0-9_:]*)[ \t]*(\{)?")
_LABEL = re.compile(r'[ \t]*([a-zA-Z_][a-zA-Z0-9_]*)[ \t]*=[ \t]*"([^"\\]*(?:\\.[^"\\]*)*)"[ \t]*(,|(?=\}))')
_BLANKS = re.compile(r"[ \t]*")
_END = re.compile(r"[ \t]*\}")
_ESCAPE = re.compile(r"\\(.)")
VALUE_CHARACTERS = b"0123456789+-.eE"  # of a finite number
_NO_LABELS: Mapping[str, str] = {}
_ESCAPES = {"n": "\n", '"': '"', "\\": "\\"}


class Line(msgspec.Struct, frozen=True, gc=False):
    """The parts of a sample line.

    `prefix` is everything before the value, including the separator. Later scrapes repeat it byte by byte.
    """

    prefix: bytes
    name: str
    labels: Mapping[str, str]  # shared between lines: nobody changes it
    value: bytes
    timestamp: bytes  # empty when the line carries none


def parse_line(raw: bytes) -> Line:
    """Parse a sample line. Raises RecordError `line_too_long`, `bad_encoding`, `bad_line` or `bad_label`.

    >>> parse_line(b'up{node="n1"} 1').labels
    {'node': 'n1'}
    """
    if len(raw) > MAX_LINE_BYTES:
        raise RecordError("line_too_long", f"{len(raw)} bytes: {raw[:60]!r}")
    try:
        text = raw.decode()
    except UnicodeDecodeError:
        raise RecordError("bad_encoding", repr(raw[:80])) from None
    head = _NAME.match(text)
    if head is None:
        raise RecordError("bad_line", text[:80])
    end = head.end()
    labels: Mapping[str, str] = _NO_LABELS
    if head.group(2):
        end = text.rfind("}") + 1
        labels = _parse_labels(text[head.end() : end])
        end = _BLANKS.match(text, end).end()  # type: ignore[union-attr]  # it matches nothing, too
    rest = raw[end:] if len(raw) == len(text) else text[end:].encode()
    tokens = rest.split()  # as bytes: there are more blanks in Unicode than in the format
    if not 1 <= len(tokens) <= 2 or text[end - 1] not in "} \t":
        raise RecordError("bad_line", text[:80])
    timestamp = tokens[1] if len(tokens) == 2 else b""
    return Line(raw[: len(raw) - len(rest)], head.group(1), labels, tokens[0], timestamp)


class LineParser:
    """A parser of the lines of one page.

    Most lines combine the metric name of an earlier line with the labels of another.
    """

    def __init__(self) -> None:
        self._names: dict[bytes, str] = {}
        self._labels: dict[bytes, Mapping[str, str]] = {}  # by their text, with the brace at its end

    def parse(self, raw: bytes) -> Line:
        """Parse a line as `parse_line` does, and remember its name and labels."""
        line = parse_line(raw)
        head, brace, text = line.prefix[:-1].partition(b"{")
        if brace and text.endswith(b"}") and line.prefix.endswith(b" ") and head == line.name.encode():
            self._names[head], self._labels[text] = line.name, line.labels
        return line

    def combine(self, key: bytes, value: bytes) -> tuple[str, Mapping[str, str]] | None:
        """Return the name and labels of a new line from the parts of earlier lines, without parsing it.

        key: the line's name and labels as bytes. value: its value. Returns None if the line has to be parsed.

        >>> parser = LineParser()
        >>> _ = parser.parse(b'up{node="n1"} 1'), parser.parse(b'load{node="n2"} 7')
        >>> parser.combine(b'up{node="n2"}', b"0"), parser.combine(b'up{node="n3"}', b"0")
        (('up', {'node': 'n2'}), None)
        """
        head, _, text = key.partition(b"{")
        labels = self._labels.get(text)
        is_plain = value and not value.translate(None, VALUE_CHARACTERS)
        if labels is None or not is_plain or len(key) + len(value) >= MAX_LINE_BYTES:
            return None
        name = self._names.get(head)
        return None if name is None else (name, labels)


@lru_cache(4096)  # the fields of one GPU all carry the same labels
def _parse_labels(text: str) -> Mapping[str, str]:
    """Parse labels of the form `name="value",...}`, including the brace. Raises RecordError `bad_label`."""
    labels: dict[str, str] = {}
    at = 0
    while (end := _END.match(text, at)) is None:
        pair = _LABEL.match(text, at)
        if pair is None:
            raise RecordError("bad_label", text[at : at + 80])
        name, value = pair.group(1), pair.group(2)
        if name in labels:
            raise RecordError("bad_label", f"{name} is given twice: {text[:80]}")
        labels[name] = _ESCAPE.sub(_unescape, value) if "\\" in value else value
        at = pair.end()
    if end.end() != len(text):
        raise RecordError("bad_label", text[:80])
    return labels


def _unescape(match: re.Match[str]) -> str:
    return _ESCAPES.get(match.group(1), match.group(0))


def parse_value(token: bytes) -> float:
    """Parse a number of the text format, including NaN and +Inf. Raises RecordError `bad_value`.

    >>> parse_value(b"1e3")
    1000.0
    """
    try:
        if b"_" in token:  # Python reads 1_000, the format does not
            raise ValueError
        return float(token)
    except ValueError:
        raise RecordError("bad_value", repr(token[:40])) from None


def parse_timestamp(token: bytes, *, seconds: bool = False) -> int:
    """Parse a timestamp as Unix ms. Raises RecordError `bad_timestamp`.

    seconds: whether the text is in seconds, as in OpenMetrics. Seconds may have fractions.

    >>> parse_timestamp(b"1795648400000"), parse_timestamp(b"1795648400.5", seconds=True)
    (1795648400000, 1795648400500)
    """
    if seconds:
        return _parse_seconds(token)
    digits = token[1:] if token[:1] == b"-" else token
    if not digits.isdigit() or len(digits) > 15:
        raise RecordError("bad_timestamp", repr(token[:40]))
    return int(token)


def _parse_seconds(token: bytes) -> int:
    try:
        time_s = parse_value(token)
    except RecordError:
        time_s = float("nan")
    if not abs(time_s) < 1e13:
        raise RecordError("bad_timestamp", repr(token[:40]))
    return round(time_s * 1000)


def is_sample_line(line: bytes) -> bool:
    """Return whether a line is neither blank nor a comment."""
    return line.lstrip(b" \t\r")[:1] not in (b"", b"#")


def parse_metric_name(prefix: bytes) -> str:
    """Return the metric's name at the beginning of a sample line's prefix.

    >>> parse_metric_name(b'power{gpu="0"} '), parse_metric_name(b"up ")
    ('power', 'up')
    """
    return prefix.partition(b"{")[0].strip()[:80].decode("utf-8", "replace")


def is_open_metrics(page: bytes) -> bool:
    """Return whether a page ends as OpenMetrics 1.0 requires. Such a page has timestamps in seconds."""
    return page[-16:].rstrip().endswith(b"# EOF")


def cut_exemplar(line: bytes) -> bytes:
    """Return a line of OpenMetrics without its exemplar, or the same object if it has none.

    >>> cut_exemplar(b'a_bucket{le="1"} 5 # {trace="x"} 0.6 1795648400'), cut_exemplar(b'a{b=" # {"} 5')
    (b'a_bucket{le="1"} 5', b'a{b=" # {"} 5')
    """
    at = line.find(b" # {")
    while at >= 0:
        if (line.count(b'"', 0, at) - line.count(b'\\"', 0, at)) % 2 == 0:
            return line[:at]
        at = line.find(b" # {", at + 1)
    return line


def read_kernel_start_s(page: bytes) -> float:
    r"""Return when the kernel of a node_exporter's page started, in Unix s, or 0 if not stated.

    >>> read_kernel_start_s(b"# TYPE x gauge\nnode_boot_time_seconds 1.795e+09\n"), read_kernel_start_s(b"up 1\n")
    (1795000000.0, 0.0)
    """
    at = page.find(b"\nnode_boot_time_seconds ")
    if at < 0:
        return 0.0
    try:
        started_s = parse_value(page[at + 24 : at + 64].split(b"\n", 1)[0].split(b" ", 1)[0].strip())
    except RecordError:
        return 0.0  # counted when the line itself is read
    return started_s if 0 < started_s < 1e13 else 0.0
