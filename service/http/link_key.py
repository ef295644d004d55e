"""The secret key that only the api and the placer of one state folder share.

With this key, the api proves to the placer that it has checked a caller's certificate. The header
`x-fleetcast-caller` contains the caller's name and scopes.
"""

import os
import secrets
from pathlib import Path

FILE = "placer.key"


def read_link_key(folder: Path) -> str:
    """Read the key from a state folder. The first call creates the key. Raises OSError."""
    path = folder / FILE
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        new = folder / f".{FILE}.{secrets.token_hex(8)}"
        try:
            with open(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="ascii") as file:
                file.write(secrets.token_urlsafe(32))
                file.flush()
                os.fsync(file.fileno())
            os.link(new, path)  # fails where another was there first
        except FileExistsError:
            pass
        finally:
            new.unlink(missing_ok=True)
    return path.read_text(encoding="ascii")
