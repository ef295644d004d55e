"""The specification of a scrape target: the URL of an exporter's page, and the page's node."""

from dataclasses import dataclass
from urllib.parse import urlsplit

from fleetcast.fleet.errors import ConfigError
from fleetcast.ingest.node_names import check_name


@dataclass(frozen=True, slots=True)
class TargetSpec:
    """The URL of an exporter's page. `node` is empty unless the configuration names it."""

    url: str
    node: str = ""

    @property
    def host(self) -> str:
        """The host of the URL, which names the node if nothing else does."""
        return urlsplit(self.url).hostname or self.url

    @property
    def address(self) -> str:
        """The host:port, as in Prometheus' label `instance`."""
        parts = urlsplit(self.url)
        return parts.netloc.rpartition("@")[2] or self.url


def parse_target(text: str) -> TargetSpec:
    """Parse a target of the form "URL [node]". Raises ConfigError that quotes the text.

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
