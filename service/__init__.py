"""The service: its processes (pipeline, api, placer, adapters) and their wiring."""
