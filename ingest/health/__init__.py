"""Health services and launchers: gpud, UFM, NVSentinel, torchelastic."""
