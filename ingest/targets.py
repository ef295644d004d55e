"""Which exporters to scrape: URLs, and files that list them and are read again when they change.

http://n001:9400/metrics          the node is what the page says, else the host
http://10.0.0.7:9400 n001         the second word names the node, whatever the page says
file:targets.txt                  one such line each; '#' begins a comment
file_sd:targets/*.json            Prometheus' target groups, in JSON or YAML (see ingest.target_groups)
http_sd:http://inventory/gpus     the same in JSON, asked for now and then
"""

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

from fleet.errors import ConfigError
from ingest.node_names import check_name

logger = logging.getLogger(__name__)

_FILE, _FILE_SD, _HTTP_SD = "file:", "file_sd:", "http_sd:"


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
class _Watched:
    """Files of one entry: a path, or for groups a pattern such as targets/*.json. `files`: (when changed, targets).

    refused: file -> why its list is not taken, and the one of before stays.
    """

    path: Path
    groups: bool
    files: dict[Path, tuple[float, list[TargetSpec]]] = field(default_factory=dict)
    refused: dict[Path, str] = field(default_factory=dict)
    absent: bool = False  # and it is told

    def read(self) -> Iterator[TargetSpec]:
        """Targets as of now; a file that did not change is not read again, one of groups that is broken not taken."""
        paths = sorted(self.path.parent.glob(self.path.name)) if self.groups else [self.path]
        self._tell_absent(not any(path.exists() for path in paths))
        self.files = {path: self.files.get(path, (0.0, [])) for path in paths}
        self.refused = {path: why for path, why in self.refused.items() if path in self.files}
        for path, (seen, targets) in self.files.items():
            changed = _changed(path)
            if changed != seen:
                targets = self._read_groups(path, targets) if self.groups else _read_file(path)
                self.files[path] = (changed, targets)
            yield from targets

    def _read_groups(self, path: Path, last: list[TargetSpec]) -> list[TargetSpec]:
        from ingest.target_groups import read_groups

        try:
            targets = read_groups(path.read_bytes(), str(path))
        except (OSError, ConfigError) as error:
            logger.warning("cannot read targets from %s: %s, going on with the %d of before", path, error, len(last))
            self.refused[path] = str(error)
            return last
        self.refused.pop(path, None)
        return targets

    def _tell_absent(self, absent: bool) -> None:
        if absent and not self.absent:
            logger.warning("no targets from %s: there is no such file, looking for it", self.path)
        self.absent = absent


class TargetList:
    """The targets of a configuration. Raises ConfigError on a bad entry; a bad line of a file is logged and skipped.

    `asked`: the URLs of HTTP service discovery; somebody else gets what they say, and tells it by `learn`.
    """

    def __init__(self, entries: Sequence[str]) -> None:
        self._fixed: list[TargetSpec] = []
        self._watched: list[_Watched] = []
        self._told: dict[str, list[TargetSpec]] = {}
        self._refused: dict[str, str] = {}  # URL -> why what it says is not taken
        for entry in entries:
            kind, colon, rest = entry.partition(":")
            if entry.startswith((_FILE, _FILE_SD)):
                if not Path(rest).name:
                    raise ConfigError(f"scrape target {entry!r}: expected a file, such as {kind}:targets.json")
                self._watched.append(_Watched(Path(rest), f"{kind}{colon}" == _FILE_SD))
            elif entry.startswith(_HTTP_SD):
                parse_target(rest)
                self._told[rest] = []
            else:
                self._fixed.append(parse_target(entry))

    @property
    def watched(self) -> bool:
        return bool(self._watched or self._told)

    @property
    def asked(self) -> tuple[str, ...]:
        return tuple(self._told)

    def learn(self, url: str, targets: list[TargetSpec]) -> None:
        """What the service at `url` says now."""
        self._told[url] = targets
        self._refused.pop(url, None)

    def refuse(self, url: str, why: str) -> bool:
        """What the service says cannot be taken: what it said before stays. Whether that is news."""
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
        told = (target for targets in self._told.values() for target in targets)
        return {target.url: target for target in (*self._fixed, *files, *told)}


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
