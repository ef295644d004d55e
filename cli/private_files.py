"""What our processes write is for the user who runs them, and for nobody else, unless the environment says otherwise.

State, archive and reports hold who ran what, and the copy of a configuration may hold passwords. `FLEETCAST_UMASK`
widens it: with 027 the group may read (the archive, say), with 022 everybody. Children have it from us.
"""

import os
import re

from fleet.errors import ConfigError

VARIABLE = "FLEETCAST_UMASK"
DEFAULT = "077"


def keep_files_private() -> None:
    """Set the umask of this process. ConfigError where the environment names none that leaves us our own files."""
    text = os.environ.get(VARIABLE) or DEFAULT
    if not re.fullmatch("0*[0-7]{1,3}", text) or int(text, 8) & 0o700:
        raise ConfigError(f"{VARIABLE} = {text!r}: expected an umask such as 077, 027 or 022")
    os.umask(int(text, 8))
