"""The examples in docstrings of the product give what they say."""

import doctest
import importlib

import pytest

from tests.test_plain_english import ROOT, modules

WITH_EXAMPLES = [module for module in modules() if ">>> " in (ROOT / module).read_text(encoding="utf-8")]


@pytest.mark.parametrize("path", WITH_EXAMPLES)
def test_the_examples_of_a_module_hold(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "sdk")
    name = path.removesuffix(".py").replace("/", ".").removeprefix("sdk.")
    if (ROOT / "fleetcast" / name.partition(".")[0]).is_dir():
        name = f"fleetcast.{name}"
    done = doctest.testmod(importlib.import_module(name))
    assert done.attempted
    assert not done.failed, "the output above says which"
