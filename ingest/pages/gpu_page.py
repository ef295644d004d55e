"""A fast reader of the first page of a GPU exporter, which resolves names and GPUs separately.

The exporters of a fleet print similar pages: each of some 40 metric names occurs with the labels of
each GPU. A name states the metric and the unit, and the labels state the GPU. So each name and each
set of labels is resolved once, and a line only combines them.

`read_gpu_page` reads a page only if no line changes the meaning of another. `PageDecoder` reads all
other pages line by line, with the same results. Examples are pages with a refused line, a board of
another target, or a timestamp.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol

import msgspec

from fleetcast.fleet.errors import RecordError
from fleetcast.fleet.samples import EntityKind
from fleetcast.ingest.gpu_labels import JobLabel
from fleetcast.ingest.machines import Target
from fleetcast.ingest.pages.exposition import VALUE_CHARACTERS, parse_line
from fleetcast.ingest.pages.page_shape import LineRole, parse_values
from fleetcast.ingest.pages.page_state import PageState
from fleetcast.ingest.series import Fold, Form, Series
from fleetcast.ingest.tally import SkipRule

MAX_PART_BYTES = 2048  # of a name, of labels or of a value. Three of them stay below MAX_LINE_BYTES
_NO_CEILING = float("nan")


class GpuField(msgspec.Struct, frozen=True, gc=False):
    """The catalogue row of a metric name, and the way to read its number.

    of_instance: the row for a MIG instance, or None if instances have none.
    """

    metric: int
    of_instance: int | None
    scale: float
    form: Form


class PlacedGpu(msgspec.Struct, frozen=True, gc=False):
    """The rows of a GPU and its node, and the job that its labels name."""

    gpu: int
    node: int
    holder: JobLabel | None


class GpuResolver(Protocol):
    """The interface that resolves the names and the labels of GPU lines separately."""

    def find_gpu_field(self, name: bytes, /) -> GpuField | SkipRule | None:
        """Return the field of a name, the rule that skips the name, or None if no reader knows it.

        Raises LookupError if the name belongs to another exporter.
        """

    def find_gpu_skip_rule(self, labels: Mapping[str, str], /) -> SkipRule | None:
        """Return the rule that skips all lines with these labels, or None."""

    def place_new_gpu(self, labels: Mapping[str, str], target: Target, /) -> PlacedGpu:
        """Return the rows of a GPU that no earlier page contradicts, and its job.

        Raises RecordError if the GPU is refused, and LookupError if its lines must be resolved one by one.
        """


def read_gpu_page(lines: Sequence[bytes], resolve: GpuResolver, target: Target, page: PageState) -> bool:
    """Read all lines into the state of a page, and return whether this was possible.

    If it returns False, the state is unchanged, and the page must be read line by line.
    """
    samples = [line.rpartition(b" ") for line in lines if not line.startswith(b"#")]
    tokens = [token for _, _, token in samples]
    values = parse_values(tokens) if _are_plain_numbers(tokens) else None
    if values is None:  # before any name is registered: a line with a bad value registers none
        return False
    found, wanted = PageState(page.arrival_ms, page.open_metrics), list[int]()
    try:
        _read_lines(lines, iter(enumerate(key for key, _, _ in samples)), resolve, target, found, wanted)
    except (LookupError, RecordError):
        return False
    if len({(one.metric, one.entity) for one in found.series}) < len(found.series):
        return False
    page.prefixes, page.roles, page.series = found.prefixes, found.roles, found.series
    page.raw, page.time_ms = values[wanted].tolist(), [page.arrival_ms] * len(wanted)
    return True


def _read_lines(
    lines: Sequence[bytes],
    keys: Iterator[tuple[int, bytes]],
    resolve: GpuResolver,
    target: Target,
    page: PageState,
    wanted: list[int],
) -> None:
    """Give each line its role and its series.

    keys: (number, text before the value) of each sample line. wanted: the function adds the numbers of
    the lines that have a series. Raises LookupError or RecordError if the page must be read line by
    line.
    """
    fields: dict[bytes, GpuField | SkipRule | None] = {}
    labels: dict[bytes, Mapping[str, str]] = {}  # by their text, with the brace at its end
    gpus: dict[bytes, PlacedGpu | SkipRule | None] = {}  # by the same text; None: not placed yet
    for line in lines:
        if line.startswith(b"#"):
            page.record_line(line, LineRole.NOTHING)
            continue
        number, key = next(keys)
        name, _, text = key.partition(b"{")
        if name not in fields:
            fields[name] = resolve.find_gpu_field(name)
        if text not in gpus:
            labels[text] = _parse_labels(line, key, text)
            gpus[text] = resolve.find_gpu_skip_rule(labels[text])
        field, gpu = fields[name], gpus[text]
        if isinstance(field, SkipRule):
            page.record_line(key + b" ", field)
        elif isinstance(gpu, SkipRule):
            page.record_line(key + b" ", gpu)
        elif field is None:
            page.record_line(key + b" ", LineRole.UNREAD)
        else:
            if gpu is None:
                gpu = gpus[text] = resolve.place_new_gpu(labels[text], target)
            series = Series(
                *(EntityKind.GPU, field.metric, gpu.gpu, gpu.node, gpu.gpu, field.scale, field.form),
                *(_NO_CEILING, Fold.WHOLE, gpu.holder),
            )
            page.record_line(key + b" ", LineRole.WANTED)
            page.series.append(series)
            wanted.append(number)


def _parse_labels(line: bytes, key: bytes, text: bytes) -> Mapping[str, str]:
    """Return the labels of a line. Raises LookupError if the line does not begin with `key` and a blank."""
    parsed = parse_line(line)
    if not 0 < len(text) <= MAX_PART_BYTES or parsed.prefix != key + b" ":
        raise LookupError(text)
    return parsed.labels


def _are_plain_numbers(tokens: Sequence[bytes]) -> bool:
    """Return whether each token is short and has only the characters of a finite number."""
    is_short = bool(tokens) and all(tokens) and max(map(len, tokens)) <= MAX_PART_BYTES
    return is_short and not b"".join(tokens).translate(None, VALUE_CHARACTERS)
