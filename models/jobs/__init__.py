"""What jobs look like and how they affect each other: phases, templates, interference, checkpoints."""
