"""Foreign YAML: bounded, and every refusal has a line."""

import json

import pytest

from fleetcast.fleet.errors import ConfigError
from fleetcast.schedulers.imports import things
from fleetcast.schedulers.imports.things import parse_quantity, read_things

BOMB = "a: &a [x,x]\nb: &b [*a,*a]\nc: [*b,*b]\n"
POD = {"kind": "Pod", "apiVersion": "v1", "metadata": {"name": "p"}, "spec": {"on": True, "n": 5, "none": None}}


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (BOMB, "f, line 2: alias \\*a: aliases are not read"),
        ("[" * 100_000, "f, line 1: nested deeper than 40"),
        ("{" * 100_000, "f, line 1: (nested deeper|a key that is no text)"),
        ("a: 1\na: 2\n", "f, line 2: key 'a' is there twice"),
        ("kind: X\nmetadata: {name: [1]}\n", "line 2: X: metadata.name is \\[1\\], must be a text"),
        ("a: b: c\n", "f, line 1: no valid YAML"),
        ("a: \x00\n", "f: no valid YAML"),
        ("- 1\n", "is no object"),
        ("metadata: {}\n", "line 1: an object without a kind"),
        ("kind: X\n", "line 1: X without a name"),
        ("kind: List\nitems: 5\n", "line 2: items is 5, must be a list"),
        ("? [a]\n: b\n", "line 1: a key that is no text"),
        ("", "there is no object in it"),
        ("--- null\n", "there is no object in it"),
    ],
)
def test_what_is_no_list_of_objects_is_refused(text: str, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        read_things("f", text)


def test_a_tag_makes_nothing() -> None:
    found = read_things("f", "kind: X\nmetadata: {name: !!python/object:os.system x}\n")
    assert found[0].name == "x"


def test_size_and_values_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(things, "MOST_BYTES", 10)
    with pytest.raises(ConfigError, match="at most 10 are read"):
        read_things("f", "kind: X\nmetadata: {name: x}\n")
    monkeypatch.setattr(things, "MOST_BYTES", 1000)
    monkeypatch.setattr(things, "MOST_VALUES", 5)
    with pytest.raises(ConfigError, match="f, line 2: more than 5 values"):
        read_things("f", "kind: X\nmetadata: {name: x, a: b}\n")


def test_json_is_read_as_yaml_with_lines() -> None:
    text = json.dumps({"kind": "PodList", "apiVersion": "v1", "items": [POD]}, indent=1)
    (pod,) = read_things("f", text)
    assert pod.line.line > 1
    found = pod.name, pod.spec.pop_text("on"), pod.spec.pop_number("n", 0), pod.spec.pop_text("none")
    assert found == ("p", "true", 5, "")


@pytest.mark.parametrize("text", ["", "x", "8x", "nan", "inf", "1_0", "0x10", "--1", "１"])
def test_no_quantity(text: str) -> None:
    assert parse_quantity(text) != parse_quantity(text)
