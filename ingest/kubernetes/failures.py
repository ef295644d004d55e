"""A classifier of ended pods into failure categories.

A disruption of the pod decides the category. Without a disruption, the pod's reason decides it, and otherwise
the container's output or exit code. An exit code of 1 to 127, 134 (abort), 136 (arithmetic) or 139
(segment violation) is the user's fault. The category of any other code is unknown. UnexpectedAdmissionError is
hardware: the node lacks GPUs that it offered.
"""

import re
from typing import Final, Literal

import msgspec

from fleetcast.fleet.events import FailureCategory
from fleetcast.ingest.kubernetes.objects import Condition, Pod, Terminated, convert_to_ms

MESSAGE_LENGTH = 1_000
FINISHED: Final = "finished"
USER_SIGNALS = frozenset({134, 136, 139})
PREEMPTIONS = {"PreemptionByScheduler": "kube-scheduler", "EvictionByEvictionAPI": "eviction"}
NODE_GONE = frozenset({"DeletionByTaintManager", "DeletionByPodGC"})
_BY_REASON: dict[str, FailureCategory] = {
    **{"NodeLost": "node_lost", "NodeShutdown": "node_lost", "Shutdown": "node_lost", "Terminated": "node_lost"},
    **{"DeadlineExceeded": "timeout", "UnexpectedAdmissionError": "hardware", "OOMKilled": "out_of_memory"},
    **{"OutOfmemory": "out_of_memory", "NodeAffinity": "unknown"},
}
_HARDWARE = re.compile(
    r"\bxid\b|uncorrectable|\bECC\b|fallen off the bus|nvidia-container-cli|device-side nvml|nvlink error",
    re.IGNORECASE,
)
_NETWORK = re.compile(
    r"NCCL[^\n]{0,60}(timeout|timed out|remote|system) ?(error|process)?"
    r"|ibv_|connection (refused|reset)|no route to host",
    re.IGNORECASE,
)
_MEMORY = re.compile(r"cuda out of memory|outofmemoryerror|hip out of memory", re.IGNORECASE)


class Ending(msgspec.Struct, frozen=True, array_like=True):
    """The end of a pod or job.

    The pod or job finished if `category` is "finished". Otherwise it was preempted if `by` names the cause, and it
    failed if `by` is empty.
    """

    time_ms: int
    category: FailureCategory | Literal["finished"] = "unknown"
    message: str = ""
    by: str = ""


def find_pod_ending(pod: Pod, now_ms: int) -> Ending:
    """Return when and why a pod or its container failed. A disruption takes precedence."""
    ended = _find_ended_container(pod)
    at_ms = (convert_to_ms(ended.finished_at) if ended else None) or now_ms
    disruption = pod.find_condition("DisruptionTarget")
    if disruption is not None and disruption.is_true:
        return make_disruption_ending(disruption, at_ms)
    message = _format_message(pod, ended)
    return Ending(at_ms, _choose_category(pod, ended, message), f"pod {pod.metadata.name}: {message}"[:MESSAGE_LENGTH])


def make_disruption_ending(disruption: Condition, at_ms: int) -> Ending:
    """Return the end of a pod that was evicted or preempted, as its condition DisruptionTarget states it."""
    reason = disruption.reason or ""
    if reason in PREEMPTIONS:
        return Ending(at_ms, "unknown", disruption.text[:MESSAGE_LENGTH], PREEMPTIONS[reason])
    category: FailureCategory = "node_lost" if reason in NODE_GONE else "unknown"
    return Ending(at_ms, category, disruption.text[:MESSAGE_LENGTH])


def _find_ended_container(pod: Pod) -> Terminated | None:
    """Return the end of the container that failed first. If none failed, return the end of one that succeeded.

    Returns None if no container has ended. Earlier runs of restarted containers count only if no current run failed.
    """
    statuses = pod.status.container_statuses or ()
    now = [status.state.terminated for status in statuses if status.state.terminated]
    before = [status.last_state.terminated for status in statuses if status.last_state.terminated]
    for states in (now, before):
        failed = [state for state in states if state.exit_code != 0]
        if failed:
            return min(failed, key=lambda state: convert_to_ms(state.finished_at) or 0)
    return next(iter(now), None)


def _format_message(pod: Pod, ended: Terminated | None) -> str:
    phrases = [pod.status.reason, pod.status.message]
    if ended is not None:
        phrases += [ended.reason if ended.reason not in ("", "Error") else "", f"exit code {ended.exit_code}"]
        phrases += [ended.message.strip()]
    return ", ".join(part for part in phrases if part) or "it failed and said nothing"


def _choose_category(pod: Pod, ended: Terminated | None, message: str) -> FailureCategory:
    if pod.status.reason == "Evicted":
        return "out_of_memory" if "memory" in pod.status.message.lower() else "unknown"
    if pod.status.reason in _BY_REASON:
        return _BY_REASON[pod.status.reason]
    if pod.status.reason.startswith("OutOf"):  # OutOfcpu, OutOfnvidia.com/gpu: two schedulers, or a node that shrank
        return "hardware" if "gpu" in pod.status.reason.lower() else "unknown"
    if ended is None:
        return "unknown"
    return classify_exit(ended.exit_code, ended.reason, message)


def classify_exit(code: int, reason: str, message: str) -> FailureCategory:
    """Return the failure category of a container's exit, by its reason, then its message, then its code.

    >>> classify_exit(1, "Error", "ValueError"), classify_exit(1, "Error", "NCCL error: timeout")
    ('user', 'network')
    >>> classify_exit(137, "OOMKilled", ""), classify_exit(137, "Error", "")
    ('out_of_memory', 'unknown')
    """
    if reason in _BY_REASON:
        return _BY_REASON[reason]
    for pattern, category in ((_MEMORY, "out_of_memory"), (_HARDWARE, "hardware"), (_NETWORK, "network")):
        if pattern.search(message[:MESSAGE_LENGTH]):
            return category  # type: ignore[return-value]
    return "user" if 1 <= code <= 127 or code in USER_SIGNALS else "unknown"


def classify_condition(reason: str) -> FailureCategory:
    """Return the failure category of a Job, JobSet or PyTorchJob, by the reason of its failed condition.

    The category counts only if none of the job's pods states a failure.
    """
    return "timeout" if "Deadline" in reason else "unknown"
