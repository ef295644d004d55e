"""The shape of a page: its text without its values, compared with the next page by a few numpy calls.

A number that grows by a digit moves everything after it. So a page is cut at its values. The text between
two values (a *segment*, with line ends and comments) is compared in windows of WINDOW bytes. They are
placed from the segment's end backwards:

    # TYPE power gauge⏎power{gpu="0",node="n1"} 401⏎power{gpu="1",node="n1"} 399⏎
    └──────────────── segment 0 ──────────────┘   └─────── segment 1 ──────┘   └ tail
      └───window───┘└───window───┘└───window──┘     (the last one overlaps: it begins with its segment)

Windows cover every byte between values, so only the same text fits. Each distinct window is stored once.
Labels repeat on every line, and so do windows that are counted from the end.
"""

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import lru_cache

import msgspec
import numpy as np
from numpy.typing import NDArray

from fleetcast.fleet.errors import RecordError
from fleetcast.ingest.pages.exposition import parse_value
from fleetcast.ingest.tally import SkipRule

WINDOW = 32
_PADDING = bytes(WINDOW)
_TEXT = np.dtype(f"V{WINDOW}")
_LINE_END, _COMMA = b"\n,"


class LineRole(IntEnum):
    """The role of a line on its page. If a `SkipRule` skips a line, the rule itself is the role."""

    NOTHING = 0  # the prefix is the whole line: a comment or a blank line
    UNREAD = 1  # a value that nothing reads
    WANTED = 2
    REFUSED = 3  # a value behind a prefix that is refused, whatever the value is
    BROKEN = 4  # the prefix is the whole line, which is refused as it is


Role = LineRole | SkipRule
_WITHOUT_VALUE = (LineRole.NOTHING, LineRole.BROKEN)
_ROLES: dict[int, Role] = {**{int(role): role for role in LineRole}, **{int(rule): rule for rule in SkipRule}}


@dataclass(frozen=True, slots=True)
class _Plan:
    """The places of values and windows in all pages whose prefixes have the same lengths and roles.

    line, head, length: (s,) the line in which a segment ends, where in that line it ends, and its length.
    tail: bytes of text after the last value, which belong to no segment.
    segment, back: (w,) the segment of each window, and how far before the segment's end the window begins.
    reach: (s,) the largest `back` in each segment.
    ends: (w,) where the segment of each window ends if all values are empty.
    short: (k,) windows that begin before their segment does.
    keep: (k, WINDOW) 255 at the segment's bytes, else 0.
    wanted: (n,) segments that end at a wanted value.
    """

    roles: bytes
    line: NDArray[np.intp]
    head: NDArray[np.intp]
    length: NDArray[np.intp]
    tail: int
    segment: NDArray[np.intp]
    back: NDArray[np.intp]
    reach: NDArray[np.intp]
    ends: NDArray[np.intp]
    short: NDArray[np.intp]
    keep: NDArray[np.uint8]
    wanted: NDArray[np.intp]


@lru_cache(1024)
def _make_plan(heads: bytes, roles: bytes) -> _Plan:
    """Return the plan for prefixes of these lengths (int32, as bytes) and roles (uint8, as bytes)."""
    head = np.frombuffer(heads, np.int32).astype(np.intp)
    role = np.frombuffer(roles, np.uint8)
    line = np.flatnonzero(~np.isin(role, _WITHOUT_VALUE))
    ends = np.cumsum(head + 1) - 1  # of prefixes, if every value were empty
    length = np.diff(ends[line], prepend=0)
    windows = np.maximum(1, -(-length // WINDOW))
    segment = np.repeat(np.arange(len(line)), windows)
    number = np.arange(len(segment)) - np.repeat(np.cumsum(windows) - windows, windows)
    short = np.flatnonzero(length[segment] < WINDOW)
    own = np.arange(WINDOW)[None, :] >= WINDOW - length[segment[short], None]
    return _Plan(
        roles=roles,
        line=line,
        head=head[line],
        length=length,
        tail=int(ends[-1]) + 1 - int(length.sum()),
        segment=segment,
        back=np.maximum(WINDOW, np.minimum(WINDOW * (number + 1), length[segment])),
        reach=np.maximum(WINDOW, length),
        ends=np.cumsum(length)[segment],
        short=short,
        keep=np.where(own, 255, 0).astype(np.uint8),
        wanted=np.flatnonzero(role[line] == LineRole.WANTED),
    )


class PageShape:
    """The text of a page without its values, stored as windows.

    The page has at least one value and ends with a line end.
    """

    def __init__(self, prefixes: Sequence[bytes], roles: Sequence[Role]) -> None:
        heads = np.array([len(prefix) for prefix in prefixes], np.int32)
        self._plan = plan = _make_plan(heads.tobytes(), bytes(roles))
        text = _PADDING + b"".join(prefix + b"\n" for prefix in prefixes)
        self._tail = text[len(text) - plan.tail :]
        windows = _view_windows(text)[WINDOW + plan.ends - plan.back]
        _mask_short_windows(windows, plan)
        texts = windows.tolist()
        numbers = {text: number for number, text in enumerate(dict.fromkeys(texts))}
        ids = map(numbers.__getitem__, texts)
        self._ids = np.fromiter(ids, np.min_scalar_type(len(numbers)), len(texts))  # (w,)
        self._distinct = np.frombuffer(b"".join(numbers), _TEXT)

    @property
    def lines(self) -> int:
        """The number of lines of a page of this shape."""
        return len(self._plan.roles)

    def read_values(self, page: bytes) -> NDArray[np.float64] | None:
        """Return (n,) float64, the wanted values of a page of this shape, in order.

        Returns None if the page has another shape, or if a value is broken.
        """
        plan = self._plan
        first = WINDOW if len(plan.short) else 0
        if first:  # so that no window begins before the page does
            page = _PADDING + page
        ends = np.flatnonzero(np.frombuffer(page, np.uint8) == _LINE_END)
        if len(ends) != len(plan.roles) or not page.endswith(self._tail):
            return None
        starts = np.empty(len(ends), np.intp)
        starts[0] = first
        np.add(ends[:-1], 1, out=starts[1:])
        begin, end = starts[plan.line] + plan.head, ends[plan.line]
        if not self._fits(page, first, begin, end):
            return None
        return _decode_numbers(page, begin[plan.wanted], end[plan.wanted])

    def _fits(self, page: bytes, first: int, begin: NDArray[np.intp], end: NDArray[np.intp]) -> bool:
        """Return whether the page's text after `first` differs from the shape only in its values.

        begin, end: (s,) the places of the values, if the text fits.
        """
        plan = self._plan
        if begin[0] != plan.length[0] + first or np.count_nonzero((begin > end) | (begin < plan.reach)):
            return False
        windows = _view_windows(page)[begin[plan.segment] - plan.back]
        _mask_short_windows(windows, plan)
        return not np.count_nonzero(windows.view(np.uint64) != self._distinct.take(self._ids).view(np.uint64))

    def list_prefixes(self) -> list[tuple[bytes, Role]]:
        """Return (prefix, role) of each line that has a value, in order."""
        plan = self._plan
        text = bytearray(WINDOW + int(plan.length.sum()))
        back_to_front = slice(None, None, -1)  # a short window's blanks fall on what is written after it
        at = (WINDOW + plan.ends - plan.back)[back_to_front]
        _view_windows(text)[at] = self._distinct.take(self._ids)[back_to_front]
        roles = [_ROLES[role] for role in plan.roles if role not in _WITHOUT_VALUE]
        ends = (WINDOW + np.cumsum(plan.length)).tolist()
        segments = [bytes(text[begin:end]) for begin, end in zip([WINDOW, *ends[:-1]], ends, strict=True)]
        return [(segment.rpartition(b"\n")[2], role) for segment, role in zip(segments, roles, strict=True)]


def _view_windows(text: bytes | bytearray) -> NDArray[np.void]:
    """Return (len(text) - WINDOW + 1,) windows as a view. One window begins at each byte."""
    return np.ndarray((len(text) - WINDOW + 1,), _TEXT, text, strides=(1,))


def _mask_short_windows(windows: NDArray[np.void], plan: _Plan) -> None:
    """Zero the bytes of short windows that lie before their segments. Changes `windows`, (w,), in place."""
    if len(plan.short):
        windows.view(np.uint8).reshape(-1, WINDOW)[plan.short] &= plan.keep


_JSON_NUMBERS = msgspec.json.Decoder(list[float])


def _decode_numbers(page: bytes, begin: NDArray[np.intp], end: NDArray[np.intp]) -> NDArray[np.float64] | None:
    """Return (n,) float64, the numbers at these places of a page.

    Returns None if a number is invalid or a timestamp follows it. The numbers are decoded as JSON, which is three
    times as fast as `float`.
    """
    if not len(begin):
        return np.zeros(0)
    size = end - begin + 1  # with the line end, which becomes a comma
    stop = np.cumsum(size)
    index = np.repeat(begin - stop + size, size)
    index += np.arange(len(index))
    text = np.frombuffer(page, np.uint8)[index]
    text[stop - 1] = _COMMA
    numbers = _decode_json_list(text[:-1].tobytes(), len(begin))
    if numbers is not None:
        return numbers
    return _parse_each_value([page[first:last] for first, last in zip(begin.tolist(), end.tolist(), strict=True)])


def parse_values(tokens: Sequence[bytes]) -> NDArray[np.float64] | None:
    """Return (n,) float64, the numbers in tokens, or None if a token is not exactly one number."""
    numbers = _decode_json_list(b",".join(tokens), len(tokens)) if tokens else np.zeros(0)
    return _parse_each_value(tokens) if numbers is None else numbers


def _decode_json_list(text: bytes, count: int) -> NDArray[np.float64] | None:
    """Return (count,) float64, the numbers in comma-separated text.

    Returns None if it is invalid JSON or has another length.
    """
    try:
        numbers = _JSON_NUMBERS.decode(b"[" + text + b"]")
    except msgspec.DecodeError:
        return None
    if len(numbers) != count:
        return None
    return np.frombuffer(struct.pack(f"{len(numbers)}d", *numbers))  # half the time of np.array


def _parse_each_value(tokens: Sequence[bytes]) -> NDArray[np.float64] | None:
    try:
        return np.array([parse_value(token) for token in tokens])
    except RecordError:
        return None
