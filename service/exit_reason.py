"""The reason why a role ended. The file state/ROLE.ended contains it until the role is ready again.

The api and the supervisor read the file.
"""

import contextlib
import logging
from collections.abc import Iterator
from pathlib import Path

from fleetcast.fleet import files
from fleetcast.fleet.errors import FleetcastError
from fleetcast.fleet.process import report_ready
from fleetcast.service.config import Config

logger = logging.getLogger(__name__)

MOST_CHARACTERS = 600


@contextlib.contextmanager
def record_exit_reason(folder: Path, role: str) -> Iterator[None]:
    """Record the exception that ends the role, and raise it again.

    If the disk refuses the record, log an error.
    """
    try:
        yield
    except Exception as error:
        try:
            files.replace_file(_get_reason_path(folder, role), [_format_reason(error)], role, sync=False)
        except OSError as unwritten:
            logger.error("cannot write %s: %s", _get_reason_path(folder, role), unwritten)
        raise


def make_api_name(config: Config) -> str:
    """Return the name of this api. It differs from the other apis that share the state folder."""
    return f"api-{config.api.port}"


def make_pipeline_name(instance: int) -> str:
    """Return the name of one of several pipelines."""
    return f"pipeline-{instance}" if instance else "pipeline"


def _format_reason(error: BaseException) -> bytes:
    while isinstance(error, BaseExceptionGroup):  # of tasks: the first is what ended the others
        error = error.exceptions[0]
    said = str(error) if isinstance(error, FleetcastError) else f"a bug, {type(error).__name__}: {error}"
    return said[:MOST_CHARACTERS].encode("utf-8", "replace")


def announce_ready(folder: Path, role: str) -> None:
    """Remove the reason for the role's last exit, and report to the supervisor that the role is ready."""
    clear_exit_reason(folder, role)
    report_ready()


def clear_exit_reason(folder: Path, role: str) -> None:
    """Remove the recorded reason for an earlier exit of a role."""
    with contextlib.suppress(OSError):
        _get_reason_path(folder, role).unlink(missing_ok=True)


def read_exit_reason(folder: Path, role: str) -> str:
    """Return the recorded reason. Returns "" while the role works, or if the reason is unknown."""
    try:
        return _get_reason_path(folder, role).read_bytes()[: 4 * MOST_CHARACTERS].decode("utf-8", "replace")
    except OSError:
        return ""


def _get_reason_path(folder: Path, role: str) -> Path:
    return folder / f"{role}.ended"
