"""The executor of each running job: its own agent, or the system that runs it."""

from collections.abc import Callable, Sequence

from fleetcast.placement.actions.action import AGENTS, ActionKind
from fleetcast.service.config import AdaptersConfig

POLLED_MS = 300_000  # a job whose agent has not polled for so long has none
MOST_AGENTS = 100_000

ConfiguredExecutors = Sequence[tuple[str, Callable[[str, str], str]]]  # name, and why it cannot do a kind for a job


def open_configured_executors(config: AdaptersConfig) -> ConfiguredExecutors:
    """Return the executors of a configuration that may act. Raises ConfigError."""
    if not config.executor:
        return ()
    from fleetcast.service.doors import open_executors  # a placer without executors does not load them

    found = open_executors(config)
    return [(row.name, row.executor.explain_inability) for row in found if row.row.mode == "write"]


class ExecutorChoice:
    """The choice of an executor for an action on a job. A job's own agent comes before configured executors."""

    def __init__(self, configured: ConfiguredExecutors = ()) -> None:
        self.configured = configured
        self._polled_ms: dict[str, int] = {}  # job → when its agent last asked for its actions

    def record_agent(self, job: str, now_ms: int) -> None:
        """Record that the agent of a job asks for its actions."""
        if len(self._polled_ms) >= MOST_AGENTS:
            self._polled_ms = {name: ms for name, ms in self._polled_ms.items() if now_ms - ms <= POLLED_MS}
        if len(self._polled_ms) < MOST_AGENTS or job in self._polled_ms:
            self._polled_ms[job] = now_ms

    def find_executor(self, kind: ActionKind, job: str, now_ms: int) -> str:
        """Return the name of the executor for a kind of action on a job, or "" if none can carry it out."""
        polled_ms = self._polled_ms.get(job)
        if polled_ms is not None and abs(now_ms - polled_ms) <= POLLED_MS:
            return AGENTS
        return next((name for name, explain in self.configured if not explain(kind, job)), "")
