"""The site is built from the documents alone, holds all of them, and loads nothing from other hosts."""

import doctest
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from docs import reference, site_pages
from tests.docs import pages
from tests.docs.pages import DOCS, ROOT

LOADED = re.compile(r"""<(?:script|link|img|iframe|source)\b[^>]*?\b(?:src|href)=["']?((?:https?:)?//[^"' >]+)""")
IMPORTED = re.compile(r"""(?:url\(\s*["']?|@import\s+["'])((?:https?:)?//[^"')]+)""")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--strict", "--site-dir", str(folder)]
    env = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return folder


def test_every_document_is_a_page(site: Path) -> None:
    built = {path.relative_to(site).with_suffix(".md").as_posix() for path in site.rglob("*.html")}
    documents = {path.relative_to(ROOT / "docs").as_posix() for path in DOCS if path.name != "README.md"}
    assert documents <= built
    assert {"index.md", "contributing.md", "results-speed.md", "results-forecasts.md", "runbooks.md"} <= built


def test_it_loads_nothing_from_another_host(site: Path) -> None:
    texts = {path: path.read_text(encoding="utf-8") for path in site.rglob("*") if path.suffix in (".html", ".css")}
    found = {path.name: LOADED.findall(text) + IMPORTED.findall(text) for path, text in texts.items()}
    assert {name: links for name, links in found.items() if links} == {}


def test_what_would_load_from_another_host_is_seen() -> None:
    assert LOADED.findall('<script defer src="https://a.example/x.js">') == ["https://a.example/x.js"]
    assert LOADED.findall('<link rel=stylesheet href="//fonts.example/css">') == ["//fonts.example/css"]
    assert LOADED.findall('<a href="https://a.example">') == []
    assert IMPORTED.findall("src: url(https://a.example/f.woff)") == ["https://a.example/f.woff"]


def test_the_index_of_the_search_is_part_of_it(site: Path) -> None:
    index = (site / "search" / "search_index.js").read_text(encoding="utf-8")
    assert "remote write" in index.lower()


def test_the_reference_has_the_public_names_and_their_docstrings(site: Path) -> None:
    page = (site / "reference.html").read_text(encoding="utf-8")
    for name in ("check_source", "Forecaster", "PlacementRequest", "Adapter", "Client", "Reporter"):
        assert re.search(rf'<h3 id="[^"]+">{name}', page), name
    assert "Contract tests for plugins" in page
    assert not re.search(r"<h3[^>]*>_", page)


def test_the_reference_keeps_decorators_and_members_and_hides_private_fields(tmp_path: Path) -> None:
    for name in reference.PUBLIC:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("", encoding="utf-8")
    (tmp_path / "fleetcast/ingest/source.py").write_text(
        """
@dataclass(frozen=True)
class Advice(IntEnum):
    __slots__ = ()
    NONE = 0
    DRAIN = 2
    shared: int = 3
    _hidden: int = 4
    _other = 5

    @classmethod
    def merge(cls) -> "Advice": ...

    @property
    def size(self) -> int: ...
""",
        encoding="utf-8",
    )
    page = reference.build_reference(tmp_path)
    head = "@dataclass(frozen=True)\nclass Advice(IntEnum):\n    NONE = 0\n    DRAIN = 2\n    shared: int = 3\n```"
    assert head in page
    assert "@classmethod\ndef merge(cls) -> 'Advice'" in page
    assert "@property\ndef size(self) -> int" in page
    assert "_hidden" not in page
    assert "_other" not in page


def test_the_picture_of_the_data_flow_is_in_the_site(site: Path) -> None:
    assert "data-flow.svg" in (site / "concepts.html").read_text(encoding="utf-8")
    assert "<svg" in (site / "assets" / "data-flow.svg").read_text(encoding="utf-8")


@pytest.mark.parametrize("module", [site_pages, pages])
def test_the_examples_hold(module: ModuleType) -> None:
    done = doctest.testmod(module)
    assert done.attempted
    assert not done.failed
