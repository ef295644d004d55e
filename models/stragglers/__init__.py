"""Models of stragglers: which node slows a job down, since when and at what cost."""
