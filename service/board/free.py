"""The GPUs and nodes of a board that are free for placements.

The operator's settings may ignore unknown use and missing telemetry.
"""

from collections import Counter

import msgspec
import numpy as np
from numpy.typing import NDArray

from fleetcast.placement.machines.view import Hearing, mask_placeable_nodes
from fleetcast.service.board.board import Board
from fleetcast.service.board.gpu_use import KEEPS, NO_HOLDER, Occupant, classify_gpu_use
from fleetcast.service.config import PlacerConfig

IGNORE = "ignore"


def find_unattributed_gpus(board: Board, placer: PlacerConfig) -> NDArray[np.bool_] | None:
    """Return for each GPU whether it is busy although no job holds it: (n, g) bool.

    Returns None if the operator ignores such use, or if the board does not state it.
    """
    if placer.unknown_use == IGNORE or "gpu.unknown_use" not in board:
        return None
    return board.array("gpu.unknown_use")


def read_gpu_use(board: Board) -> NDArray[np.int8]:
    """Return the Occupant of each GPU: (n, g) int8. Raises KeyError if the board does not state the holders."""
    if "gpu.use" in board:
        return board.array("gpu.use")
    holder = board.array("gpu.job")
    unknown = board.array("gpu.unknown_use") if "gpu.unknown_use" in board else np.zeros(holder.shape, bool)
    nothing = np.full(len(holder), Occupant.NOTHING, np.int8)
    return classify_gpu_use(holder, np.full(holder.shape, NO_HOLDER, np.int32), unknown, nothing)


def find_unheld_gpus(board: Board, placer: PlacerConfig) -> NDArray[np.bool_]:
    """Return for each GPU whether it is free as far as known: (n, g) bool.

    Raises KeyError if the board does not state the holders.
    """
    use = read_gpu_use(board)
    nothing: NDArray[np.bool_] = use == Occupant.NOTHING
    return nothing | (use == Occupant.UNKNOWN) if placer.unknown_use == IGNORE else nothing


def find_placeable_nodes(board: Board, placer: PlacerConfig) -> NDArray[np.bool_]:
    """Return for each node of the board whether jobs may be placed on it: (n,) bool."""
    state = board.array("node.state")
    return mask_placeable_nodes(state, read_hearing(board, len(state), placer))


def count_promised_gpus(board: Board, row: int) -> dict[str, int]:
    """Return request → the number of the node's GPUs that are promised to it, in the order of requests.

    row: the node's row on the board.
    """
    if "gpu.promise" not in board:
        return {}
    names = msgspec.json.decode(board.raw("promises"), type=list[str])
    promise = board.array("gpu.promise")[row][read_gpu_use(board)[row] == Occupant.PROMISE]
    return {names[number]: count for number, count in sorted(Counter(promise.tolist()).items())}


def find_windowed_nodes(board: Board, n: int) -> NDArray[np.bool_]:
    """Return for each node whether a window or a reservation withholds it now: (n,) bool.

    All values are False if the board states no windows.
    """
    found = np.zeros(n, bool)
    if "node.kept" in board:
        stated = board.array("node.kept")[:n]
        found[: len(stated)] = np.isin(stated, KEEPS)
    return found


def describe_window(board: Board, node: str) -> str:
    """Describe the window or reservation that withholds a node. Returns "" if there is none."""
    return str(board.json("kept").get(node, "")) if "kept" in board else ""


def read_hearing(board: Board, n: int, placer: PlacerConfig) -> NDArray[np.int8] | None:
    """Return the Hearing of each node: (n,) int8. Returns None if the board does not state it.

    With the setting `unheard = "ignore"`, nodes without fresh telemetry count as UNCONFIRMED.
    """
    if "node.hearing" not in board:
        return None
    stated = board.array("node.hearing")[:n]
    found = np.concatenate([stated, np.full(n - len(stated), Hearing.UNHEARD, np.int8)])
    if placer.unheard == IGNORE:
        found[found != Hearing.FRESH] = Hearing.UNCONFIRMED
    return found
