"""Log a disk error and continue."""

import contextlib
import logging
from collections.abc import Iterator

logger = logging.getLogger(__name__)


@contextlib.contextmanager
def log_disk_errors(what: str, then: str) -> Iterator[None]:
    """Log an OSError of the block, and `then`: what happens instead.

    A restart would not repair the disk.
    """
    try:
        yield
    except OSError as error:
        logger.error("cannot %s: %s; %s", what, error, then)
