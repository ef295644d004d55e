"""A parser of Slurm's generic resources in GRES and TRES lists: GPUs, MIG instances and parts of GPUs.

    gpu:h100:4(IDX:0-1,6-7)                 GRES of a node that a job holds, with numbers of the GPUs
    cpu=2,gres/gpu=16,gres/gpu:a100=16      TRES of all nodes; a typed count repeats the plain one
    gpu:a100_3g.20gb:2(IDX:9-10)            MIG instances; the numbers count instances, so they name no GPU
    shard:h100:4(4/8,0/8)                   4 of the 8 shards of the first GPU, none of the second

Parts of GPUs are `shard` and `mps`. Any text is accepted. A text that names no GPU gives an empty result.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

from fleetcast.fleet.entities import MAX_NAME_LENGTH
from fleetcast.fleet.mig import SLICES, parse_mig_profile
from fleetcast.fleet.requests import WHOLE_GPU
from fleetcast.ingest.slurm.numbers import expand_numbers

MAX_GPUS = 1024
MPS_OF_A_GPU = 100  # gres/mps counts percents of a GPU where the node does not say otherwise
_GRES = re.compile(
    r"(?:^|[,:])(?:gres[:/])?(gpu|shard|mps)((?:[:=](?:\(null\)|[^,:=()]{1,64}))*)(?:\(([^()]*)\))?(?=,|$)"
)
_COUNT = re.compile(r"([0-9]{1,9})([KMG]?)")
_SCALE = {"": 1, "K": 1024, "M": 1024**2, "G": 1024**3}
_PART = re.compile(r"([0-9]{1,9})/([0-9]{1,9})")
_MIG = re.compile(r"(?:^|[-_.:])((?:[0-9]c\.)?[0-9]g\.[0-9]+gb(?:[.+_][a-z]+)*)", re.IGNORECASE)


class HeldShards(NamedTuple):
    """The number of shards of one GPU that a job holds, and of all shards that the GPU has."""

    gpu: int
    held: int
    size: int


@dataclass(frozen=True, slots=True)
class Gres:
    """The GPUs and parts of GPUs in one list.

    milli: the size of all `gpus` in thousandths of a GPU, smaller for MIG instances. indices: the numbers of the
    GPUs, empty if the list has none or counts MIG instances. shares: the number of parts of the kind `unit`
    (shard or mps). parts: the shards of each GPU, if the list names the GPUs.
    """

    gpus: int = 0
    kind: str = ""
    indices: tuple[int, ...] = ()
    milli: int = 0
    has_mig: bool = False
    shares: int = 0
    unit: str = ""
    parts: tuple[HeldShards, ...] = ()


NO_GRES = Gres()


def read_gres(text: str) -> Gres:
    """Parse a GRES or TRES list, of one node or of all nodes.

    >>> read_gres("gpu:h100:4(IDX:0-1,6-7)").indices, read_gres("gpu:(null):2(IDX:0-1)").gpus
    ((0, 1, 6, 7), 2)
    >>> found = read_gres("cpu=2,gres/gpu=2,gres/gpu:a100_3g.20gb=2")
    >>> found.gpus, found.kind, found.milli
    (2, 'a100_3g.20gb', 858)
    >>> read_gres("shard:h100:4(4/8,0/8)").parts
    (HeldShards(gpu=0, held=4, size=8),)
    """
    return _read_again(text) if len(text) < 256 else _parse_gres(text)


def _parse_gres(text: str) -> Gres:
    plain = typed = milli = shares = 0
    kind = unit = ""
    has_mig = False
    held: list[int] = []
    parts: list[HeldShards] = []
    for name, words, details in _GRES.findall(text[:10_000]) if _may_hold_gpus(text) else ():
        stated = [part for part in re.split("[:=]", words) if part and part != "(null)"]
        count = _parse_amount(stated.pop()) if stated and _COUNT.fullmatch(stated[-1]) else 1
        if name != "gpu":
            shares, unit = max(shares, count), name
            parts += (HeldShards(gpu, int(row[1]), int(row[2])) for gpu, row in enumerate(_PART.finditer(details)))
            continue
        if stated:
            profile = parse_mig_profile(find_mig_profile(stated[0]))
            has_mig = has_mig or profile is not None
            if not kind or (
                strip_mig_profile(stated[0]) and not strip_mig_profile(kind)
            ):  # a profile alone names no model
                kind = stated[0]
            typed += count
            milli += count * (round(WHOLE_GPU * profile.slices / SLICES) if profile else WHOLE_GPU)
        else:
            plain += count
        if details.startswith("IDX:"):
            held += parse_indices(details[4:])
    total = max(typed, plain)
    return Gres(
        gpus=total,
        kind=kind[:MAX_NAME_LENGTH],
        indices=() if has_mig else tuple(dict.fromkeys(held)),
        milli=milli + (total - typed) * WHOLE_GPU,
        has_mig=has_mig,
        shares=shares,
        unit=unit,
        parts=tuple(part for part in parts if 0 < part.held <= part.size),
    )


_read_again = lru_cache(16_384)(_parse_gres)  # polls repeat themselves, and half of a poll's time would go here


def _may_hold_gpus(text: str) -> bool:
    return "gpu" in text or "shard" in text or "mps" in text


def _parse_amount(text: str) -> int:
    found = _COUNT.fullmatch(text)
    return int(found[1]) * _SCALE[found[2]] if found else 0


def parse_indices(text: str) -> list[int]:
    """Parse a list of GPU indices. Returns [] if the text is not a list of indices, or an index is too large.

    >>> parse_indices("0-3,7"), parse_indices("N/A")
    ([0, 1, 2, 3, 7], [])
    """
    found = expand_numbers(text, MAX_GPUS)
    return found if found and max(found) < MAX_GPUS else []


def find_mig_profile(kind: str) -> str:
    """Return the MIG profile in the name of a GRES type, or "" for other types.

    >>> [find_mig_profile(kind) for kind in ("a100_3g.20gb", "1g.5gb", "nvidia_h100_80gb_hbm3_1g.10gb", "h100")]
    ['3g.20gb', '1g.5gb', '1g.10gb', '']
    """
    found = _MIG.search(kind)
    return found[1].lower().replace("_", "+") if found else ""


def strip_mig_profile(kind: str) -> str:
    """Return a GRES type without its MIG profile.

    >>> strip_mig_profile("a100_3g.20gb"), strip_mig_profile("1g.5gb"), strip_mig_profile("h100")
    ('a100', '', 'h100')
    """
    found = _MIG.search(kind)
    return kind[: found.start()] if found else kind


def make_resource_fields(
    had: str = "",
    asked: str = "",
    *,
    per_node: str = "",
    per_job: str = "",
    per_task: str = "",
    tasks: int | None = None,
    details: Sequence[str] = (),
) -> dict[str, Any]:
    """Return the fields of a `SlurmJob` for the GPUs that it holds or requests.

    had, asked: TRES of all nodes. per_node, per_job, per_task: the requests of `--gpus-per-node`, `--gpus`,
    `--gpus-per-task` and similar options. details: the GRES that it holds, one text for each node. Held GPUs
    take precedence over requested ones.
    """
    rows = [read_gres(text) for text in details]
    stated = [read_gres(text) for text in (had, asked, per_job)]
    each_task, each_node = read_gres(per_task), read_gres(per_node)
    times = max(1, tasks or 1)
    total = stated[0] if stated[0].gpus else max(stated, key=lambda found: found.gpus)
    shared = next((found for found in (*rows, *stated, each_node, each_task) if found.shares), NO_GRES)
    held = sum(row.gpus for row in rows)
    return {
        "gpus": total.gpus or each_task.gpus * times,
        "gpus_per_node": each_node.gpus,
        "milli": sum(row.milli for row in rows) if held else total.milli or each_node.milli or each_task.milli,
        "of_gpus": held or total.gpus or each_node.gpus or each_task.gpus,
        "gpu_kind": next((found.kind for found in (*rows, total, each_node, each_task) if found.kind), ""),
        "indices": tuple(row.indices for row in rows),
        "shares": max((found.shares for found in stated), default=0) or each_task.shares * times,
        "shares_per_node": each_node.shares,
        "unit": shared.unit,
        "parts": tuple(row.parts for row in rows),
    }
