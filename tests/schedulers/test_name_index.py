import json

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from fleetcast.schedulers.kube_extender import Pieces
from fleetcast.schedulers.name_index import NameIndex


def compact(names: list[str]) -> bytes:
    return json.dumps(names, separators=(",", ":")).encode()


NAMES = st.lists(st.text(min_size=0, max_size=40) | st.from_regex(r"[a-z]{1,3}[0-9]{1,3}", fullmatch=True), unique=True)


@given(NAMES, st.lists(st.integers(0, 10**6), max_size=20))
@example(["a", "a\0"], [0, 1])
@example(["", "a"], [0])
def test_rows_are_those_of_a_dict_or_none(names: list[str], picks: list[int]) -> None:
    asked = [names[pick % len(names)] for pick in picks] if names else []
    rows = NameIndex(names).find_rows(compact(asked))
    if asked and all(name and name.isascii() and name.isalnum() for name in asked):
        assert rows is not None
    if rows is not None:
        assert [names[row] for row in rows.tolist()] == asked


def test_thousands_of_names_of_all_lengths_are_all_found() -> None:
    names = [f"n{'x' * (number % 30)}{number}" for number in range(5_000)]
    index = NameIndex(names)
    rows = np.random.default_rng(1).permutation(len(names))
    found = index.find_rows(compact([names[row] for row in rows]))
    assert found is not None
    assert found.tolist() == rows.tolist()


@pytest.mark.parametrize(
    "array",
    [
        b"[]",
        b"null",
        b'["c"]',
        b'["a","c"]',
        b'["a", "b"]',
        b'[ "a"]',
        b'["a"] ',
        b'["\\u0061"]',
        b'["a\\",\\"b"]',
        b'[""]',
        b'["aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa"]',
        b'"',
        b"",
    ],
)
def test_what_is_not_known_or_not_plainly_written_is_left_to_others(array: bytes) -> None:
    assert NameIndex(["a", "b", 'a","b']).find_rows(array) is None
    assert NameIndex([]).find_rows(array) is None


@given(st.lists(st.text(max_size=10), min_size=1), st.lists(st.integers(0, 10**6), max_size=9))
def test_pieces_are_put_together_as_json(values: list[str], picks: list[int]) -> None:
    rows = np.array([pick % len(values) for pick in picks], np.intp)
    joined = Pieces([json.dumps(value).encode() for value in values]).join_rows(rows)
    assert json.loads(joined) == [values[row] for row in rows.tolist()]


def test_numbers_are_written_into_copies() -> None:
    pieces = Pieces([b'{"n":  }', b'{"n":  ,"a":1}'])
    numbered = pieces.replace_numbers(np.array([7, 42]), len('{"n":'))
    assert json.loads(numbered.join_rows(np.array([1, 0, 1]))) == [{"n": 42, "a": 1}, {"n": 7}, {"n": 42, "a": 1}]
    assert json.loads(pieces.replace_numbers(np.array([0, 10]), 5).join_rows(np.array([0, 1])))[1]["n"] == 10
