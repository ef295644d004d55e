"""The fleetcast command, one file a command group."""
