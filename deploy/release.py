"""A script that releases product, client and chart with one version, in one commit with one tag.

    python -m deploy.release 0.2.0 --dry-run   # print what would happen
    python -m deploy.release 0.2.0             # do it; the files are in dist/0.2.0
    python -m deploy.release --rebuild         # build the released version of this tree again: the same hashes

It pushes nothing. If a step fails, it resets the tree to its state before.
"""

import argparse
import datetime as dt
import re
import subprocess
import sys
from pathlib import Path

from deploy import artifacts
from deploy.changelog import FOLDER, ReleaseError, add_version_section, find_version_date, read_fragments

ROOT = Path(__file__).resolve().parents[1]
CHANGELOG = "CHANGELOG.md"
VERSION = re.compile(r"(0|[1-9]\d*)\.(0|[1-9]\d*)\.(0|[1-9]\d*)")
PLACES = {  # file → the lines of it that hold the version
    "pyproject.toml": r'^version = "(.+)"$',
    "sdk/pyproject.toml": r'^version = "(.+)"$',
    "deploy/helm/fleetcast/Chart.yaml": r"^(?:version|appVersion): (.+)$",
}


def find_current_version(root: Path) -> str:
    """Return the version of this tree.

    Raises ReleaseError if product, client and chart have different versions.
    """
    found = {place: set(_find_versions(root, place)) for place in PLACES}
    if len(set().union(*found.values())) != 1:
        listed = ", ".join(f"{place} {sorted(versions)}" for place, versions in found.items())
        raise ReleaseError(f"the versions differ: {listed}; make them one")
    return next(iter(found["pyproject.toml"])).strip()


def check_releasable(root: Path, version: str) -> None:
    """Raise ReleaseError unless this tree can be released as this version."""
    if not VERSION.fullmatch(version):
        raise ReleaseError(f"{version!r} is no version: write MAJOR.MINOR.PATCH, such as 0.2.0")
    current = find_current_version(root)
    if _parse_version(version) <= _parse_version(current):
        raise ReleaseError(f"{version} is not above {current}, the version of this tree")
    if dirty := _run_git(root, "status", "--porcelain"):
        raise ReleaseError(f"the tree is not clean: commit or stash\n{dirty}")
    if _run_git(root, "tag", "--list", f"v{version}"):
        raise ReleaseError(f"the tag v{version} exists: choose the next version")


def make_release_texts(root: Path, version: str, date: str) -> dict[str, str]:
    """Return file → new text, for each file that the release changes."""
    texts = {}
    for place, pattern in PLACES.items():
        text = (root / place).read_text(encoding="utf-8")
        for match in reversed(list(re.finditer(pattern, text, re.MULTILINE))):
            text = text[: match.start(1)] + version + text[match.end(1) :]
        texts[place] = text
    changelog = (root / CHANGELOG).read_text(encoding="utf-8")
    return {**texts, CHANGELOG: add_version_section(changelog, read_fragments(root / FOLDER), version, date)}


def release(root: Path, version: str, date: str, dry_run: bool = False) -> None:
    """Release this tree as this version. If it raises ReleaseError, the tree is unchanged.

    dry_run: only print what would happen.
    """
    check_releasable(root, version)
    texts = make_release_texts(root, version, date)
    fragments = [f"{FOLDER}/{name}" for name in read_fragments(root / FOLDER)]
    if dry_run:
        _print_plan(texts, fragments, version)
        return
    before = _run_git(root, "rev-parse", "HEAD").strip()
    try:
        for name, text in texts.items():
            (root / name).write_text(text, encoding="utf-8")
        for name in fragments:
            (root / name).unlink()
        _run_git(root, "add", "--", *texts, *fragments)
        artifacts.build_release_files(root, root / "dist" / version, version, compute_epoch(date))
        _run_git(root, "commit", "--quiet", "-m", f"release: publish Fleetcast {version}")
        _run_git(root, "tag", "--annotate", "-m", f"Fleetcast {version}", f"v{version}")
    except BaseException:
        _run_git(root, "reset", "--quiet", "--hard", before)
        raise
    print(f"released {version}: commit and tag v{version} are here, nothing is pushed (RELEASE.md has the next steps)")


def rebuild_release(root: Path) -> None:
    """Build the released version of this tree again, with its date in the changelog."""
    version = find_current_version(root)
    date = find_version_date((root / CHANGELOG).read_text(encoding="utf-8"), version)
    artifacts.build_release_files(root, root / "dist" / version, version, compute_epoch(date))


def compute_epoch(date: str) -> int:
    """Return the SOURCE_DATE_EPOCH of a release: midnight UTC of its date, in seconds."""
    return int(dt.datetime.combine(dt.date.fromisoformat(date), dt.time(), dt.UTC).timestamp())


def _print_plan(texts: dict[str, str], fragments: list[str], version: str) -> None:
    for name in texts:
        print(f"write   {name}")
    for name in fragments:
        print(f"delete  {name}, now in {CHANGELOG}")
    for name in artifacts.list_release_files(version):
        print(f"build   dist/{version}/{name}")
    print(f"commit  release: publish Fleetcast {version}")
    print(f"tag     v{version}")


def _find_versions(root: Path, place: str) -> list[str]:
    return re.findall(PLACES[place], (root / place).read_text(encoding="utf-8"), re.MULTILINE)


def _parse_version(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split("."))


def _run_git(root: Path, *words: str) -> str:
    done = subprocess.run(["git", *words], cwd=root, capture_output=True, text=True, check=False)
    if done.returncode:
        raise ReleaseError(f"git {words[0]}: {done.stderr.strip()}")
    return done.stdout.strip()


def main(words: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m deploy.release", description="Release Fleetcast (RELEASE.md).")
    parser.add_argument("version", nargs="?", help="MAJOR.MINOR.PATCH, above the version of this tree")
    parser.add_argument("--dry-run", action="store_true", help="print what would happen and change nothing")
    parser.add_argument("--rebuild", action="store_true", help="build the version of this tree again")
    parser.add_argument("--date", default=dt.datetime.now(dt.UTC).date().isoformat(), help="YYYY-MM-DD, today in UTC")
    options = parser.parse_args(words)
    if bool(options.version) == options.rebuild:
        parser.error("name a version, such as 0.2.0, or --rebuild")
    try:
        dt.date.fromisoformat(options.date)
    except ValueError:
        parser.error(f"--date {options.date!r}: write YYYY-MM-DD")
    try:
        if options.rebuild:
            rebuild_release(ROOT)
        else:
            release(ROOT, options.version, options.date, options.dry_run)
    except ReleaseError as error:
        print(f"not released: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
