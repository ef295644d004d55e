"""The import arrows of the house, walked module by module."""

import ast
from collections.abc import Iterable
from functools import cache
from pathlib import Path

import pytest

from tests.sources import get_module, list_nodes

ROOT = Path(__file__).resolve().parent.parent

MAY_IMPORT = {
    "fleet": set(),
    "clients": {"fleet"},
    "ingest": {"fleet", "clients"},
    "features": {"fleet"},
    "models": {"fleet", "features"},
    "placement": {"fleet"},
    "simulator": {"fleet", "ingest", "placement"},
    "schedulers": {"fleet", "clients", "models"},
    "training": {"fleet", "ingest", "features", "models", "placement"},
    "service": {"fleet", "clients", "ingest", "features", "models", "placement", "schedulers"},
    "benchmarks": {
        *("fleet", "clients", "ingest", "features", "models", "placement", "schedulers"),
        *("service", "training"),
    },
    "cli": {
        *("fleet", "clients", "ingest", "features", "models", "placement", "schedulers"),
        *("service", "training", "simulator", "benchmarks"),
    },
}
SCHEDULERS_MAY_SEE_OF_MODELS = {"models.demand.rows", "models.forecast", "models.risk.scores"}
HEAVY = {"pandas", "sklearn", "pyarrow", "lightgbm", "scipy"}


def modules(package: str) -> list[Path]:
    return sorted((ROOT / package).rglob("*.py"))


Imports = list[ast.Import | ast.ImportFrom]


@cache
def parsed(path: Path) -> tuple[Imports, Imports, list[str]]:
    """Return a module's imports, those at import time, and the names of its classes."""
    nodes, body = list_nodes(path), get_module(path).body
    kinds = ast.Import | ast.ImportFrom
    classes = [node.name for node in nodes if isinstance(node, ast.ClassDef)]
    return [node for node in nodes if isinstance(node, kinds)], [n for n in body if isinstance(n, kinds)], classes


@cache
def imports(path: Path) -> tuple[frozenset[str], frozenset[str]]:
    """Return the names that a module imports: anywhere in it, and at import time."""
    anywhere, at_import, _ = parsed(path)
    return named(anywhere), named(at_import)


def named(nodes: Iterable[ast.AST]) -> frozenset[str]:
    found: set[str] = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            found |= {alias.name.removeprefix("fleetcast.") for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            found.add(node.module.removeprefix("fleetcast."))
    return frozenset(found)


@pytest.mark.parametrize("package", sorted(MAY_IMPORT))
def test_a_package_imports_only_along_its_arrows(package: str) -> None:
    allowed = MAY_IMPORT[package] | {package}
    for path in modules(package):
        ours = {name for name in imports(path)[0] if name.split(".")[0] in MAY_IMPORT}
        wrong = {name for name in ours if name.split(".")[0] not in allowed}
        assert not wrong, f"{path.relative_to(ROOT)} imports {sorted(wrong)}, {package} may import {sorted(allowed)}"


ROOMS_MAY_IMPORT = {
    "placement": {
        "columns": set(),
        "queues": {"columns"},
        "machines": {"columns", "queues"},
        "engine": {"machines"},
        "fragmentation": {"machines"},
        "reclaim": {"columns", "engine", "machines", "queues"},
        "elastic": {"columns", "engine", "machines", "queues", "reclaim"},
        "recovery": {"engine", "machines", "queues", "reclaim"},
        "plan": {"actions", "elastic", "engine", "machines", "queues", "reclaim", "recovery"},
        "ahead": {"engine", "machines", "plan", "queues"},
        "play": {"elastic", "engine", "machines", "plan", "queues", "reclaim"},
        "actions": set(),
        "ledger": {"actions", "queues"},
    },
    "service": {
        "http": set(),
        "answers": set(),
        "ports": set(),
        "board": {"answers", "http"},
        "pipeline": {"answers", "board"},
        "placer": {"answers", "board", "http", "pipeline"},
        "api": {"answers", "board", "http", "pipeline"},
    },
}
MOST_MODULES = 15  # of a room of placement/


@pytest.mark.parametrize("package", ROOMS_MAY_IMPORT)
def test_rooms_of_a_package_import_only_along_their_arrows(package: str) -> None:
    arrows = ROOMS_MAY_IMPORT[package]
    for path in modules(package):
        room = room_of(name(path))
        wrong = {room_of(other) for other in imports(path)[0]} & arrows.keys() - {room, *arrows.get(room, arrows)}
        assert not wrong, f"{path.relative_to(ROOT)} imports {sorted(wrong)}, {room} may import {sorted(arrows[room])}"
    assert {path.parent.name for path in (ROOT / package).glob("*/__init__.py")} <= arrows.keys()


def room_of(module: str) -> str:
    return module.split(".")[1] if "." in module else ""


def test_every_room_of_placement_is_small() -> None:
    for folder in (ROOT / "placement", *(path.parent for path in (ROOT / "placement").glob("*/__init__.py"))):
        assert len(list(folder.glob("*.py"))) - 1 <= MOST_MODULES, folder


def test_schedulers_see_only_the_types_of_models() -> None:
    for path in modules("schedulers"):
        seen = {name for name in imports(path)[0] if name.split(".")[0] == "models"}
        assert seen <= SCHEDULERS_MAY_SEE_OF_MODELS, f"{path.name} imports {sorted(seen)}"


@pytest.mark.parametrize("package", sorted(MAY_IMPORT))
def test_an_init_file_holds_a_docstring_only(package: str) -> None:
    for path in (ROOT / package).rglob("__init__.py"):
        body = ast.parse(path.read_text(encoding="utf-8")).body
        assert len(body) == 1, f"{path.relative_to(ROOT)} holds more than a docstring"
        assert isinstance(body[0], ast.Expr)


@pytest.mark.parametrize("package", ["fleet", "ingest", "features", "models", "placement", "service", "cli"])
def test_heavy_libraries_are_imported_inside_functions_only(package: str) -> None:
    for path in modules(package):
        heavy = {name for name in imports(path)[1] if name.split(".")[0] in HEAVY}
        assert not heavy, f"{path.relative_to(ROOT)} imports {sorted(heavy)} at import time"


def test_no_modules_import_one_another_in_a_circle() -> None:
    """Imports in functions and for type checkers count, too: a reader has to follow them all the same."""
    assert not circle({name(path): needs(path) for package in MAY_IMPORT for path in modules(package)})


def name(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def needs(path: Path) -> set[str]:
    """The modules that one imports, by their full names; `from package import module` names a module, too."""
    found = set(imports(path)[0])
    for node in parsed(path)[0]:
        if isinstance(node, ast.ImportFrom) and node.module:
            found |= {f"{node.module}.{alias.name}".removeprefix("fleetcast.") for alias in node.names}
    return found - {name(path)}


def circle(needed: dict[str, set[str]]) -> list[str]:
    """What is left of the modules when those that need none of the others are taken away, again and again."""
    left = dict(needed)
    while free := [module for module, others in left.items() if not others & left.keys()]:
        for module in free:
            del left[module]
    return sorted(left)


def test_a_circle_is_found_and_a_chain_is_none() -> None:
    assert circle({"a": {"b"}, "b": {"c"}, "c": {"b", "d"}, "d": set()}) == ["a", "b", "c"]
    assert circle({"a": {"b", "c"}, "b": {"c"}, "c": {"json"}}) == []


SAME_NAME_TWICE: frozenset[str] = frozenset()  # public class names that two modules may share; each with its reason


def test_no_two_modules_have_a_public_class_of_one_name() -> None:
    homes: dict[str, list[str]] = {}
    for package in MAY_IMPORT:
        for path in modules(package):
            for name in parsed(path)[2]:
                if not name.startswith("_"):
                    homes.setdefault(name, []).append(str(path.relative_to(ROOT)))
    twice = {name: where for name, where in homes.items() if len(where) > 1 and name not in SAME_NAME_TWICE}
    assert not twice, f"one name, two classes: {twice}"
