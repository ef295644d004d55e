"""The changelog, assembled from fragments: one file for each change, `changes/NAME.TYPE.md`.

A fragment contains the text of one entry, without the dash of a list. TYPE is one of `TYPES`. A
release moves the fragments into a section of `CHANGELOG.md` and deletes their files. So two changes
never edit the same line.
"""

import re
from collections.abc import Mapping
from pathlib import Path

TYPES = ("added", "changed", "deprecated", "removed", "fixed", "security")
FOLDER = "changes"
MAX_WORDS = 60
HEAD = "## [Unreleased]"
_NAME = re.compile(rf"[a-z0-9][a-z0-9-]*\.({'|'.join(TYPES)})\.md")
_SECTION = re.compile(r"^## \[([^\]]+)\](?: - (\d{4}-\d\d-\d\d))?$", re.MULTILINE)


class ReleaseError(Exception):
    """The error that stops a release. Its message says how to fix the cause."""


def read_fragments(folder: Path) -> dict[str, str]:
    """Return file name → text of each fragment. Raises ReleaseError for an invalid name or text."""
    found = {}
    for path in sorted(folder.glob("*")):
        if path.name == "README.md":
            continue
        text = path.read_text(encoding="utf-8").strip()
        if not _NAME.fullmatch(path.name):
            raise ReleaseError(f"{path.name}: name it NAME.TYPE.md, where TYPE is one of {', '.join(TYPES)}")
        if not text or text.startswith(("-", "#", "*")):
            raise ReleaseError(f"{path.name}: write the text of one entry, without a dash or a heading")
        if len(text.split()) > MAX_WORDS:
            raise ReleaseError(f"{path.name}: {len(text.split())} words; at most {MAX_WORDS} are read")
        found[path.name] = text
    return found


def add_version_section(changelog: str, fragments: Mapping[str, str], version: str, date: str) -> str:
    """Return the changelog with a new section for this version. Entries under `Unreleased` move into the section.

    Raises ReleaseError if there is nothing to release.
    """
    before, head, rest = changelog.partition(f"{HEAD}\n")
    if not head:
        raise ReleaseError(f"CHANGELOG.md has no heading `{HEAD}`: add it above the newest version")
    following = _SECTION.search(rest)
    unreleased, older = (rest[: following.start()], rest[following.start() :]) if following else (rest, "")
    entries = _parse_entries(unreleased)
    for name, text in fragments.items():
        entries[name.split(".")[-2]].append("- " + "\n  ".join(text.splitlines()))
    if not any(entries.values()):
        raise ReleaseError(f"nothing changed: write a fragment in {FOLDER}/ for each change")
    parts = [f"### {kind.capitalize()}\n\n" + "\n".join(entries[kind]) for kind in TYPES if entries[kind]]
    section = f"## [{version}] - {date}\n\n" + "\n\n".join(parts)
    return f"{before}{HEAD}\n\n{section}\n\n{older}".rstrip() + "\n"


def find_version_date(changelog: str, version: str) -> str:
    """Return the date of a version, as YYYY-MM-DD. Raises ReleaseError if the changelog has none."""
    for name, date in _SECTION.findall(changelog):
        if name == version and date:
            return str(date)
    raise ReleaseError(f"CHANGELOG.md has no dated section of {version}: release it first")


def _parse_entries(unreleased: str) -> dict[str, list[str]]:
    """Return type → entries that are already under `Unreleased`. Raises ReleaseError."""
    entries: dict[str, list[str]] = {kind: [] for kind in TYPES}
    untitled, *parts = re.split(r"^### ", unreleased, flags=re.MULTILINE)
    if untitled.strip():
        raise ReleaseError(f"CHANGELOG.md: {untitled.strip()[:60]!r} stands below no `### Added` or other heading")
    for part in parts:
        title, _, text = part.partition("\n")
        kind = title.strip().lower()
        if kind not in entries:
            raise ReleaseError(f"CHANGELOG.md: `### {title.strip()}` is none of {', '.join(TYPES)}")
        if text.strip():
            entries[kind].append(text.strip())
    return entries
