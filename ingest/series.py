"""What a line of an exporter page stands for, and how its raw number becomes a value in our unit.

A raw number is *missing* (not bad) when it is one of DCGM's blanks or the value at which a counter sticks.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

from fleet.samples import EntityKind

# DCGM prints "no data" as a number: blank, not found, not supported, not permitted (dcgm_structs.h). int64 blanks
# round to 2**63 as floats.
_BLANK_INT32 = 2147483632.0
_BLANK_FP64 = 140737488355328.0
_BLANK_INT64 = 2.0**63
_BLANKS = 16
# Profiling ratios measure a little above 1 at times; what lies further above is a percentage.
_RATIO_SLACK = 1.05


class Form(IntEnum):
    """How to read a raw number beyond `scale`."""

    PLAIN = 0
    DCGM = 1  # blanks mean missing
    DCGM_PERCENT = 2  # a percent field under a name that says ratio: below 1 it is taken for the ratio it claims
    DCGM_RATIO = 3  # a ratio field that some sites export in percent: above 1 it is taken for percent


@dataclass(frozen=True, slots=True)
class Series:
    """One series of the catalogue. `device` is the row of its GPU (for MIG instances: of the GPU they lie on) or port.

    value = raw * scale; raw == `ceiling` is missing (a saturated counter; NaN: there is no such value).
    """

    kind: EntityKind
    metric: int
    entity: int
    node: int
    device: int = -1
    scale: float = 1.0
    form: Form = Form.PLAIN
    ceiling: float = float("nan")


@dataclass(frozen=True, slots=True)
class Conversion:
    """The conversion columns of n series; see `Series`."""

    scale: NDArray[np.float64]  # (n,)
    ceiling: NDArray[np.float64]  # (n,)
    dcgm: NDArray[np.bool_]  # (n,)
    percent: NDArray[np.intp]  # rows with Form.DCGM_PERCENT
    ratio: NDArray[np.intp]  # rows with Form.DCGM_RATIO

    @classmethod
    def of(cls, series: Sequence[Series]) -> "Conversion":
        form = np.array([one.form for one in series], np.int8)
        return cls(
            scale=np.array([one.scale for one in series], np.float64),
            ceiling=np.array([one.ceiling for one in series], np.float64),
            dcgm=form != Form.PLAIN,
            percent=np.flatnonzero(form == Form.DCGM_PERCENT),
            ratio=np.flatnonzero(form == Form.DCGM_RATIO),
        )

    def missing(self, raw: NDArray[np.float64]) -> NDArray[np.bool_]:
        """(n,) where the number stands for "no data"."""
        blank = raw >= _BLANK_INT64
        for first in (_BLANK_INT32, _BLANK_FP64):
            blank |= (raw >= first) & (raw < first + _BLANKS)
        result: NDArray[np.bool_] = (blank & self.dcgm) | (raw == self.ceiling)
        return result

    def values(self, raw: NDArray[np.float64]) -> NDArray[np.float64]:
        """(n,) in our units; meaningless where `missing`."""
        value = raw * self.scale
        if self.percent.size:
            part = raw[self.percent]
            value[self.percent] = np.where((part > 0) & (part < 1), part, value[self.percent])
        if self.ratio.size:
            part = raw[self.ratio]
            value[self.ratio] = np.where(part > _RATIO_SLACK, part * 0.01, np.minimum(part, 1.0))
        return value
