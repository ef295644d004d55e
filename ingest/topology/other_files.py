"""Say what a file is that no reader of topologies takes, and what would be read instead."""

import re

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


def what_it_is(text: str) -> str:
    """Return a sentence about a file of a known kind that is not read, or "" for an unknown one.

    >>> what_it_is("CA \'mlx5_0\'\\n\\tCA type: MT4129\\n")
    "it looks like `ibstat`, which is not read; missing is the fabric: `ibnetdiscover`"
    """
    head = text[:8192]
    for sign, name, missing in _SIGNS:
        if re.search(sign, head, re.MULTILINE | re.IGNORECASE):
            return f"it looks like {name}, which is not read; missing is {missing}"
    return ""
