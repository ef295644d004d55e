"""Commands for data scientists: fits, evaluations, simulations and benchmarks."""
