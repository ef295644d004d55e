"""XID codes: their meaning for a node, and NVIDIA's advice.

Sources: NVIDIA's XID catalogue (the first action of each code), its decoding of NVLink codes, and
published fleet studies. The catalogue's actions are for one GPU. The tables HARD and SOFT decide when a
node leaves service.
"""

from typing import Final

from fleetcast.fleet.events import NodeEvent

HARD: Final = {
    48: "double-bit ECC error",
    64: "row remapping failed",
    74: "NVLink error",
    79: "GPU has fallen off the bus",
    94: "contained memory error",
    95: "uncontained memory error",
    119: "GSP does not answer",
    120: "GSP error",
    140: "unrecovered ECC error",
    149: "NVLink fatal error",
    154: "GPU needs recovery",
}
SOFT: Final = {
    61: "microcontroller breakpoint",
    62: "microcontroller halt",
    63: "row remapping recorded",
    92: "many single-bit ECC errors",
    110: "security fault",
    121: "C2C link error",
    136: "link training failed",
    145: "NVLink error",
    150: "NVLink error",
    156: "resource retired",
    158: "GPU timeout",
}
APPLICATION: Final = {  # the program is to blame: no signal
    8: "GPU stopped processing",
    13: "graphics engine exception",
    31: "GPU memory page fault",
    43: "GPU stopped processing",
    45: "channel cleaned up after an earlier error",
    69: "graphics engine class error",
}
OTHER: Final = {
    46: "GPU timeout",
    54: "auxiliary power is not connected",
    78: "vGPU does not start",
    109: "context switch timeout",
    143: "GPU initialisation error",
    144: "NVLink error",
    146: "NVLink error",
    147: "NVLink error",
    148: "NVLink error",
    155: "NVLink error",
    157: "resource retirement failed",
    167: "PCIe fatal timeout",
    171: "uncorrectable DRAM error",
    172: "uncorrectable SRAM error",
}
PART: Final = frozenset({64, 74, 140, 149})  # a part to replace, not a reset, is the usual cure
BUS: Final = 79  # the code of a GPU that has fallen off the bus, with or without a number in the log

WORDS: Final = OTHER | APPLICATION | SOFT | HARD

# The catalogue's action for a code → what to do, in words.
ACTIONS: Final = {
    "RESTART_APP": "restart the application",
    "RESET_GPU": "reset the GPU",
    "RESTART_BM": "restart the node",
    "RESTART_VM": "restart the virtual machine",
    "IGNORE": "nothing to do",
    "CONTACT_SUPPORT": "contact support",
    "CHECK_MECHANICALS": "check that the board and its power cables are seated",
    "UPDATE_SWFW": "update driver and firmware",
    "DOUBLE_BIT": "reset the GPU; with XID 63 or 64 drain the node first",
    "CLEANUP": "follow the XID before it; alone, restart the fabric manager",
    "NVLINK": "check the link's seating, then run field diagnostics",
    "NVLINK_FATAL": "reset the GPU",
    "RECOVERY": "do what the message says",
    "UVM": "reset the GPU where unified memory is used",
}
_CODES: Final = {
    "RESTART_APP": (
        *(8, 11, 13, 25, 31, 32, *range(39, 42), 60, *range(68, 73), 75, 76, 77, 80, *range(82, 87), 88, 89, 94),
        *(*range(96, 106), *range(126, 136), 139),
    ),
    "RESET_GPU": (46, 62, 64, 95, 109, 110, 119, 120, 136, 140, 143, 155, 156, 158),
    "RESTART_BM": (79,),
    "RESTART_VM": (151,),
    "IGNORE": (14, 37, 38, 43, 44, 63, 66, 67, 92, 93, 106, 107, 108, 121, 137, 141, 152, 153, 157, 160, 161),
    "CONTACT_SUPPORT": (61, 142),
    "CHECK_MECHANICALS": (54,),
    "UPDATE_SWFW": (78,),
    "DOUBLE_BIT": (48,),
    "CLEANUP": (45,),
    "NVLINK": (74,),
    "NVLINK_FATAL": (144, 145, 146, 147, 148, 149, 150),
    "RECOVERY": (154,),
    "UVM": (159,),
}
ACTION_OF: Final = {code: action for action, codes in _CODES.items() for code in codes}


def describe_code(code: int) -> str:
    """Return the meaning of a code in a few words, or "" if the tables lack it."""
    return WORDS.get(code, "")


def find_advice(code: int) -> str:
    """Return NVIDIA's immediate action for a code in words, or "" if the catalogue names none.

    >>> find_advice(79), find_advice(9)
    ('restart the node', '')
    """
    return ACTIONS.get(ACTION_OF.get(code, ""), "")


def classify_severity(event: NodeEvent) -> str:
    """Return "fatal", "warning" or "ok" for an XID or health event.

    Returns "" for an application's error and for any other event.

    >>> classify_severity(NodeEvent(node="n1", source="s", sequence=1, time_ms=1, type="xid", code=79))
    'fatal'
    """
    if event.type == "health":
        return event.severity or "warning"
    if event.type != "xid" or not str(event.code).isdecimal():
        return ""
    if event.severity is not None:
        return event.severity
    code = int(str(event.code))
    return "fatal" if code in HARD else "warning" if code in SOFT else ""
