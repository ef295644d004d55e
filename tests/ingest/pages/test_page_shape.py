import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleetcast.ingest.pages.page_shape import WINDOW, LineRole, PageShape
from fleetcast.ingest.tally import SkipRule
from tests.fuzz.bounds import examples
from tests.ingest.exporter_pages import Desk, dcgm_page, reasons

LINES = [
    (b"# HELP power Power draw (in W) of the whole board.", LineRole.NOTHING),
    (b'power{gpu="0",node="n1"} ', LineRole.WANTED),
    (b'power{gpu="1",node="n1"} ', LineRole.WANTED),
    (b"go_threads ", LineRole.UNREAD),
    (b"", LineRole.NOTHING),
    (b'power{gpu="1",node="n1",pod="b"} ', SkipRule.REPEATED),
    (b"# EOF", LineRole.NOTHING),
]


def shape_of(lines: list[tuple[bytes, LineRole]]) -> PageShape:
    return PageShape([prefix for prefix, _ in lines], [role for _, role in lines])


def filled(lines: list[tuple[bytes, LineRole]], *values: bytes) -> bytes:
    """The page with these values in the places of values."""
    rest = iter(values)
    return b"".join(prefix + (next(rest) if role else b"") + b"\n" for prefix, role in lines)


def test_wanted_values_are_read_however_wide_they_and_others_are() -> None:
    shape = shape_of(LINES)
    for values in ((b"1", b"2", b"3", b"4"), (b"401.25", b"-7", b"12345678", b"")):
        raw = shape.read_values(filled(LINES, *values))
        assert raw is not None
        assert raw.tolist() == [float(values[0]), float(values[1])]


def test_a_refused_prefix_may_have_any_value_and_a_broken_line_stays_as_it_is() -> None:
    shape = shape_of([*LINES, (b'power{gpu="x"} ', LineRole.REFUSED), (b"no line", LineRole.BROKEN)])
    page = filled(LINES, b"1", b"2", b"3", b"4")
    for value in (b"5", b"401.25 1000", b"what?", b""):
        raw = shape.read_values(page + b'power{gpu="x"} ' + value + b"\nno line\n")
        assert raw is not None
        assert raw.tolist() == [1.0, 2.0]
    for end in (b'power{gpu="x"} 5\nno  line\n', b'power{gpu="x"} 5\n', b'power{gpu="y"} 5\nno line\n', b"no line\n"):
        assert shape.read_values(page + end) is None


def test_every_changed_byte_between_values_is_seen() -> None:
    shape = shape_of(LINES)
    page = filled(LINES, b"1", b"2", b"3", b"4")
    values = {page.index(b"} 1") + 2, page.index(b"} 2") + 2, page.index(b" 3") + 1, page.index(b"} 4") + 2}
    for at in range(len(page)):
        other = page[:at] + (b"X" if page[at : at + 1] != b"X" else b"Y") + page[at + 1 :]
        if at not in values:
            assert shape.read_values(other) is None, other


def test_every_byte_lost_or_added_between_values_is_seen() -> None:
    shape = shape_of(LINES)
    page = filled(LINES, b"1", b"2", b"3", b"4")
    for at in range(len(page)):
        shorter, longer = page[:at] + page[at + 1 :], page[:at] + b"}" + page[at:]
        for other in (shorter, longer):
            raw = shape.read_values(other)
            # Only in the values that nobody wants does it change nothing.
            assert raw is None or (raw.tolist() == [1.0, 2.0] and other.startswith(page[: page.index(b"go_thr") + 11]))


def test_labels_that_swap_their_lines_are_another_page() -> None:
    shape = shape_of(LINES)
    swapped = [LINES[0], LINES[2], LINES[1], *LINES[3:]]
    assert shape.read_values(filled(swapped, b"1", b"2", b"3", b"4")) is None


@pytest.mark.parametrize("value", [b"", b"1 2", b"1,2", b"1_0", b"nought", b'"1"', b"[1]", b"1]", b"null"])
def test_what_is_no_number_is_left_to_the_line_path(value: bytes) -> None:
    assert shape_of(LINES).read_values(filled(LINES, b"1", value, b"3", b"4")) is None


def test_numbers_that_json_does_not_know_are_read() -> None:
    raw = shape_of(LINES).read_values(filled(LINES, b"+Inf", b"NaN", b"3", b"4"))
    assert raw is not None
    assert raw[0] == np.inf
    assert np.isnan(raw[1])


def test_a_page_that_begins_with_a_short_prefix_is_compared_whole() -> None:
    lines = [(b"a ", LineRole.WANTED), (b"b ", LineRole.WANTED)]
    shape = shape_of(lines)
    raw = shape.read_values(b"a 1\nb 2\n")
    assert raw is not None
    assert raw.tolist() == [1.0, 2.0]
    for other in (b"b 1\na 2\n", b"a 1\nb2\n", b"a 1\n b 2\n", b"a 1\nb 2", b"a 1\nb 2\n\n", b" a 1\nb 2\n", b"\n\n"):
        assert shape.read_values(other) is None, other


@given(
    st.lists(st.tuples(st.binary(min_size=1, max_size=3 * WINDOW), st.sampled_from(LineRole)), min_size=1, max_size=12)
)
@examples(500)
def test_a_shape_knows_its_prefixes(lines: list[tuple[bytes, LineRole]]) -> None:
    lines = [(prefix.replace(b"\n", b"_"), role) for prefix, role in [*lines, (b"last ", LineRole.UNREAD)]]
    whole = (LineRole.NOTHING, LineRole.BROKEN)
    assert shape_of(lines).list_prefixes() == [(prefix, role) for prefix, role in lines if role not in whole]


@given(st.data())
@examples(750)
def test_a_torn_page_is_read_as_by_a_decoder_that_keeps_no_shape(data: st.DataObject) -> None:
    whole = dcgm_page(gpus=3)
    at = data.draw(st.integers(0, len(whole)))
    cut = data.draw(st.integers(0, 4))
    page = whole[:at] + data.draw(st.sampled_from([b"", b"7", b" ", b"\n", b"}", b'"', b"\x00"])) + whole[at + cut :]
    shaped, plain = Desk(), Desk()
    shaped.decoder.decode(whole, 1000)
    plain.decoder.decode(whole + b"junk\n", 1000)
    read, expected = shaped.decoder.decode(page, 2000), plain.decoder.decode(page, 2000)
    assert shaped.words(read) == plain.words(expected)
    assert sorted(reasons(read)) == sorted(reasons(expected))
