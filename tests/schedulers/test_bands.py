from pathlib import Path

import pytest

from fleet.errors import ConfigError
from schedulers.band_file import BandFile
from schedulers.bands import BandRule, Bands


def test_a_band_is_left_only_well_below_where_it_was_entered() -> None:
    bands = Bands(BandRule(elevated=0.1, high=0.5, leave_ratio=0.7))
    assert bands.update(["a"], [0.51], 0) == {"a": "high"}
    assert bands.update(["a"], [0.40], 1) == {}
    assert bands.update(["a"], [0.34], 2) == {"a": "elevated"}
    assert bands.update(["a"], [0.08], 3) == {}
    assert bands.update(["a"], [0.06], 4) == {"a": "low"}


def test_an_unknown_score_changes_nothing() -> None:
    bands = Bands()
    assert bands.update(["a"], [float("nan")], 0) == {}


def test_writes_are_limited_and_the_riskiest_go_first() -> None:
    bands = Bands(BandRule(elevated=0.1, high=0.5, writes_per_minute=1))
    bands.update(["a", "b"], [0.0, 0.0], 0)
    assert bands.update(["a", "b"], [0.6, 0.9], 1_000) == {"b": "high"}
    assert bands.update(["a", "b"], [0.6, 0.9], 2_000) == {}
    assert bands.update(["a", "b"], [0.6, 0.9], 62_000) == {"a": "high"}


def test_the_file_is_rewritten_only_when_a_band_changes(tmp_path: Path) -> None:
    path = tmp_path / "bands"
    adapter = BandFile({"path": str(path)})
    assert adapter.update(["b", "a"], [0.9, 0.0], 0) == 2
    assert path.read_text() == "a low\nb high\n"
    path.unlink()
    assert adapter.update(["b", "a"], [0.9, 0.0], 1) == 0
    assert not path.exists()


def test_wrong_options_are_named() -> None:
    with pytest.raises(ConfigError, match="colour"):
        BandFile({"path": "x", "colour": "red"})
