"""The entry point of `python -m fleetcast`, which is the command `fleetcast`."""

from fleetcast.cli.main import main

main()
