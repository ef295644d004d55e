"""Several boards in one slot of a page: one is read, the others are refused until it has left the page."""

from collections.abc import Callable, Sequence

import pytest

from fleetcast.ingest.source import Batch
from tests.ingest.exporter_pages import Desk, labels, page, reasons

POWER, TEMP = "DCGM_FI_DEV_POWER_USAGE", "DCGM_FI_DEV_GPU_TEMP"
NOW_MS = 1_795_648_400_000
WATTS = {"a": 100, "b": 200, "c": 300}
Render = Callable[[int], str]


def lines(board: str, end: str = "") -> list[str]:
    """The lines of a board in slot 0 of the one node of these pages."""
    named = labels(0, UUID=f"GPU-{board}")
    return [f"{POWER}{named} {WATTS[board]}{end}", f"{TEMP}{named} {WATTS[board] / 10}{end}"]


class Slot:
    """Decodes pages of boards in one slot, and counts the lines that a resolver was asked about."""

    def __init__(self) -> None:
        self.desk = Desk()
        self.now_ms = NOW_MS
        self.end: Render = lambda now_ms: ""
        self.resolved = 0
        resolve = self.desk.decoder._resolve

        class Counting:
            def __getattr__(_, name: str) -> object:  # noqa: N805
                return getattr(resolve, name)

            def __call__(_, *args: object) -> object:  # noqa: N805
                self.resolved += 1
                return resolve(*args)  # type: ignore[arg-type]

        self.desk.decoder._resolve = Counting()  # type: ignore[assignment]

    def scrape(self, boards: str) -> Batch:
        """Decode a page of these boards, in this order."""
        self.now_ms += 15_000
        text = page(*(line for board in boards for line in lines(board, self.end(self.now_ms))))
        return self.desk.decoder.decode(text, self.now_ms)

    def seen(self, boards: Sequence[str]) -> list[tuple[str, int]]:
        """Return the board that is read on each page, and the number of lines that are refused as two_boards."""
        found = []
        for one in boards:
            batch = self.scrape(one)
            watts = self.desk.words(batch)["power_w n001/0"] if len(batch) else 0.0
            board = next((board for board in WATTS if WATTS[board] == watts), "")
            assert set(reasons(batch)) <= {"two_boards"}
            found.append((board, len(reasons(batch))))
        return found


@pytest.fixture(params=["", "timestamps"])
def slot(request: pytest.FixtureRequest) -> Slot:
    """Pages whose shape comes again, and pages whose shape does not."""
    made = Slot()
    if request.param:
        made.end = lambda now_ms: f" {now_ms}"
    return made


@pytest.mark.parametrize("both", ["ab", "ba"])
def test_a_board_that_joins_the_slot_of_another_is_refused_from_the_next_page_on(slot: Slot, both: str) -> None:
    slot.seen(["a"] * 3)
    slot.scrape(both)
    assert slot.seen([both] * 5) == [(both[0], 2)] * 5


def test_the_board_that_was_read_first_is_read_in_any_order_of_lines(slot: Slot) -> None:
    assert slot.seen(["ab", "ab", "ba", "ab", "ba", "ba", "ba", "ab"]) == [("a", 2)] * 8


@pytest.mark.parametrize("rest", ["b", "bc", "cb"])
def test_a_refused_board_is_read_once_the_other_one_has_left_the_page(slot: Slot, rest: str) -> None:
    slot.seen(["abc"] * 4)
    slot.seen([rest] * 4)
    assert slot.seen([rest] * 3) == [(rest[0], 2 * (len(rest) - 1))] * 3


def test_a_refused_board_that_comes_back_alone_is_read(slot: Slot) -> None:
    slot.seen(["ab", "ab", "ab", "a", "a"])
    slot.seen(["b"] * 4)
    assert slot.seen(["b"] * 3) == [("b", 0)] * 3


def test_a_board_that_replaces_another_is_read_at_once(slot: Slot) -> None:
    assert slot.seen(["a", "a", "b", "b", "b", "c", "c", "a", "a"]) == [(board, 0) for board in "aabbbccaa"]


@pytest.mark.parametrize("boards", ["ab", "ba", "abc"])
def test_a_page_of_several_boards_is_soon_resolved_once_and_for_all(slot: Slot, boards: str) -> None:
    slot.seen(["a", boards, boards, boards, boards, boards])
    before = slot.resolved
    slot.seen([boards] * 10)
    assert slot.resolved == before
