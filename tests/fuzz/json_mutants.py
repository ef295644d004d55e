"""JSON documents that are wrong somewhere: other types, huge numbers, depth, keys twice, text that is none."""

import json
from copy import deepcopy
from random import Random
from typing import Any


class Raw(bytes):
    """Bytes that stand in a document as they are."""


class Pairs(list[tuple[Any, Any]]):
    """An object whose keys may come twice."""


DEEP = 1500
VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 2, 8, 0.5, -0.0, 1e-9, 1e12, 1e308, 2**31, 2**53, 2**53 + 1, 2**63, 2**64, -(2**63)),
    *(
        "",
        "a",
        "\x00",
        "\u2028",
        "\ufeff",
        "\U0001f600",
        "n01",
        "../..",
        "a/b",
        "%2F",
        "a" * 300,
        "a" * 70_000,
        "1",
        "NaN",
    ),
    *([], {}, [[]], [{}], {"": 0}, [None] * 50, [0] * 5000, ["n01"] * 300, {"a": {"a": {"a": 1}}}),
    *(Raw(text) for text in (b"NaN", b"Infinity", b"-Infinity", b"1e400", b"-1e400", b"1e-400", b"-0", b"01", b"0x10")),
    *(Raw(text) for text in (b"", b"-", b"1.", b".5", b"True", b"'a'", b"1 2", b"1,", b"}", b"]", b'"', b"9" * 30)),
    *(Raw(text) for text in (b"9" * 5000, b"0." + b"9" * 5000, b'"\\ud800"', b'"\\udc00\\ud800"', b'"\\u0000"')),
    *(Raw(text) for text in (b'"\xff"', b'"\xed\xa0\x80"', b'"\xc3("', b'"\n"', b'"\\x"', b"/**/1", b"\xef\xbb\xbf1")),
    Raw(b"[" * DEEP + b"]" * DEEP),
    Raw(b'{"a":' * DEEP + b"1" + b"}" * DEEP),
    Raw(b"[" * 100_000),
)


def mutant(rng: Random, document: Any, edits: int) -> bytes:
    """The document with some edits, spelled."""
    tree = deepcopy(document)
    for _ in range(edits):
        tree = _edited(rng, tree)
    return spelled(tree)


def spelled(value: Any) -> bytes:
    """UTF-8 JSON, but for what is `Raw`."""
    match value:
        case Raw():
            return bytes(value)
        case Pairs() | dict():
            pairs = value if isinstance(value, Pairs) else value.items()
            return b"{" + b",".join(spelled(key) + b":" + spelled(row) for key, row in pairs) + b"}"
        case list() | tuple():
            return b"[" + b",".join(map(spelled, value)) + b"]"
        case _:
            return json.dumps(value, ensure_ascii=False).encode("utf-8", "surrogatepass")


def _value(rng: Random) -> Any:
    """One of VALUES, of its own: it may be edited, too."""
    return deepcopy(rng.choice(VALUES))


def _edited(rng: Random, tree: Any) -> Any:
    """One edit, at the root or anywhere below it."""
    if rng.random() < 0.05:
        return _value(rng)
    places = list(_places(tree))
    if not places:
        return _value(rng)
    holder, key = rng.choice(places)
    match holder:
        case dict():
            return _edit_object(rng, tree, holder, key)
        case _:
            _edit_list(rng, holder, key)
            return tree


def _places(tree: Any) -> Any:
    """(holder, key or index) of everything below the root."""
    if isinstance(tree, dict):
        for key, value in tree.items():
            yield tree, key
            yield from _places(value)
    elif isinstance(tree, list) and not isinstance(tree, Pairs):
        for index, value in enumerate(tree):
            yield tree, index
            yield from _places(value)


def _edit_object(rng: Random, tree: Any, holder: dict[Any, Any], key: Any) -> Any:
    what = rng.random()
    if what < 0.55:
        holder[key] = _value(rng)
    elif what < 0.65:
        del holder[key]
    elif what < 0.75:
        holder[rng.choice((f"{key}_", str(key).upper(), "unknown", "", "\x00", "a" * 2000, "__proto__"))] = holder[key]
    elif what < 0.85:
        holder[key] = rng.choice(([holder[key]], [holder[key]] * 3, {"value": holder[key]}, str(holder[key])))
    else:
        return _with_a_key_twice(rng, tree, holder, key)
    return tree


def _with_a_key_twice(rng: Random, tree: Any, holder: dict[Any, Any], key: Any) -> Any:
    pairs = Pairs([*holder.items(), (key, rng.choice((holder[key], _value(rng))))])
    return pairs if tree is holder else _replaced(tree, holder, pairs)


def _replaced(tree: Any, old: Any, new: Any) -> Any:
    if tree is old:
        return new
    if isinstance(tree, dict):
        return {key: _replaced(value, old, new) for key, value in tree.items()}
    if isinstance(tree, Pairs):
        return Pairs((key, _replaced(value, old, new)) for key, value in tree)
    return [_replaced(value, old, new) for value in tree] if isinstance(tree, list) else tree


def _edit_list(rng: Random, holder: list[Any], index: int) -> None:
    what = rng.random()
    if what < 0.6:
        holder[index] = _value(rng)
    elif what < 0.75:
        del holder[index]
    elif what < 0.9:
        holder.insert(index, holder[index])
    else:
        holder[:] = (holder * rng.choice((2, 20, 300)))[:3000]
