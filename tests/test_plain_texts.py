"""Texts that users read have none of the words that say no actor or have a plainer word: told, kept, beside …

Texts are the string literals of the product with at least two words, the titles and descriptions of dashboards and
alerts, and the literals of the console. Docstrings and identifiers have a test of their own (test_plain_english.py).
"""

import ast
import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from tests.sources import Nodes, list_nodes, parse_nodes
from tests.test_plain_english import ROOT, modules

WORDS = re.compile(
    r"\b(?:told|tells?|telling|kept|taken|heard|anew|whoever|somebody|nobody|so many|beside|wished|he|his|him)\b", re.I
)
ALLOWED = {  # names of rows in benchmarks/RESULTS.md
    "benchmarks/answers/extender.py: , p99 beside ticks",
    "benchmarks/answers/queue.py: placing beside it, p99",
}
_LITERAL = re.compile(r"\"((?:[^\"\\\n]|\\.)*)\"|`((?:[^`\\]|\\.)*)`")


def texts_of(nodes: Nodes) -> Iterator[str]:
    """Yield the string literals of a module that are no docstrings and have at least two words."""
    docstrings = set()
    for node in nodes:
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            docstrings.add(id(node.value))
    literals = (node for node in nodes if isinstance(node, ast.Constant) and id(node) not in docstrings)
    yield from (node.value for node in literals if isinstance(node.value, str) and " " in node.value)


def described(value: object) -> Iterator[str]:
    """Yield the titles, descriptions and summaries in a tree of JSON or YAML."""
    if isinstance(value, dict):
        for key, inner in value.items():
            if key in ("title", "description", "summary", "legendFormat", "noValue") and isinstance(inner, str):
                yield inner
            yield from described(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from described(inner)


def console_texts(source: str) -> Iterator[str]:
    """Yield the literals with at least two words of a script. Expressions inside a template do not count."""
    for match in _LITERAL.finditer(re.sub(r"^\s*(?://|/?\*).*$|[;,{})] // .*$", "", source, flags=re.M)):
        text = re.sub(r"\$\{[^{}]*\}", "…", match[1] or match[2] or "")
        if " " in text.strip() and "=>" not in text and "${" not in text:
            yield text


def test_no_text_of_the_product_has_a_word_that_hides_its_actor() -> None:
    found = set()
    for module in modules():
        texts = texts_of(list_nodes(ROOT / module))
        found |= {f"{module}: {text}" for text in texts if WORDS.search(text)}
    assert found - ALLOWED == set(), "say who does it, or choose the plainer word: docs/glossary.md"
    assert ALLOWED - found == set(), "these are gone: take them off the list"


@pytest.mark.parametrize("path", sorted((ROOT / "dashboards").rglob("*.json")), ids=lambda path: path.stem)
def test_no_text_of_a_dashboard_has_such_a_word(path: Path) -> None:
    assert [text for text in described(json.loads(path.read_text(encoding="utf-8"))) if WORDS.search(text)] == []


def test_no_text_of_an_alert_has_such_a_word() -> None:
    alerts = yaml.safe_load((ROOT / "dashboards/alerts.yml").read_text(encoding="utf-8"))
    assert [text for text in described(alerts) if WORDS.search(text)] == []


def test_no_text_of_the_console_has_such_a_word() -> None:
    found = []
    for path in sorted((ROOT / "service/console").glob("*.js")):
        found += [
            f"{path.name}: {text}" for text in console_texts(path.read_text(encoding="utf-8")) if WORDS.search(text)
        ]
    assert found == []


def test_a_text_with_such_a_word_is_found() -> None:
    nodes = parse_nodes('"""Told."""\nX = f"{1} was told of it"\nY = "told"\n')
    assert [text for text in texts_of(nodes) if WORDS.search(text)] == [" was told of it"]
    assert list(described({"panels": [{"title": "GPUs nobody can use", "expr": "told"}]})) == ["GPUs nobody can use"]
    assert list(console_texts("a(`told by ${name}`, kept); // told it\n")) == ["told by …"]
