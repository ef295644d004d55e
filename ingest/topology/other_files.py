"""Hints for files that are not a topology: the kind of the file, and the file that is needed instead."""

import re
from collections.abc import Mapping
from typing import Any

READ = (
    "our TOML, Slurm's topology.conf and topology.yaml, `kubectl get nodes -o json`, node labels, ibnetdiscover, NetQ, "
    "`nvidia-smi topo -m` and NCCL's XML"
)
_SIGNS: tuple[tuple[str, str, str], ...] = (
    (r"^[ \t]*+NodeName=\S+ ", "`scontrol show node` or slurm.conf", "switches: `scontrol show topology`"),
    (r"^(NODELIST|PARTITION)\b", "`sinfo`", "switches: `scontrol show topology`"),
    (r"^NAME\s+STATUS\s+ROLES\b", "`kubectl get nodes` as a table", "labels: add -o json"),
    (r"==\(\s*\d+X\s", "`iblinkinfo`", "the ports' GUIDs as `ibnetdiscover` prints them"),
    (r"^CA '\w+'", "`ibstat`", "the fabric: `ibnetdiscover`"),
    (r"^(Ca|Switch)\t: 0x", "`ibhosts` or `ibswitches`", "the links: `ibnetdiscover`"),
    (r"^\| NVIDIA-SMI ", "the table of `nvidia-smi`", "the matrix: `nvidia-smi topo -m`"),
    (r"^GPU \d+: .*\(UUID: ", "`nvidia-smi -L` or `nvidia-smi nvlink`", "the matrix: `nvidia-smi topo -m`"),
    (r"^=+NVSMI LOG=+", "`nvidia-smi -q`", "the matrix: `nvidia-smi topo -m`"),
    (r"ROCm System Management Interface", "`rocm-smi --showtopo`", "adapters, which it does not list"),
    (r"^[0-9a-f]{2,4}:[0-9a-f]{2}(:[0-9a-f]{2})?\.[0-7] ", "`lspci`", "the matrix: `nvidia-smi topo -m`"),
    (r"<!DOCTYPE topology|<topology[ >]", "hwloc's XML (lstopo)", "the matrix: `nvidia-smi topo -m`"),
    (r"^[ \t]*+<(!DOCTYPE )?html", "a page of HTML", "the file itself"),
    (r"^[ \t]*+<", "XML", "a root element `system`, as NCCL writes it"),
)


def describe_unread_file(text: str) -> str:
    r"""Return a sentence that says what a file is and what is needed instead, or "" for an unknown file.

    >>> describe_unread_file("CA 'mlx5_0'\n\tCA type: MT4129\n")
    'it looks like `ibstat`, which is not read; missing is the fabric: `ibnetdiscover`'
    """
    head = text[:8192]
    for sign, name, missing in _SIGNS:
        if re.search(sign, head, re.MULTILINE | re.IGNORECASE):
            return f"it looks like {name}, which is not read; missing is {missing}"
    return ""


_KEYS = {  # of a JSON document
    "nodes": ("Slurm's nodes as JSON", "switches: `scontrol show topology`"),
    "sinfo": ("`sinfo --json`", "switches: `scontrol show topology`"),
    "jobs": ("Slurm's jobs as JSON", "switches: `scontrol show topology`"),
    "blockdevices": ("`lsblk --json`", "the matrix: `nvidia-smi topo -m`"),
    "lscpu": ("`lscpu --json`", "the matrix: `nvidia-smi topo -m`"),
}
_MAGIC = {
    **{b"\x1f\x8b": "gzip: unpack it first", b"\x28\xb5\x2f\xfd": "Zstandard: unpack it first"},
    **{b"PK\x03\x04": "a ZIP archive: unpack it first", b"BZh": "bzip2: unpack it first"},
    **{b"\xff\xfe": "UTF-16: write it as UTF-8", b"\xfe\xff": "UTF-16: write it as UTF-8"},
}


def describe_unread_document(document: Mapping[str, Any]) -> str:
    """Return a sentence that says what a JSON or YAML document is and what is needed instead.

    Returns "" if the document may be a table of node labels, or is unknown.

    >>> describe_unread_document({"nodes": [], "errors": []})
    "it looks like Slurm's nodes as JSON, which is not read; missing is switches: `scontrol show topology`"
    """
    odd = next((key for key, value in document.items() if not isinstance(value, dict)), None)
    if odd is None:
        return ""
    for key, (name, missing) in _KEYS.items():
        if isinstance(document.get(key), list):
            return f"it looks like {name}, which is not read; missing is {missing}"
    return ""


def describe_bytes(content: bytes) -> str:
    """Return a sentence that names the likely format of bytes that are not UTF-8, and the remedy.

    >>> describe_bytes(bytes.fromhex("1f8b08")), describe_bytes(bytes.fromhex("6ee9"))
    ('it is gzip: unpack it first', 'it is no UTF-8: byte 1 is 0xe9')
    """
    for magic, what in _MAGIC.items():
        if content.startswith(magic):
            return f"it is {what}"
    try:
        content.decode("utf-8")
    except UnicodeDecodeError as error:
        return f"it is no UTF-8: byte {error.start} is 0x{content[error.start]:02x}"
    return ""
