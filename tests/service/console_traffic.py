"""What passes through the made-up fleet: demand, the queue, decisions and ingestion, in the shapes of the API."""

import math
import random
from typing import Any

QUANTILES = (0.05, 0.1, 0.25, 0.5, 0.75, 0.9, 0.95)
DEMAND_HORIZONS_S = (600, 1200, 1800, 3600, 7200, 10800, 18000, 28800, 43200, 64800, 86400)
DECISIONS = 340  # before the scene begins
START_MS = 1_795_202_400_000  # a Friday in November 2026, 18:00 UTC
HOUR_MS = 3_600_000
POOLS = ("all", "train", "research", "serve")

WHY = (
    "needs {n} GPUs inside one rack; the freest rack has 24",
    "needs {n} GPUs; 41 are free and usable",
    "waits behind train-9117 (its start would be delayed)",
    "n042 and n119 are too risky for a gang of this length",
)


class Traffic:
    """Pure functions of the fleet's time, its size and its state."""

    nodes: int
    state: str

    def as_of_ms(self) -> int:
        """Fleet time of the last board."""
        raise NotImplementedError

    def newest_ms(self) -> int | None:
        """Time of the newest sample."""
        raise NotImplementedError

    def _level(self, pool: str, target: str, time_ms: int) -> float:
        """A day's swing plus ripples, a pure function of the time."""
        share = {"all": 1.0, "train": 0.55, "research": 0.3, "serve": 0.15}.get(pool, 0.1)
        hours = time_ms / HOUR_MS
        day = math.sin((hours - 9) / 24 * 2 * math.pi)
        ripple = 0.35 * math.sin(hours * 2.1) + 0.25 * math.sin(hours * 5.3 + 1) + 0.2 * math.sin(hours * 11.7)
        running = min(1050.0, 1000 + 34 * day + 20 * ripple)
        queued = max(0.0, 90 + 190 * day + 60 * ripple)
        level = {"running": running, "queued": queued, "wanted": running + queued}.get(
            target, 46 + 30 * day + 16 * ripple
        )
        return round(share * level * self.nodes / 133)

    def _quantiles(self, pool: str, target: str, issued_ms: int, ahead_s: float) -> list[float]:
        level = self._level(pool, target, issued_ms)
        pull = 1 - math.exp(-ahead_s / 30_000)
        middle = level + pull * (self._level(pool, target, issued_ms + int(ahead_s * 1000)) - level) * 0.8
        width = max(4.0, 0.02 * level) + 1.6 * math.sqrt(ahead_s / 60) * max(0.1, level / 1100)
        return [max(0.0, round(middle + width * z, 1)) for z in (-2.0, -1.5, -0.75, 0, 0.85, 1.8, 2.5)]

    def demand(self, pool: str | None, target: str | None, class_: str | None = None) -> dict[str, Any]:
        issued = self.as_of_ms() // 600_000 * 600_000
        series = [
            {
                "queue": each_pool,
                "pool": "all",
                "class": each_class,
                "group": "all",
                "target": each,
                "now": self._level(each_pool, each, self.as_of_ms()),
                "model": "persistence" if each != "arriving" else "seasonal naive (day)",
                "models": ["persistence"] * 4 + ["theta"] * 7 if each_class == "training" else [],
                "issued_ms": issued,
                "horizons_s": list(DEMAND_HORIZONS_S),
                "quantiles": list(QUANTILES),
                "values": [
                    list(path)
                    for path in zip(
                        *(self._quantiles(each_pool, each, issued, h) for h in DEMAND_HORIZONS_S), strict=True
                    )
                ],
                "record": {"wql_vs_best_naive": 0.97, "coverage_80": 0.81, "origins": 214},
            }
            for each_pool in POOLS
            for each in ("arriving", "running", "queued", "wanted")
            for each_class in ("all", "training")
            if pool in (None, each_pool) and target in (None, each) and class_ in (None, each_class)
        ]
        return {"as_of_ms": self.as_of_ms(), "series": [] if self.state == "empty" else series}

    def record(self, pool: str, target: str) -> dict[str, Any]:
        issued = self.as_of_ms() // 600_000 * 600_000
        old = issued - HOUR_MS
        return {
            "as_of_ms": self.as_of_ms(),
            "queue": pool,
            "pool": "all",
            "target": target,
            "history": [[t, self._level(pool, target, t)] for t in range(issued - 24 * HOUR_MS, issued + 1, 600_000)],
            "forecast": [],
            "old": [
                [old + h * 1000, *(self._quantiles(pool, target, old, h)[at] for at in (0, 3, 6))]
                for h in DEMAND_HORIZONS_S
                if h <= 7200
            ],
        }

    def queue(self) -> dict[str, Any]:
        if self.state == "empty":
            return {"as_of_ms": self.as_of_ms(), "rows": []}
        now, rows = self.as_of_ms(), []
        for position, gang in enumerate((8, 16, 4, 4, 1, 8, 2, 1, 1, 2, 4), start=1):
            chance = random.Random(position * 31)
            start = now + int(position * 7.3 * 60_000)
            known = position != 9
            rows.append(
                {
                    "request_id": f"req-{9100 + position * 17}",
                    "job": f"train-{9100 + position * 17}",
                    "position": position,
                    "tenant": "research" if position % 3 else "platform",
                    "queue": POOLS[1 + position % 3],
                    "user": f"u{chance.randint(10, 60)}",
                    "gang": {"min": gang, "desired": gang, "step": 1},
                    "gpus_per_node": 8 if gang > 1 else chance.choice((1, 2, 4)),
                    "priority": 0,
                    "waiting_s": 4000 - position * 310,
                    "why": WHY[(position - 1) % len(WHY)].format(n=gang * 8),
                    "start_ms": {"p10": start, "p50": start + 600_000, "p90": start + 2_500_000} if known else None,
                }
            )
        return {"as_of_ms": now, "rows": rows}

    def placements(self, after: int | None, limit: int) -> dict[str, Any]:
        """One decision a fleet minute; a cursor is its number."""
        if self.state == "empty":
            return {"as_of_ms": self.as_of_ms(), "rows": [], "cursor": after or 0}
        last = DECISIONS + (self.as_of_ms() - START_MS) // 60_000
        first = min(last, after or 0)
        return {
            "as_of_ms": self.as_of_ms(),
            "rows": [self._decision(number) for number in range(first + 1, min(last, first + limit) + 1)],
            "cursor": min(last, first + limit),
        }

    def _decision(self, number: int) -> dict[str, Any]:
        sentence, outcome = (
            ("placed 4 x 8 GPUs in rack r03; avoided n042: SM clock 990 MHz, usual 1,980 (thermal slowdown)", "placed"),
            ("placed 1 x 4 GPUs on n088", "placed"),
            ("refused: needs 64 GPUs inside one rack; the freest rack has 24 (133 nodes: 102 busy, 2 risk)", "refused"),
            ("placed 2 x 8 GPUs in rack r05; avoided n119: series vanished (XID 79)", "placed"),
            ("queued at position 6: 41 GPUs free, needs 64", "queued"),
        )[number % 5]
        return {
            "request_id": f"req-{number}",
            "decision_id": f"d-{number}",
            "cursor": number,
            "time_ms": START_MS + (number - DECISIONS) * 60_000,
            "job": f"train-{9000 + number}",
            "attempt": 1,
            "outcome": outcome,
            "sentence": sentence,
            "ranks": [],
            "nodes": 133,
            "candidates": 12,
            "rejected": {"busy": 119, "risk": 2},
        }

    def adapters(self) -> dict[str, Any]:
        write = {
            "time_ms": self.now_ms() - 90_000,
            "decision": "nodes-1-1",
            "adapter": "nodes",
            "mode": "write",
            "board": 812,
            "key": "n041",
            "field": "label fleetcast.io/risk",
            "seen": "low",
            "value": "high",
            "why": "risk 81% within 1 h: SM clock 990 MHz, usual 1,980",
            "outcome": "done",
        }
        stands = {"kind": "writer", "board": 812, "seen_ms": self.now_ms(), "error": "", "withdrawn": False}
        nodes = {"name": "nodes", "mode": "write", "ours": 133, "writes": 14, "held_back": 2, "last": write}
        away = {"name": "slurm", "mode": "observe", "errors": 3, "error": "slurmctld does not answer", "last": None}
        rows = [{"name": "kube", "mode": "answer", "kind": "answerer"}, {**stands, **nodes}, {**stands, **away}]
        return {"as_of_ms": self.as_of_ms(), "rows": rows[:1] if self.state == "empty" else rows}

    def ingestion(self) -> dict[str, Any]:
        quiet = self.state in ("empty", "stale")
        lag = None if self.state == "empty" else 274.0 if quiet else 3.1
        count = 0 if self.state == "empty" else self.nodes
        return {
            "as_of_ms": self.as_of_ms(),
            "sources": [
                {
                    "name": "scrape",
                    "kind": "scrape",
                    "rate_per_s": 0 if quiet else 3810.2,
                    "lag_s": lag,
                    "bad": 17,
                    "up": not quiet,
                },
                {"name": "inbox", "kind": "inbox", "rate_per_s": 2.2, "lag_s": 0.4, "bad": 2, "up": True},
            ],
            "samples_per_s": 0.0 if quiet else 3812.4,
            "events_per_s": 2.2,
            "newest_sample_ms": self.newest_ms(),
            "bad_records": {} if self.state == "empty" else {"not_a_number": 12, "unknown_metric": 5, "future": 2},
            "targets": {"up": 0 if quiet else count * 2 - 3, "down": count * 2 if quiet else min(3, count)},
            "tick_ms": {"p50": 21.4, "p99": 48.0},
            "lag_ms": {"p50": 410.0, "p99": 880.0},
        }
