"""Node risk: rules, evidence, scores and reasons."""
