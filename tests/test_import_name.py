"""One package, `fleetcast`: its links are the folders of the root, and no module has two names."""

import ast
import os
import subprocess
import sys
from pathlib import Path

from tests.sources import Nodes, list_nodes, parse_nodes
from tests.test_arrows import MAY_IMPORT, ROOT

PACKAGE = ROOT / "fleetcast"
CONFIGURATION_KEYS = {"fleet.nodes", "fleet.topology"}  # keys that are also modules
ABOUT_SHORT_NAMES = {"tests/test_arrows.py", "tests/test_import_name.py", "tests/fleet/test_import_names.py"}
NAMES_AND_FILES = """
import sys
from pathlib import Path
import fleetcast.cli.main, fleetcast.checks
import fleetcast.service.api.role, fleetcast.service.pipeline.role
import fleetcast.service.placer.role, fleetcast.service.adapters
for name, module in list(sys.modules.items()):
    if getattr(module, "__file__", None):
        print(name, Path(module.__file__).resolve())
"""


def test_each_folder_of_the_root_is_one_relative_link() -> None:
    folders = {path.parent.name for path in ROOT.glob("*/__init__.py")} - {"tests", "fleetcast"}
    assert folders == MAY_IMPORT.keys()
    links = {path.name: os.readlink(path) for path in PACKAGE.iterdir() if path.is_symlink()}
    assert links == {name: f"../{name}" for name in folders}


def test_no_module_is_loaded_under_two_names() -> None:
    done = subprocess.run([sys.executable, "-c", NAMES_AND_FILES], cwd=ROOT, capture_output=True, text=True, check=True)
    names: dict[str, str] = {}
    for line in done.stdout.splitlines():
        name, _, file = line.partition(" ")
        if Path(file).is_relative_to(ROOT) and ".venv" not in file:
            assert name.partition(".")[0] == "fleetcast", f"{file} is loaded as {name}"
            assert names.setdefault(file, name) == name, f"{file} is loaded as {name} and as {names[file]}"
    assert len(names) > 300


def sources() -> list[Path]:
    folders = (*MAY_IMPORT, "fleetcast", "tests", "examples", "deploy", "docs", "sdk")
    return sorted(
        path for folder in folders for path in (ROOT / folder).rglob("*.py") if not path.stem.endswith("_pb2")
    )


def test_no_import_and_no_import_path_names_a_folder_without_the_package() -> None:
    found = []
    for path in sources():
        name = path.relative_to(ROOT).as_posix()
        is_shared = name.partition("/")[0] in MAY_IMPORT  # other tests read these files, too
        nodes = list_nodes(path) if is_shared else parse_nodes(path.read_text(encoding="utf-8"))
        found += [f"{name}: {short}" for short in short_names(nodes, skips_texts=name in ABOUT_SHORT_NAMES)]
    assert found == []


def short_names(nodes: Nodes, *, skips_texts: bool = False) -> list[str]:
    """Return the names of modules in imports, and in strings such as `models.forecast:Panel`, without `fleetcast`."""
    found = []
    for node in nodes:
        match node:
            case ast.Import(names=names):
                found += [alias.name for alias in names]
            case ast.ImportFrom(module=str(module), level=0):
                found.append(module)
            case ast.Constant(value=str(text)) if not skips_texts and is_module(text.partition(":")[0]):
                found.append(text)
    return [name for name in found if name.partition(".")[0] in MAY_IMPORT]


def is_module(name: str) -> bool:
    parts = name.split(".")
    return (
        name not in CONFIGURATION_KEYS
        and len(parts) > 1
        and all(map(str.isidentifier, parts))
        and ROOT.joinpath(*parts).with_suffix(".py").exists()
    )


def test_a_short_name_is_found() -> None:
    source = 'import models.forecast\nfrom fleet import errors\nuse = "ingest.source:Source"\nkey = "fleet.topology"\n'
    assert short_names(parse_nodes(source)) == ["models.forecast", "fleet", "ingest.source:Source"]
