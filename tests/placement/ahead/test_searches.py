"""Which searches the start times use: compiled ones where numba works, array programs elsewhere."""

import sys
from functools import lru_cache

import pytest

from fleetcast.placement.ahead import searches
from fleetcast.placement.ahead.searches import ARRAY_PROGRAMS, COMPILED_FROM, Searches, choose_searches, load_searches

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


def test_a_process_compiles_from_its_first_long_queue_on(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = ARRAY_PROGRAMS._replace(record_gang_hold=lambda calendar, place, run_s, holder: place.nodes)

    @lru_cache(1)
    def load() -> Searches:
        return compiled

    monkeypatch.setattr(searches, "load_searches", load)
    queues = [0, COMPILED_FROM - 1, COMPILED_FROM, 0]
    assert [choose_searches(waiting) is compiled for waiting in queues] == [False, False, True, True]
