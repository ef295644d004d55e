"""The rule for names of nodes, which applies to every input.

A name becomes a word of Slurm's commands, a line of files, a label, a part of a URL and a part of
other names. So only characters that occur in real names are allowed: host names (RFC 1123), names in Slurm
and Kubernetes, full domain names, addresses with a port (`10.0.0.1:9400`) and IPv6 (`2001:db8::1`,
`fe80::1%eth0`).
"""

import re
from functools import lru_cache

from fleetcast.fleet.entities import MAX_NAME_LENGTH

ALLOWED = (
    f"1 to {MAX_NAME_LENGTH} ASCII letters, digits, '-', '_', '.', ':' and '%' with at least one letter or digit, "
    "neither '-' nor '.' first, no slash, no space"
)
_NODE = re.compile(r"(?![-.])[-.:%_]*[A-Za-z0-9][-A-Za-z0-9_.:%]*")


def is_node_name(text: str) -> bool:
    """Return whether a node can have this name.

    >>> [is_node_name(name) for name in ("n001", "gpu_7.site-a.example", "10.0.0.1:9400", "::1", "n 1", "n[1-4]", "..")]
    [True, True, True, True, False, False, False]
    """
    return len(text) <= MAX_NAME_LENGTH and _is_well_formed(text)


@lru_cache(maxsize=16_384)
def _is_well_formed(text: str) -> bool:
    """Return whether a name has the form of a node name.

    The answers are cached, because events repeat the names of nodes.
    """
    return _NODE.fullmatch(text) is not None


def explain_node_name_fault(text: str) -> str:
    """Explain why a node cannot have this name. Returns "" if it can."""
    if is_node_name(text):
        return ""
    shown = repr(text) if len(text) <= 80 else f"{text[:80]!r}… ({len(text):,} characters)"
    return f"{shown} is no name of a node: {ALLOWED}"
