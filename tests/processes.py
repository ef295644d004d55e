"""Whether a process that a test watches still runs."""

from pathlib import Path


def is_running(pid: int) -> bool:
    """Tell whether the process runs; one that ended does not, whether or not its parent has waited for it."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:  # it ended before the file was opened, or between that and the reading
        return False
