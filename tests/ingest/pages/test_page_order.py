"""Pages whose lines change their order from scrape to scrape, as an exporter prints them from a hash table."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleetcast.ingest.pages import text
from fleetcast.ingest.pages.exposition import Line, parse_line
from fleetcast.ingest.pages.page_order import PageOrder
from fleetcast.ingest.pages.text import PageDecoder
from fleetcast.ingest.source import Batch
from fleetcast.ingest.tally import RecordTally
from tests.fuzz.bounds import examples
from tests.ingest.exporter_pages import Desk, labels, page, reasons

NAMES = ("DCGM_FI_DEV_POWER_USAGE", "DCGM_FI_DEV_GPU_TEMP", "DCGM_FI_DEV_GPU_UTIL", "DCGM_FI_DEV_SOME_FIELD")


def families(order: Sequence[int], shift: float = 0.0) -> bytes:
    """A page with the families of NAMES in an order."""
    lines: list[str] = []
    for row in order:
        lines += [f"# HELP {NAMES[row]} Help.", f"# TYPE {NAMES[row]} gauge"]
        lines += [f"{NAMES[row]}{labels(gpu)} {40 + 10 * row + gpu + shift}" for gpu in range(3)]
    return page(*lines)


def count_parsed(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """Return a list that grows with every line that is parsed."""
    parsed: list[bytes] = []

    def counting(raw: bytes) -> Line:
        parsed.append(raw)
        return parse_line(raw)

    monkeypatch.setattr(text, "parse_line", counting)
    return parsed


def count_by_line(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """Return a list that grows with every page that is read line by line."""
    pages: list[bytes] = []
    decode = PageDecoder._decode_lines

    def counting(self: PageDecoder, page: bytes, arrival_ms: int, open_metrics: bool) -> Batch:
        pages.append(page)
        return decode(self, page, arrival_ms, open_metrics)

    monkeypatch.setattr(PageDecoder, "_decode_lines", counting)
    return pages


def test_a_page_in_another_order_is_read_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    desk, fresh = Desk(), Desk()
    desk.decoder.decode(families((0, 1, 2, 3)), 1000)
    by_line = count_by_line(monkeypatch)
    for number, order in enumerate([(3, 1, 0, 2), (2, 3, 0, 1), (0, 1, 2, 3), (1, 0, 3, 2)]):
        read = desk.decoder.decode(families(order, number), 2000 + number)
        assert not by_line
        expected = fresh.decoder.decode(families(order, number), 2000 + number)
        by_line.clear()
        assert desk.words(read) == fresh.words(expected)
        assert read.get_tally() == expected.get_tally()
        fresh = Desk()


def test_an_order_that_stays_is_learnt(monkeypatch: pytest.MonkeyPatch) -> None:
    desk = Desk()
    desk.decoder.decode(families((0, 1, 2, 3)), 1000)
    by_line = count_by_line(monkeypatch)
    for number in range(5):
        desk.decoder.decode(families((3, 2, 1, 0), number), 2000 + number)
    assert len(by_line) == 1


def test_two_orders_in_turn_are_read_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    desk = Desk()
    desk.decoder.decode(families((0, 1, 2, 3)), 1000)
    by_line = count_by_line(monkeypatch)
    for number in range(6):
        desk.decoder.decode(families((0, 1, 2, 3) if number % 2 else (3, 2, 1, 0), number), 2000 + number)
    assert not by_line


def test_a_label_that_changes_at_every_scrape_is_taken_for_another_order_once(monkeypatch: pytest.MonkeyPatch) -> None:
    desk, tried = Desk(), []
    read = PageOrder.read_values
    monkeypatch.setattr(PageOrder, "read_values", lambda self, page: tried.append(page) or read(self, page))
    for number in range(6):
        desk.decode(*(f"{name}{labels(0, build=str(number))} 40" for name in NAMES))
    assert len(tried) == 1


def test_comments_and_blank_lines_may_move(monkeypatch: pytest.MonkeyPatch) -> None:
    desk = Desk()
    lines = families((0, 1, 2, 3)).decode().splitlines()
    desk.decode(*lines, "")
    by_line = count_by_line(monkeypatch)
    assert desk.decode("", *sorted(lines)) == Desk().decode(*lines)
    assert len(by_line) == 1  # that of the new desk


@pytest.mark.parametrize(
    "last",
    [
        f"{NAMES[0]}{labels(0)} 44",  # a line twice, and another one gone
        f"{NAMES[0]}{labels(9)} 44",  # another GPU
        f"{NAMES[0]}{labels(2)} 4,4",
        f"{NAMES[0]}{labels(2)} 44 1700000000000",
        f"{NAMES[0]}{labels(2)}  44",
        f"{NAMES[0]}{labels(2)}\t44",
        f"{NAMES[0]}{labels(2)} NaN",
        f"{NAMES[0]}{labels(2)} 2147483632",
        f'{NAMES[0]}{labels(2)} 44 # {{trace="x"}} 1',
        f"{NAMES[0]}{labels(2)} broken",
    ],
)
def test_what_is_more_than_another_order_is_read_as_by_a_new_decoder(last: str) -> None:
    lines = [f"{name}{labels(gpu)} {gpu + 40}" for name in NAMES for gpu in range(3)]
    other = [last, *(line for line in lines if not line.startswith(f"{NAMES[0]}{labels(2)}"))]
    warm, fresh = Desk(), Desk()
    warm.decode(*lines)
    for desk in (warm, fresh):
        desk.decoder.reported = {}
    batches = [desk.decoder.decode(page(*other), 1_700_000_000_000) for desk in (warm, fresh)]
    assert warm.words(batches[0]) == fresh.words(batches[1])
    assert reasons(batches[0]) == reasons(batches[1])
    assert batches[0].get_tally() == batches[1].get_tally()
    assert warm.decoder.reported == fresh.decoder.reported


TOKENS = ("0", "7e2", "401.5", "NaN", "-1", "+Inf", "1_0", "x", "5 ", "2147483632")
KINDS = [
    *(f"{name}{labels(gpu)}" for name in NAMES for gpu in range(2)),
    f"{NAMES[2]}{labels(1, GPU_I_ID='3')}",
    f"{NAMES[0]}{labels(1, pod='train-1', namespace='ml')}",
    'node_cpu_seconds_total{cpu="0",mode="idle"}',
    'node_cpu_seconds_total{cpu="1",mode="idle"}',
    "up",
]


@st.composite
def orders(draw: st.DrawFn) -> list[bytes]:
    """Four pages of the same lines in other orders, with other values."""
    chosen = draw(st.lists(st.sampled_from(KINDS), min_size=1, max_size=9))
    pages = []
    for _ in range(4):
        values = draw(st.lists(st.sampled_from(TOKENS[:3] * 6 + TOKENS), min_size=len(chosen), max_size=len(chosen)))
        rows = draw(st.permutations(range(len(chosen))))
        pages.append(page("# HELP a b", *(f"{chosen[row]} {values[row]}" for row in rows)))
    return pages


@examples(300)
@given(orders())
def test_pages_in_any_order_are_read_as_by_a_decoder_without_memory(pages: list[bytes]) -> None:
    warm, plain = Desk(), Desk()
    plain.decoder._read_reordered_page = lambda page, shape: None  # type: ignore[method-assign]
    for number, one in enumerate(pages):
        batches = [desk.decoder.decode(one, 1000 + 15_000 * number) for desk in (warm, plain)]
        assert warm.words(batches[0]) == pytest.approx(plain.words(batches[1]))
        assert sorted(reasons(batches[0])) == sorted(reasons(batches[1]))
        assert _counts(batches[0].get_tally()) == _counts(batches[1].get_tally())
        assert warm.decoder.reported == plain.decoder.reported
        assert warm.decoder.noted == plain.decoder.noted


def _counts(tally: RecordTally) -> tuple[object, ...]:
    return tally.read, tally.refused, dict(tally.ignored), tally.unread, frozenset(tally.names)
