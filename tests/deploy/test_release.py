"""The release command refuses what it should, changes one commit and one tag, and builds the same bytes twice."""

import hashlib
import os
import shutil
import subprocess
import tarfile
from pathlib import Path

import pytest

from deploy import artifacts, release
from deploy.changelog import FOLDER, ReleaseError, add_version_section, read_fragments

ROOT = Path(__file__).resolve().parents[2]
DATE = "2026-11-26"
PROJECT = """[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"
[project]
name = "{name}"
version = "0.1.0"
requires-python = ">=3.11"
[tool.hatch.build.targets.wheel]
packages = ["{package}"]
"""
CHANGELOG = "# Changelog\n\n## [Unreleased]\n\n### Added\n\n- One.\n\n## [0.1.0]\n\n- The first.\n"


def git(folder: Path, *words: str) -> str:
    identity = ["-c", "user.name=A Developer", "-c", "user.email=developer@example.org"]
    done = subprocess.run(["git", *identity, *words], cwd=folder, capture_output=True, text=True, check=True)
    return done.stdout.strip()


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A small project with the files that a release changes and builds."""
    for name in ("AUTHOR", "COMMITTER"):
        monkeypatch.setenv(f"GIT_{name}_NAME", "A Developer")
        monkeypatch.setenv(f"GIT_{name}_EMAIL", "developer@example.org")
    root = tmp_path / "project"
    texts = {
        "pyproject.toml": PROJECT.format(name="fleetcast", package="weather"),
        "weather/__init__.py": "",
        "sdk/pyproject.toml": PROJECT.format(name="fleetcast-client", package="fleetcast_client"),
        "sdk/fleetcast_client/__init__.py": "",
        "deploy/helm/fleetcast/Chart.yaml": "name: fleetcast\nversion: 0.1.0\nappVersion: 0.1.0\n",
        "CHANGELOG.md": CHANGELOG,
        f"{FOLDER}/README.md": "How to write one.\n",
        f"{FOLDER}/two.fixed.md": "Two lines\nof one entry.\n",
        "mkdocs.yml": "site_name: A\n",
        "docs/index.md": "# A\n",
        "Dockerfile": "FROM scratch\n",
        ".gitignore": "dist/\n",
    }
    for name, text in texts.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    git(root, "init", "--quiet")
    git(root, "add", ".")
    git(root, "commit", "--quiet", "-m", "all: begin")
    return root


def test_a_release_is_one_commit_one_tag_and_its_files(tree: Path) -> None:
    release.release(tree, "0.2.0", DATE)
    assert release.find_current_version(tree) == "0.2.0"
    assert git(tree, "log", "-1", "--format=%s") == "release: publish Fleetcast 0.2.0"
    assert git(tree, "tag", "--points-at", "HEAD") == "v0.2.0"
    assert git(tree, "status", "--porcelain") == ""
    assert [path.name for path in (tree / FOLDER).iterdir()] == ["README.md"]
    assert {path.name for path in (tree / "dist/0.2.0").iterdir()} == set(artifacts.list_release_files("0.2.0"))
    section = (tree / "CHANGELOG.md").read_text().partition("## [0.2.0] - 2026-11-26\n")[2]
    assert section.startswith("\n### Added\n\n- One.\n\n### Fixed\n\n- Two lines\n  of one entry.\n\n## [0.1.0]")


def test_the_released_version_can_be_built_again_to_the_byte(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    release.release(tree, "0.2.0", DATE)
    first = (tree / "dist/0.2.0" / artifacts.SUMS).read_text()
    shutil.rmtree(tree / "dist")
    for path in tree.rglob("*"):
        os.utime(path, (1_000_000_000, 1_000_000_000))
    monkeypatch.setattr(release, "ROOT", tree)
    assert release.main(["--rebuild"]) == 0
    assert (tree / "dist/0.2.0" / artifacts.SUMS).read_text() == first


def test_the_chart_is_packed_as_helm_expects(tree: Path) -> None:
    release.release(tree, "0.2.0", DATE)
    with tarfile.open(tree / "dist/0.2.0/fleetcast-chart-0.2.0.tgz") as chart:
        assert chart.getnames() == ["fleetcast/Chart.yaml"]
        data = chart.extractfile("fleetcast/Chart.yaml")
        assert data
        assert b"appVersion: 0.2.0" in data.read()


def test_a_dry_run_prints_the_plan_and_changes_nothing(tree: Path, capsys: pytest.CaptureFixture[str]) -> None:
    release.release(tree, "0.2.0", DATE, dry_run=True)
    plan = capsys.readouterr().out
    assert "write   deploy/helm/fleetcast/Chart.yaml" in plan
    assert "delete  changes/two.fixed.md" in plan
    assert "tag     v0.2.0" in plan
    assert git(tree, "status", "--porcelain") == ""
    assert git(tree, "tag") == ""
    assert not (tree / "dist").exists()


@pytest.mark.parametrize(("version", "reason"), [("0.1.0", "not above"), ("0.0.9", "not above"), ("v1", "no version")])
def test_a_version_that_does_not_grow_is_refused(tree: Path, version: str, reason: str) -> None:
    with pytest.raises(ReleaseError, match=reason):
        release.check_releasable(tree, version)


def test_version_numbers_are_compared_as_numbers(tree: Path) -> None:
    release.check_releasable(tree, "0.10.0")


def test_a_tree_that_is_not_clean_is_refused(tree: Path) -> None:
    (tree / "new.txt").write_text("new")
    with pytest.raises(ReleaseError, match=r"not clean(.|\n)*new\.txt"):
        release.check_releasable(tree, "0.2.0")


def test_an_existing_tag_is_refused(tree: Path) -> None:
    git(tree, "tag", "v0.2.0")
    with pytest.raises(ReleaseError, match=r"v0\.2\.0 exists"):
        release.check_releasable(tree, "0.2.0")


def test_versions_that_differ_are_refused(tree: Path) -> None:
    (tree / "sdk/pyproject.toml").write_text(PROJECT.format(name="c", package="c").replace("0.1.0", "0.1.1"))
    with pytest.raises(ReleaseError, match=r"sdk/pyproject.toml \['0\.1\.1'\]"):
        release.check_releasable(tree, "0.2.0")


def test_a_step_that_fails_leaves_the_tree_as_it_was(tree: Path) -> None:
    (tree / "mkdocs.yml").write_text("site_name: A\ntheme: missing\n")
    git(tree, "commit", "--quiet", "-am", "docs: break the site")
    before = git(tree, "rev-parse", "HEAD")
    with pytest.raises(ReleaseError, match="missing"):
        release.release(tree, "0.2.0", DATE)
    assert git(tree, "rev-parse", "HEAD") == before
    assert git(tree, "status", "--porcelain") == ""
    assert (tree / f"{FOLDER}/two.fixed.md").exists()


def test_a_tag_that_fails_leaves_the_tree_as_it_was(tree: Path) -> None:
    before = git(tree, "rev-parse", "HEAD")
    git(tree, "config", "tag.gpgSign", "true")
    git(tree, "config", "gpg.program", "false")
    with pytest.raises(ReleaseError, match="git tag"):
        release.release(tree, "0.2.0", DATE)
    assert git(tree, "rev-parse", "HEAD") == before
    assert release.find_current_version(tree) == "0.1.0"
    git(tree, "config", "tag.gpgSign", "false")
    release.release(tree, "0.2.0", DATE)


@pytest.mark.parametrize(
    ("name", "text", "reason"),
    [
        ("a.new.md", "An entry.", "one of added"),
        ("a.md", "An entry.", "NAME.TYPE.md"),
        ("a.added.md", "- An entry.", "without a dash"),
        ("a.added.md", "\n", "text of one entry"),
        ("a.added.md", "word " * 61, "61 words"),
    ],
)
def test_a_fragment_that_no_section_could_hold_is_refused(tmp_path: Path, name: str, text: str, reason: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(ReleaseError, match=reason):
        read_fragments(tmp_path)


def test_nothing_to_release_is_refused() -> None:
    with pytest.raises(ReleaseError, match="nothing changed"):
        add_version_section("## [Unreleased]\n\n## [0.1.0]\n", {}, "0.2.0", DATE)


def test_the_next_change_of_this_tree_can_be_released(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also right after a release, when no fragment is there."""
    assert release.VERSION.fullmatch(release.find_current_version(ROOT))
    fragments = {**read_fragments(ROOT / FOLDER), "next.fixed.md": "The next change."}
    monkeypatch.setattr(release, "read_fragments", lambda folder: fragments)
    texts = release.make_release_texts(ROOT, "99.0.0", DATE)
    assert set(texts) == {*release.PLACES, "CHANGELOG.md"}
    assert "- The next change.\n" in texts["CHANGELOG.md"].partition("## [99.0.0]")[2]
    assert texts["deploy/helm/fleetcast/Chart.yaml"].count(": 99.0.0\n") == 2


def test_two_builds_of_the_wheel_are_equal_to_the_byte(tmp_path: Path) -> None:
    hashes = set()
    left_out = shutil.ignore_patterns(".*", "var", "tests", "dist", "__pycache__")
    for number, name in enumerate(("one", "another")):
        shutil.copytree(ROOT, tmp_path / name, symlinks=True, ignore=left_out)
        for path in (tmp_path / name).rglob("*"):
            os.utime(path, (1e9 + number, 1e9 + number), follow_symlinks=False)
        artifacts.build_distribution(tmp_path / name, tmp_path / f"{name}-out", "wheel", release.compute_epoch(DATE))
        (wheel,) = (tmp_path / f"{name}-out").glob("fleetcast-*.whl")
        hashes.add(hashlib.sha256(wheel.read_bytes()).hexdigest())
    assert len(hashes) == 1
