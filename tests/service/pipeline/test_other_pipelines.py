"""What another pipeline publishes may be anything: a word that makes no sense is not taken, and the last one stays."""

from pathlib import Path

import numpy as np
import pytest

from fleetcast.service.board.board import Board, BoardReader, Section, encode_board
from fleetcast.service.pipeline.other_pipelines import OtherPipeline
from tests.service.board.test_two_pipelines import Run, placed


class Given(BoardReader):
    """A reader of the board that a test gives it."""

    def __init__(self) -> None:
        self.board: Board | None = None

    def latest(self) -> Board | None:
        return self.board


@pytest.fixture(scope="module")
def sections(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Section]:
    """As the second of two pipelines publishes them."""
    two = Run(tmp_path_factory.mktemp("two"), 2, placed())
    for number in range(2):
        two.round(number)
    board = BoardReader(Path(two.config.get_pipeline_folder(1)) / "board").latest()
    assert board is not None
    found = {}
    for name in board.sections():
        row = board.meta(name)
        part = board.text(name) if row["dtype"] == "bytes" else board.array(name)
        found[name] = Section(name, part, row["as_of_ms"])
    return found


def word(*sections: Section) -> Board:
    return Board(encode_board(sections, 1, sections[0].as_of_ms))


def other_than(section: Section) -> list[bytes | np.ndarray]:
    """What may be there in its place."""
    if isinstance(section.data, bytes):
        return [b"", b"[]", b"null", b'{"rows": 3}', b"\xff\xfe", section.data[:-1]]
    array = section.data
    return [array[:-1], array.ravel()[:0], np.zeros((3, 3), array.dtype), np.full(array.shape, 10**6).astype("f4")]


def test_a_word_with_any_part_missing_or_odd_is_taken_whole_or_not_at_all(sections: dict[str, Section]) -> None:
    good, taken = word(*sections.values()), 0
    for name, section in sections.items():
        rest = [one for one in sections.values() if one.name != name]
        boards = [word(*rest)] + [word(*rest, Section(name, part, section.as_of_ms)) for part in other_than(section)]
        for board in boards:
            reader = Given()
            other = OtherPipeline(1, reader)
            reader.board = good
            other.poll()
            known = other.report
            assert known is not None
            reader.board = board
            other.poll()
            taken += other.report is not known
    assert 0 < taken < 5 * len(sections)


@pytest.mark.parametrize(
    "told", [b"", b"7", b"[]", b"{}", b'{"rows": [7]}', b'{"rows": [{}]}', b'{"rows": [{"taken_ms": null}]}']
)
def test_hard_signals_that_make_no_sense_are_none(sections: dict[str, Section], told: bytes) -> None:
    reader = Given()
    reader.board = word(*sections.values(), Section("doc.urgent", told, next(iter(sections.values())).as_of_ms))
    other = OtherPipeline(1, reader)
    assert other.poll() == []
    assert other.urgent == []
