"""The rules by which an elastic Kubernetes Job gives up pods. They read objects of the API, and write none."""

from collections.abc import Collection, Sequence

from fleetcast.schedulers.kubernetes_replace import explain_missing_pods
from fleetcast.schedulers.kubernetes_stop import KUEUE_QUEUE, StoppableJob, StoppablePod

INDEXED = "Indexed"
POD_INDEX = "batch.kubernetes.io/job-completion-index"


def plan_shrink(job: StoppableJob, pods: Sequence[StoppablePod], nodes: Collection[str]) -> int | str:
    """Return the number of pods of a Job without those on some nodes, or why it cannot give these up.

    pods: those that have not ended. The Job controller always removes the pods with the highest indexes.
    """
    spec = job.spec
    if job.is_set:
        return "a JobSet keeps its number of pods"
    if job.metadata.get_word(KUEUE_QUEUE):
        return "Kueue suspends a Job whose parallelism changes"
    if spec.completion_mode != INDEXED or spec.completions != spec.parallelism:
        return "only an Indexed Job whose completions equal its parallelism can give up pods"
    if why := explain_missing_pods(pods, nodes):
        return why
    leaving = {pod.metadata.get_word(POD_INDEX) for pod in pods if pod.spec.node_name in nodes}
    size = spec.parallelism - len(leaving)
    if size < 1:
        return "no pod would be left"
    highest = {str(index) for index in range(size, spec.parallelism)}
    if leaving != highest:
        shown, named = (", ".join(sorted(rows)) for rows in (highest, leaving))
        return f"a Job gives up its highest indexes first: {shown}, and the action names {named}"
    return size
