"""Failpoints: named places in the writers where a test may end the process or make the disk fail.

A test may also tear a write at a failpoint. Each operation in OPERATIONS has two failpoints,
`AREA.before_OPERATION` and `AREA.after_OPERATION` (`POINTS` lists all). Failpoints are off, and cost one
look-up each, unless `FLEETCAST_FAILPOINTS` is set when the process starts:

    FLEETCAST_FAILPOINTS="inbox.after_write:3=kill"     the third time a process reaches it, it kills itself
    FLEETCAST_FAILPOINTS="board.before_rename=error"    the first time, OSError "No space left on device"
    FLEETCAST_FAILPOINTS="inbox.before_write:2=torn"    half of the bytes are written, then the process kills itself

Commas separate several failpoints. Each acts once in a process. `torn` is only for `before_write`.
"""

import errno
import os
import signal
from collections.abc import Callable
from dataclasses import dataclass

DURABLE = ("write", "sync", "rename", "sync_folder")  # of a file that is replaced as a whole
OPERATIONS = {
    "inbox": ("write", "sync", "truncate", "sync_folder"),  # the segments: what is acknowledged
    "mark": DURABLE,  # how far a pipeline has read the inbox
    "board": DURABLE,  # `board`; `urgent` is not synced
    "snapshot": ("write", "sync", "link", "rename", "sync_folder"),  # its files, and the rename that makes it one
    "archive": DURABLE,  # a part, or a compacted file that takes its place
    "ledger": ("commit",),  # a transaction: decisions, intents, queue, audit
    "migration": ("rename", "sync_folder"),  # the copy of a ledger of an earlier version
    "backup": DURABLE,  # the manifest of a backup, and the renames that make it one
    "queues": DURABLE,  # the file of queues, as an operator puts it
    "models": DURABLE,  # which version serves
    "progress": DURABLE,  # windows that a backfill has done
    "bands": DURABLE,  # the bands of nodes, for other systems
    "adapters": ("write", "rename"),  # how adapters stand, and the audit of what they wrote
    "listening": ("write", "rename"),  # since when the api has received all events
    "held_starts": ("sync_folder",),  # marks of starts that were refused
    "mirror": ("write", "rename"),  # the board of an api on another host
    "pids": ("write", "rename"),  # the processes of a supervisor
}
POINTS = tuple(
    f"{area}.{when}_{operation}"
    for area, operations in OPERATIONS.items()
    for operation in operations
    for when in ("before", "after")
)
VARIABLE = "FLEETCAST_FAILPOINTS"
ACTIONS = ("kill", "error", "torn")
KEEP_ALL = 1.0

Hook = Callable[[str], float]  # point → which share of the bytes of a write reaches the disk before the process ends


def call_hook(point: str) -> float:
    """Call the hook for a failpoint. Return KEEP_ALL, or the share of a torn write that should reach the disk.

    The hook may raise an error or end the process.
    """
    return KEEP_ALL if _hook is None else _hook(point)


def kill_process() -> None:
    """End this process as `kill -9` does."""
    os.kill(os.getpid(), signal.SIGKILL)


def end_after_torn_write() -> None:
    """End the process after a torn write, with the function that was given to `set_hook`."""
    _end()


def set_hook(hook: Hook | None, end: Callable[[], None] = kill_process) -> None:
    """Set the hook that is called at every failpoint. None removes it.

    `end`: the function that ends the process after a torn write.
    """
    global _hook, _end
    _hook, _end = hook, end


@dataclass(slots=True)
class _Rule:
    """A failpoint that acts once, when `left` has been counted down to 0."""

    left: int
    action: str


def parse_failpoints(text: str) -> Hook:
    """Parse the value of FLEETCAST_FAILPOINTS, and return the hook that acts at its failpoints.

    Raises ValueError that names the wrong part.
    """
    rules = dict(_parse_rule(part.strip()) for part in text.split(",") if part.strip())

    def act_at_point(point: str) -> float:
        rule = rules.get(point)
        if rule is None:
            return KEEP_ALL
        rule.left -= 1
        return _run_action(rule.action, point) if rule.left == 0 else KEEP_ALL

    return act_at_point


def _parse_rule(part: str) -> tuple[str, _Rule]:
    place, _, action = part.partition("=")
    point, colon, number = place.partition(":")
    known = point in POINTS and action in ACTIONS and (not colon or (number.isdecimal() and int(number) > 0))
    if not known or (action == "torn" and not point.endswith(".before_write")):
        raise ValueError(
            f"{VARIABLE}: {part!r} is no failpoint: expected POINT[:TIME]=ACTION, with TIME from 1, one of {ACTIONS} "
            f"(torn: at a before_write) and one of {', '.join(POINTS)}"
        )
    return point, _Rule(int(number or 1), action)


def _run_action(action: str, point: str) -> float:
    if action == "kill":
        kill_process()
    if action == "error":
        raise OSError(errno.ENOSPC, f"{os.strerror(errno.ENOSPC)} (failpoint {point})")
    return 0.5


_end: Callable[[], None] = kill_process
_hook: Hook | None = parse_failpoints(os.environ[VARIABLE]) if os.environ.get(VARIABLE) else None
