"""GPU model names: one short name for what NVML, dcgm-exporter and node labels spell differently."""

import re
from functools import lru_cache

_VENDOR = re.compile(r"^(NVIDIA|Tesla|GRID)[ -]+", re.IGNORECASE)
_FAMILIES = ("RTX", "GeForce", "Quadro", "TITAN")


@lru_cache(256)
def short_model(name: str) -> str:
    """The model without vendor, memory size and form factor; families of workstation cards keep their full name.

    >>> short_model("NVIDIA H100 80GB HBM3"), short_model("NVIDIA-A100-SXM4-40GB"), short_model("Tesla T4")
    ('H100', 'A100', 'T4')
    >>> short_model("NVIDIA RTX 4000 Ada Generation")
    'RTX 4000 Ada Generation'
    """
    text = name.strip()
    while (bare := _VENDOR.sub("", text)) != text:
        text = bare
    if text.startswith(_FAMILIES):
        return text.replace("-", " ")
    return re.split(r"[ \-]", text, maxsplit=1)[0]
