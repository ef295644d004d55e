"""Run the property tests with a fresh seed: `python -m tests.explore`, or `make explore`.

It prints the seed, and after a failure the command that replays it. The failure's smallest example then joins its test
as an `@example`. Exploring ends after `--seconds`; the seed decides which files go first.
"""

import os
import secrets
import subprocess
import sys
import time
from typing import Annotated

import typer

PROPERTIES = "hypothesis and not integration and not outside and not simulation"
HANGS_S = 1800


def main(
    paths: Annotated[list[str] | None, typer.Argument(help="Files of tests.  [default: all]")] = None,
    seconds: Annotated[float, typer.Option(help="Begin no further test after this time.")] = 240,
    strength: Annotated[float, typer.Option(help="FLEETCAST_FUZZ: 0.12 as in make test, 1.2 for ten times more.")] = 1,
    seed: Annotated[int | None, typer.Option(help="Repeat this one.  [default: a fresh one]")] = None,
    processes: Annotated[int, typer.Option(help="How many side by side.")] = 2,
) -> None:
    """Look for new counterexamples; exit 1 when one was found."""
    number = secrets.randbelow(2**31) if seed is None else seed
    print(f"exploring with seed {number} at strength {strength:g}, for at most {seconds:g} s", flush=True)
    command = [sys.executable, "-m", "pytest", "-m", PROPERTIES, f"--hypothesis-seed={number}"]
    command += ["-n", str(processes), "--dist", "loadfile", "--no-loadscope-reorder", f"--timeout={HANGS_S}", "-rfE"]
    until_s = time.time() + seconds
    mine = {"FLEETCAST_FUZZ": f"{strength:g}", "FLEETCAST_EXPLORE_UNTIL": f"{until_s:.0f}"}
    order = {"FLEETCAST_EXPLORE_ORDER": str(number)}
    ended = subprocess.run([*command, *(paths or ["tests"])], env={**os.environ, **mine, **order}, check=False)
    if ended.returncode:
        python = os.path.relpath(sys.executable)
        print(f"replay: FLEETCAST_FUZZ={strength:g} {python} -m pytest -n 0 --hypothesis-seed={number} TEST")
        print("with TEST from a line above that begins with FAILED; then add its example to the test by @example")
    sys.exit(1 if ended.returncode else 0)


if __name__ == "__main__":
    app = typer.Typer(pretty_exceptions_enable=False)
    app.command()(main)
    app()
