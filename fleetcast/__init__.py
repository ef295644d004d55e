"""A weather service for GPU fleets. Its subpackages are links to the folders next to this one."""
