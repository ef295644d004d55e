"""The pipeline: read sources, keep the state, score each tick, publish the board."""
