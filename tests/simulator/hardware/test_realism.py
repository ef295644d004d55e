"""A healthy simulated fleet looks like recorded H100 runs; the distances are printed (pytest -s)."""

import os
from pathlib import Path

import numpy as np
import pytest

from fleetcast.fleet.errors import ConfigError
from fleetcast.simulator.hardware.h100 import FOLDER
from fleetcast.simulator.hardware.realism import (
    HEADER,
    compare_with_recordings,
    compute_ks_distance,
    read_recorded_gpus,
)

DATA = Path(os.environ.get("FLEETCAST_DATA", "../shared/data"))
FARTHEST = {"power shape": 0.3, "warmth": 0.3}


def test_the_distance_is_the_largest_gap_between_two_distributions() -> None:
    assert compute_ks_distance(np.arange(10.0), np.arange(10.0)) == 0
    assert compute_ks_distance(np.arange(10.0), np.arange(10.0) + 5) == pytest.approx(0.5)


def test_without_recordings_there_is_nothing_to_compare(tmp_path: Path) -> None:
    assert list(compare_with_recordings(tmp_path)) == []


@pytest.mark.skipif(not (DATA / FOLDER).exists(), reason="needs the public recordings in FLEETCAST_DATA")
def test_healthy_telemetry_is_like_the_recorded() -> None:
    rows = list(compare_with_recordings(DATA))
    print("\n".join(["", HEADER, *(row.format_row() for row in rows)]))
    assert {row.quantity for row in rows} == {*FARTHEST, "port equality"}
    for row in rows:
        if row.quantity in FARTHEST:
            assert row.distance < FARTHEST[row.quantity], row.format_row()
        else:  # within 3 % on both sides: that they are so is what counts, not how
            assert max(row.real[2], row.simulated[2]) < 1.03, row.format_row()


@pytest.mark.parametrize(
    ("page", "why"),
    [
        (b"", "no table of phase"),
        (b"a,b\n1,2\n", "no table of phase"),
        (b"phase,timestamp,gpu,power_w,temp_c\ninit,1,0,1,1\n", "no row"),
    ],
)
def test_a_recording_that_is_none_is_named(tmp_path: Path, page: bytes, why: str) -> None:
    path = tmp_path / "t2_telemetry.csv"
    path.write_bytes(page)
    with pytest.raises(ConfigError, match=why):
        read_recorded_gpus(path)
