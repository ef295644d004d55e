"""What the pages of a node and of a job ask for, of the made-up fleet: timelines, drains, fingerprints, load peaks."""

from typing import Any

from tests.service.console_scene import GPUS, HOUR_MS, Scene

HORIZONS_S = (3600, 86_400)
MINUTE_MS = 60_000


def timeline(scene: Scene, name: str, minutes: int) -> dict[str, Any] | None:
    """A calm past, and since its trouble began that; warming scenes know four minutes."""
    row = scene.row(name)
    if row is None:
        return None
    now_ms = scene.as_of_ms()
    from_ms = now_ms - minutes * MINUTE_MS
    known_ms = now_ms - (4 * MINUTE_MS if scene.state == "warming" else 30 * HOUR_MS)
    trouble = scene.troubles.get(row)
    began_ms = now_ms - int(trouble.since_s * 1000) if trouble else None
    return {
        "node": name,
        "as_of_ms": now_ms,
        "from_ms": from_ms,
        "known_since_ms": known_ms,
        "scores": [_scores(scene, row, horizon_s, known_ms, began_ms) for horizon_s in HORIZONS_S],
        "signals": _signals(scene, row, began_ms, now_ms, from_ms),
        "events": _events(name, began_ms) if trouble else [],
        "jobs": _jobs(scene, row, known_ms),
        "actions": _actions(scene, row, began_ms, now_ms, from_ms),
        "states": [],
    }


def _scores(scene: Scene, row: int, horizon_s: int, known_ms: int, began_ms: int | None) -> dict[str, Any]:
    at = (3600, 18000, 86400, 604800).index(horizon_s)
    p = None if scene.unknown(row) else max(values[at] for values in scene.p(row).values())
    calm = min(p or 0.0, 0.004 * (1 + at))
    steps: list[dict[str, Any]] = [{"time_ms": known_ms, "p": None if p is None else calm}]
    if began_ms is not None and p is not None:
        steps += [{"time_ms": began_ms - 90_000, "p": (calm + p) / 2}, {"time_ms": began_ms, "p": p}]
    return {"horizon_s": horizon_s, "steps": [step for step in steps if step["time_ms"] >= known_ms]}


def _signals(scene: Scene, row: int, began_ms: int | None, now_ms: int, from_ms: int) -> list[dict[str, Any]]:
    trouble = scene.troubles.get(row)
    if trouble is None or began_ms is None:
        return []
    usual = trouble.usual
    values = [(began_ms, (trouble.value + (usual or 0)) / 2), (began_ms + 60_000, trouble.value)]
    now = {"feature": trouble.feature, "entity": trouble.entity, "unit": trouble.unit, "sentence": trouble.sentence}
    rows = [
        {
            **now,
            "usual": usual,
            "share": 0.78,
            "began_ms": began_ms,
            "ended_ms": None,
            "values": [{"time_ms": time_ms, "value": value} for time_ms, value in values],
        },
        {
            "feature": "gpu_temp_c",
            "entity": trouble.entity,
            "unit": "°C",
            "sentence": f"GPU {trouble.entity[-1]}: temperature 88 °C, usual 66",
            "usual": 66.0,
            "share": 0.14,
            "began_ms": now_ms - 41 * MINUTE_MS,
            "ended_ms": now_ms - 29 * MINUTE_MS,
            "values": [{"time_ms": now_ms - 41 * MINUTE_MS, "value": 84.0}],
        },
    ]
    return [found for found in rows if found["ended_ms"] is None or found["ended_ms"] >= from_ms]


def _events(name: str, began_ms: int | None) -> list[dict[str, Any]]:
    if began_ms is None:
        return []
    return [
        {
            "time_ms": began_ms + 20_000,
            "type": "xid",
            "sentence": "GPU 3: XID 63: row remapping pending",
            "source": "kernel-log",
            "gpu": 3,
            "code": 63,
        },
        {
            "time_ms": began_ms - 25 * MINUTE_MS,
            "type": "health",
            "sentence": f"fan speed of {name} was low",
            "source": "bmc",
            "gpu": None,
            "code": None,
        },
    ]


def _jobs(scene: Scene, row: int, known_ms: int) -> list[dict[str, Any]]:
    rows = [
        {
            "job": job.name,
            "attempt": 1,
            "gpus": job.per_node,
            "began_ms": job.started_ms,
            "ended_ms": None,
            "outcome": "",
        }
        for job in scene.jobs
        if row in job.nodes
    ]
    if rows and scene.state != "warming":
        first = rows[0]["began_ms"]
        before = {"job": "before-17", "attempt": 2, "gpus": GPUS, "began_ms": first - HOUR_MS // 2}
        rows.insert(0, {**before, "ended_ms": first - 4 * MINUTE_MS, "outcome": "failed"})
    return rows


def _actions(scene: Scene, row: int, began_ms: int | None, now_ms: int, from_ms: int) -> list[dict[str, Any]]:
    rows = []
    if began_ms is not None:
        action = scene.action(row)
        rows.append({**action, "began_ms": began_ms, "ended_ms": None, "taken": False})
    if scene.marked.get(row) == "drained":
        said = "Removed from service by admin: fan"
        rows.append(
            {"code": "drained", "sentence": said, "began_ms": now_ms - 900_000, "ended_ms": None, "taken": True}
        )
    return [found for found in rows if found["began_ms"] >= from_ms]


def drain(scene: Scene, name: str) -> dict[str, Any] | None:
    row = scene.row(name)
    if row is None:
        return None
    now_ms, gone = scene.as_of_ms(), scene.marked.get(row) in ("drained", "lost")
    jobs = [job for job in scene.jobs if row in job.nodes]
    fleet = scene.fleet()["gpus"]
    free_here = sum(job is None for job in scene.holder[row])
    lost = 0 if gone else GPUS
    total = sum(len(job.nodes) * job.per_node for job in jobs)
    return {
        "node": name,
        "as_of_ms": now_ms,
        "in_service": not gone,
        "pool": "train",
        "gpus_lost": lost,
        "gpus_free_here": free_here,
        "gpus_free_now": fleet["free"],
        "gpus_free_after": fleet["free"] - (0 if gone else free_here),
        "gpus_in_service_now": fleet["total"],
        "gpus_in_service_after": fleet["total"] - lost,
        "p_day": None if scene.unknown(row) else scene.p(row)["fail"][2],
        "jobs": [_hit(scene, job.name, now_ms) for job in jobs],
        "queue_delay_s": None,
        "queue_reason": "the placer does not play the queue on a smaller fleet",
        "sentence": f"Draining {name} interrupts {len(jobs)} job with {total} GPUs and takes {lost} out of service.",
    }


def _hit(scene: Scene, name: str, now_ms: int) -> dict[str, Any]:
    job = next(job for job in scene.jobs if job.name == name)
    return {
        "job": name,
        "attempt": 1,
        "class": "training",
        "gpus": len(job.nodes) * job.per_node,
        "gpus_here": job.per_node,
        "nodes": len(job.nodes),
        "running_s": (now_ms - job.started_ms) / 1000,
        "remaining_s": {"p50": 5400.0, "p90": 21_000.0},
        "last_checkpoint_s": 780.0,
        "next_checkpoint_ms": quantiles(now_ms + 420_000),
        "restart_ms": quantiles(now_ms + 1_200_000),
        "restart_reason": "",
    }


def quantiles(time_ms: int) -> dict[str, int]:
    return {"p10": time_ms - 20_000, "p50": time_ms, "p90": time_ms + 90_000}


def job(scene: Scene, name: str) -> dict[str, Any] | None:
    found = next((row for row in scene.job_rows()["rows"] if row["job"] == name), None)
    return found and {"as_of_ms": scene.as_of_ms(), **found, "placement": [], "events": []}


def fingerprint(scene: Scene, name: str) -> dict[str, Any] | None:
    if job(scene, name) is None:
        return None
    now_ms = scene.as_of_ms()
    power = [{"metric": "power_w", "horizon_s": ahead_s, "p50": 35_210.0, "p90": 36_900.0} for ahead_s in (300, 900)]
    return {
        "job": name,
        "attempt": 1,
        "as_of_ms": now_ms - 4000,
        "looked_ms": now_ms - 4000,
        "class": "training",
        "class_p": 0.97,
        "class_told": "training",
        "gpus_heard": 8,
        "unheard_reason": "",
        "period_s": 2.41,
        "period_basis": "steps",
        "period_reason": "",
        "phase": "steady",
        "phase_since_ms": now_ms - 900_000,
        "phase_ends_ms": quantiles(now_ms + 420_000),
        "next_checkpoint_ms": quantiles(now_ms + 420_000),
        "last_checkpoint_ms": now_ms - 780_000,
        "checkpoint_every_s": 1200.0,
        "checkpoint_cost_s": 31.0,
        "checkpoint_cost_basis": "measured",
        "next_evaluation_ms": None,
        "expected": power,
    }


def checkpoint(scene: Scene, name: str) -> dict[str, Any] | None:
    if job(scene, name) is None:
        return None
    return {
        "as_of_ms": scene.as_of_ms(),
        "model": "rules",
        "interval_s": 2520.0,
        "failure_rate_per_day": 0.84,
        "checkpoint_cost_s": 31.0,
        "cost_basis": "measured",
        "expected_ettr": 0.972,
        "every_s": 1200.0,
        "ettr_now": 0.965,
        "restart_s": 300.0,
        "sentence": "Checkpoint every 42 min: 8 nodes fail 0.84 times a day and a checkpoint takes 31 s.",
    }


def spikes(scene: Scene) -> dict[str, Any]:
    now_ms = scene.as_of_ms()
    told = (
        ("rack", "r03", "power_w", "W", 131_000.0, 152_000.0, 150_000.0, 9),
        ("storage", "lustre", "checkpoint_bytes_per_s", "B/s", 2.1e10, 4.2e10, None, 7),
        ("rail", "rg1/0", "sent_bytes_per_s", "B/s", 3.1e11, 3.6e11, 7.6e11, 12),
    )
    keys = ("domain_kind", "domain", "quantity", "unit", "p50", "p90", "capacity", "jobs")
    rows = [dict(zip(keys, row, strict=True)) | {"peak_ms": now_ms + 390_000} for row in told]
    rows[1] |= {"capacity_reason": "no topology names it"}
    return {"as_of_ms": now_ms, **looked(scene), "rows": [] if scene.state == "empty" else rows}


def looked(scene: Scene) -> dict[str, int]:
    return {"jobs_looked": len(scene.jobs) - 1, "jobs_running": len(scene.jobs)}


def utilisation(scene: Scene) -> dict[str, Any]:
    rows = [_use(row, number) for number, row in enumerate(scene.job_rows()["rows"])]
    return {"as_of_ms": scene.as_of_ms(), **looked(scene), "rows": rows}


def _use(row: dict[str, Any], number: int) -> dict[str, Any]:
    verdict = ("works", "abandoned", "works", "busy_but_little_work")[number % 4]
    idle = verdict == "abandoned"
    return {
        "job": row["job"],
        "class": "interactive" if idle else "training",
        "gpus": row["gpus"],
        "looked_ms": row["started_ms"],
        "user": row["user"],
        "span_s": 120.0,
        "loaded_share": 1.0,
        "busy": 0.0 if idle else 0.99,
        "sm_active": 0.0 if idle else 0.31 if verdict == "busy_but_little_work" else 0.82,
        "tensor_active": 0.0 if idle else 0.3,
        "mfu": None if idle else 0.38,
        "mfu_reason": "it tells no FLOPs" if idle else "",
        "data_share": None if idle else 0.11,
        "communication_share": None if idle else 0.2,
        "idle_s": 1800.0 if idle else 0.0,
        "held_gpu_memory_gib": 131.5 if idle else 610.0,
        "verdict": verdict,
    }


def interference(asked: dict[str, Any]) -> dict[str, Any]:
    return {"known": False, "sentence": f"Nothing is known of {asked['a']} beside {asked['b']}."}
