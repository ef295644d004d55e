"""What the placer reads of the board that the pipeline writes."""

import numpy as np

from fleetcast.fleet.topology import NodeSpec, Topology
from fleetcast.models.risk.rules import ACTIONS
from fleetcast.models.risk.score import ScoredFleet
from fleetcast.models.risk.scores import RISK_HORIZONS_S, RISK_KINDS, Action, RiskScores
from fleetcast.placement.machines.view import Advice
from fleetcast.service.board.board import Board, encode_board
from fleetcast.service.pipeline.fleet_scores import FleetScores
from fleetcast.service.placer.view import ViewDecoder
from tests.service.ticks import GPUS, tick_of

NOW_MS = 1_589_310_000_000


def test_the_view_has_the_advice_of_the_forecasts() -> None:
    n = len(ACTIONS)
    risk = np.full((len(RISK_KINDS), len(RISK_HORIZONS_S), n), 0.01)
    actions = {row: Action(code, code) for row, code in enumerate(ACTIONS)}
    fleet = ScoredFleet(RiskScores(risk, {}, actions, risk[0, 0] > 2, "rules"), {})
    tick = tick_of(NOW_MS, Topology.build([NodeSpec(f"n{row}", GPUS, "H100") for row in range(n)]), fleet)
    board = Board(encode_board(FleetScores().make_sections(tick), 1, NOW_MS))
    advice = dict(zip(ACTIONS, ViewDecoder().decode_board(board).view.advice.tolist(), strict=True))
    assert advice == {
        "none": Advice.NONE,
        "watch": Advice.NONE,
        "avoid": Advice.AVOID,
        "drain_at_job_end": Advice.DRAIN,
        "drain_now": Advice.DRAIN,
        "replace_part": Advice.DRAIN,
    }
