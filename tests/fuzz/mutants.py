"""Bytes that look like what a decoder expects, and are wrong somewhere."""

from collections.abc import Sequence

from hypothesis import strategies as st

# What breaks parsers of anything: ends, escapes, numbers beyond their type, digits that are none, text that is no text.
WORDS = (
    b"\x00", b"\xff", b"\xc3\x28", b"\xed\xa0\x80", b"\xef\xbb\xbf", b"\r\n", b"\n", b"\t", b" ", b'"', b"\\", b"\\u",
    b"{", b"}", b"[", b"]", b"(", b",", b"=", b":", b";", b"#", b"/", b"-", b"0", b"-1", b"1e400", b"-1e400", b"NaN",
    b"Infinity", b"9" * 30, b"9" * 5000, b"18446744073709551616", b"9223372036854775807", b"-9223372036854775808",
    b"2147483648", b"1_000", b"0x10", b"1.5", b"true", b"null", b'""', "\u0663\u00b2".encode(), "\U0001f600".encode(),
    "\u2028".encode(), b"\\ud800", b"[" * 5000, b'{"a":' * 2000, b"a" * 9000,
)  # fmt: skip


@st.composite
def mutants(draw: st.DrawFn, seeds: Sequence[bytes], words: Sequence[bytes] = ()) -> bytes:
    """A seed with a few edits: cut, repeated, overwritten, a word put in, a piece of another seed put in."""
    body = bytearray(draw(st.sampled_from(seeds)))
    known = st.sampled_from((*words, *WORDS))
    for _ in range(draw(st.integers(0, 5))):
        at = draw(st.integers(0, len(body)))
        end = min(len(body), at + draw(st.integers(0, 40)))
        match draw(st.sampled_from(("cut", "repeat", "overwrite", "word", "replace", "splice"))):
            case "cut":
                del body[at:end]
            case "repeat":
                body[at:at] = body[at:end] * draw(st.integers(1, 4))
            case "overwrite":
                body[at:end] = draw(st.binary(max_size=8))
            case "word":
                body[at:at] = draw(known)
            case "replace":
                body[at:end] = draw(known)
            case "splice":
                other = draw(st.sampled_from(seeds))
                begin = draw(st.integers(0, len(other)))
                body[at:at] = other[begin : begin + draw(st.integers(0, 200))]
    return bytes(body)
