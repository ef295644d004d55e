"""The command `fleetcast demo`, with its checks, its terminal and its report."""
