"""Actions on running jobs: their kinds, their life, and the limits on how many are sent."""
