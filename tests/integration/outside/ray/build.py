"""Ray in an environment of its own: it would bring some 400 MB of packages into ours.

python -m tests.integration.outside.ray.build
"""

import sys
from pathlib import Path

from tests.integration.built import Say, alone_in, cache_folder, main, step, to_stderr, told

RAY = "2.60.0"


def python() -> Path:
    """The interpreter that has Ray."""
    return cache_folder(f"ray-{RAY}-python{sys.version_info.major}.{sys.version_info.minor}") / "bin" / "python"


def is_built() -> bool:
    return _whole().exists()


def build(say: Say = to_stderr) -> Path:
    """That interpreter, its environment made first where it is not there. Raises BuildError."""
    folder = python().parents[1]
    with alone_in(folder):
        if not is_built():
            with told(say, f"installing Ray {RAY}"):
                step([sys.executable, "-m", "venv", str(folder)])
                step([str(python()), "-m", "pip", "install", "--quiet", f"ray[serve]=={RAY}"])
            _whole().touch()
    return python()


def _whole() -> Path:
    return python().parents[1] / "whole"


if __name__ == "__main__":
    main(build)
