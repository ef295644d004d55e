"""A field-by-field reader of protobuf's wire format, for data that the faster readers cannot handle."""

from collections.abc import Iterator

from fleetcast.fleet.errors import RecordError

VARINT, FIXED64, BYTES, FIXED32 = 0, 1, 2, 5  # wire types


def read_varint(data: bytes, at: int) -> tuple[int, int]:
    """Return the number at index `at`, and the index after it.

    Raises IndexError at the end of the data, and RecordError `bad_protobuf` above 64 bits.
    """
    number = shift = 0
    while True:
        byte = data[at]
        number |= (byte & 0x7F) << shift
        at += 1
        if byte < 0x80:
            return number, at
        shift += 7
        if shift > 63:
            raise RecordError("bad_protobuf", "a number of more than 64 bits")


def read_fields(data: bytes, at: int, end: int) -> Iterator[tuple[int, int, int, int]]:
    """Yield (field number, wire type, begin, end) of each field of a message.

    begin, end: the place of a field's content, or of a varint's bytes. Raises IndexError, or RecordError
    `bad_protobuf`.
    """
    while at < end:
        key, begin = read_varint(data, at)
        kind = key & 7
        if kind == BYTES:
            length, begin = read_varint(data, begin)
            at = begin + length
        elif kind == VARINT:
            at = read_varint(data, begin)[1]
        elif kind in (FIXED64, FIXED32):
            at = begin + (8 if kind == FIXED64 else 4)
        else:
            raise RecordError("bad_protobuf", f"wire type {kind}")
        yield key >> 3, kind, begin, at
    if at != end:
        raise RecordError("bad_protobuf", "a field goes beyond its message")


def read_packed_varints(data: bytes, at: int, end: int) -> list[int]:
    """Return the numbers in a packed list of varints.

    Raises IndexError at the end of the data, and RecordError `bad_protobuf`.
    """
    numbers = []
    while at < end:
        number, at = read_varint(data, at)
        numbers.append(number)
    if at != end:
        raise RecordError("bad_protobuf", "a number goes beyond its list")
    return numbers
