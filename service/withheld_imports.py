"""Modules that roles must not import, because they use memory and no role needs them.

Some libraries import them if they are installed. pyarrow imports pandas at its first array (34 MiB), and
its own clients of object stores together with Parquet (9 MiB). lightgbm imports pandas, scikit-learn and
matplotlib. Archives reach object stores through fsspec, without those clients.
"""

import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

OBJECT_STORES = ("pyarrow._s3fs", "pyarrow._gcsfs", "pyarrow._azurefs", "pyarrow._hdfs")
WITHHELD = ("pandas", "sklearn", "matplotlib", *OBJECT_STORES)


class _WithheldFinder(MetaPathFinder):
    """An import finder that refuses the withheld modules as if they were not installed."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname in WITHHELD or fullname.partition(".")[0] in WITHHELD:
            raise ModuleNotFoundError(f"{fullname} is withheld: no role uses it", name=fullname)
        return None


_finder = _WithheldFinder()


def withhold_imports() -> None:
    """Withhold the modules from this process, unless it has imported one of them already."""
    if _finder not in sys.meta_path and not any(name in sys.modules for name in WITHHELD):
        sys.meta_path.insert(0, _finder)


def allow_imports() -> None:
    """Let this process import every module. Use it before plugins run, because they may need these modules."""
    if _finder in sys.meta_path:
        sys.meta_path.remove(_finder)
