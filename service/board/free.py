"""Which GPUs of a board no work is known on: by jobs, and unless the operator ignores it by telemetry alone."""

import numpy as np
from numpy.typing import NDArray

from service.board.board import Board
from service.config import PlacerConfig


def unknown_use(board: Board, placer: PlacerConfig) -> NDArray[np.bool_] | None:
    """(n, g) GPUs at work that no job holds; None where such use is ignored, and of a board that does not say."""
    if placer.unknown_use == "ignore" or "gpu.unknown_use" not in board:
        return None
    return board.array("gpu.unknown_use")


def unheld(board: Board, placer: PlacerConfig) -> NDArray[np.bool_]:
    """(n, g) nobody is known to use the GPU. Raises KeyError when the board does not say who holds what."""
    nobody: NDArray[np.bool_] = board.array("gpu.job") < 0
    in_use = unknown_use(board, placer)
    return nobody if in_use is None or in_use.shape != nobody.shape else nobody & ~in_use
