"""A made-up fleet in the exact shapes of the HTTP API, for working on the console and for its tests.

Nothing here is a simulation: the numbers only look right and move with the time. A test moves them by hand.
"""

import math
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from tests.service.console_traffic import HOUR_MS, POOLS, START_MS, Traffic
from tests.service.console_troubles import TROUBLES, Trouble

KINDS = ("fail", "drain", "slow")
HORIZONS_S = (3600, 18000, 86400, 604800)
GPUS = 8
RACK_NODES = 19
STATES = ("live", "empty", "unheard", "warming", "stale", "broken")


@dataclass(slots=True)
class Job:
    name: str
    user: str
    queue: str
    nodes: list[int]
    per_node: int
    started_ms: int


@dataclass(slots=True)
class Scene(Traffic):
    """A fleet of `nodes`. `drift` lets probabilities wobble with the time; `clock_ms` is wall time."""

    nodes: int = 133
    seed: int = 7
    speed: float = 15.0
    state: str = "live"
    drift: bool = True
    clock_ms: Callable[[], float] = lambda: time.time() * 1000
    troubles: dict[int, Trouble] = field(default_factory=lambda: dict(TROUBLES))
    signals: list[dict[str, Any]] = field(default_factory=list)
    began_ms: float = 0.0
    jobs: list[Job] = field(default_factory=list)
    holder: list[list[str | None]] = field(default_factory=list)
    base: list[float] = field(default_factory=list)
    marked: dict[int, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.began_ms = self.clock_ms()
        chance = random.Random(self.seed)
        self.base = [10 ** chance.uniform(-3.3, -1.7) for _ in range(self.nodes)]
        self.holder = [[None] * GPUS for _ in range(self.nodes)]
        self.marked = {row: text for row, text in ((57, "drained"), (88, "lost"), (120, "stale")) if row < self.nodes}
        self._fill(chance)

    def _fill(self, chance: random.Random) -> None:
        """Gangs of whole nodes first, small jobs in the gaps; about one GPU in twenty stays free."""
        row, number = 0, 8800
        while row < self.nodes:
            size = min(chance.choice((12, 8, 8, 4, 4, 2, 1)), self.nodes - row)
            members = [index for index in range(row, row + size) if self.marked.get(index) not in ("drained", "lost")]
            row += size
            if not members or chance.random() < 0.01:
                continue
            per_node = GPUS if size > 1 else chance.choice((2, 4, 8, 8, 8))
            number += chance.randint(1, 9)
            queue = chance.choice(POOLS[1:])
            started = START_MS - int(chance.uniform(0.1, 9) * HOUR_MS)
            job = Job(f"{queue}-{number}", f"u{chance.randint(10, 60)}", queue, members, per_node, started)
            self.jobs.append(job)
            for index in members:
                self.holder[index][:per_node] = [job.name] * per_node

    def name(self, row: int) -> str:
        return f"n{row + 1:03d}" if self.nodes < 1000 else f"n{row + 1:05d}"

    def row(self, name: str) -> int | None:
        row = int(name[1:]) - 1 if name[1:].isdigit() else -1
        return row if 0 <= row < self.nodes and self.name(row) == name else None

    def now_ms(self) -> int:
        """Fleet time; a stale or broken fleet's board stands still at four minutes after the start."""
        elapsed = (self.clock_ms() - self.began_ms) * self.speed
        return int(START_MS + 240_000 + elapsed)

    def as_of_ms(self) -> int:
        return self.now_ms() // 10_000 * 10_000

    def p(self, row: int) -> dict[str, list[float]]:
        """Probabilities by kind at the four horizons."""
        trouble = self.troubles.get(row)
        wobble = 1 + 0.08 * math.sin(self.now_ms() / 90_000 + row) if self.drift else 1.0
        if trouble:
            hour = dict(zip(KINDS, (trouble.fail, trouble.drain, trouble.slow), strict=True))
        else:
            hour = {"fail": self.base[row] * 0.6, "drain": self.base[row] * 0.4, "slow": self.base[row]}
        return {
            kind: [float(f"{1 - (1 - min(0.97, p * wobble)) ** power:.3g}") for power in (1, 2.2, 4, 9)]
            for kind, p in hour.items()
        }

    def flagged(self, row: int) -> bool:
        return self.state != "unheard" and row in self.troubles and self.troubles[row].action not in ("none", "watch")

    def node_state(self, row: int) -> str:
        if self.state == "unheard":
            return "unknown"
        return self.marked.get(row, "degraded" if self.flagged(row) else "ok")

    def reason(self, row: int) -> str | None:
        return self.troubles[row].sentence if row in self.troubles and self.state != "unheard" else None

    def action(self, row: int) -> dict[str, str]:
        trouble = self.troubles.get(row)
        return (
            {"code": trouble.action, "sentence": trouble.advice}
            if trouble
            else {"code": "none", "sentence": "Nothing to do."}
        )

    def place(self, row: int) -> dict[str, str]:
        rack = row // RACK_NODES
        return {
            "rack": f"r{rack + 1:02d}",
            "rail_group": f"rg{rack // 2 + 1}",
            "block": f"b{rack // 4 + 1}",
        }

    def unknown(self, row: int) -> bool:
        return self.state in ("empty", "unheard") or self.marked.get(row) == "stale"

    def usable(self, row: int, gpu: int) -> bool:
        trouble = self.troubles.get(row)
        return not (trouble and trouble.feature == "silent_s" and trouble.entity.endswith(f"/{gpu}"))

    # documents, one function a route

    def newest_ms(self) -> int | None:
        return {"empty": None, "unheard": None, "stale": START_MS - 30_000}.get(self.state, self.as_of_ms() - 3000)

    def warming(self) -> dict[str, int] | None:
        if self.state == "empty":
            return {"have_s": 0, "need_s": 1800}
        return {"have_s": 240, "need_s": 1800} if self.state == "warming" else None

    def fleet(self) -> dict[str, Any]:
        if self.state == "empty":
            return self._header([], 0, 0)
        rows = []
        for row in range(self.nodes):
            worst = max(values[0] for values in self.p(row).values())
            jobs = sorted({job for job in self.holder[row] if job})
            rows.append(
                {
                    "node": self.name(row),
                    **self.place(row),
                    "state": self.node_state(row),
                    "flagged": self.flagged(row),
                    "placed": True,
                    "p": None if self.unknown(row) else worst,
                    "reason": self.reason(row),
                    "gpus": [{"job": job, "usable": self.usable(row, gpu)} for gpu, job in enumerate(self.holder[row])],
                    "jobs": jobs,
                }
            )
        busy = sum(job is not None for gpus in self.holder for job in gpus)
        return self._header(rows, busy, sum(not gpu["usable"] for row in rows for gpu in row["gpus"]))

    def _header(self, rows: list[dict[str, Any]], busy: int, unusable: int) -> dict[str, Any]:
        queue = self.queue()["rows"]
        out = sum(GPUS for mark in self.marked.values() if mark != "stale") if rows else 0
        return {
            "as_of_ms": self.as_of_ms(),
            "fleet_time_ms": self.as_of_ms(),
            "horizon_s": 3600,
            "name": "venus",
            "speed": self.speed,
            "gpus": {
                "running": busy,
                "free": max(0, len(rows) * GPUS - busy - unusable - out),
                "unusable": unusable,
                "out_of_service": min(out, len(rows) * GPUS - busy - unusable),
                "total": len(rows) * GPUS,
            },
            "queued_gpus": sum(row["gang"]["desired"] * row["gpus_per_node"] for row in queue),
            "queued_jobs": len(queue),
            "at_risk": sum(row["flagged"] for row in rows),
            "samples_per_s": 0.0 if self.state in ("empty", "stale") else 3812.4,
            "newest_sample_ms": self.newest_ms(),
            "warming": self.warming(),
            "nodes": rows,
        }

    def risk(self, limit: int, horizon_s: int) -> dict[str, Any]:
        at = HORIZONS_S.index(horizon_s)
        rows = []
        for row in range(self.nodes if self.state != "empty" else 0):
            kind, p = max(((kind, values[at]) for kind, values in self.p(row).items()), key=lambda pair: pair[1])
            rows.append(
                {
                    "node": self.name(row),
                    "rack": self.place(row)["rack"],
                    "p": None if self.unknown(row) else p,
                    "kind": None if self.unknown(row) else kind,
                    "horizon_s": horizon_s,
                    "state": self.node_state(row),
                    "placed": True,
                    "reason": self.reason(row),
                    "action": self.action(row),
                }
            )
        rows.sort(key=lambda row: -(row["p"] or -1))
        record = {"horizon_s": horizon_s, "matured": 5210, "mean_p": 0.0081, "observed": 0.0112}
        record["bins"] = [{"low": 0.2, "high": 0.5, "n": 60, "p": 0.31, "observed": 0.4}]
        return {"as_of_ms": self.as_of_ms(), "model": "rules", "rows": rows[:limit], "calibration": [record]}

    def node(self, name: str) -> dict[str, Any] | None:
        row = self.row(name)
        if row is None:
            return None
        trouble = self.troubles.get(row)
        reasons = []
        if trouble:
            reasons.append(
                {
                    "feature": trouble.feature,
                    "entity": trouble.entity,
                    "value": trouble.value,
                    "usual": trouble.usual,
                    "unit": trouble.unit,
                    "share": 0.78,
                    "since_ms": self.as_of_ms() - int(trouble.since_s * 1000),
                    "sentence": trouble.sentence,
                }
            )
            reasons.append(
                {
                    "feature": "gpu_temp_c",
                    "entity": trouble.entity,
                    "value": 88.0,
                    "usual": 66.0,
                    "unit": "°C",
                    "share": 0.14,
                    "since_ms": self.as_of_ms() - int(trouble.since_s * 1200),
                    "sentence": f"GPU {trouble.entity[-1]}: temperature 88 °C, usual 66",
                }
            )
        return {
            "node": name,
            "as_of_ms": self.as_of_ms(),
            "state": self.node_state(row),
            "placed": True,
            "rack": self.place(row)["rack"],
            "gpu_model": "H100",
            "risk": [
                {"kind": kind, "horizon_s": horizon, "p": None if self.unknown(row) else p}
                for kind, values in self.p(row).items()
                for horizon, p in zip(HORIZONS_S, values, strict=True)
            ],
            "reasons": reasons,
            "action": self.action(row),
            "jobs": sorted({job for job in self.holder[row] if job}),
            "gpus": [self._gpu(row, index) for index in range(GPUS)],
            "model": "rules",
        }

    def _gpu(self, row: int, index: int) -> dict[str, Any]:
        job, chance = self.holder[row][index], random.Random(row * 8 + index)
        trouble = self.troubles.get(row)
        slow = bool(trouble and trouble.feature == "sm_clock_mhz" and trouble.entity.endswith(f"/{index}"))
        if not self.usable(row, index):
            return (
                {"index": index, "job": job, "age_s": 610.0}
                | dict.fromkeys(
                    ("power_w", "gpu_temp_c", "sm_clock_mhz", "gpu_util", "sm_active", "tensor_active"), None
                )
                | {"xid": 79.0}
            )
        return {
            "index": index,
            "job": job,
            "age_s": 4.0,
            "power_w": round(chance.uniform(560, 690)) if job else round(chance.uniform(66, 75)),
            "gpu_temp_c": 88.0 if slow else round(chance.uniform(58, 70)) if job else round(chance.uniform(29, 34)),
            "sm_clock_mhz": 990.0 if slow else 1980.0 if job else 345.0,
            "gpu_util": round(chance.uniform(0.95, 1), 2) if job else 0.0,
            "sm_active": round(chance.uniform(0.75, 0.9), 2) if job else 0.0,
            "tensor_active": round(chance.uniform(0.3, 0.45), 2) if job else 0.0,
            "xid": 0.0,
        }

    def job_rows(self) -> dict[str, Any]:
        rows = [
            {
                "job": job.name,
                "attempt": 1,
                "state": "running",
                "class": "training",
                "user": job.user,
                "queue": job.queue,
                "gpus": len(job.nodes) * job.per_node,
                "nodes": [self.name(row) for row in job.nodes],
                "submitted_ms": job.started_ms - 900_000,
                "started_ms": job.started_ms,
                "ended_ms": None,
                "remaining_s": {"p50": 5400.0, "p90": 21_000.0},
                "slow": job.name in self._slow(),
            }
            for job in self.jobs
        ]
        return {"as_of_ms": self.as_of_ms(), "rows": [] if self.state == "empty" else rows}

    def _slow(self) -> dict[str, int]:
        """Job -> row of the node that drags it."""
        slow = {}
        for row, trouble in self.troubles.items():
            if trouble.slow > 0.3 and row < self.nodes:
                for job in self.holder[row]:
                    if job:
                        slow[job] = row
        return slow

    def stragglers(self, job: str) -> dict[str, Any] | None:
        row = self._slow().get(job)
        if row is None:
            return {"as_of_ms": self.as_of_ms(), "job": job, "slow": False, "culprit": {"kind": "nobody"}}
        node, trouble = self.name(row), self.troubles[row]
        ratio = 1.62 if trouble.feature == "sm_clock_mhz" else 1.18
        link = "mlx5" in trouble.entity
        return {
            "as_of_ms": self.as_of_ms(),
            "job": job,
            "slow": True,
            "since_ms": self.as_of_ms() - int(trouble.since_s * 1000),
            "observed_step_s": round(2.41 * ratio, 2),
            "expected_step_s": 2.41,
            "ratio": ratio,
            "culprit": {"kind": "link" if link else "worker", "name": trouble.entity, "share": 0.91, "node": node},
            "cause": "communication" if link else "compute",
            "sentence": f"{job} runs {(ratio - 1) * 100:.0f} % slower: {trouble.entity} holds the gang back; "
            + trouble.sentence,
            "model": "peers",
        }
