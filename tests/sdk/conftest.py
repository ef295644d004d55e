"""The client is a distribution of its own: its folder is put on the path, as an installation would."""

import sys
from pathlib import Path

SDK = Path(__file__).resolve().parents[2] / "sdk"
if str(SDK) not in sys.path:
    sys.path.insert(0, str(SDK))
