"""The product's names and docstrings follow the glossary: no forbidden word in a name, no docstring without a subject.

`plain_english_names.txt` lists the names that still break the rule, one `FILE NAME` a line. The list only shrinks: a
name that is gone must leave it, and no new name may join. `python -m tests.test_plain_english` prints it.
"""

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from tests.sources import Nodes, list_nodes

ROOT = Path(__file__).resolve().parents[1]
ALLOWED = Path(__file__).with_name("plain_english_names.txt")
FOLDERS = (
    *("fleet", "clients", "ingest", "features", "models", "placement", "schedulers", "service"),
    *("training", "simulator", "cli", "benchmarks", "sdk", "deploy", "fleetcast/checks.py"),
)
FORBIDDEN = frozenset(
    (
        *("told", "tell", "take", "note", "look", "see", "settle", "desk", "book", "keeper", "hub"),
        *("heard", "kept", "anew", "whoever", "somebody", "nobody"),
    )
)
WITHOUT_SUBJECT = re.compile(r"(?:What|Who|Whoever|Of|As|That)\b|Whether\b.*\bis\b")
_PART = re.compile(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])")


@cache
def modules() -> tuple[str, ...]:
    """Return the modules of the product, by path."""
    found: list[Path] = []
    for folder in FOLDERS:
        found += (ROOT / folder).rglob("*.py") if (ROOT / folder).is_dir() else [ROOT / folder]
    return tuple(sorted(path.relative_to(ROOT).as_posix() for path in found if not path.stem.endswith("_pb2")))


def parts_of(name: str) -> set[str]:
    """Split a name into its words.

    >>> sorted(parts_of("_QueueDesk")), sorted(parts_of("heard_ms")), sorted(parts_of("MAX_BOOKS"))
    (['desk', 'queue'], ['heard', 'ms'], ['books', 'max'])
    """
    return {part.lower() for part in _PART.findall(name)}


def defined_in(nodes: Nodes) -> Iterator[str]:
    """Yield the names that a module defines: functions, classes, arguments, variables and attributes."""
    for node in nodes:
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                yield name
            case ast.arg(arg=name) | ast.Name(id=name, ctx=ast.Store()) | ast.Attribute(attr=name, ctx=ast.Store()):
                yield name


def names_against_the_rule() -> list[str]:
    """Return `FILE NAME` for each name with a forbidden word, sorted."""
    found = set()
    for module in modules():
        names = set(defined_in(list_nodes(ROOT / module)))
        found |= {f"{module} {name}" for name in names if FORBIDDEN & parts_of(name)}
    return sorted(found)


def test_no_name_has_a_forbidden_word() -> None:
    allowed = ALLOWED.read_text(encoding="utf-8").splitlines()
    found = names_against_the_rule()
    assert sorted(set(found) - set(allowed)) == [], "choose another word: CONTRIBUTING.md lists some"
    assert sorted(set(allowed) - set(found)) == [], "these are gone: take them off the list"
    assert allowed == sorted(set(allowed))


def test_every_docstring_has_a_subject_or_an_imperative() -> None:
    found = []
    for module in modules():
        for node in list_nodes(ROOT / module):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                first = (ast.get_docstring(node) or "").partition("\n")[0]
                found += [f"{module}: {first}"] if WITHOUT_SUBJECT.match(first) else []
    assert found == []


def test_words_of_names() -> None:
    assert parts_of("_QueueDesk") == {"queue", "desk"}
    assert parts_of("heard_ms") == {"heard", "ms"}
    assert not FORBIDDEN & parts_of("notebook_seed")
    assert WITHOUT_SUBJECT.match("Whether a node is lost.")
    assert not WITHOUT_SUBJECT.match("Off the list.")


if __name__ == "__main__":
    print("\n".join(names_against_the_rule()))
