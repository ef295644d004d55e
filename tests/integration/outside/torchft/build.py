"""TorchFT's wheel without PyTorch: its lighthouse and the clients of it are one extension module.

python -m tests.integration.outside.torchft.build
"""

import importlib.machinery
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

from tests.integration.built import Say, alone_in, cache_folder, main, step, to_stderr

TORCHFT = "0.2.0"
FOLDER = cache_folder(f"torchft-{TORCHFT}-python{sys.version_info.major}.{sys.version_info.minor}")
WHOLE = FOLDER / "whole"


def is_built() -> bool:
    return WHOLE.exists()


def build(say: Say = to_stderr) -> Path:
    """Return the extension module's file, after installing the wheel if it is missing. Raises BuildError."""
    with alone_in(FOLDER):
        if not is_built():
            say(f"installing torchft {TORCHFT} without what it depends on")
            install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps"]
            step([*install, "--target", str(FOLDER), f"torchft=={TORCHFT}"])
            WHOLE.touch()
    (found,) = (FOLDER / "torchft").glob("_torchft*.so")
    return found


def load() -> ModuleType:
    """Import the extension module alone. The package around it needs PyTorch."""
    spec = importlib.util.spec_from_file_location("_torchft", build())
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


if __name__ == "__main__":
    main(build)
