"""Comments and docstrings name only what exists: files, modules, their members and identifiers."""

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from functools import cache

from tests.sources import Nodes, get_module, list_nodes, parse_nodes
from tests.test_plain_english import ROOT, modules

FOREIGN = frozenset({"ce_id", "health_row"})  # of Kafka's binding of CloudEvents; a key as a user may mistype it
_NAME = re.compile(r"(?<!`)`(?:fleetcast_)?(_?[a-z][a-z0-9]*(?:_[a-z0-9]+)+)(?:\(\))?`")
_FILE = re.compile(r"`(\w+\.py)`")
_PATH = re.compile(r"\bfleetcast((?:\.\w+)+)")


def texts_of(source: str, nodes: Nodes) -> Iterator[str]:
    """Yield the docstrings of a module, and its comments if one of them may name something.

    Finding the comments takes the longest, and in most modules no line with a comment has such a name.
    """
    for node in nodes:
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield ast.get_docstring(node) or ""
    commented = [line for line in source.splitlines() if "#" in line]
    if not any(pattern.search(line) for line in commented for pattern in (_NAME, _FILE, _PATH)):
        return
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.string


@cache
def known_names() -> frozenset[str]:
    """Return every identifier of the product's code, and every word of its strings other than docstrings."""
    found: set[str] = set()
    for module in modules():
        tokens = tokenize.generate_tokens(io.StringIO((ROOT / module).read_text(encoding="utf-8")).readline)
        for token in tokens:
            if token.type == tokenize.NAME or (token.type == tokenize.STRING and not token.string.startswith('"""')):
                found.update(re.findall(r"\w+", token.string))
        found.update(module.removesuffix(".py").split("/"))
    return frozenset(found)


@cache
def known_files() -> frozenset[str]:
    return frozenset(module.rpartition("/")[2] for module in modules())


def exists(path: str) -> bool:
    """Return whether a dotted path below `fleetcast` leads to a package, a module or a name in one.

    >>> exists(".models.forecast"), exists(".models.forecast.Panel"), exists(".models.forecasts"), exists(".io")
    (True, True, False, True)
    """
    parts = path.split(".")[1:]
    here = ROOT / "fleetcast"
    if not (here / parts[0]).exists():  # of a label, a topic or a metric
        return True
    for number, part in enumerate(parts):
        if (here / part).is_dir():
            here = here / part
        elif (here / f"{part}.py").is_file():
            member = parts[number + 1] if number + 1 < len(parts) else part
            return member == part or re.search(rf"\b{member}\b", (here / f"{part}.py").read_text()) is not None
        else:
            return False
    return True


def unknown_names(source: str, nodes: Nodes) -> list[str]:
    """Return the names in the comments and docstrings of a module that do not exist."""
    known, found = known_names(), []
    for text in texts_of(source, nodes):
        found += [name for name in _NAME.findall(text) if name not in known and name not in FOREIGN]
        found += [name for name in _FILE.findall(text) if name not in known_files()]
        found += [f"fleetcast{path}" for path in _PATH.findall(text) if not exists(path)]
    return found


def test_comments_and_docstrings_name_what_exists() -> None:
    found = []
    for module in modules():
        path = ROOT / module
        unknown = unknown_names(path.read_text(encoding="utf-8"), list_nodes(path))
        found += [f"{module}: {name}" for name in unknown]
    assert found == []


def test_a_name_that_is_gone_is_found() -> None:
    source = '"""See `compute_nothing_at_all` and `nowhere.py`."""\nX = 1  # of fleetcast.models.nowhere.X\n'
    gone = ["compute_nothing_at_all", "nowhere.py", "fleetcast.models.nowhere.X"]
    assert unknown_names(source, parse_nodes(source)) == gone
    source = '"""See `known_names`, `naive.py` and fleetcast.models.forecast.Panel."""\n'
    assert unknown_names(source, parse_nodes(source)) == []


def test_no_constant_is_defined_twice() -> None:
    """The second value would replace the first one everywhere."""
    found = []
    for module in modules():
        seen = set()
        for node in get_module(ROOT / module).body:
            if isinstance(node, ast.Assign | ast.AnnAssign):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                for name in [target.id for target in targets if isinstance(target, ast.Name)]:
                    found += [f"{module}: {name}"] if name in seen else []
                    seen.add(name)
    assert found == []
