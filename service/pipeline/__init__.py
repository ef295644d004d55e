"""The pipeline: it reads sources, holds the state, scores each tick, and publishes the board."""
