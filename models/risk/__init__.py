"""Models of node risk: rules, evidence, probabilities and reasons."""
