"""GPUs at work that no job holds: what turns a verdict, and what it changes."""

import msgspec
import numpy as np
import pytest
from numpy.typing import NDArray

from fleetcast.features.frame import FeatureFrame
from fleetcast.fleet.samples import EntityKind
from fleetcast.service.pipeline.unknown_use import UnknownUse, classify_work

NAMES = ("gpu_util", "sm_active", "fb_used_bytes", "power_w", "age_s")
NODES = ("a",)
ROWS = np.array([[0, 1]], np.int32)
NOBODY = np.zeros((1, 2), bool)
IDLE, BUSY = (0.0, np.nan, 0.0, 70.0), (0.99, np.nan, 7e10, 690.0)
NOTHING = (np.nan,) * 4


def frame(*gpus: tuple[float, ...], age_s: float = 0.0) -> FeatureFrame:
    values = np.array([(*gpu, age_s) for gpu in gpus], np.float32)
    node = np.zeros(len(gpus), np.int32)
    return FeatureFrame(EntityKind.GPU, NAMES, values, node, np.zeros(values.shape, np.int64), 0)


def play(use: UnknownUse, *ticks: tuple[float, tuple[float, ...], NDArray[np.bool_]]) -> list[bool]:
    """The verdict on the first GPU after each tick: (seconds, its reading, held)."""
    return [
        bool(use.update_verdicts(NODES, frame(reading, IDLE), ROWS, held, round(at_s * 1000))[0, 0])
        for at_s, reading, held in ticks
    ]


@pytest.mark.parametrize(
    "reading",
    [(0.99, np.nan, np.nan, np.nan), (0.0, 0.3, 0.0, 70.0), (0.0, 0.0, 7e10, 70.0), (np.nan, np.nan, np.nan, 400.0)],
    ids=["utilization", "SM activity", "memory", "power"],
)
def test_each_sign_of_work_counts_by_itself(reading: tuple[float, ...]) -> None:
    assert classify_work(frame(reading, IDLE), ROWS).tolist() == [[1, 0]]


@pytest.mark.parametrize("used_mib", [621, 1101], ids=["used alone", "with what the driver reserves"])
def test_an_open_context_and_a_gpu_never_heard_are_no_work(used_mib: int) -> None:
    """The readings are those of an H100 on which a process holds a context and does nothing."""
    context = (0.0, 0.0, used_mib * 2.0**20, 118.6)
    assert classify_work(frame(context, NOTHING), np.array([[0, 1], [-1, 9]], np.int32)).tolist() == [[0, -1], [-1, -1]]


def test_a_gpu_at_work_when_first_heard_is_in_use_at_once() -> None:
    assert play(UnknownUse(), (0, BUSY, NOBODY)) == [True]


def test_it_takes_a_minute_to_turn_and_a_blip_turns_nothing() -> None:
    ticks = [
        (0, IDLE),
        (15, BUSY),
        (30, IDLE),
        (45, BUSY),
        (100, BUSY),
        (105, BUSY),
        (120, IDLE),
        (165, IDLE),
        (180, IDLE),
    ]
    found = play(UnknownUse(), *[(at_s, reading, NOBODY) for at_s, reading in ticks])
    assert found == [False, False, False, False, False, True, True, True, False]


def test_one_reading_decides_nothing_however_long_it_stands() -> None:
    use = UnknownUse()
    play(use, (0, IDLE, NOBODY))
    found = [
        use.update_verdicts(NODES, frame(BUSY, IDLE, age_s=at), ROWS, NOBODY, 20_000 + at * 1000)[0, 0]
        for at in (0, 60, 100)
    ]
    assert found == [False, False, False]


def test_stale_readings_decide_nothing_new() -> None:
    found = play(UnknownUse(), (0, BUSY, NOBODY), (200, NOTHING, NOBODY), (900, NOTHING, NOBODY), (910, IDLE, NOBODY))
    assert found == [True] * 4
    assert (
        play(UnknownUse(), (0, IDLE, NOBODY), (15, BUSY, NOBODY), (30, NOTHING, NOBODY), (500, BUSY, NOBODY))
        == [False] * 4
    )


def test_a_job_event_wins_at_once_and_after_its_end_a_minute_begins_anew() -> None:
    held = np.array([[True, False]])
    ticks = [
        (0, BUSY, NOBODY),
        (10, BUSY, held),
        (900, BUSY, held),
        (910, BUSY, NOBODY),
        (960, BUSY, NOBODY),
        (971, BUSY, NOBODY),
    ]
    assert play(UnknownUse(), *ticks) == [True, False, False, False, False, True]


def test_a_verdict_outlives_the_process_and_new_nodes() -> None:
    use = UnknownUse()
    play(use, (0, BUSY, NOBODY))
    about, arrays = use.dump()
    again = UnknownUse()
    again.load(msgspec.msgpack.decode(msgspec.msgpack.encode(about)), arrays)
    assert again.dump()[0] == about, "what nobody has asked about yet is kept, too"
    rows, nobody = np.array([[-1, -1, -1], [0, 1, -1]], np.int32), np.zeros((2, 3), bool)
    found = again.update_verdicts(("new", "a"), frame(NOTHING, IDLE), rows, nobody, 5000)
    assert found.tolist() == [[False] * 3, [True, False, False]]


def test_a_damaged_verdict_is_refused() -> None:
    with pytest.raises(ValueError, match="none of -1, 0, 1"):
        UnknownUse().load({"a": [7]}, {})


def test_a_clock_that_was_set_moves_what_is_under_way() -> None:
    use = UnknownUse()
    play(use, (0, IDLE, NOBODY), (15, BUSY, NOBODY))
    use.shift_times(100_000)
    assert play(use, (170, BUSY, NOBODY), (176, BUSY, NOBODY)) == [False, True]
