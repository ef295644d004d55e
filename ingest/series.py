"""The series behind lines of exporter pages, and the conversion of raw numbers to our units."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import lru_cache
from hashlib import blake2b

import msgspec
import numpy as np
from numpy.typing import NDArray

from fleetcast.fleet.samples import EntityKind
from fleetcast.ingest.gpu_labels import JobLabel

# DCGM prints "no data" as 16 numbers from each of 2147483632, 140737488355328 and 2**63 on (dcgm_structs.h:
# blank, not found, not supported, not permitted). Drivers print all ones of 32 bits; 16-bit fields have a `ceiling`.
_BLANK_INT32 = 2147483632.0
_BLANK_BITS = np.float64(_BLANK_INT32).view(np.uint64)
# Between an even number of edges lies what stands for no data: what is below 0 first.
_BLANK_EDGES = np.array(
    [
        *(0.0, _BLANK_INT32, _BLANK_INT32 + 16),
        *(4_294_967_295.0, 4_294_967_296.0),
        *(140737488355328.0, 140737488355344.0),
        *(2.0**63, np.inf),
    ]
)
# Profiling ratios measure a little above 1 at times; what lies further above is a percentage.
_RATIO_SLACK = 1.05


class Form(IntEnum):
    """The way in which a raw number is read, in addition to its `scale`."""

    PLAIN = 0
    DCGM = 1  # blanks mean missing
    DCGM_PERCENT = 2  # a percent field under a name that says ratio: below 1 it is taken for the ratio it claims
    DCGM_RATIO = 3  # a ratio field that some sites export in percent: above 1 it is taken for percent
    FLAG = 4  # above 0 it is `scale`, else 0: flags of one mask have scales of their own and are summed
    POSITIVE = 5  # as DCGM; 0 means missing, too: of power, temperatures, clocks and links of a board that answers


class Fold(IntEnum):
    """The way in which several lines are combined into one sample. See `fleetcast.ingest.pages.parts`."""

    WHOLE = 0  # they do not: a line is a sample, and a second one of the same series is dropped
    SUM = 1
    MEAN = 2
    RATE = 3  # a sum of counters, of which the growth per second is the sample


class Series(msgspec.Struct, frozen=True, gc=False):
    """A series of the catalogue, and how to convert the numbers of its lines: value = raw * scale.

    `device`: row of its GPU or port. A MIG instance has the row of its GPU. `node`: -1 for none. A raw number
    equal to `ceiling` (saturated) is missing. NaN means that there is no ceiling. A series with a `fold` is a
    part of a sample. label: the job that labels name as the holder of the GPU, or of the MIG instance if it is
    `divided`. part: the number of the device, CPU or rank (`hash_part`) that this part covers. A second series with
    the same number is a repeat. If it is 0, each series is a part.
    """

    kind: EntityKind
    metric: int
    entity: int
    node: int
    device: int = -1
    scale: float = 1.0
    form: Form = Form.PLAIN
    ceiling: float = float("nan")
    fold: Fold = Fold.WHOLE
    label: JobLabel | None = None
    divided: bool = False
    part: int = 0


def hash_part(*words: str) -> int:
    """Return a number for a part of a sum: a 64-bit hash of the names and labels that split the sum.

    The words must not include labels that a sender adds.
    """
    return int.from_bytes(blake2b("\0".join(words).encode(), digest_size=8).digest(), "little", signed=True)


@dataclass(frozen=True, slots=True)
class Conversion:
    """The columns of n series that convert raw numbers. See `Series`.

    Targets with the same series in the same order share one object.
    """

    scale: NDArray[np.float64]  # (n,)
    form: NDArray[np.int8]  # (n,)
    ceiling: NDArray[np.float64]  # (n,)
    sticky: NDArray[np.intp]  # rows with a ceiling
    percent: NDArray[np.intp]  # rows with Form.DCGM_PERCENT
    ratio: NDArray[np.intp]  # rows with Form.DCGM_RATIO
    flag: NDArray[np.intp]  # rows with Form.FLAG
    positive: NDArray[np.intp]  # rows with Form.POSITIVE

    @classmethod
    def from_fields(cls, scale: Sequence[float], form: Sequence[Form], ceiling: Sequence[float]) -> "Conversion":
        """Return the conversion of n series from their fields. Equal fields give the same object."""
        columns = np.array(scale, np.float64), np.array(ceiling, np.float64)
        return _make_conversion(columns[0].tobytes(), bytes(form), columns[1].tobytes())

    @classmethod
    def from_columns(
        cls, scale: NDArray[np.float64], form: NDArray[np.int8], ceiling: NDArray[np.float64]
    ) -> "Conversion":
        """Build a conversion from (n,) columns of the fields of `Series`."""
        return cls(
            scale,
            form,
            ceiling,
            sticky=np.flatnonzero(np.isfinite(ceiling)),
            percent=np.flatnonzero(form == Form.DCGM_PERCENT),
            ratio=np.flatnonzero(form == Form.DCGM_RATIO),
            flag=np.flatnonzero(form == Form.FLAG),
            positive=np.flatnonzero(form == Form.POSITIVE),
        )

    def list_fields(self) -> tuple[list[float], list[Form], list[float]]:
        """Return the lists of scales, forms and ceilings of the series."""
        forms = tuple(Form)
        return self.scale.tolist(), [forms[form] for form in self.form.tolist()], self.ceiling.tolist()

    def find_missing(self, raw: NDArray[np.float64]) -> NDArray[np.intp]:
        """Return the rows of `raw` (n,) whose number means "no data".

        Negative numbers are among them, because no exporter measures a GPU value below 0.
        """
        missing = np.flatnonzero(raw.view(np.uint64) >= _BLANK_BITS)  # as bits, what is below 0 is the largest
        if len(missing):
            blank = np.searchsorted(_BLANK_EDGES, raw[missing], "right") & 1 == 0
            missing = missing[blank & (self.form[missing] != Form.PLAIN)]
        if len(self.sticky):
            stuck = self.sticky[raw[self.sticky] == self.ceiling[self.sticky]]
            missing = np.concatenate([missing, stuck])
        if np.count_nonzero(measured := raw[self.positive]) < len(measured):
            missing = np.concatenate([missing, self.positive[measured == 0]])
        return missing

    def convert(self, raw: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return (n,) float64 values in our units. They are meaningless in rows without data."""
        value = raw * self.scale
        if self.percent.size:
            part = raw[self.percent]
            value[self.percent] = np.where((part > 0) & (part < 1), part, value[self.percent])
        if self.ratio.size:
            part = raw[self.ratio]
            if not (part <= 1.0).all():
                value[self.ratio] = np.where(part > _RATIO_SLACK, part * 0.01, np.minimum(part, 1.0))
        if self.flag.size:
            value[self.flag] = np.where(raw[self.flag] > 0, self.scale[self.flag], 0.0)
        return value


@lru_cache(1024)
def _make_conversion(scale: bytes, form: bytes, ceiling: bytes) -> Conversion:
    """Build a conversion from the bytes of its columns: scale float64, form int8, ceiling float64."""
    return Conversion.from_columns(
        np.frombuffer(scale, np.float64), np.frombuffer(form, np.int8), np.frombuffer(ceiling, np.float64)
    )
