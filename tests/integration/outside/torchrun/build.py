"""PyTorch for the CPU, with torchrun and gloo: a Debian package of some 800 MB with all that it needs.

python -m tests.integration.outside.torchrun.build
"""

import shutil
import subprocess
from functools import cache
from pathlib import Path

from tests.integration.built import BuildError, Say, main, to_stderr

PYTHON, TORCHRUN = "/usr/bin/python3", "/usr/bin/torchrun"
PROBE = "import torch.distributed as dist; assert dist.is_gloo_available()"


@cache
def is_built() -> bool:
    if shutil.which(TORCHRUN) is None:
        return False
    return subprocess.run([PYTHON, "-c", PROBE], capture_output=True, check=False).returncode == 0


def build(say: Say = to_stderr) -> Path:
    """Return the interpreter that has PyTorch. Raises BuildError, since only a person installs Debian packages."""
    if not is_built():
        raise BuildError("torchrun is needed: apt-get install python3-torch")
    return Path(PYTHON)


if __name__ == "__main__":
    main(build)
