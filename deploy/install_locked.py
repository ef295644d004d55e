"""A script that installs a lock file with pip, and prints the size of the download and the progress.

It needs only the standard library.

python deploy/install_locked.py requirements.lock
"""

import re
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path

PINNED = re.compile(r"^[A-Za-z0-9][\w.-]*==", re.MULTILINE)
COLLECTING = re.compile(r"^Collecting (\S+?)(==\S+)?( |$)")
SIZE = re.compile(r"\(([\d.]+) (kB|MB)")
EVERY_S = 2.0  # between two lines of progress


def main() -> int:
    lock = Path(sys.argv[1])
    packages = len(PINNED.findall(lock.read_text(encoding="utf-8")))
    print(
        f"installing up to {packages} packages of {lock}: about {packages * 5 // 2} MB to download, less what pip has",
        flush=True,
    )
    command = [sys.executable, "-m", "pip", "install", "--disable-pip-version-check", "--progress-bar", "off"]
    command += ["--require-hashes", "-r", str(lock)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as pip:
        assert pip.stdout is not None
        print_progress(pip.stdout, packages)
    return pip.returncode


def print_progress(lines: Iterable[str], packages: int) -> None:
    """Print the progress every few seconds. lines: pip's output. packages: how many pip installs at most."""
    done, megabytes, printed_s = 0, 0.0, 0.0
    for line in lines:
        done += bool(COLLECTING.match(line))
        if "Downloading" in line and (size := SIZE.search(line)):
            megabytes += float(size[1]) / (1000 if size[2] == "kB" else 1)
        installs = line.startswith("Installing collected")
        if installs or time.monotonic() - printed_s > EVERY_S:
            printed_s = time.monotonic()
            what = "all are here, installing them" if installs else f"{done} of at most {packages}"
            print(f"  {what} ({megabytes:.0f} MB downloaded)", flush=True)


if __name__ == "__main__":
    sys.exit(main())
