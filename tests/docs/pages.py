"""The documents, and what stands in them: links, sentences, code blocks, inline code."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DOCS = (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))
OTHERS = (
    *("CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md", "RELEASE.md", "CODE_OF_CONDUCT.md", "changes/README.md"),
    *("ingest/README.md", "training/README.md", "sdk/README.md"),
)
RESULTS = tuple(ROOT / name for name in ("benchmarks/RESULTS.md", "training/RESULTS.md"))
PAGES = (*DOCS, *(ROOT / name for name in OTHERS), *RESULTS)

_FENCE = re.compile(r"^```([^\n]*)\n(.*?)^```", re.DOTALL | re.MULTILINE)
_ASIDE = re.compile(r"^(?:\||#|<!--|!\[| {4}).*$", re.MULTILINE)  # tables, headings, markers, pictures, indented code
_ITEM = re.compile(r"^\s*(?:[-*]|\d+\.)\s+", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Block:
    """A fenced block of code. `language` is empty where none is named."""

    page: str
    language: str
    code: str


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def text_of(page: Path) -> str:
    return page.read_text(encoding="utf-8")


def blocks_of(page: Path) -> list[Block]:
    return [Block(name_of(page), language, code) for language, code in _FENCE.findall(text_of(page))]


def prose_of(text: str) -> str:
    """Without code blocks."""
    return _FENCE.sub("", text)


def codes_of(page: Path) -> list[str]:
    """Inline code, outside blocks."""
    return re.findall(r"`([^`\n]+)`", prose_of(text_of(page)))


def links_of(page: Path) -> list[str]:
    return re.findall(r"\]\(([^)\s]+)\)", prose_of(text_of(page)))


def anchors_of(page: Path) -> set[str]:
    """Names of headings as GitHub and MkDocs make them."""
    titles = re.findall(r"^#+ (.+)$", prose_of(text_of(page)), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def sentences_of(text: str) -> Iterator[str]:
    """Sentences of paragraphs and list items; a piece of inline code is one word.

    >>> list(sentences_of("# A title\\n\\nOne `a b`. Two:\\n\\n- three\\n- four is\\n  long\\n\\n| a | b |\\n"))
    ['One `code`.', 'Two:', 'three', 'four is long']
    """
    text = re.sub(r"`[^`\n]+`", "`code`", _ASIDE.sub("\n", prose_of(text)))
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", text)
    for paragraph in re.split(r"\n\s*\n", _ITEM.sub("\n\n", text)):
        yield from (one for one in re.split(r"(?<=[.!?])[*\")]*\s+", " ".join(paragraph.split())) if one)


def words_of(sentence: str) -> list[str]:
    return [word for word in sentence.split() if re.search(r"\w", word)]
