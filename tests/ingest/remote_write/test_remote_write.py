import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleetcast.fleet.errors import RecordError
from fleetcast.ingest.remote_write import request as remote_write
from fleetcast.ingest.remote_write.request import Version, parse_write_request
from fleetcast.ingest.remote_write.snappy import unpack
from tests.fuzz.bounds import examples
from tests.ingest.write_requests import T0, Row, block, gpu, message_v1, message_v2, number, packed, sample

MESSAGES = {Version.V1: message_v1, Version.V2: message_v2}
POWER = "DCGM_FI_DEV_POWER_USAGE"
EXEMPLAR, HISTOGRAM = {1: 3, 2: 4}, {1: 4, 2: 3}  # numbers of fields in the two versions


def taken(rows: list[Row], version: Version, behind: bytes = b"") -> list[tuple[int, int, float]]:
    write = parse_write_request(MESSAGES[version](rows, behind), version, exact=True)
    return list(zip(write.of.tolist(), write.time_ms.tolist(), write.value.tolist(), strict=True))


@pytest.mark.parametrize("version", Version)
def test_samples_come_in_the_order_they_were_sent_whatever_their_form(version: Version) -> None:
    rows: list[Row] = [
        (gpu(POWER, 0), [(T0, 401.5)]),
        (gpu(POWER, 1), [(T0, 0.0)]),  # no value on the wire
        (gpu(POWER, 2), [(T0, 1.0), (T0 + 1, 2.0)]),
        (gpu(POWER, 3), [(T0, 5.0), (T0 + 1, 0.0)]),
        (gpu(POWER, 4), [(5, 3.0)]),  # a time of one byte
        (gpu(POWER, 5), [(0, 0.0)]),
        (gpu(POWER, 6), [(-1, 7.0)]),
        (gpu(POWER, 7), []),
        (gpu(POWER, 8), [(T0, 8.0)]),
    ]
    expected = [(row, *one) for row, (_, samples) in enumerate(rows) for one in samples]
    assert taken(rows, version) == expected
    quick = parse_write_request(MESSAGES[version](rows), version)
    assert list(zip(quick.of.tolist(), quick.time_ms.tolist(), quick.value.tolist(), strict=True)) == expected


@pytest.mark.parametrize("version", Version)
def test_histograms_and_exemplars_are_counted_and_what_is_unknown_is_passed(version: Version) -> None:
    rows: list[Row] = [(gpu(POWER, 0), [(T0, 1.0)])]
    behind = block(EXEMPLAR[version], b"") + block(HISTOGRAM[version], b"abc") + block(77, b"?" * 300)
    write = parse_write_request(MESSAGES[version](rows, behind) + block(99, b"new"), version)
    assert (write.exemplars, write.histograms, write.value.tolist()) == (1, 1, [1.0])


def test_the_metadata_of_a_series_hides_no_sample() -> None:
    rows: list[Row] = [(gpu(POWER, 0), [(T0, 1.0)]), (gpu(POWER, 1), [(T0, 0.0)])]
    assert taken(rows, Version.V2, block(5, b"\x08\x02\x18\x01")) == [(0, T0, 1.0), (1, T0, 0.0)]


def test_a_sample_may_say_since_when_it_counts() -> None:
    started = sample(2, T0, 2.0)[2:] + b"\x18" + number(T0 - 1)
    message = message_v2([(gpu(POWER, 0), [])], block(2, started))
    assert parse_write_request(message, Version.V2).value.tolist() == [2.0]


def test_references_are_numbers_of_symbols_packed_or_not() -> None:
    write = parse_write_request(message_v2([({f"label{n}": "x" for n in range(200)}, [(T0, 1.0)])]), Version.V2)
    names = [write.symbols[ref] for ref in write.refs[write.begin[0] : write.end[0] : 2]]
    assert names == [f"label{n}".encode() for n in range(200)]
    loose = parse_write_request(
        block(4, b"") + block(4, b"a") + block(5, b"\x08\x01\x08\x00" + sample(2, T0, 1.0)), Version.V2
    )
    assert loose.refs.tolist() == [1, 0]


@pytest.mark.parametrize("version", Version)
def test_an_empty_message_is_one_without_samples(version: Version) -> None:
    assert len(parse_write_request(b"", version).of) == 0


@pytest.mark.parametrize(
    ("message", "version"),
    [
        (b"\x0a", Version.V1),
        (b"\x0a\x05ab", Version.V1),
        (b"\x0a\xff\xff\xff\xff\xff\xff\xff\xff\xff\x7f", Version.V1),
        (b"\x0b\x00", Version.V1),
        (b"\x0a\x03\x12\x05a", Version.V1),  # a sample that goes beyond its series
        (block(4, b"") + block(5, block(1, b"\x01") + sample(2, T0, 1.0)), Version.V2),  # the symbol is not there
        (block(4, b"") + block(5, block(1, b"\x80") + sample(2, T0, 1.0)), Version.V2),
        (block(4, b"") + block(5, block(1, b"\xff" * 9 + b"\x01") + sample(2, T0, 1.0)), Version.V2),
    ],
)
def test_what_is_no_message_is_refused_whole(message: bytes, version: Version) -> None:
    with pytest.raises(RecordError, match="bad_protobuf"):
        parse_write_request(message, version)


@pytest.mark.parametrize("body", [b"", b"\x80", b"\x05abc", b"\xff\xff\x03\x00"])
def test_what_is_not_snappy_is_refused(body: bytes) -> None:
    with pytest.raises(RecordError, match="bad_snappy"):
        unpack(body, 2**20)


def test_a_body_that_says_it_is_huge_is_not_unpacked() -> None:
    with pytest.raises(RecordError, match="too_large"):
        unpack(packed(bytes(2000)), 1999)


@pytest.mark.parametrize("version", Version)
def test_a_small_body_that_unpacks_to_many_fields_is_refused_before_they_are_read(version: Version) -> None:
    exemplars = block(4 if version is Version.V1 else 3, b"") * 40
    rows: list[Row] = [({"__name__": "m"}, [(T0, 1.0)])] * 30
    assert parse_write_request(MESSAGES[version](rows, exemplars), version).histograms == 1_200
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(remote_write, "MAX_FIELDS_READ", 1_000)
        with pytest.raises(RecordError, match="too_many_samples"):
            parse_write_request(MESSAGES[version](rows, exemplars), version)


def test_a_sample_is_short() -> None:
    long = block(2, sample(2, T0, 1.0)[2:] + b"\x18\x00" * 100)
    with pytest.raises(RecordError, match="bad_protobuf"):
        parse_write_request(block(1, block(1, b"") + long), Version.V1)


LABELS = st.dictionaries(st.text(min_size=1, max_size=20), st.text(max_size=150), max_size=5)
SAMPLES = st.lists(st.tuples(st.integers(-(2**63), 2**63 - 1), st.floats(allow_nan=False)), max_size=3)


@examples(150)
@given(st.lists(st.tuples(LABELS, SAMPLES), max_size=6), st.sampled_from(Version))
def test_what_is_written_is_read(rows: list[Row], version: Version) -> None:
    expected = [(row, *one) for row, (_, samples) in enumerate(rows) for one in samples]
    assert taken(rows, version) == expected
    write = parse_write_request(MESSAGES[version](rows), version)
    assert np.all(np.diff(write.of) >= 0)
