"""XID codes: what they mean for the node. Sources: NVIDIA's XID catalogue and the fleets that published theirs.

Application errors (13, 31, 43, 45, ...) speak of the program, not of the hardware: they are no signal.
"""

HARD = {
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
SOFT = {
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
PART = frozenset({64, 74, 140, 149})  # a part to replace, not a reset, is the usual cure


def meaning(code: int) -> str:
    """A few words for a code, empty when it is not in the tables."""
    return HARD.get(code) or SOFT.get(code) or ""
