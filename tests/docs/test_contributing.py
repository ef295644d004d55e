"""The worked changes of CONTRIBUTING can be walked: the files are there, and the names are in them."""

import ast
import importlib
import re
from pathlib import Path

import pytest

from fleetcast.ingest.pages.exporters import RESOLVERS
from fleetcast.ingest.pages.resolver import Resolver
from fleetcast.service.pipeline.capability import Capability
from fleetcast.service.pipeline.node_past import NodePasts
from fleetcast.service.pipeline.role import BUILT_IN
from fleetcast.service.pipeline.served_models import ServedInstances
from tests.docs.pages import ROOT, text_of

TEXT = text_of(ROOT / "CONTRIBUTING.md")
WORKED = TEXT[TEXT.index("## Worked changes") : TEXT.index("## What passes")]
WIRING = (
    "service/pipeline/pipeline.py",
    "service/pipeline/pipeline_clock.py",
    "service/api/app.py",
)
PLACE = re.compile(r"`([\w./]+/(?:[\w.]+\.\w+)?)(?:: ([\w.]+))?`( \(new\))?")


def changes() -> list[tuple[str, int, str]]:
    """Title, most product files, text of each."""
    parts = re.split(r"^### (.+?) \((?:at most )?(\d+) product files[^)]*\)$", WORKED, flags=re.MULTILINE)[1:]
    return [(parts[at], int(parts[at + 1]), parts[at + 2]) for at in range(0, len(parts), 3)]


def steps(text: str) -> list[str]:
    return re.findall(r"^\d+\. (.*(?:\n   .*)*)", text, re.MULTILINE)


def names_in(path: Path) -> set[str]:
    """Functions, classes and variables of a module; methods and fields as Class.name."""
    found: set[str] = set()
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        found |= _defined(node)
        if isinstance(node, ast.ClassDef):
            found |= {f"{node.name}.{name}" for inner in node.body for name in _defined(inner)}
    return found


def _defined(node: ast.stmt) -> set[str]:
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return {node.name}
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    names = {target.id for target in targets if isinstance(target, ast.Name)}
    if isinstance(node, ast.Import | ast.ImportFrom):
        names |= {alias.asname or alias.name for alias in node.names}
    return names


def test_five_kinds_of_change_are_worked() -> None:
    assert len(changes()) == WORKED.count("\n### ") == 5


@pytest.mark.parametrize(("title", "most", "text"), changes(), ids=lambda value: str(value)[:30])
def test_every_step_begins_with_one_product_file_and_there_are_no_more_than_promised(
    title: str, most: int, text: str
) -> None:
    listed = steps(text)
    firsts = [PLACE.match(step) for step in listed]
    assert all(firsts), listed
    files = {first[1] for first in firsts if first}
    assert len(files) == len(listed) <= most
    assert not any(file.startswith(("tests/", "docs/")) for file in files)


@pytest.mark.parametrize(("title", "most", "text"), changes(), ids=lambda value: str(value)[:30])
def test_every_file_exists_and_has_the_names(title: str, most: int, text: str) -> None:
    for path, name, new in PLACE.findall(text):
        if new:
            package = Path(*[part for part in Path(path).parent.parts if part != "NAME"])
            assert (ROOT / package / "__init__.py").exists(), f"no package for {path}"
            continue
        assert (ROOT / path).exists(), path
        if name:
            assert name in names_in(ROOT / path), f"{path} has no {name}"


def test_the_row_is_all_that_names_a_source_or_an_exporter() -> None:
    for place in BUILT_IN.values():
        module, _, name = place.partition(":")
        assert hasattr(importlib.import_module(module), name), place
    assert all(issubclass(one, Resolver) and one.__module__.startswith("fleetcast.ingest.pages.") for one in RESOLVERS)


@pytest.mark.parametrize("example", [NodePasts, ServedInstances])
def test_the_wiring_knows_no_capability_by_name(example: type[Capability]) -> None:
    knows = [name for name in WIRING if re.search(rf"\b{example.__name__}\b", text_of(ROOT / name))]
    assert knows == []
    assert issubclass(example, Capability)
    assert example.__name__ in text_of(ROOT / "service/pipeline/capabilities.py")


def test_the_map_names_every_folder_of_the_product() -> None:
    table = TEXT[TEXT.index("## The house") : TEXT.index("## Where do I put")]
    listed = re.findall(r"^\| `(\w+)/` \|", table, re.MULTILINE)
    folders = {path.parent.name for path in ROOT.glob("*/__init__.py")} - {"tests", "fleetcast"}
    assert set(listed) == folders | {"sdk"}
