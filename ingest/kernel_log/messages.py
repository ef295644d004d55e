"""A parser of driver messages in the kernel log. Messages outside a closed list are ignored.

NVIDIA: XIDs and SXids, GPUs off the bus (XID 79 even if the message has no number), driver and NVLink
failures. AMD: resets and uncorrectable RAS errors. Network cards: power, cable, link, health. The PCIe bus:
uncorrected errors, lost cards.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Literal

from fleetcast.fleet.devices import normalise_device_name
from fleetcast.fleet.xids import BUS

Severity = Literal["ok", "warning", "fatal"]
NVLINK_CODES: Final = range(144, 151)  # their lines say whether they are fatal
RECOVERY: Final = 154
MAX_CODE: Final = 100_000

# Every line that `MessageReader` knows has one of these.
TELLING: Final = re.compile(rb"NVRM|nvidia|mlx5|amdgpu|AER: |PCIe Bus Error|pciehp")

_ADDRESS = r"([0-9a-fA-F]{4,8}:[0-9a-fA-F]{2}:[0-9a-fA-F]{2}(?:\.[0-7])?)"
_xid = re.compile(r"NVRM:.{0,40}? Xid \((?:PCI:)?([0-9a-fA-F:.]{5,16})[^)]{0,40}\): (\d{1,9})(?:, ?(.*))?")
_sxid = re.compile(r"nvidia-nvswitch(\d{1,3}): SXid \((?:PCI:)?[0-9a-fA-F:.]{5,16}\): (\d{1,9}),? ?(.*)")
_adapter = re.compile(rf"NVRM: GPU (?:at )?(?:PCI:)?{_ADDRESS}: ?(RmInitAdapter failed!.*)")
_nvlink = re.compile(r"NVRM: knvlink\w{1,80}: .*[Ff]ailed")
_card = re.compile(rf"mlx5_core {_ADDRESS}")
_power = re.compile(r"mlx5.*[Dd]etected insufficient power on the PCIe slot")
_cable = re.compile(r"mlx5.*Port module event\[error\]: (.*)")
_down = re.compile(r"mlx5_core.*\b[Ll]ink down\b")
_up = re.compile(r"mlx5_core.*\b[Ll]ink up\b")
_card_health = re.compile(
    r"mlx5.*(?:health compromised|handling bad device|[Ff]irmware internal error|Fatal error \d+ detected)"
)
_bus_error = re.compile(rf"{_ADDRESS}: PCIe Bus Error: severity=(.*)")
_aer = re.compile(
    rf"AER: .*Uncorrect(?:ed|able) \((Fatal|Non-Fatal)\) error.*?(?:received|from):? (?:from )?{_ADDRESS}"
)
_hotplug = re.compile(rf"{_ADDRESS}.*pciehp: Slot\([^)]{{1,20}}\): (?:Link Down|Card not present)")
_amdgpu = rf"amdgpu {_ADDRESS}: .{{0,80}}?"
_ras = re.compile(
    rf"{_amdgpu}(?:\b[1-9]\d{{0,18}} (?:new )?uncorrectable hardware errors detected in (?:total in )?"
    r"(\w{1,40}) block|uncorrectable hardware error ?\((\w{1,40})\) detected)"
)
_reset = re.compile(
    rf"{_amdgpu}GPU (?:(reset begin)|(reset(?:\(\d{{1,9}}\))? succeeded)|(?:reset\(\d{{1,9}}\)|[Rr]ecovery) [Ff]ailed)"
)
_named = re.compile(rf"NVRM: (?:The NVIDIA )?GPU (?:at )?(?:PCI:)?{_ADDRESS}")
_grave = re.compile(r"\b(Fatal|Nonfatal|Non-fatal)\b")
_recovery = re.compile(r"changed from .*? to 0x[0-9a-fA-F]+ \(([^)]*)\)")


@dataclass(frozen=True, slots=True)
class KernelFinding:
    """A fact about the hardware that a kernel message reports.

    If `severity` is None, the XID code decides it.
    """

    type: Literal["xid", "health"]
    message: str
    code: int | None = None
    check: str = ""
    severity: Severity | None = None
    device: str = ""
    advice: str = ""


class MessageReader:
    """A reader of one node's kernel messages, in order.

    It remembers the last named GPU, because "fallen off the bus" may follow two lines after the GPU's address.
    """

    def __init__(self) -> None:
        self._named = ""

    def read(self, text: str) -> KernelFinding | None:
        """Return the finding in a message, or None if it says nothing about the hardware."""
        if "NVRM" in text:
            return self._parse_driver_line(text)
        for pattern, read in _OTHERS:
            found = pattern.search(text)
            if found is not None:
                return read(found, text)
        return None

    def _parse_driver_line(self, text: str) -> KernelFinding | None:
        found = _xid.search(text) if " Xid (" in text else None
        if found is not None:
            return _parse_xid(found, text)
        named = _named.search(text)
        if named is not None:
            self._named = named[1]
        if "fallen off the bus" in text:
            device, self._named = self._named, ""
            return KernelFinding("xid", text, BUS, device=normalise_device_name(device))
        found = _adapter.search(text)
        if found is not None:
            advice = "restart the node"
            return KernelFinding("health", text, None, "GPU driver", "fatal", normalise_device_name(found[1]), advice)
        if "knvlink" in text and _nvlink.search(text) is not None:
            return KernelFinding("health", text, None, "NVLink", "warning")
        return None


def _parse_xid(found: re.Match[str], text: str) -> KernelFinding | None:
    code, message = int(found[2]), found[3] or ""
    if code > MAX_CODE:
        return None
    severity, advice = _parse_severity(code, message)
    return KernelFinding("xid", text, code, severity=severity, device=normalise_device_name(found[1]), advice=advice)


def _parse_severity(code: int, message: str) -> tuple[Severity | None, str]:
    """Return the severity and advice that an XID message itself states, or (None, "") if it states none."""
    if code == RECOVERY:
        action = _recovery.search(message)
        if action is None:
            return None, ""
        return ("ok", "") if action[1] == "None" else ("fatal", action[1].lower())
    grave = _grave.search(message) if code in NVLINK_CODES else None
    if grave is None:
        return None, ""
    return ("fatal" if grave[1] == "Fatal" else "warning"), ""


def _parse_sxid(found: re.Match[str], text: str) -> KernelFinding | None:
    """Return the finding of an NVSwitch error (SXid). Returns None for a register line that follows such an error."""
    switch, code, message = found.groups()
    if int(code) > MAX_CODE or message.startswith(("Data {", "Severity ")):
        return None
    grave = _grave.search(message)
    fatal = grave is not None and grave[1] == "Fatal"
    advice = "reset the GPUs and NVSwitches, or restart the node" if fatal else ""
    severity: Severity = "fatal" if fatal else "warning"
    return KernelFinding("health", text, int(code), f"SXid {code}", severity, f"nvswitch{switch}", advice)


def _parse_bus_error(found: re.Match[str], text: str) -> KernelFinding | None:
    """Return the finding of an uncorrected PCIe error, or None for a corrected one.

    Corrected errors are normal on a link. DCGM counts them as replays.
    """
    address, message = found.groups()
    if not message.startswith("Uncorrect"):
        return None
    severity: Severity = "fatal" if "(Fatal)" in message else "warning"
    return KernelFinding("health", text, None, "PCIe", severity, normalise_device_name(address))


def _parse_aer(found: re.Match[str], text: str) -> KernelFinding:
    severity: Severity = "fatal" if found[1] == "Fatal" else "warning"
    return KernelFinding("health", text, None, "PCIe", severity, normalise_device_name(found[2]))


def _make_card_parser(check: str, severity: Severity) -> "Callable[[re.Match[str], str], KernelFinding]":
    def read(found: re.Match[str], text: str) -> KernelFinding:
        card = _card.search(text)
        return KernelFinding("health", text, None, check, severity, normalise_device_name(card[1]) if card else "")

    return read


def _parse_slot_loss(found: re.Match[str], text: str) -> KernelFinding:
    return KernelFinding("health", text, None, "PCIe slot", "warning", normalise_device_name(found[1]))


def _parse_ras(found: re.Match[str], text: str) -> KernelFinding:
    return KernelFinding("health", text, None, f"RAS {found[2] or found[3]}", "fatal", normalise_device_name(found[1]))


def _parse_reset(found: re.Match[str], text: str) -> KernelFinding:
    severity: Severity = "warning" if found[2] else "ok" if found[3] else "fatal"
    return KernelFinding("health", text, None, "GPU reset", severity, normalise_device_name(found[1]))


_OTHERS: tuple[tuple[re.Pattern[str], Callable[[re.Match[str], str], KernelFinding | None]], ...] = (
    (_sxid, _parse_sxid),
    (_power, _make_card_parser("NIC power", "warning")),
    (_cable, _make_card_parser("NIC cable", "warning")),
    (_card_health, _make_card_parser("NIC health", "fatal")),
    (_down, _make_card_parser("NIC link", "warning")),
    (_up, _make_card_parser("NIC link", "ok")),
    (_bus_error, _parse_bus_error),
    (_aer, _parse_aer),
    (_hotplug, _parse_slot_loss),
    (_ras, _parse_ras),
    (_reset, _parse_reset),
)
