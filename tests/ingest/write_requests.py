"""Remote-write messages of both versions, made field by field as the protocol says, for tests."""

import struct
from collections.abc import Mapping, Sequence

import cramjam

T0 = 1_760_000_000_000
Row = tuple[Mapping[str, str], Sequence[tuple[int, float]]]  # labels, [(time_ms, value)]


def number(value: int) -> bytes:
    """A varint."""
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*out, value])


def block(field: int, data: bytes) -> bytes:
    """A field of bytes."""
    return number(field << 3 | 2) + number(len(data)) + data


def sample(field: int, time_ms: int, value: float) -> bytes:
    """As Go writes it: what is zero is left out."""
    bits = struct.pack("<d", value)
    told = b"\x09" + bits if any(bits) else b""
    return block(field, told + (b"\x10" + number(time_ms % 2**64) if time_ms else b""))


def message_v1(rows: Sequence[Row], behind: bytes = b"") -> bytes:
    """`behind`: further fields of each series, such as exemplars."""
    series = []
    for labels, samples in rows:
        pairs = [block(1, block(1, name.encode()) + block(2, value.encode())) for name, value in labels.items()]
        series.append(block(1, b"".join([*pairs, *(sample(2, *one) for one in samples)]) + behind))
    return b"".join(series)


def message_v2(rows: Sequence[Row], behind: bytes = b"") -> bytes:
    symbols = {"": 0}
    series = []
    for labels, samples in rows:
        words = [word for pair in labels.items() for word in pair]
        refs = b"".join(number(symbols.setdefault(word, len(symbols))) for word in words)
        series.append(block(5, block(1, refs) + b"".join(sample(2, *one) for one in samples) + behind))
    return b"".join(block(4, symbol.encode()) for symbol in symbols) + b"".join(series)


def packed(message: bytes) -> bytes:
    return bytes(cramjam.snappy.compress_raw(message))


def gpu(name: str, index: int, node: str = "n1", **more: str) -> dict[str, str]:
    """The labels of a GPU's series as Prometheus sends them: in order of their names."""
    labels = {"__name__": name, "Hostname": node, "UUID": f"GPU-{node}-{index}", "gpu": str(index), **more}
    return dict(sorted(labels.items()))
