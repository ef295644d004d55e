"""Run episodes of a seed: `python -m tests.simulation --seed 7 --steps 100000`; exit status 1 where a law is broken.

A run is made of episodes, each a world of its own with its own faults, and a failure names the one to replay:

    python -m tests.simulation --seed 7 --episode 3
"""

import os
import sys

from tests.simulation.runner import main

if __name__ == "__main__":
    if os.environ.get("PYTHONHASHSEED") != "0":  # the order of sets is part of what happens
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], {**os.environ, "PYTHONHASHSEED": "0"})
    sys.exit(main())
