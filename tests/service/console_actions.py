"""Actions on running jobs of the made-up fleet, in the shapes of the API, and the switches that stop them."""

from typing import Any

from tests.service.console_scene import Scene

MINUTE_MS = 60_000
# kind, row of the job in the scene, state, minutes since, GPUs, GPU-hours, executor, why
DEEDS: tuple[tuple[str, int, str, int, float, float, str, str], ...] = (
    ("preempt", 5, "seen", 41, 32.0, 9.4, "slurm", "telemetry shows it"),
    ("preempt", 6, "refused", 33, 16.0, 1.2, "agents", "no checkpoint can be written now"),
    ("grow", 3, "seen", 30, 16.0, -21.0, "agents", ""),
    ("replace", 4, "seen", 22, 8.0, 3.1, "kubernetes", ""),
    ("preempt", 1, "proposed", 2, 32.0, 14.0, "advice", ""),
    ("shrink", 2, "sent", 1, 16.0, 0.4, "agents", ""),
    ("preempt", 0, "accepted", 1, 64.0, 4.75, "agents", ""),
)
REASONS = {
    "preempt": "a queue gets back what it is guaranteed (guaranteed 400, held 340)",
    "shrink": "a higher class needs the GPUs",
    "grow": "no request waits for the GPUs",
    "replace": "nodes were lost",
}
VERBS = {"preempt": "stops", "shrink": "shrinks", "grow": "grows", "replace": "replaces nodes of"}


class Actions:
    """The actions of a scene. opened_ms: since when the circuit breaker is open, or None. mode, act_in: the policy."""

    def __init__(self, scene: Scene) -> None:
        self.scene = scene
        self.opened_ms: int | None = None
        self.paused_ms: int | None = None
        self.mode, self.act_in = "act", list[str]()

    def list_newest(self, job: str | None) -> dict[str, Any]:
        known = self.scene.state != "empty" and self.scene.queue()["rows"]
        found = [self._make(at) for at, deed in enumerate(DEEDS) if known and deed[1] < len(self.scene.jobs)]
        chosen = [row for row in found if job is None or row["job"] == job]
        return {"as_of_ms": self.scene.now_ms(), "rows": chosen, "cursor": 900, "switches": self.switches()}

    def switches(self) -> dict[str, Any]:
        why = "" if self.opened_ms is None else "queue 'language' would lose 62 of 400 GPUs within an hour: at most 40"
        return {
            "mode": self.mode,
            "act_in": self.act_in,
            "paused_ms": self.paused_ms,
            "paused_by": "ada" if self.paused_ms else "",
            "opened_ms": self.opened_ms,
            "why": why,
        }

    def use(self, verb: str) -> dict[str, Any]:
        if verb == "reset":
            self.opened_ms = None
        else:
            self.paused_ms = self.scene.now_ms() if verb == "pause" else None
        return self.switches()

    def _make(self, at: int) -> dict[str, Any]:
        kind, number, state, minutes, gpus, hours, executor, why = DEEDS[at]
        job, waiting = self.scene.jobs[number], self.scene.queue()["rows"]
        payer = "" if kind in ("grow", "replace") else waiting[at % 2 % len(waiting)]["request_id"]
        by = f"by {gpus:g} GPUs" if kind in ("shrink", "grow") else f"({gpus:g} GPUs)"
        for_payer = f" for request {payer}" if payer else ""
        return {
            "action_id": f"{at:024x}-1",
            "kind": kind,
            "state": state,
            "since_ms": self.scene.as_of_ms() - minutes * MINUTE_MS,
            "job": job.name,
            "attempt": 1,
            "queue": job.queue,
            "gpus": gpus,
            "ranks": [],
            "places": [],
            "payer": payer,
            "executor": executor,
            "by_ms": self.scene.as_of_ms() + 3 * MINUTE_MS,
            "grace_s": 120.0,
            "cost_gpu_s": hours * 3600,
            "sentence": f"{VERBS[kind]} attempt 1 of {job.name} {by}{for_payer}: {REASONS[kind]}",
            "why": why,
            "changed": 800 + at,
        }
