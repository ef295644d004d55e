"""A fleet that does not fit the memory is left out with a word; caches of files are no reason."""

from pathlib import Path

import pytest

from fleetcast.benchmarks.kit import case

MEMINFO = "MemTotal: 24000000 kB\nMemFree:  100000 kB\nMemAvailable:   20000000 kB\n"


def test_memory_that_only_caches_use_is_available(tmp_path: Path) -> None:
    (tmp_path / "meminfo").write_text(MEMINFO)
    assert case.read_available_bytes(tmp_path / "meminfo", tmp_path / "absent") == 20_000_000 * 1024
    assert case.read_available_bytes(tmp_path / "absent", tmp_path / "absent") > 0


@pytest.mark.parametrize(("limit", "available"), [("5000000", 4_500_000), ("max", 20_000_000 * 1024)])
def test_the_limit_of_a_container_counts(tmp_path: Path, limit: str, available: int) -> None:
    (tmp_path / "meminfo").write_text(MEMINFO)
    (tmp_path / "memory.max").write_text(f"{limit}\n")
    (tmp_path / "memory.current").write_text("2000000\n")
    (tmp_path / "memory.stat").write_text("anon 500000\ninactive_file 1500000\n")
    assert case.read_available_bytes(tmp_path / "meminfo", tmp_path) == available


def test_a_fleet_that_is_left_out_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(case, "read_available_bytes", lambda: 2**30)
    assert case.fits_memory(1_000, 120_000)
    assert capsys.readouterr().err == ""
    assert not case.fits_memory(100_000, 120_000)
    assert capsys.readouterr().err == "100,000 GPUs are left out: they need 11.2 GiB, 1.0 are available\n"
