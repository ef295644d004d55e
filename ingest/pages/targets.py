"""Scrape targets: URLs, and files that list them. A file is read again when it changes.

http://n001:9400/metrics          the page names its node, else the URL's host does
http://10.0.0.7:9400 n001         the second word names the node and overrides the page
file:targets.txt                  one such line each; '#' begins a comment
file_sd:targets/*.json            Prometheus' target groups, in JSON or YAML (see fleetcast.ingest.pages.target_groups)
http_sd:http://inventory/gpus     target groups in JSON, polled over HTTP
"""

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from fleetcast.fleet.errors import ConfigError
from fleetcast.ingest.pages.target_groups import read_groups
from fleetcast.ingest.pages.target_spec import TargetSpec, parse_target

logger = logging.getLogger(__name__)

_FILE, _FILE_SD, _HTTP_SD = "file:", "file_sd:", "http_sd:"


@dataclass(slots=True)
class _WatchedFiles:
    """The target files at one path, or at all paths that match a pattern such as targets/*.json.

    `groups`: whether the files hold target groups. `files`: path → (time of change in Unix s, targets).
    `refused`: path → the reason why the file's list is refused.
    """

    path: Path
    groups: bool
    files: dict[Path, tuple[float, list[TargetSpec]]] = field(default_factory=dict)
    refused: dict[Path, str] = field(default_factory=dict)
    absent: bool = False  # and it is told

    def read_targets(self) -> Iterator[TargetSpec]:
        """Yield the current targets. A file is read again only when it has changed.

        If a file of groups becomes invalid, its last good targets remain.
        """
        paths = sorted(self.path.parent.glob(self.path.name)) if self.groups else [self.path]
        self._log_missing_files(not any(path.exists() for path in paths))
        self.files = {path: self.files.get(path, (0.0, [])) for path in paths}
        self.refused = {path: why for path, why in self.refused.items() if path in self.files}
        for path, (seen, targets) in self.files.items():
            changed = _read_change_time(path)
            if changed != seen:
                targets = self._read_group_file(path, targets) if self.groups else _read_target_file(path)
                self.files[path] = (changed, targets)
            yield from targets

    def _read_group_file(self, path: Path, last: list[TargetSpec]) -> list[TargetSpec]:
        try:
            targets = read_groups(path.read_bytes(), str(path))
        except (OSError, ConfigError) as error:
            logger.warning("cannot read targets from %s: %s, going on with the %d of before", path, error, len(last))
            self.refused[path] = str(error)
            return last
        self.refused.pop(path, None)
        return targets

    def _log_missing_files(self, absent: bool) -> None:
        if absent and not self.absent:
            logger.warning("no targets from %s: there is no such file, looking for it", self.path)
        self.absent = absent


class TargetList:
    """The targets of a configuration. The constructor raises ConfigError if an entry is bad.

    The caller must poll the URLs of HTTP service discoveries, and call `replace_targets` with their answers.
    """

    def __init__(self, entries: Sequence[str]) -> None:
        self._fixed: list[TargetSpec] = []
        self._watched: list[_WatchedFiles] = []
        self._received: dict[str, list[TargetSpec]] = {}
        self._refused: dict[str, str] = {}  # URL -> why what it says is not taken
        for entry in entries:
            kind, colon, rest = entry.partition(":")
            if entry.startswith((_FILE, _FILE_SD)):
                if not Path(rest).name:
                    raise ConfigError(f"scrape target {entry!r}: expected a file, such as {kind}:targets.json")
                self._watched.append(_WatchedFiles(Path(rest), f"{kind}{colon}" == _FILE_SD))
            elif entry.startswith(_HTTP_SD):
                parse_target(rest)
                self._received[rest] = []
            else:
                self._fixed.append(parse_target(entry))

    @property
    def has_changing_lists(self) -> bool:
        return bool(self._watched or self._received)

    @property
    def queried_urls(self) -> tuple[str, ...]:
        return tuple(self._received)

    def replace_targets(self, url: str, targets: list[TargetSpec]) -> None:
        """Replace the targets of the service at `url`."""
        self._received[url] = targets
        self._refused.pop(url, None)

    def refuse_answer(self, url: str, why: str) -> bool:
        """Record that a service's answer is refused, and return whether the reason is new.

        The targets of its previous answer remain.
        """
        news = self._refused.get(url) != why
        self._refused[url] = why
        return news

    def list_refusals(self) -> dict[str, str]:
        """Return file or URL → the reason why its list is refused. The last good list remains in use."""
        files = {str(path): why for watched in self._watched for path, why in watched.refused.items()}
        return {**files, **self._refused}

    def read_targets(self) -> dict[str, TargetSpec]:
        """Return URL → target for all current targets."""
        files = (target for watched in self._watched for target in watched.read_targets())
        received = (target for targets in self._received.values() for target in targets)
        return {target.url: target for target in (*self._fixed, *files, *received)}


def _read_change_time(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def _read_target_file(path: Path) -> list[TargetSpec]:
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
