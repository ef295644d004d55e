"""Foreign programs that tests need: skip where one is not installed, fail on CI."""

import os
import shutil
import sys
from pathlib import Path

import pytest


def needed(name: str) -> str:
    """The program's path. Where it is missing the test is skipped; with CI=true it fails."""
    path = shutil.which(name) or shutil.which(name, path=Path(sys.executable).parent)
    if path is None and os.environ.get("CI") == "true":
        pytest.fail(f"{name} is not installed")
    if path is None:
        pytest.skip(f"{name} is not installed")
    return path
