"""Checks that this installation has the cluster, pool and GPU model that a request names.

Without these checks, such a request would be refused or wait for ever, and a misspelt name would stay
undetected.
"""

from collections.abc import Sequence

from fleetcast.fleet.errors import RequestError
from fleetcast.fleet.requests import PlacementRequest
from fleetcast.fleet.spelling import find_nearest_names
from fleetcast.fleet.topology import Level
from fleetcast.placement.machines.view import ClusterView
from fleetcast.placement.queues.tree import ANY, QueueTree
from fleetcast.service.config import FleetConfig

NAMED = 3  # names that a refusal proposes


def check_known_names(
    request: PlacementRequest, fleet: FleetConfig, view: ClusterView | None, tree: QueueTree | None
) -> None:
    """Check the names in a request. Raises RequestError that states the field and the nearest known names.

    Without a view, only the cluster is checked.
    """
    check_cluster(request.cluster, fleet, view)
    if view is None or not len(view):
        return
    if request.pool and request.pool not in view.inventory.pools:
        raise RequestError(_describe_unknown_name("pool", request.pool, view.inventory.pools), "pool")
    _check_models(request, view, tree)


def check_cluster(cluster: str, fleet: FleetConfig, view: ClusterView | None) -> None:
    """Check that the configuration or the topology has this cluster. Raises RequestError if neither does."""
    if not cluster or cluster in fleet.clusters:
        return
    named = view.topology.domain_names[Level.CLUSTER] if view is not None else ()
    if cluster in named:
        return
    if fleet.is_unnamed and not named:
        why = "this installation has no name of its own: set [fleet] name or [fleet] cluster in its configuration"
        raise RequestError(f"cluster is {cluster!r}, and {why}, or leave cluster out", "cluster")
    raise RequestError(_describe_unknown_name("cluster", cluster, (*fleet.clusters, *named)), "cluster")


def _check_models(request: PlacementRequest, view: ClusterView, tree: QueueTree | None) -> None:
    """Check that some node may have one of the requested models. Raises RequestError if no node may.

    If no node states its model, every model passes.
    """
    stated = [name for name in view.inventory.gpu_models if name]
    if not request.models or not stated:
        return
    planned = [name for name in tree.resources if name != ANY] if tree is not None else []
    known = list(dict.fromkeys((*stated, *planned)))
    if any(wanted in name.casefold() for wanted in request.models for name in known):
        return
    field = "gpu_models" if request.gpu_models else "gpu_model"
    raise RequestError(
        _describe_unknown_name(field, " or ".join(request.gpu_models or (request.gpu_model,)), known), field
    )


def _describe_unknown_name(field: str, name: str, known: Sequence[str]) -> str:
    """Describe an unknown name and the nearest known ones.

    >>> _describe_unknown_name("pool", "trian", ["serve", "train"])
    "pool is 'trian', and there is none of that name; the nearest is train"
    """
    near = find_nearest_names(name, known, NAMED, 0.5)
    if near:
        hint = f"the nearest {'is' if len(near) == 1 else 'are'} {', '.join(near)}"
    else:
        more = f" and {len(known) - NAMED} more" if len(known) > NAMED else ""
        hint = f"there {'is' if len(known) == 1 else 'are'} {', '.join(known[:NAMED])}{more}"
    return f"{field} is {name!r}, and there is none of that name; {hint}"
