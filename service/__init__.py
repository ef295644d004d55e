"""The service: its processes (pipeline, api, placer, adapters) and how they are connected."""
