"""Readers of health services and launchers: gpud, UFM, NVSentinel and torchelastic."""
