"""Snappy's block format with a limit. The stated length is checked before anything is unpacked."""

import cramjam

from fleetcast.fleet.errors import RecordError
from fleetcast.ingest.remote_write.protobuf import read_varint


def read_unpacked_size(body: bytes) -> int:
    """Return the unpacked size in bytes that a snappy block states. Raises RecordError `bad_snappy`."""
    try:
        return read_varint(body, 0)[0]
    except IndexError:
        raise RecordError("bad_snappy", "the body is empty or ends in its length") from None


def unpack(body: bytes, most: int) -> bytes:
    """Return the unpacked bytes of a body in snappy's block format, at most `most` bytes.

    Raises RecordError `too_large` or `bad_snappy`.
    """
    size = read_unpacked_size(body)
    if size > most:
        raise RecordError("too_large", f"{size:,} bytes unpacked, at most {most:,} are accepted")
    try:
        return bytes(cramjam.snappy.decompress_raw(body))
    except cramjam.DecompressionError as error:
        raise RecordError("bad_snappy", str(error)[:200]) from None
