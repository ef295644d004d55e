"""Shell blocks of the documents, the tags that decide where each one runs, and examples of the command line's help.

A tag is an HTML comment on the line before a block, so that no reader sees it:

    <!-- run -->               `tests/integration/test_documents.py` runs the block beside a running service
    <!-- run in NAME -->       the suite of that component runs it (SUITES)
    <!-- slow -->              parsed in CI, run by `make docs-run`
    <!-- not run: REASON -->   parsed only
    <!-- file: NAME -->        the block is a file that later commands of the page or a suite read
    <!-- output -->            no commands: what the block before prints, in this shape
"""

import re
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import typer

from fleetcast.cli.main import app
from tests.docs.pages import DOCS, ROOT, name_of, text_of

MORE = ("CONTRIBUTING.md", "SECURITY.md", "RELEASE.md", "dashboards/runbooks.md", "sdk/README.md", "ingest/README.md")
RESULTS = ("training/README.md", "training/RESULTS.md", "benchmarks/RESULTS.md")
PAGES = (*DOCS, *(ROOT / name for name in (*MORE, *RESULTS)))
SHELLS = ("sh", "console")
OTHERS = ("text", "toml", "yaml", "json", "python", "sql")
SUITES = {
    "dask": "tests/integration/test_documents.py",
    "external_metrics": "tests/integration/kubernetes/test_external_metrics.py",
    "helm": "tests/integration/outside/helm/test_page.py",
    "hosts": "tests/integration/test_hosts_and_ports.py",
    "kafka": "tests/integration/kafka/test_kafka_page.py",
    "keda": "tests/integration/kubernetes/test_keda.py",
    "kubernetes": "tests/integration/kubernetes/test_pages.py",
    "prometheus": "tests/integration/test_prometheus_page.py",
    "ray": "tests/integration/outside/ray/test_ray.py",
    "slurm": "tests/integration/slurm/test_slurm_pages.py",
}

_FENCE = re.compile(r"(?:^<!-- ([^\n]+?) -->\n)?^```([^\n]*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
_HELP = re.compile(r"(fleetcast(?: .*?)?)(?:\s{3,}.*)?$")


@dataclass(frozen=True, slots=True)
class Command:
    """One command of a block. `shows` is the output that the page prints below it, empty where it prints none."""

    text: str
    shows: str = ""


@dataclass(slots=True)
class PageBlock:
    """A fenced block with its tag. `line` is that of its first line of code."""

    page: str
    line: int
    language: str
    tag: str
    code: str
    commands: list[Command] = field(default_factory=list)

    @property
    def is_shell(self) -> bool:
        return self.language in SHELLS


def blocks_of(page: Path) -> list[PageBlock]:
    """Return the page's blocks. An `output` block becomes what the last command before it shows."""
    found: list[PageBlock] = []
    text = text_of(page)
    for match in _FENCE.finditer(text):
        tag, language, code = match[1] or "", match[2], match[3]
        block = PageBlock(name_of(page), text[: match.start(3)].count("\n") + 1, language, tag, code)
        if block.is_shell:
            block.commands = _console(code) if language == "console" else [Command(one) for one in split(code)]
        elif tag == "output":
            found[-1].commands[-1] = Command(found[-1].commands[-1].text, code)
        found.append(block)
    return found


def blocks(page: Path, *tags: str) -> list[PageBlock]:
    """Return the page's files, and its shell blocks with one of these tags, in order."""
    return [block for block in blocks_of(page) if block.tag in tags or block.tag.startswith("file: ")]


def pages_with(*tags: str) -> list[Path]:
    return [page for page in PAGES if any(block.tag in tags for block in blocks_of(page))]


def split(code: str) -> list[str]:
    """Split a script into its commands: a command ends where the shell could run all lines so far.

    >>> split("a | \\n  b\\n# why\\nfor x in 1; do\\n  c; done\\n")
    ['a | \\n  b', 'for x in 1; do\\n  c; done']
    """
    found, lines = [], []
    for line in code.splitlines():
        if not lines and (not line.strip() or line.lstrip().startswith("#")):
            continue
        lines.append(line)
        if _is_whole("\n".join(lines)):
            found.append("\n".join(lines))
            lines = []
    return [*found, *(["\n".join(lines)] if lines else [])]


def _is_whole(text: str) -> bool:
    if text.rstrip().endswith(("\\", "|", "&&", "||")):
        return False
    if not re.search(r"['\"`(){}]|<<|\b(?:if|for|while|case|do)\b", text):
        return True
    done = subprocess.run(["bash", "-n"], input=text, capture_output=True, text=True, check=False)
    return not done.returncode and not done.stderr


def _console(code: str) -> list[Command]:
    """Commands are behind `$ `; the lines after one are its output."""
    parts = re.split(r"^\$ ", code, flags=re.MULTILINE)[1:]
    return [Command(part.partition("\n")[0], part.partition("\n")[2].strip()) for part in parts]


@cache
def command_tree() -> Any:
    """Return the command line's tree of commands. Building it takes longer than parsing a command with it."""
    return typer.main.get_command(app)


def help_examples() -> Iterator[tuple[str, str]]:
    """Yield (command, example) for each command line that a help text prints."""
    for name, help_text in _helps(command_tree(), "fleetcast"):
        for line in help_text.splitlines():
            line = re.sub(r"^Examples?:\s+", "", line.strip())
            for part in line.split("; "):
                if (example := _HELP.fullmatch(part)) and not re.search(r"`", part):
                    yield name, example[1]


def _helps(command: object, name: str) -> Iterator[tuple[str, str]]:
    yield name, getattr(command, "help", None) or ""
    for part, inner in getattr(command, "commands", {}).items():
        yield from _helps(inner, f"{name} {part}")
