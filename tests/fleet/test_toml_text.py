"""Whatever a TOML text holds, it is read in linear work or refused; what is accepted is what the parser reads."""

import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleetcast.fleet.errors import ConfigError
from fleetcast.fleet.toml_text import DEEPEST, MOST_CHARACTERS, MOST_PARTS, read_toml
from fleetcast.ingest.topology.load import parse_toml_nodes
from fleetcast.service.config import load_config
from fleetcast.simulator.faults.fault_file import parse_fault_file

LONG_KEY = ".".join("a" * 20_000)
TOO_MUCH = {
    "a header of many parts": (f"[{LONG_KEY}]\nx = 1\n", "more than 10 parts"),
    "a key of many parts": (f"{LONG_KEY} = 1\n", "more than 10 parts"),
    "quoted parts": (".".join('"a.b"' for _ in range(11)) + " = 1", "more than 10 parts"),
    "parts with spaces": (" . ".join("a" for _ in range(11)) + " = 1", "more than 10 parts"),
    "nested arrays": ("a = " + "[" * 12 + "]" * 12, "more than 10 tables and arrays"),
    "nested tables": ("a = " + "{a = " * 12 + "1" + "}" * 12, "more than 10 tables and arrays"),
    "a deep recursion": ("a = " + "[" * 100_000, "more than 10 tables and arrays"),
    "many keys": ("".join(f"a{at} = 1\n" for at in range(200_000)), "at most 300,000 are read"),
    "many values": ("a = [" + "1," * 400_000 + "]", "at most 300,000 are read"),
    "many lines": ("#\n" * 400_000, "at most 300,000 are read"),
    "many characters": ("#" * (MOST_CHARACTERS + 1), "at most 4,194,304 are read"),
    "an integer of 67 bits": ("a = 99999999999999999999", "67 bits"),
    "an integer of 20,000 bits": (f"a = [[0x{'f' * 5000}]]", "20000 bits"),
    "an integer of 5,000 digits": (f"a = {'9' * 5000}", "4300 digits"),
}


@pytest.mark.parametrize("name", TOO_MUCH)
def test_what_costs_too_much_is_refused_by_every_reader(name: str, tmp_path: Path) -> None:
    text, why = TOO_MUCH[name]
    with pytest.raises(ValueError, match=why):
        read_toml(text)
    with pytest.raises(ConfigError, match=why):
        parse_toml_nodes(text)
    with pytest.raises(ConfigError, match=why):
        parse_fault_file(text)
    (tmp_path / "config.toml").write_text(text)
    with pytest.raises(ConfigError, match=why):
        load_config(tmp_path / "config.toml")


@pytest.mark.parametrize(
    "text",
    [
        ".".join("a" * DEEPEST) + " = 1",
        'a = "' + ".".join("a" * 100) + '"',
        f"a = '{LONG_KEY}' # {LONG_KEY}",
        f"a = \"\"\"\n{LONG_KEY}\n\"\"\"\nb = '''{LONG_KEY}'''",
        'a = "\\"" # " , ' + "[" * 400_000,
        "a = 1.5\nb = 1979-05-27T07:32:00Z\nc = 9223372036854775807",
        "a = '" + "," * MOST_PARTS + "'",
    ],
)
def test_what_only_looks_deep_or_long_is_read(text: str) -> None:
    assert read_toml(text) == tomllib.loads(text)


signs = st.text(st.sampled_from("ab.=\"'#[]{},\n\\ 1"), max_size=60)


@given(signs | st.text(max_size=60))
def test_any_text_is_read_as_the_parser_reads_it_or_refused(text: str) -> None:
    found, read = parsed(tomllib.loads, text), parsed(read_toml, text)
    assert read == found or (isinstance(read, str) and (isinstance(found, str) or "more than 10" in read))


def parsed(reader: Callable[[str], dict[str, Any]], text: str) -> dict[str, Any] | str:
    """The document, or why there is none."""
    try:
        return reader(text)
    except ValueError as error:
        return f"refused: {error}"
