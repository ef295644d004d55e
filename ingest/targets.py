"""Which exporters to scrape: URLs, and files that list them and are read again when they change.

http://n001:9400/metrics          the node is what the page says, else the host
http://10.0.0.7:9400 n001         the second word names the node, whatever the page says
file:targets.txt                  one such line each; '#' begins a comment
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

from fleet.errors import ConfigError
from ingest.node_names import check_name

logger = logging.getLogger(__name__)

_FILE = "file:"


@dataclass(frozen=True, slots=True)
class TargetSpec:
    """`node` is empty unless the configuration names it."""

    url: str
    node: str = ""

    @property
    def host(self) -> str:
        """What names the node when nothing else does."""
        return urlsplit(self.url).hostname or self.url

    @property
    def address(self) -> str:
        """host:port, as Prometheus' label `instance` has it."""
        parts = urlsplit(self.url)
        return parts.netloc.rpartition("@")[2] or self.url


def parse_target(text: str) -> TargetSpec:
    """Raises ConfigError that quotes the text.

    >>> parse_target("http://n001:9400 gpu-7")
    TargetSpec(url='http://n001:9400/metrics', node='gpu-7')
    """
    words = text.split()
    if not 1 <= len(words) <= 2:
        raise ConfigError(f"scrape target {text!r}: expected a URL, and at most a node name behind it")
    try:
        parts = urlsplit(words[0])
        good = parts.scheme in ("http", "https") and parts.hostname and (parts.port is None or parts.port > 0)
    except ValueError:
        good = False
    if not good:
        raise ConfigError(f"scrape target {text!r}: expected a URL such as http://n001:9400/metrics")
    url = words[0] if parts.path else parts._replace(path="/metrics").geturl()
    return TargetSpec(url, check_name(words[1]) if len(words) == 2 else "")


@dataclass(slots=True)
class TargetList:
    """The targets of a configuration. Raises ConfigError on a bad entry; a bad line of a file is logged and skipped."""

    entries: Sequence[str]
    _fixed: list[TargetSpec] = field(default_factory=list)
    _files: dict[Path, tuple[float, list[TargetSpec]]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for entry in self.entries:
            if entry.startswith(_FILE):
                self._files[Path(entry[len(_FILE) :])] = (0.0, [])
            else:
                self._fixed.append(parse_target(entry))

    @property
    def watched(self) -> bool:
        return bool(self._files)

    def read(self) -> dict[str, TargetSpec]:
        """URL -> target, as of now."""
        for path, (seen, _) in self._files.items():
            changed = _changed(path)
            if changed != seen:
                self._files[path] = (changed, _read_file(path))
        files = (target for _, targets in self._files.values() for target in targets)
        return {target.url: target for target in (*self._fixed, *files)}


def _changed(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def _read_file(path: Path) -> list[TargetSpec]:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        logger.warning("cannot read targets from %s: %s, going on without them", path, error)
        return []
    targets = []
    for line in lines:
        text = line.split("#", 1)[0].strip()
        if text:
            try:
                targets.append(parse_target(text))
            except ConfigError as error:
                logger.warning("%s: skipping a line: %s", path, error)
    return targets
