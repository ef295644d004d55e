"""One target: the URL of an exporter's page, and the node that it belongs to."""

from dataclasses import dataclass
from urllib.parse import urlsplit

from fleet.errors import ConfigError
from ingest.node_names import check_name


@dataclass(frozen=True, slots=True)
class TargetSpec:
    """`node` is empty unless the configuration names it."""

    url: str
    node: str = ""

    @property
    def host(self) -> str:
        """The node's name when nothing else names it."""
        return urlsplit(self.url).hostname or self.url

    @property
    def address(self) -> str:
        """host:port, as Prometheus' label `instance` has it."""
        parts = urlsplit(self.url)
        return parts.netloc.rpartition("@")[2] or self.url


def parse_target(text: str) -> TargetSpec:
    """Parse a target. Raises ConfigError that quotes the text.

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
