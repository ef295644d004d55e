"""Models of jobs and how they affect each other: phases, templates, interference, checkpoints."""
