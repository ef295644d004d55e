"""The commit-msg hook refuses subjects that are not `area: imperative subject`, and replaces no hook of a user."""

import doctest
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from deploy import commit_message
from deploy.commit_message import find_problem, install_hook

ROOT = Path(__file__).resolve().parents[2]


def git(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    identity = ["-c", "user.name=A Developer", "-c", "user.email=developer@example.org"]
    return subprocess.run(["git", *identity, *words], cwd=folder, capture_output=True, text=True, check=False)


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", "/dev/null")
    git(tmp_path, "init", "--quiet")
    (tmp_path / "deploy").mkdir()
    (tmp_path / "deploy" / "commit_message.py").write_text(Path(commit_message.__file__).read_text())
    (tmp_path / ".venv/bin").mkdir(parents=True)
    (tmp_path / ".venv/bin/python").symlink_to(sys.executable)
    return tmp_path


@pytest.mark.parametrize(
    "message",
    [
        "placement: key the pass cache by the whole request",
        "service, placer: bring the queue back after a restart\n\nA body.",
        "docs/api: speed the page up",
        "fleet: process events once",
        "Merge branch 'next'",
        "fixup! fleet: process events once",
        "fleet: pass events on\n# a comment of git\n\nA body.",
        "tests: " + "a" * 65,
        ".ci: run the suites side by side",
        "README: shred the old table",
        'Reapply "fleet: process events once"',
        "\n\nfleet: process events once\n\nA body.",
        "fleet: process events once\n# ------------------------ >8 ------------------------\ndiff --git a/a b/a\n",
    ],
)
def test_a_good_message_passes(message: str) -> None:
    assert find_problem(message) == ""


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        ("", "is not 'area: imperative subject'"),
        ("Fix it", "is not 'area: imperative subject'"),
        ("fix: ", "is not 'area: imperative subject'"),
        ("placement: fixed the cache", "'fixed' is no imperative"),
        ("placement: fixes the cache", "'fixes' is no imperative"),
        ("placement: fixing the cache", "'fixing' is no imperative"),
        ("placement: fix the cache.", "full stop"),
        ("placement: fix the cache\nbody", "second line"),
        ("tests: " + "a" * 66, "73 characters"),
    ],
)
def test_a_bad_message_is_refused_with_the_way_to_write_it(message: str, reason: str) -> None:
    assert reason in find_problem(message)


def test_comments_begin_as_git_was_configured() -> None:
    assert find_problem("; a hint\nfleet: process events once\n; On branch main\n", ";") == ""


def test_the_hook_refuses_and_accepts_real_commits(tree: Path) -> None:
    assert "checks the subjects" in install_hook(tree)
    refused = git(tree, "commit", "--allow-empty", "-m", "did things")
    assert refused.returncode == 1
    assert "area: imperative subject" in refused.stderr
    assert git(tree, "commit", "--allow-empty", "-m", "fleet: do things").returncode == 0
    assert "checks the subjects" in install_hook(tree)


def test_a_branch_without_the_check_can_still_commit(tree: Path) -> None:
    install_hook(tree)
    (tree / "deploy" / "commit_message.py").unlink()
    assert git(tree, "commit", "--allow-empty", "-m", "did things").returncode == 0


def test_a_hook_of_the_user_stays(tree: Path) -> None:
    hook = tree / ".git/hooks/commit-msg"
    hook.parent.mkdir(exist_ok=True)
    hook.write_text("#!/bin/sh\nexit 0\n")
    assert "stays" in install_hook(tree)
    assert hook.read_text() == "#!/bin/sh\nexit 0\n"


def test_a_folder_of_hooks_that_the_user_configured_stays_as_it_is(tree: Path) -> None:
    (tree / "hooks").mkdir()
    git(tree, "config", "core.hooksPath", "hooks")
    assert "core.hooksPath" in install_hook(tree)
    assert list((tree / "hooks").iterdir()) == []


def test_without_a_repository_nothing_is_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert "no hook checks" in install_hook(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_without_git_or_a_folder_that_can_be_written_setup_goes_on(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tree / ".git/hooks").rename(tree / ".git/other")
    (tree / ".git/hooks").write_text("a file where the folder would be")
    assert "no hook checks" in install_hook(tree)
    monkeypatch.setenv("PATH", "")
    assert "no hook checks" in install_hook(tree)


def test_a_folder_within_another_repository_installs_nothing_there(tree: Path) -> None:
    assert "part of the repository" in install_hook(tree / "deploy")
    assert not (tree / ".git/hooks/commit-msg").exists()


def test_a_range_that_cannot_be_read_is_no_success(tree: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert commit_message.main(["--range", "nothing..here"]) == 1
    assert "cannot be read" in capsys.readouterr().err


def test_a_range_names_the_commits_that_are_wrong(tree: Path) -> None:
    for message in ("fleet: begin", "did things", "fleet: end"):
        git(tree, "commit", "--allow-empty", "-m", message)
    (problem,) = commit_message.check_commit_range(tree, "HEAD~2..HEAD")
    assert "did things" in problem


def test_setup_installs_it_and_the_lane_of_changes_calls_the_same_targets() -> None:
    plan = subprocess.run(["make", "--dry-run", "setup"], cwd=ROOT, capture_output=True, text=True, check=True)
    assert "deploy/commit_message.py --install" in plan.stdout
    flow = yaml.safe_load((ROOT / ".github/workflows/change.yml").read_text())
    (job,) = flow["jobs"].values()
    assert job["timeout-minutes"] <= 10
    assert job["strategy"]["matrix"]["target"] == ["lint", "test"]
    assert "make ${{ matrix.target }}" in [step.get("run") for step in job["steps"]]


def test_the_hooks_of_pre_commit_are_local() -> None:
    config = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())
    assert [repo["repo"] for repo in config["repos"]] == ["local"]
    for hook in config["repos"][0]["hooks"]:
        assert hook["language"] == "system"
        file = next((word for word in hook["entry"].split() if word.endswith(".py")), "deploy/release.py")
        assert (ROOT / file).exists()


def test_the_examples_hold() -> None:
    done = doctest.testmod(commit_message)
    assert done.attempted
    assert not done.failed
