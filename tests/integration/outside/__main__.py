"""Run the suites of components that take long to build.

Each is a folder here with a `build.py` that says whether its programs are in the cache.

    python -m tests.integration.outside            builds what is missing, then runs every suite
    python -m tests.integration.outside --built    runs those whose programs are in the cache, and names the others
    python -m tests.integration.outside ray helm   runs these
"""

import argparse
import importlib
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent


def suites() -> list[str]:
    """Their names, sorted."""
    return sorted(path.parent.name for path in HERE.glob("*/build.py"))


def is_built(suite: str) -> bool:
    """Whether what it needs is in the cache."""
    return bool(importlib.import_module(f"tests.integration.outside.{suite}.build").is_built())


def main(arguments: list[str]) -> int:
    """The exit status of the first suite that failed, or 0."""
    parser = argparse.ArgumentParser(prog="python -m tests.integration.outside", description=__doc__.partition("\n")[0])
    parser.add_argument("--built", action="store_true", help="run only suites whose programs are in the cache")
    parser.add_argument("suite", nargs="*", choices=[*suites(), []], help=f"one of {', '.join(suites())}; all without")
    options, further = parser.parse_known_args(arguments)
    asked = options.suite or suites()
    chosen = [suite for suite in asked if not options.built or is_built(suite)]
    command = [sys.executable, "-m", "pytest", "-m", "outside"]
    statuses = [subprocess.run([*command, str(HERE / suite), *further], check=False).returncode for suite in chosen]
    for suite in asked:
        print(f"outside suite {suite}: {'ran' if suite in chosen else 'NOT RUN, its programs are not in the cache'}")
    return next((status for status in statuses if status), 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
