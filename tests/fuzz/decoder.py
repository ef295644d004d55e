"""What the suites need to know of a decoder."""

from collections.abc import Callable
from dataclasses import dataclass

from tests.fuzz.bounds import MIB


@dataclass(frozen=True, slots=True)
class Decoder:
    """`decode` takes any bytes and asserts what holds of them all; it raises nothing else: what may be refused is.

    seeds: good and nearly good inputs, written by hand; words: what the format is made of.
    At most `base_bytes` and `times` the size of the input are allocated at once.
    """

    decode: Callable[[bytes], None]
    seeds: tuple[bytes, ...]
    words: tuple[bytes, ...] = ()
    base_bytes: int = 2 * MIB
    times: int = 64
