"""Node risk bands as a file: one `node band` pair a line, replaced atomically when a band changes. Needs no HTTP."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from fleet import files
from fleet.errors import ConfigError
from schedulers.bands import BandRule, Bands


class BandFile:
    """Adapter `band_file`; options: path (required), elevated, high, writes_per_minute."""

    def __init__(self, options: Mapping[str, str | int | float | bool]) -> None:
        unknown = set(options) - {"path", "elevated", "high", "writes_per_minute"}
        if unknown or not isinstance(options.get("path"), str):
            raise ConfigError(
                f"adapter band_file: needs `path`, takes elevated, high, writes_per_minute; got {options}"
            )
        self.path = Path(str(options["path"]))
        rule = BandRule()
        self.bands = Bands(
            BandRule(
                elevated=float(options.get("elevated", rule.elevated)),
                high=float(options.get("high", rule.high)),
                writes_per_minute=int(options.get("writes_per_minute", rule.writes_per_minute)),
            )
        )

    def update(self, nodes: Sequence[str], risk: Sequence[float], now_ms: int) -> int:
        """Rewrite the file if a band changed; returns how many did."""
        changed = self.bands.update(nodes, risk, now_ms)
        if changed:
            text = "".join(f"{node} {band}\n" for node, band in sorted(self.bands.current.items()))
            files.replace_file(self.path, [text.encode()], "bands")
        return len(changed)
