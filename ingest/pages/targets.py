"""Scrape targets: URLs, and files that list them and are read again when they change.

http://n001:9400/metrics          the node is what the page says, else the host
http://10.0.0.7:9400 n001         the second word names the node, whatever the page says
file:targets.txt                  one such line each; '#' begins a comment
file_sd:targets/*.json            Prometheus' target groups, in JSON or YAML (see ingest.pages.target_groups)
http_sd:http://inventory/gpus     the same in JSON, asked for now and then
"""

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from fleet.errors import ConfigError
from ingest.pages.target_groups import read_groups
from ingest.pages.target_spec import TargetSpec, parse_target

logger = logging.getLogger(__name__)

_FILE, _FILE_SD, _HTTP_SD = "file:", "file_sd:", "http_sd:"


@dataclass(slots=True)
class _Watched:
    """Files of a path, or a pattern such as targets/*.json. `files`: (when changed, targets); refused: file -> why."""

    path: Path
    groups: bool
    files: dict[Path, tuple[float, list[TargetSpec]]] = field(default_factory=dict)
    refused: dict[Path, str] = field(default_factory=dict)
    absent: bool = False  # and it is told

    def read(self) -> Iterator[TargetSpec]:
        """Targets as of now; a file that did not change is not read again, one of groups that is broken not taken."""
        paths = sorted(self.path.parent.glob(self.path.name)) if self.groups else [self.path]
        self._log_absent(not any(path.exists() for path in paths))
        self.files = {path: self.files.get(path, (0.0, [])) for path in paths}
        self.refused = {path: why for path, why in self.refused.items() if path in self.files}
        for path, (seen, targets) in self.files.items():
            changed = _changed(path)
            if changed != seen:
                targets = self._read_groups(path, targets) if self.groups else _read_file(path)
                self.files[path] = (changed, targets)
            yield from targets

    def _read_groups(self, path: Path, last: list[TargetSpec]) -> list[TargetSpec]:
        try:
            targets = read_groups(path.read_bytes(), str(path))
        except (OSError, ConfigError) as error:
            logger.warning("cannot read targets from %s: %s, going on with the %d of before", path, error, len(last))
            self.refused[path] = str(error)
            return last
        self.refused.pop(path, None)
        return targets

    def _log_absent(self, absent: bool) -> None:
        if absent and not self.absent:
            logger.warning("no targets from %s: there is no such file, looking for it", self.path)
        self.absent = absent


class TargetList:
    """The targets of a configuration. ConfigError on a bad entry. `queried`: URLs whose answers `learn` takes."""

    def __init__(self, entries: Sequence[str]) -> None:
        self._fixed: list[TargetSpec] = []
        self._watched: list[_Watched] = []
        self._received: dict[str, list[TargetSpec]] = {}
        self._refused: dict[str, str] = {}  # URL -> why what it says is not taken
        for entry in entries:
            kind, colon, rest = entry.partition(":")
            if entry.startswith((_FILE, _FILE_SD)):
                if not Path(rest).name:
                    raise ConfigError(f"scrape target {entry!r}: expected a file, such as {kind}:targets.json")
                self._watched.append(_Watched(Path(rest), f"{kind}{colon}" == _FILE_SD))
            elif entry.startswith(_HTTP_SD):
                parse_target(rest)
                self._received[rest] = []
            else:
                self._fixed.append(parse_target(entry))

    @property
    def watched(self) -> bool:
        return bool(self._watched or self._received)

    @property
    def queried(self) -> tuple[str, ...]:
        return tuple(self._received)

    def learn(self, url: str, targets: list[TargetSpec]) -> None:
        """Take the targets that the service at `url` lists now."""
        self._received[url] = targets
        self._refused.pop(url, None)

    def refuse(self, url: str, why: str) -> bool:
        """Refuse what the service answered: its answer before stays. Return whether the refusal is news."""
        news = self._refused.get(url) != why
        self._refused[url] = why
        return news

    def refused(self) -> dict[str, str]:
        """File or URL -> why its list is not taken; the last good one stays."""
        files = {str(path): why for watched in self._watched for path, why in watched.refused.items()}
        return {**files, **self._refused}

    def read(self) -> dict[str, TargetSpec]:
        """URL -> target, as of now."""
        files = (target for watched in self._watched for target in watched.read())
        received = (target for targets in self._received.values() for target in targets)
        return {target.url: target for target in (*self._fixed, *files, *received)}


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
