"""Why a pipeline or the placer ended: the sentence lies in state/ROLE.ended until the role works again.

An api has no other way to know it: the process that could tell is the one that is gone.
"""

import contextlib
import logging
from collections.abc import Iterator
from pathlib import Path

from fleet import files
from fleet.errors import FleetcastError

logger = logging.getLogger(__name__)

MOST_CHARACTERS = 600


@contextlib.contextmanager
def last_words(folder: Path, role: str) -> Iterator[None]:
    """Whatever the role ends of is written down, and goes on. A disk that does not take it costs the sentence."""
    try:
        yield
    except Exception as error:
        try:
            files.replace_file(_path(folder, role), [_sentence(error)], role, sync=False)
        except OSError as unwritten:
            logger.error("cannot write %s: %s", _path(folder, role), unwritten)
        raise


def _sentence(error: BaseException) -> bytes:
    while isinstance(error, BaseExceptionGroup):  # of tasks: the first is what ended the others
        error = error.exceptions[0]
    said = str(error) if isinstance(error, FleetcastError) else f"a bug, {type(error).__name__}: {error}"
    return said[:MOST_CHARACTERS].encode("utf-8", "replace")


def works_again(folder: Path, role: str) -> None:
    """The role has what it needs: what the one before ended of is over."""
    with contextlib.suppress(OSError):
        _path(folder, role).unlink(missing_ok=True)


def why_ended(folder: Path, role: str) -> str:
    """What the role ended of the last time, while it does not work again; empty where nobody knows."""
    try:
        return _path(folder, role).read_bytes()[: 4 * MOST_CHARACTERS].decode("utf-8", "replace")
    except OSError:
        return ""


def _path(folder: Path, role: str) -> Path:
    return folder / f"{role}.ended"
