"""The fleetcast command, with one file for each command group."""
