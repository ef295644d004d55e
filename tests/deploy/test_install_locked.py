"""What `make demo` says while it installs."""

import importlib.util
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def test_the_progress_counts_packages_and_megabytes(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = importlib.util.spec_from_file_location("install_locked", ROOT / "deploy" / "install_locked.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "EVERY_S", -1.0)
    lines = [
        "Collecting numpy==2.1.0 (from -r requirements.lock (line 3))",
        "  Downloading numpy-2.1.0-cp311-cp311-manylinux.whl (16.3 MB)",
        "Collecting idna==3.10 (from -r requirements.lock (line 9))",
        "  Using cached idna-3.10-py3-none-any.whl (70 kB)",
        "Installing collected packages: numpy, idna",
    ]
    module.print_progress(lines, 2)
    said = capsys.readouterr().out.splitlines()
    assert said[1] == "  1 of at most 2 (16 MB downloaded)"
    assert said[-1] == "  all are here, installing them (16 MB downloaded)"
