"""Lines of one page mostly combine the name of one line with the labels of another, and are parsed as such."""

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleetcast.fleet.errors import RecordError
from fleetcast.ingest.pages import exposition
from fleetcast.ingest.pages.exposition import MAX_LINE_BYTES, Line, LineParser, parse_line
from tests.fuzz.bounds import examples
from tests.ingest.exporter_pages import Desk, labels

NAMES = (b"up", b"up ", b" up", b"load", b"", b"#up", b"up{")
LABELS = (b'a="1"}', b'a="2",b="} 3"}', b'a="1" }', b"}", b'a="1"} b="2"}', b'a="\\"} 1"}', b'a="\xff"}', b"")
VALUES = (b"5", b"5\r", b"\t5", b"5\t7", b"1_0", b"NaN", b"", b"5}", b"e", b"-1.5e-3", b"5" * MAX_LINE_BYTES)
HEADS = [name + brace + rest for name in NAMES for brace in (b"{", b"") for rest in LABELS]
LINES = [head + b" " + value for head in HEADS for value in VALUES]


@examples(300)
@given(st.lists(st.sampled_from(LINES), max_size=30))
def test_a_line_that_combines_two_others_is_what_the_grammar_says(lines: list[bytes]) -> None:
    parser = LineParser()
    for raw in lines:
        key, _, value = raw.rpartition(b" ")
        if (combined := parser.combine(key, value)) is not None:
            line = parse_line(raw)
            assert (line.prefix, line.name, line.labels) == (key + b" ", *combined)
            assert (line.value, line.timestamp) == (value, b"")
        with contextlib.suppress(RecordError):
            parser.parse(raw)


def test_lines_of_one_page_share_the_objects_of_their_names_and_labels() -> None:
    parser = LineParser()
    first = parser.parse(b'up{node="n1",text="} 7"} 5')
    parser.parse(b'load{node="n2"} 5')
    combined = parser.combine(b'load{node="n1",text="} 7"}', b"0.5")
    assert combined is not None
    assert combined == ("load", {"node": "n1", "text": "} 7"})
    assert combined[1] is first.labels


def test_a_new_page_parses_each_name_and_each_text_of_labels_once(monkeypatch: pytest.MonkeyPatch) -> None:
    parsed: list[bytes] = []

    def counting(raw: bytes) -> Line:
        parsed.append(raw)
        return parse_line(raw)

    monkeypatch.setattr(exposition, "parse_line", counting)
    names = [f"DCGM_FI_DEV_{name}" for name in ("POWER_USAGE", "GPU_TEMP", "GPU_UTIL", "SM_CLOCK")]
    lines = ["up 1", *(f"{name}{labels(gpu)} 5" for name in names for gpu in range(8))]
    assert len(Desk().decode(*lines)) == 32
    assert len(parsed) == 1 + 8 + 3  # `up`, the first metric of each GPU, then the first GPU of each metric
