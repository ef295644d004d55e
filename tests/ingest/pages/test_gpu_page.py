"""First pages of GPU exporters: `gpu_page` and the reading line by line give the same answers."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleetcast.fleet.entities import Entities
from fleetcast.fleet.samples import EntityKind
from fleetcast.ingest.pages import text
from fleetcast.ingest.pages.exporters import ExporterResolver
from fleetcast.ingest.pages.gpu_page import read_gpu_page
from fleetcast.ingest.pages.text import PageDecoder, Target
from fleetcast.ingest.source import Batch
from tests.fuzz.bounds import examples
from tests.ingest.exporter_pages import Desk, dcgm_page, labels, page

NAMES = (
    "DCGM_FI_DEV_POWER_USAGE",
    "DCGM_FI_DEV_GPU_TEMP",
    "DCGM_FI_DEV_GPU_UTIL",
    "DCGM_FI_DEV_GPU_UTIL_RATIO",  # the same series as the name before
    "DCGM_FI_PROF_SM_ACTIVE",
    "DCGM_FI_DEV_XID_ERRORS",
    "DCGM_FI_DEV_NO_SUCH_FIELD",
    "DCGM_EXP_XID_ERRORS_COUNT",
    "dcgm_fi_dev_fb_used",
)
# Labels beside those of every GPU. An empty value leaves the label out.
MORE_LABELS: Sequence[dict[str, str]] = (
    {},
    {"pod": "train-1-worker-0", "namespace": "ml"},
    {"hpc_job": "4711"},
    {"pod": "slurmd-7", "namespace": "slurm"},
    {"err_code": "31", "err_msg": "MMU } 5"},
    {"GPU_I_ID": "1", "GPU_I_PROFILE": "1g.10gb"},
    {"nvlink": "3"},
    {"UUID": ""},
    {"UUID": "GPU-aa-0"},
    {"UUID": "MIG-aa"},
    {"Hostname": ""},
    {"Hostname": "localhost"},
    {"Hostname": "n002"},
    {"Hostname": "a b"},
    {"modelName": "NVIDIA A100"},
    {"pci_bus_id": "00000000:0A:00.0"},
    {"gpu": "x"},
    {"gpu": ""},
)
VALUES = (
    "400.5",
    "97",
    "0",
    "1e2",
    "+7",
    "01",
    "9223372036854775794",
    "oops",
    "NaN",
    "1_0",
    "",
    "5 1795648400000",
    "7\r",
)
LINES = (
    "",
    " ",
    "# HELP DCGM_FI_DEV_GPU_TEMP Temperature.",
    "# EOF",
    "go_goroutines 9",
    "up",
    'node_uname_info{nodename="n007"} 1',
    'DCGM_FI_DEV_GPU_TEMP{gpu="0" 5',
    "DCGM_FI_DEV_GPU_TEMP{} 5",
    "DCGM_FI_DEV_GPU_TEMP 5",
    'DCGM_FI_DEV_GPU_TEMP{gpu="0",gpu="1"} 5',
    f" DCGM_FI_DEV_GPU_TEMP{labels(0)} 5",
    f"DCGM_FI_DEV_GPU_TEMP {labels(0)} 5",
    f"DCGM_FI_DEV_GPU_TEMP{labels(0)}  5",
    f"DCGM_FI_DEV_GPU_TEMP{labels(0)}\t5",
    f"DCGM_FI_DEV_GPU_TEMP{labels(0)}5",
    f"DCGM_FI_DEV_GPU_TEMP{labels(0, note='x' * 9000)} 5",
    "DCGM_FI_DEV_ÄPU_TEMP" + labels(0) + " 5",
)


def write_labels(gpu: int, node: str, more: dict[str, str]) -> str:
    """Return the labels of a GPU with one of MORE_LABELS."""
    if "gpu" in more:
        return labels(gpu, node).replace(f'gpu="{gpu}"', f'gpu="{more["gpu"]}"')
    return labels(gpu, node, **more)


@contextmanager
def count_gpu_pages(*, allowed: bool) -> Iterator[list[bool]]:
    """Record of each first page whether `read_gpu_page` read it. allowed: else each page is read line by line."""
    found: list[bool] = []

    def read(*arguments: Any) -> bool:
        found.append(allowed and read_gpu_page(*arguments))
        return found[-1]

    with patch.object(text, "read_gpu_page", read):
        yield found


def describe(batch: Batch, decoder: PageDecoder) -> Any:
    """Return everything that a page leads to, for a comparison."""
    samples = [
        (one.kind, one.metric.tolist(), one.entity.tolist(), one.time_ms.tolist(), one.value.tolist())
        for one in batch.samples
    ]
    bad = [(error.reason, error.detail, error.count) for error in batch.bad]
    return samples, bad, batch.labels, batch.tally, decoder.reported, decoder.why_unread


def decode_all(pages: Sequence[tuple[int, bytes]], *, max_series: int, most_nodes: int) -> Any:
    """Decode pages of (target, text), and return the answers and what the fleet then knows."""
    entities = Entities()
    if most_nodes:
        entities.set_limits({}, most_nodes, 2)
    resolver = ExporterResolver(entities)
    machines = resolver.inventory.machines
    targets = [Target(f"host{number}", address=f"10.0.0.{number}:9400") for number in range(3)]
    decoders = [PageDecoder(resolver, target, max_series=max_series, machines=machines) for target in targets]
    answers = [
        describe(decoders[number].decode(content, 1_795_648_400_000 + 15_000 * turn), decoders[number])
        for turn, (number, content) in enumerate(pages)
    ]
    known = [(target.node, target.renamed, target.named, target.forgets, target.unproven) for target in targets]
    names = [entities[kind].names for kind in EntityKind]
    noted = [decoder.noted for decoder in decoders]
    return answers, known, names, resolver.inventory.nodes, machines.clashes, machines.noted, noted


@st.composite
def gpu_pages(draw: st.DrawFn) -> bytes:
    """Draw a page: mostly alike lines of a few GPUs, at times with hostile ones, in one of three orders."""
    rows = st.sampled_from(MORE_LABELS) if draw(st.booleans()) else st.just(MORE_LABELS[0])
    gpus = st.tuples(st.integers(0, 2), st.sampled_from(["n001", "n001", "n009"]), rows)
    texts = [write_labels(*one) for one in draw(st.lists(gpus, min_size=1, max_size=4))]
    names = draw(st.lists(st.sampled_from(NAMES), min_size=1, max_size=5, unique=True))
    values = st.sampled_from(VALUES) if draw(st.integers(0, 3)) == 3 else st.sampled_from(VALUES[:4])
    lines = [f"{name}{label} {draw(values)}" for name in names for label in texts]
    if draw(st.booleans()):
        lines = draw(st.permutations(lines))
    for line in draw(st.lists(st.sampled_from(LINES), max_size=2)):
        lines.insert(draw(st.integers(0, len(lines))), line)
    content = page(*lines)
    return content[:-1] if draw(st.integers(0, 9)) == 9 else content


@examples(600)
@given(
    st.lists(st.tuples(st.integers(0, 2), gpu_pages()), min_size=1, max_size=4),
    st.sampled_from([50_000, 50_000, 3]),
    st.sampled_from([0, 0, 1]),
)
def test_first_pages_are_read_as_line_by_line(pages: list[tuple[int, bytes]], max_series: int, most_nodes: int) -> None:
    with count_gpu_pages(allowed=True):
        found = decode_all(pages, max_series=max_series, most_nodes=most_nodes)
    with count_gpu_pages(allowed=False):
        expected = decode_all(pages, max_series=max_series, most_nodes=most_nodes)
    assert found == expected


def test_recorded_first_pages_are_read_as_line_by_line() -> None:
    """Each page of the field, as the first of a fleet and beside the page after it."""
    files = sorted((Path(__file__).parents[2] / "field").glob("*.prom"))
    contents = [file.read_bytes() for file in files]
    assert contents
    for row, content in enumerate(contents):
        pages = [(0, content), (1, contents[(row + 1) % len(contents)]), (0, content)]
        with count_gpu_pages(allowed=True):
            found = decode_all(pages, max_series=50_000, most_nodes=0)
        with count_gpu_pages(allowed=False):
            assert found == decode_all(pages, max_series=50_000, most_nodes=0), files[row].name


@pytest.mark.parametrize("more", [MORE_LABELS[row] for row in (0, 1, 2, 4, 6)])
def test_an_ordinary_first_page_is_read_at_once(more: dict[str, str]) -> None:
    """A second set of labels of the same GPU (a job, an error's code) is no reason to read each line."""
    lines = [f"{name}{labels(gpu)} 5" for name in NAMES[:3] for gpu in range(4)]
    lines += [f"{NAMES[5]}{labels(gpu, **more)} 31" for gpu in range(4)] + [f"{NAMES[6]}{labels(0)} 1"]
    with count_gpu_pages(allowed=True) as read:
        Desk().decode(*lines)
    assert read == [True]


def test_a_board_of_another_target_is_resolved_line_by_line() -> None:
    entities = Entities()
    resolver = ExporterResolver(entities)
    with count_gpu_pages(allowed=True) as read:
        for name in ("host1", "host2"):
            PageDecoder(resolver, Target(name, address=f"{name}:9400")).decode(dcgm_page(), 1000)
    assert read == [True, False]


def test_only_the_first_page_of_a_target_is_read_at_once() -> None:
    desk = Desk()
    with count_gpu_pages(allowed=True) as read:
        for gpus in (2, 2, 1, 2):
            desk.decoder.decode(dcgm_page(gpus), 1000)
    assert read == [True]
