import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from fleetcast.fleet.errors import RecordError
from fleetcast.ingest.pages.exposition import MAX_LINE_BYTES, parse_line, parse_timestamp, parse_value

NAMES = st.from_regex(r"[a-zA-Z_:][a-zA-Z0-9_:]{0,20}", fullmatch=True)
LABEL_NAMES = st.from_regex(r"[a-zA-Z_][a-zA-Z0-9_]{0,10}", fullmatch=True)
LABEL_VALUES = st.text(st.characters(exclude_categories=["Cs", "Cc"]) | st.sampled_from('\n\\"{},= '), max_size=20)
NUMBERS = st.floats(allow_nan=False, allow_infinity=True) | st.integers(-(2**53), 2**53)


def escape(value: str) -> str:
    return value.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")


@given(NAMES, st.dictionaries(LABEL_NAMES, LABEL_VALUES, max_size=4), NUMBERS, st.none() | st.integers(0, 2**45))
def test_lines_mean_what_prometheus_client_reads(
    name: str, labels: dict[str, str], number: float, timestamp: int | None
) -> None:
    text = ",".join(f'{key}="{escape(value)}"' for key, value in labels.items())
    raw = f"{name}{{{text}}} {number}" + (f" {timestamp}" if timestamp is not None else "")
    line = parse_line(raw.encode())
    ((family,),) = [list(text_string_to_metric_families(raw + "\n"))]
    (sample,) = family.samples
    assert line.name == sample.name
    assert line.labels == sample.labels
    assert parse_value(line.value) == sample.value
    assert (float(line.timestamp) / 1000 if line.timestamp else None) == sample.timestamp
    assert raw.encode().startswith(line.prefix)


@given(st.binary(max_size=60))
def test_any_bytes_give_a_line_or_a_record_error(raw: bytes) -> None:
    found: float | str
    try:
        found = parse_value(parse_line(raw.replace(b"\n", b"")).value)
    except RecordError as error:
        found = error.reason
    assert isinstance(found, float) or found in ("bad_line", "bad_label", "bad_value", "bad_encoding")


@pytest.mark.parametrize(
    ("raw", "reason"),
    [
        (b"", "bad_line"),
        (b"name", "bad_line"),
        (b"9name 1", "bad_line"),
        (b"name 1 2 3", "bad_line"),
        (b'name{a="b"}', "bad_line"),
        (b'name{a="b" 1', "bad_label"),
        (b"name{a=b} 1", "bad_label"),
        (b'name{a="b} 1', "bad_label"),
        (b'name{a="1",a="2"} 1', "bad_label"),
        (b'name{a="b"c="d"} 1', "bad_label"),
        (b'name{a="b"}} 1', "bad_label"),
        (b'name{a="\xff"} 1', "bad_encoding"),
        (b'name{a="' + b"x" * MAX_LINE_BYTES + b'"} 1', "line_too_long"),
    ],
)
def test_broken_lines_say_why(raw: bytes, reason: str) -> None:
    with pytest.raises(RecordError) as raised:
        parse_line(raw)
    assert raised.value.reason == reason


def test_blanks_tabs_and_a_trailing_comma_are_allowed() -> None:
    line = parse_line(b' name\t{ a = "1" , b="}" , }\t 5 1700000000000\r')
    assert line.labels == {"a": "1", "b": "}"}
    assert (line.value, line.timestamp) == (b"5", b"1700000000000")


@pytest.mark.parametrize("token", [b"", b"1_000", b"abc", b"1,5", b"0x1f", b"--1"])
def test_what_is_no_number_is_a_bad_value(token: bytes) -> None:
    with pytest.raises(RecordError, match="bad_value"):
        parse_value(token)


def test_infinities_and_nan_are_numbers_of_the_format() -> None:
    assert parse_value(b"+Inf") == float("inf")
    assert parse_value(b"-Inf") == -float("inf")
    assert parse_value(b"NaN") != parse_value(b"NaN")


@pytest.mark.parametrize("token", [b"1.5", b"now", b"9" * 16])
def test_timestamps_are_whole_milliseconds(token: bytes) -> None:
    with pytest.raises(RecordError, match="bad_timestamp"):
        parse_timestamp(token)
