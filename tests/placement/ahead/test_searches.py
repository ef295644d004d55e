"""Which searches the start times use: compiled ones where numba works, array programs elsewhere."""

import sys

import pytest

from fleetcast.placement.ahead import searches
from fleetcast.placement.ahead.searches import ARRAY_PROGRAMS, load_searches

load_again = load_searches.__wrapped__


def test_without_numba_the_array_programs_serve(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(searches.importlib.util, "find_spec", lambda name: None)
    assert load_again() == ARRAY_PROGRAMS


def test_a_numba_that_fails_is_named_and_the_array_programs_serve(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(searches.importlib.util, "find_spec", lambda name: object())
    monkeypatch.setitem(sys.modules, "fleetcast.placement.ahead.compiled", None)
    monkeypatch.delattr("fleetcast.placement.ahead.compiled", raising=False)
    assert load_again() == ARRAY_PROGRAMS
    assert "numba cannot be used" in caplog.text


def test_with_numba_the_loops_are_compiled() -> None:
    pytest.importorskip("numba")
    assert load_again() != ARRAY_PROGRAMS
