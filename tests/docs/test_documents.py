"""The documents agree with the code: links, commands, keys, routes, names. Their sentences are short."""

import ast
import doctest
import importlib.util
import json
import re
import shlex
import shutil
import subprocess
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import certifi
import pytest
import yaml

from fleetcast.fleet.clock import SystemClock
from fleetcast.fleet.entities import Entities
from fleetcast.ingest.topology.load import load_topology
from fleetcast.placement.queues.queues_file import read_queues
from fleetcast.service.api.app import create_app
from fleetcast.service.config import Config, load_config
from fleetcast.service.pipeline.role import open_sources
from tests.docs import words
from tests.docs.commands import command_tree
from tests.docs.pages import (
    DOCS,
    PAGES,
    RESULTS,
    ROOT,
    Block,
    anchors_of,
    blocks_of,
    codes_of,
    links_of,
    name_of,
    sentences_of,
    text_of,
    words_of,
)

LONGEST = 25
MOST_WORDS = 18_000  # of tests/docs/words.py; the number only falls
MOST_BYTES = 9 * 1024  # of README.md
SECTIONS = set(tomllib.loads(text_of(ROOT / "config.toml")))
BLOCKS = [block for page in PAGES for block in blocks_of(page)]
NO_KEYS = ("py", "key", "files")  # of clock.py, placer.key, fleetcast.fleet.files
QUEUE_TABLES = {"policy", "class", "queue", "reservation", "maintenance", "prices", "spares", "moves"}
SUFFIXES = "py|md|toml|yaml|yml|json|ipynb|txt|lock|png"
each_page = pytest.mark.parametrize("page", PAGES, ids=name_of)


@cache
def product_text() -> str:
    """All code and configuration that ships, the SDK, and what configures the tests."""
    folders = [*(ROOT / "fleetcast").iterdir(), ROOT / "sdk", ROOT / "dashboards"]
    files = [path for folder in folders for path in folder.rglob("*") if path.suffix in (".py", ".yml")]
    files += [path for path in (ROOT / "deploy").rglob("*") if path.is_file() and path.suffix != ".pyc"]
    files += [ROOT / ".ci/run", *(ROOT / "tests").glob("*.py")]
    return "\n".join(path.read_text(encoding="utf-8") for path in files)


@each_page
def test_every_link_leads_somewhere(page: Path) -> None:
    for link in links_of(page):
        if re.match(r"https?://", link):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), f"{link}: no such file"
        assert not anchor or anchor in anchors_of(target), f"{link}: no such heading"


FRAGMENTS = tuple(sorted((ROOT / "changes").glob("*.*.md")))  # a release moves them into the changelog


@pytest.mark.parametrize("page", [*(page for page in PAGES if page not in RESULTS), *FRAGMENTS], ids=name_of)
def test_no_sentence_is_long(page: Path) -> None:
    long = [one for one in sentences_of(text_of(page)) if len(words_of(one)) > LONGEST]
    assert long == []


def test_the_documents_do_not_grow() -> None:
    total = sum(number for name, number in words.counted().items() if not name.startswith(words.EVIDENCE))
    assert total <= MOST_WORDS, "cut what repeats, or say why a page must grow: python -m tests.docs.words"


@pytest.mark.parametrize("page", [page for page in PAGES if page not in RESULTS], ids=name_of)
def test_the_spelling_is_british(page: Path) -> None:
    assert words.american(text_of(page)) == []


def test_the_examples_of_the_counts_hold() -> None:
    done = doctest.testmod(words)
    assert done.attempted
    assert not done.failed


def test_the_readme_fits_on_a_few_screens() -> None:
    assert (ROOT / "README.md").stat().st_size <= MOST_BYTES


def test_every_page_can_be_reached_from_the_readme() -> None:
    seen: set[Path] = set()
    todo = [ROOT / "README.md"]
    while todo:
        page = todo.pop()
        if page not in seen and page.suffix == ".md":
            seen.add(page)
            todo += [(page.parent / link.partition("#")[0]).resolve() for link in links_of(page) if "://" not in link]
    assert [name_of(page) for page in DOCS if page not in seen] == []


@each_page
def test_every_file_that_is_named_exists(page: Path) -> None:
    for code in codes_of(page):
        path = re.fullmatch(rf"((?:[\w.-]+/)+[\w.-]+\.(?:{SUFFIXES}))(?::.*)?", code)
        if path and path[1].partition("/")[0] not in ("var", "state", "split") and "NAME" not in code:
            assert any((base / path[1]).exists() for base in (ROOT, page.parent)), f"{code}: no such file"


def command_lines(page: Path) -> Iterator[str]:
    """Whatever begins with fleetcast, in blocks and inline."""
    codes = [line for block in blocks_of(page) for line in re.split(r"\n|\| ", block.code)]
    for code in (*codes, *codes_of(page)):
        line = re.sub(r"^(?:\$ )?(?:\.venv/bin/)?", "", code.strip())
        if re.match(r"fleetcast [a-z-]+(\s|$)", line) and "|" not in line:
            yield line


@each_page
def test_every_command_and_option_exists(page: Path) -> None:
    for line in command_lines(page):
        command: Any = command_tree()
        for word in shlex.split(line, comments=True)[1:]:
            if (commands := getattr(command, "commands", None)) and not word.startswith("-"):
                assert word in commands, f"{line}: no command {word}"
                command = commands[word]
            elif word.startswith("--"):
                options = {name for option in command.params for name in (*option.opts, *option.secondary_opts)}
                assert word.partition("=")[0] in options, f"{line}: no option {word}"


@pytest.mark.parametrize("block", [b for b in BLOCKS if b.language == "toml"], ids=lambda block: block.page)
def test_every_configuration_can_be_loaded(block: Block, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = set(tomllib.loads(block.code))
    path = tmp_path / "config.toml"
    path.write_text(block.code.replace("/etc/ufm.pem", certifi.where()), encoding="utf-8")
    if keys & QUEUE_TABLES:
        assert read_queues(block.code).nodes
        return
    (tmp_path / "queues.toml").write_text("[queue.research]\n", encoding="utf-8")
    if not keys & SECTIONS:
        assert len(load_topology(path))
        return
    monkeypatch.chdir(tmp_path)
    config = load_config(path)
    if config.pipeline.sources:
        monkeypatch.setenv("FLEETCAST_UFM_PASSWORD", "secret")
        assert open_sources(config, SystemClock(), Entities())


@each_page
def test_every_configuration_key_exists(page: Path) -> None:
    defaults = tomllib.loads(text_of(ROOT / "config.toml"))
    for code in codes_of(page):
        key = re.fullmatch(r"\[?(\w+)(?:\.|\] )(\w+)(?: = .*)?", code)
        if key and key[1] in SECTIONS and key[2] not in NO_KEYS:
            assert key[2] in defaults[key[1]], f"config.toml has no {code}"
        if section := re.fullmatch(r"\[(\w+)\]", code):
            assert section[1] in SECTIONS | QUEUE_TABLES


@cache
def routes() -> list[str]:
    api = create_app(Config(), SystemClock())
    return [re.sub(r"\{[^}]*\}", "[^/]+", getattr(route, "path", "")) for route in api.routes]


@each_page
def test_every_route_exists(page: Path) -> None:
    text = text_of(page)
    named = re.findall(r"(?<![\w.])(/v1/[\w/{},.-]+[\w}]|/api/v1/write|/healthz|/readyz|/openapi\.json)", text)
    named += re.findall(r"127\.0\.0\.1:8080(/v1/[\w/.-]+\w)", text)
    for path in named:
        choices = re.search(r"\{([\w-]+(?:,[\w-]+)+)\}", path)
        for choice in choices[1].split(",") if choices else [""]:
            one = re.sub(r"\{[^}]*\}", choice or "x", path)
            assert any(re.fullmatch(route, one) or route.startswith(f"{one}/") for route in routes()), one


@each_page
def test_every_metric_alert_and_variable_exists(page: Path) -> None:
    text = text_of(page)
    names = re.findall(r"\bFLEETCAST_[A-Z_]+\b", text)
    names += re.findall(r"\bFleetcast[A-Z]\w+", text)
    names += [name for name in re.findall(r"\bfleetcast_[a-z_]+", text) if name not in ("fleetcast_client",)]
    made = product_text()
    for name in names:
        stem = name.removeprefix("fleetcast_").rstrip("_").removesuffix("_total")
        assert name in made or (name.startswith("fleetcast_") and stem in made), f"nothing makes {name}"


@pytest.mark.parametrize("block", BLOCKS, ids=lambda block: f"{block.page}-{block.language}")
def test_every_block_can_be_read_in_its_language(block: Block) -> None:
    language, code = block.language, block.code
    if language == "python":
        ast.parse(code)
    elif language == "json" and "…" not in code:
        json.loads(code)
    elif language == "yaml":
        yaml.safe_load(code)
    elif language in ("sh", "bash") and shutil.which("bash"):
        done = subprocess.run(["bash", "-n"], input=code, capture_output=True, text=True, check=False)
        assert not done.stderr


@pytest.mark.parametrize("page", RESULTS, ids=name_of)
def test_every_table_of_results_has_its_command_and_date(page: Path) -> None:
    text = text_of(page)
    begun = re.findall(r"<!-- begin (.+?) -->\n(.*)\n", text)
    assert begun
    assert [name for name, _ in begun] == re.findall(r"<!-- end (.+?) -->", text)
    for name, line in begun:
        command = name.partition(",")[0]  # a second table of it says which one after a comma
        assert re.match(rf"`fleetcast {command}\b[^`]*` · \d{{4}}-\d\d-\d\d", line), name


def first_column(text: str) -> list[str]:
    """Return the first cell of each row of a table, without its header."""
    return re.findall(r"^\| ([^|-][^|]*) \|", text, re.MULTILINE)[1:]


def test_the_glossary_has_each_term_once_and_in_order() -> None:
    terms = first_column(text_of(ROOT / "docs/glossary.md"))
    assert terms == sorted(terms, key=str.lower)
    assert len(terms) > 30
    restricted = text_of(ROOT / "CONTRIBUTING.md").split("### Words that had several meanings\n")[1].split("\n#")[0]
    assert len(first_column(restricted)) > 5
    assert not set(terms) & set(first_column(restricted))


@each_page
def test_every_module_and_target_that_is_run_exists(page: Path) -> None:
    text = text_of(page)
    for module in re.findall(r"python -m ([\w.]+)", text):
        if (ROOT / module.partition(".")[0] / "__init__.py").exists() or module.startswith("tests."):
            assert importlib.util.find_spec(module), f"python -m {module}"
    targets = re.findall(r"^([a-z-]+):", text_of(ROOT / "Makefile"), re.MULTILINE)
    for target in re.findall(r"(?:^|`)make ([a-z-]+)", text, re.MULTILINE):
        assert target in targets, f"make {target}"


def test_every_command_is_in_some_document() -> None:
    named = {line.split()[1] for page in PAGES for line in command_lines(page)}
    assert set(getattr(command_tree(), "commands", {})) - named == set()
