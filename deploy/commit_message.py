"""A script that checks that a commit's subject has the form `area: imperative subject`.

The script can also install this check as git's `commit-msg` hook.

    python deploy/commit_message.py FILE       # the hook calls it in this way
    python deploy/commit_message.py --install  # `make setup` calls it in this way
    python deploy/commit_message.py --range origin/main..HEAD

It needs only the standard library. It never overwrites a hook of your own.
"""

import re
import subprocess
import sys
from pathlib import Path

MAX_CHARACTERS = 72
FORM = re.compile(r"[A-Za-z.][\w.-]*(?:[ ,/]+[\w.-]+)*: (\S.*)")
PASSED = ("Merge ", "Revert ", "Reapply ", "fixup! ", "squash! ", "amend! ")
SCISSORS = " ------------------------ >8 ------------------------"  # what `git commit -v` shows follows it
NOT_IMPERATIVE = re.compile(r"[a-z]+(?:ed|ing|(?<![su])s)")
IMPERATIVE = frozenset(
    (
        *("alias", "bias", "bring", "canvas", "embed", "exceed", "feed", "need", "ping", "proceed", "seed", "shed"),
        *("speed", "spread", "string", "succeed", "swing", "wing", "wed", "bed", "bleed", "breed", "cling", "fling"),
        *("heed", "king", "misread", "reed", "ring", "shred", "sing", "sling", "sting", "weed", "zing", "exceed"),
    )
)
MARK = "# installed by Fleetcast's make setup"
HOOK = f"""#!/bin/sh
{MARK}
top="$(git rev-parse --show-toplevel)"
[ -f "$top/deploy/commit_message.py" ] && [ -x "$top/.venv/bin/python" ] || exit 0 # not set up: nothing checks
exec "$top/.venv/bin/python" "$top/deploy/commit_message.py" "$1"
"""


def find_problem(message: str, comment: str = "#") -> str:
    """Return what is wrong with a commit message and how to correct it, or "" if nothing is wrong.

    comment: the prefix of lines that git leaves out, `core.commentChar`. Empty lines before the subject
    are left out, too.

    >>> find_problem("placement: key the pass cache by the whole request")
    ''
    >>> find_problem("placement: keyed the pass cache")
    "'keyed' is no imperative: write what the commit does, such as 'placement: skip satisfied queues'"
    """
    lines = message.partition(comment + SCISSORS)[0].strip("\n").splitlines()
    while lines and (not lines[0].strip() or lines[0].startswith(comment)):
        del lines[0]
    subject = lines[0].rstrip() if lines else ""
    if subject.startswith(PASSED):
        return ""
    form = FORM.fullmatch(subject)
    if not form:
        return f"the subject {subject!r} is not 'area: imperative subject', such as 'placement: skip satisfied queues'"
    if len(subject) > MAX_CHARACTERS:
        return f"the subject has {len(subject)} characters: at most {MAX_CHARACTERS}; the body has room for the rest"
    first = form[1].split()[0].rstrip(",:")
    if NOT_IMPERATIVE.fullmatch(first) and first not in IMPERATIVE:
        return f"{first!r} is no imperative: write what the commit does, such as 'placement: skip satisfied queues'"
    if subject.endswith("."):
        return "the subject ends with a full stop: leave it out"
    if len(lines) > 1 and lines[1].strip() and not lines[1].startswith(comment):
        return "the second line is not empty: put an empty line between subject and body"
    return ""


def install_hook(root: Path) -> str:
    """Install the hook in the repository at `root`.

    Returns a sentence that says what was done, or why nothing was done.
    """
    try:
        return _write_hook(root)
    except (OSError, subprocess.CalledProcessError) as error:  # no git, no repository, one that we may not write
        return f"no hook checks the subjects of commits: {str(error)[:200]}"


def _write_hook(root: Path) -> str:
    top = _run_git(root, "rev-parse", "--show-toplevel")
    if Path(top).resolve() != root.resolve():
        return f"this folder is part of the repository {top}: no hook installed"
    if _run_git(root, "config", "--default", "", "--get", "core.hooksPath"):
        return "git takes its hooks from core.hooksPath: call deploy/commit_message.py from your commit-msg hook"
    path = _run_git(root, "rev-parse", "--git-path", "hooks/commit-msg")
    hook = root / path
    if hook.exists() and MARK not in hook.read_text(encoding="utf-8", errors="replace"):
        return f"{path} is a hook of your own and stays: call deploy/commit_message.py from it"
    hook.parent.mkdir(parents=True, exist_ok=True)
    hook.write_text(HOOK, encoding="utf-8")
    hook.chmod(0o755)
    return f"{path} checks the subjects of commits"


def check_commit_range(root: Path, commits: str) -> list[str]:
    """Return `commit: problem` for each commit of a range whose message is wrong."""
    found = []
    for commit in _run_git(root, "rev-list", "--no-merges", commits).split():
        if problem := find_problem(_run_git(root, "log", "-1", "--format=%B", commit)):
            found.append(f"{commit[:8]}: {problem}")
    return found


def _run_git(root: Path, *words: str) -> str:
    """Run git, and return its output. Raises OSError without git, and CalledProcessError if git fails."""
    return subprocess.run(["git", *words], cwd=root, capture_output=True, text=True, check=True).stdout.strip()


def find_comment_prefix(root: Path) -> str:
    """Return the prefix of the lines that git removes from a message."""
    try:
        found = _run_git(root, "config", "--default", "#", "--get", "core.commentChar")
    except (OSError, subprocess.CalledProcessError):
        return "#"
    return "#" if found == "auto" else found


def main(words: list[str]) -> int:
    root = Path(__file__).resolve().parents[1]
    match words:
        case ["--install"]:
            print(install_hook(root))
            return 0
        case ["--range", commits]:
            try:
                problems = check_commit_range(root, commits)
            except (OSError, subprocess.CalledProcessError) as error:
                problems = [f"the range {commits!r} cannot be read: {getattr(error, 'stderr', '') or error}"]
        case [file] if not file.startswith("-"):
            problem = find_problem(Path(file).read_text(encoding="utf-8"), find_comment_prefix(Path.cwd()))
            problems = [problem] if problem else []
        case _:
            print(__doc__, file=sys.stderr)
            return 2
    for problem in problems:
        print(f"commit message: {problem} (CONTRIBUTING.md, Style)", file=sys.stderr)
    return bool(problems)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
