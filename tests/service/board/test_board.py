from pathlib import Path

import numpy as np
import pytest

from fleetcast.service.board.board import Board, BoardError, BoardReader, BoardWriter, Section, Standing, encode_board

MAPS = Path("/proc/self/maps")


def test_a_reader_sees_what_was_published(tmp_path: Path) -> None:
    writer, reader = BoardWriter(tmp_path), BoardReader(tmp_path)
    assert reader.latest() is None
    risk = np.arange(6, dtype=np.float64).reshape(2, 3)
    writer.publish([Section("risk", risk, 5, "rules"), Section("names.node", b"a\nb\nc", 5)], 5)
    board = reader.latest()
    assert board is not None
    assert board.array("risk").tolist() == risk.tolist()
    assert board.names("names.node") == ("a", "b", "c")
    assert board.meta("risk")["model"] == "rules"
    assert board.as_of_ms == 5


def test_a_section_that_is_not_published_again_stays(tmp_path: Path) -> None:
    writer, reader = BoardWriter(tmp_path), BoardReader(tmp_path)
    writer.publish([Section("slow", b"1", 1), Section("fast", b"1", 1)], 1)
    writer.publish([Section("fast", b"2", 2)], 2)
    board = reader.latest()
    assert board is not None
    assert (board.text("slow"), board.text("fast")) == (b"1", b"2")
    assert (board.meta("slow")["as_of_ms"], board.meta("fast")["as_of_ms"]) == (1, 2)


@pytest.mark.skipif(not MAPS.exists(), reason="only Linux lists the files that a process has mapped")
def test_the_writer_holds_a_replaced_board_until_its_readers_have_seen_the_next(tmp_path: Path) -> None:
    writer, reader = BoardWriter(tmp_path), BoardReader(tmp_path)

    def publish() -> int:
        """Publish a board, let the reader move to it, and return how many replaced boards are still mapped."""
        writer.publish([Section("fast", b"1", 1)], 1)
        board = reader.latest()
        assert board is not None
        return sum(str(tmp_path) in line and "(deleted)" in line for line in MAPS.read_text().splitlines())

    assert [publish() for _ in range(5)] == [0, 1, 1, 1, 1]


def test_a_reader_keeps_the_last_whole_board_when_the_file_is_torn(tmp_path: Path) -> None:
    writer, reader = BoardWriter(tmp_path), BoardReader(tmp_path)
    writer.publish([Section("x", b"whole", 1)], 1)
    assert reader.latest() is not None
    torn = tmp_path / "torn"
    torn.write_bytes(b"FLEETBRD\xff\xff")
    torn.replace(tmp_path / "board")
    board = reader.latest()
    assert board is not None
    assert board.text("x") == b"whole"


def test_the_newer_of_board_and_urgent_wins(tmp_path: Path) -> None:
    writer, reader = BoardWriter(tmp_path), BoardReader(tmp_path)
    writer.publish([Section("state", b"board", 1)], 1)
    writer.publish_urgent([Section("state", b"urgent", 2)], 2)
    first = reader.latest()
    writer.publish([Section("state", b"board again", 3)], 3)
    second = reader.latest()
    assert first is not None
    assert second is not None
    assert (first.text("state"), second.text("state")) == (b"urgent", b"board again")


def test_a_board_says_how_far_its_inbox_is_folded_and_an_urgent_container_claims_nothing(tmp_path: Path) -> None:
    writer, reader = BoardWriter(tmp_path), BoardReader(tmp_path)
    writer.publish([Section("x", b"1", 1)], 1, Standing(inbox={"api-000000000001.seg": 99}))
    writer.publish_urgent([Section("x", b"urgent", 2)], 2)
    board = reader.latest()
    assert board is not None
    assert board.standing == Standing(inbox={"api-000000000001.seg": 99})
    assert Board((tmp_path / "urgent").read_bytes()).standing is None


@pytest.mark.parametrize("cut", [0, 4, 11, 40, -1])
def test_a_torn_board_is_recognised_wherever_it_is_cut(cut: int) -> None:
    whole = encode_board([Section("x", np.ones(100), 1)], 1, 1)
    with pytest.raises(BoardError):
        Board(whole[: cut if cut >= 0 else len(whole) - 64])


@pytest.mark.parametrize(
    ("was", "becomes"),
    [
        (b'"offset":', b'"0ffset":'),
        (b'"nbytes":800', b'"nbytes":-80'),
        (b'"nbytes":800', b'"nbytes":792'),
        (b'"shape":[100]', b'"shape":[-99]'),
        (b'"dtype":"<f8"', b'"dtype":"<z9"'),
        (b'"dtype":"<f8"', b'"dtype":"|O8"'),
        (b'"sections":[', b'"sections":{'),
        (b'"version":2', b'"version":7'),
        (b'"standing":null', b'"standing":8888'),
    ],
)
def test_a_header_that_lies_is_no_board(was: bytes, becomes: bytes) -> None:
    whole = encode_board([Section("x", np.ones(100), 1)], 1, 1)
    assert was in whole
    with pytest.raises(BoardError):
        Board(whole.replace(was, becomes))


def test_arrays_of_a_board_cannot_be_written() -> None:
    board = Board(encode_board([Section("x", np.ones(3), 1)], 1, 1))
    with pytest.raises(ValueError, match="read-only"):
        board.array("x")[0] = 5
