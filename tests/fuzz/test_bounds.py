"""The profiles of property tests: the fixed one repeats its examples, the exploring one does not."""

import importlib.util
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.fuzz.bounds import load_profile

SHOW = """
from hypothesis import settings
from tests.fuzz.bounds import load_profile
load_profile(explores=False)
print(settings())
"""


@pytest.fixture(autouse=True)
def _same_profile_afterwards() -> Iterator[None]:
    before = settings.get_current_profile_name()
    yield
    settings.load_profile(before)


def drawn() -> list[tuple[int, str]]:
    """Return the examples of a property."""
    found = []

    @settings(max_examples=200)
    @given(st.integers(), st.text())
    def collect(number: int, text: str) -> None:
        found.append((number, text))

    collect()
    return found


def test_a_fixed_example_depends_on_no_module_that_was_imported(tmp_path: Path) -> None:
    load_profile(explores=False)
    before = drawn()
    source = tmp_path / "constants_of_a_module.py"
    source.write_text(
        "\n".join(f"A{number} = {number * 1_000_003}\nB{number} = 'word {number}'" for number in range(99))
    )
    spec = importlib.util.spec_from_file_location("constants_of_a_module", source)
    assert spec is not None
    assert spec.loader is not None
    sys.modules[spec.name] = module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
        assert drawn() == before
    finally:
        del sys.modules[spec.name]


def test_exploring_draws_other_examples() -> None:
    load_profile(explores=False)
    before = drawn()
    load_profile(explores=True)
    assert drawn() != before
    assert settings().database is None


def test_the_fixed_profile_is_the_same_where_ci_is_set() -> None:
    shown = [
        subprocess.run([sys.executable, "-c", SHOW], env=os.environ | more, capture_output=True, text=True, check=True)
        for more in ({"CI": ""}, {"CI": "true"})
    ]
    assert shown[0].stdout == shown[1].stdout
    assert "derandomize=True" in shown[0].stdout
    assert "database=None" in shown[0].stdout
