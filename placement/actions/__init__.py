"""Actions on running jobs: what they are, their life, and the limits on how many are sent."""
