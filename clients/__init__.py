"""Foreign protocols, one file each."""
