"""The view of the cluster after jobs have released their GPUs."""

from collections.abc import Collection
from dataclasses import replace
from itertools import compress

import numpy as np

from fleetcast.placement.machines.slots import WHOLE, HeldParts
from fleetcast.placement.machines.view import ClusterView


def remove_jobs(view: ClusterView, jobs: Collection[str]) -> ClusterView:
    """Return the view after these jobs have released their GPUs. The other jobs get new numbers.

    CPUs and host memory stay unchanged until the next board states them.
    """
    if frozenset(jobs).isdisjoint(view.jobs):
        return view
    stays = np.array([job not in jobs for job in view.jobs], bool)
    number = np.where(stays, np.cumsum(stays) - 1, -1).astype(np.int32)
    parts = view.parts
    stays_there = stays[parts.job] if len(parts.job) else np.zeros(0, bool)
    left = HeldParts(number[parts.job[stays_there]].astype(np.int64), parts.gpu[stays_there], parts.milli[stays_there])
    holders = np.where(view.holders >= 0, number[view.holders], np.int32(-1))
    if len(left.gpu):
        holders.ravel()[left.gpu[::-1]] = left.job[::-1]  # the first of those that share it
    freed = (view.holders >= 0) & (holders < 0) & view.usable
    milli = np.where(freed, np.int16(WHOLE), view.milli)
    if len(parts.gpu) > len(left.gpu):
        milli.ravel()[left.gpu] = WHOLE
        np.subtract.at(milli.ravel(), left.gpu, left.milli.astype(np.int16))
    names = tuple(compress(view.jobs, stays))
    return replace(view, milli=milli, holders=holders, jobs=names, parts=left)
