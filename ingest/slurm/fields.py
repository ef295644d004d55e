"""Parsers of Slurm's small notations: times, durations, sizes, exit codes, arrays.

Each parser accepts any text. Unreadable text gives None or an empty result. An impossible exit code makes its
whole record bad, because any other answer would be a guess.
"""

import re
from dataclasses import dataclass
from datetime import datetime, tzinfo
from itertools import islice

from fleetcast.fleet.entities import MAX_NAME_LENGTH
from fleetcast.fleet.errors import RecordError
from fleetcast.ingest.gpus import shorten_model
from fleetcast.ingest.inbox.job_events import MAX_TASKS as MOST_TASKS
from fleetcast.ingest.inbox.job_events import YEAR_2000_MS
from fleetcast.ingest.slurm.numbers import count_numbers, expand_numbers

MAX_TASKS = 1000  # of an array that get names of their own while they wait
_DURATION = re.compile(r"(?:([0-9]{1,6})-)?(?:([0-9]{1,6}):)?([0-9]{1,6}):([0-9]{1,2})(?:\.[0-9]{1,9})?")
_SIZE = re.compile(r"([0-9]{1,15}(?:\.[0-9]{1,6})?)([KMGTP]?)i?B?[nc]?", re.IGNORECASE)
_MASK = re.compile(rf"0x([0-9A-Fa-f]{{1,{MOST_TASKS // 4}}})")
_MIB = {"K": 1 / 1024, "": 1.0, "M": 1.0, "G": 1024.0, "T": 1024.0**2, "P": 1024.0**3}


@dataclass(frozen=True, slots=True)
class WaitingTasks:
    """The waiting tasks of an array: the first MAX_TASKS of them, and their count.

    is_cut: the list names only some of them, or is unreadable.
    """

    named: tuple[int, ...] = ()
    count: int = 0
    is_cut: bool = False


def parse_waiting_tasks(text: str) -> WaitingTasks:
    """Parse the waiting tasks of an array from a text such as `1-3,5%2`.

    Slurm ends a truncated list with dots. slurmdbd stores the tasks as a hexadecimal mask whose lowest bit
    is task 0. A mask without a bit, or a list without a number, means that all tasks have started. A text of
    another form counts as a truncated list.

    >>> parse_waiting_tasks("[7-8%1]"), parse_waiting_tasks("0-4999%50").count, parse_waiting_tasks("0,2,4,...").is_cut
    (WaitingTasks(named=(7, 8), count=2, is_cut=False), 5000, True)
    >>> parse_waiting_tasks("0x1E%2").named, parse_waiting_tasks("0x00"), parse_waiting_tasks("all").is_cut
    ((1, 2, 3, 4), WaitingTasks(named=(), count=0, is_cut=False), True)
    """
    stated = text.strip("[]").partition("%")[0]
    if (mask := _MASK.fullmatch(stated)) is not None:
        bits = f"{int(mask[1], 16):b}"[::-1]
        first = islice((task for task, bit in enumerate(bits) if bit == "1"), MAX_TASKS)
        return WaitingTasks(tuple(first), bits.count("1"))
    whole = stated.removesuffix("...").removesuffix(",")
    named = tuple(expand_numbers(whole, MAX_TASKS))
    is_cut = whole != stated or bool(whole and not named)
    return WaitingTasks(named, max(len(named), count_numbers(whole, MOST_TASKS)) if named else 0, is_cut)


def parse_model_name(kind: str) -> str:
    """Return the GPU model that a GRES type names, in capitals if it looks like a product.

    >>> parse_model_name("h100"), parse_model_name("nvidia_a100_80gb"), parse_model_name("gen")
    ('H100', 'A100', 'gen')
    """
    name = shorten_model(kind.replace("_", " "))
    return name.upper() if re.fullmatch(r"[a-z]{1,3}[0-9]{1,5}[a-z]?", name, re.IGNORECASE) else kind


def parse_time_ms(text: str, zone: tzinfo | None = None) -> int | None:
    """Convert Unix seconds, or an ISO time that is local in `zone`, to Unix ms.

    zone: None for this machine's zone. Returns None if the text is not a time since 2000.

    >>> from datetime import UTC
    >>> parse_time_ms("1617588440"), parse_time_ms("2021-04-05T02:07:20", UTC), parse_time_ms("Unknown")
    (1617588440000, 1617588440000, None)
    """
    text = text.strip()
    if text.isdecimal() and text.isascii():
        return _drop_time_before_2000(int(text) * 1000) if len(text) < 13 else None
    try:
        found = datetime.fromisoformat(text)
        return _drop_time_before_2000(round((found if found.tzinfo else found.replace(tzinfo=zone)).timestamp() * 1000))
    except (ValueError, OverflowError, OSError):
        return None


def _drop_time_before_2000(time_ms: int) -> int | None:
    return time_ms if time_ms >= YEAR_2000_MS else None


def parse_limit_s(text: str) -> float | None:
    """Parse a time limit as seconds. A bare number is minutes.

    Returns None for other text, such as UNLIMITED.

    >>> [parse_limit_s(value) for value in ("3-00:00:00", "4:59", "1:00:00", "60", "UNLIMITED")]
    [259200.0, 299.0, 3600.0, 3600.0, None]
    """
    if text.isdecimal() and text.isascii() and len(text) < 12:
        return 60.0 * int(text)
    match = _DURATION.fullmatch(text)
    if match is None:
        return None
    days, hours, minutes, seconds = (int(part or 0) for part in match.groups())
    return float(((days * 24 + hours) * 60 + minutes) * 60 + seconds)


def parse_size_gib(text: str) -> float | None:
    """Convert a size such as `1600G`, `8000M` or `60G` to GiB. A bare number is MiB.

    Returns None for other text.

    >>> parse_size_gib("1536M"), parse_size_gib("2T"), parse_size_gib("?")
    (1.5, 2048.0, None)
    """
    match = _SIZE.fullmatch(text)
    if match is None:
        return None
    return round(float(match[1]) * _MIB[match[2].upper()] / 1024, 3)


def find_tres_amount(text: str, name: str) -> str:
    """Return the amount of a resource in a TRES list as text, or "" if the list lacks it.

    >>> find_tres_amount("cpu=320,mem=1600G,node=4", "mem")
    '1600G'
    """
    return next((part.partition("=")[2] for part in text.split(",") if part.startswith(f"{name}=")), "")


def parse_exit_code(text: str) -> tuple[int, int]:
    """Parse an exit code of the form status:signal. A part that is missing is 0.

    >>> parse_exit_code("0:9"), parse_exit_code("")
    ((0, 9), (0, 0))
    """
    status, _, signal = text.partition(":")
    return _parse_small_number(status), _parse_small_number(signal)


def _parse_small_number(text: str) -> int:
    return int(text) if text.isdecimal() and text.isascii() and len(text) < 6 else 0


def split_wait_status(value: float) -> tuple[int, int]:
    """Split a wait status of wait(2) into (exit status, signal). Raises RecordError if it is too large.

    >>> split_wait_status(768), split_wait_status(9), split_wait_status(4294967294)
    ((3, 0), (0, 9), (0, 0))
    """
    if abs(value) >= 2**63:
        raise RecordError("out_of_range", f"an exit code of {len(str(value))} digits")
    number = int(value) if 0 <= value < 2**31 else 0  # Slurm's NO_VAL is none
    return number >> 8 & 0xFF, number & 0x7F


def clean_name(text: str | None) -> str:
    """Return a name that is safe to show: printable and not too long.

    Returns "" for None and for the words that Slurm writes for an empty value.
    """
    if text is None or text in ("(null)", "N/A", "None", "none", "Unknown", "n/a"):
        return ""
    shown = text if text.isprintable() else "".join(part if part.isprintable() else "?" for part in text)
    return shown[:MAX_NAME_LENGTH]
