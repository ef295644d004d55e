"""A reader of target groups of Prometheus' file and HTTP service discovery, in JSON or YAML.

    [{"targets": ["10.0.0.7:9400"], "labels": {"__metrics_path__": "/metrics", "node": "n007"}}]

`__scheme__`, `__metrics_path__` and `__param_NAME` shape the URL. `node` overrides the node on the page.
Bad entries are skipped.
"""

import logging
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlencode

import msgspec

from fleetcast.fleet.decode_faults import explain_decode_error
from fleetcast.fleet.errors import ConfigError
from fleetcast.fleet.yaml_text import read_yaml
from fleetcast.ingest.pages.target_spec import TargetSpec, parse_target

logger = logging.getLogger(__name__)

DEEPEST = 10  # levels of YAML
LOGGED = 10  # bad entries a list, by name
_PARAMETER = "__param_"


class Group(msgspec.Struct):
    """One group of targets with common labels. Unknown keys are ignored."""

    targets: list[str]
    labels: dict[str, str] = {}


_decode = msgspec.json.Decoder(list[msgspec.Raw]).decode
_group = msgspec.json.Decoder(Group, strict=False).decode


def read_groups(data: bytes, origin: str) -> list[TargetSpec]:
    """Read the targets of a list of groups. Raises ConfigError if the data is not such a list.

    `origin` names the list in log lines.
    """
    try:
        data.decode("utf-8")
    except UnicodeDecodeError as invalid:
        byte = f"byte {invalid.start} (0x{data[invalid.start]:02x})"
        raise ConfigError(f"{origin}: {byte} is not UTF-8, expected a list of target groups in UTF-8") from None
    found = [one for group in _decode_groups(data, origin) for one in _parse_group(group)]
    bad = [one for one in found if isinstance(one, ConfigError)]
    for error in bad[:LOGGED]:
        logger.warning("%s: skipping an entry: %s", origin, error)
    if len(bad) > LOGGED:
        logger.warning("%s: skipping %d entries more", origin, len(bad) - LOGGED)
    return [spec for spec in found if isinstance(spec, TargetSpec)]


def _decode_groups(data: bytes, origin: str) -> Iterator[Group | ConfigError]:
    try:
        rows = _decode(data)
    except (msgspec.MsgspecError, RecursionError):
        rows = [msgspec.Raw(msgspec.json.encode(row)) for row in _read_yaml_list(data, origin)]
    for row in rows:
        try:
            yield _group(row)
        except (msgspec.MsgspecError, RecursionError) as error:
            yield ConfigError(f"{bytes(row)[:80]!r}: {explain_decode_error(error, _group, row)}")


def _read_yaml_list(data: bytes, origin: str) -> list[Any]:
    """Read a YAML list. Raises ConfigError if the data is not a list, or if its origin requires JSON."""
    if origin.endswith(".json") or origin.startswith(("http://", "https://")):
        raise ConfigError(f"{origin}: expected a JSON list of target groups")
    try:
        rows = read_yaml(data)
    except ValueError as error:
        raise ConfigError(f"{origin}: {error}") from None
    if not isinstance(rows, list):
        raise ConfigError(f"{origin}: expected a list of target groups")
    return rows


def _parse_group(group: Group | ConfigError) -> Iterator[TargetSpec | ConfigError]:
    if isinstance(group, ConfigError):
        yield group
        return
    for address in group.targets:
        try:
            yield _make_target(address.strip(), group.labels)
        except ConfigError as error:
            yield error


def _make_target(address: str, labels: dict[str, str]) -> TargetSpec:
    """Return the scrape target at an address, with the labels of its group. Raises ConfigError.

    >>> _make_target("n1:9400", {"__param_module": "gpu", "node": "gpu-1"})
    TargetSpec(url='http://n1:9400/metrics?module=gpu', node='gpu-1')
    """
    scheme, path = labels.get("__scheme__", "http"), labels.get("__metrics_path__", "/metrics")
    url = address if "://" in address else f"{scheme}://{address}{path if path.startswith('/') else f'/{path}'}"
    wanted = {key[len(_PARAMETER) :]: value for key, value in labels.items() if key.startswith(_PARAMETER)}
    if wanted:
        url += ("&" if "?" in url else "?") + urlencode(wanted)
    if " " in address:
        raise ConfigError(f"target {address[:80]!r}: expected host:port")
    return parse_target(f"{url} {labels.get('node', '')}".strip())
