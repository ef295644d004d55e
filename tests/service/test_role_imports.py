"""What a role may import: it pays for each package with memory in every process, however small the site.

The lists may only shrink. A package that one command or one configured option needs is imported inside a function.
"""

import subprocess
import sys
from collections.abc import Sequence

import pytest

from fleetcast.service.withheld_imports import OBJECT_STORES

COMMON = {"aiohttp", "cramjam", "numpy", "tomli_w"}
SERVER = {"anyio", "click", "lz4", "prometheus_client", "starlette", "uvicorn"}
MAY_IMPORT = {
    "fleetcast.service.pipeline.role": (COMMON - {"aiohttp"}) | {"lz4", "prometheus_client"},
    "fleetcast.service.api.role": COMMON
    | SERVER
    | {"fastapi", "opentelemetry", "pydantic"},  # fastapi imports opentelemetry
    "fleetcast.service.placer.role": (COMMON - {"aiohttp"}) | SERVER,
    "fleetcast.service.adapters": COMMON | {"anyio", "starlette"},
    "fleetcast.service.supervise": {"tomli_w"},
    "fleetcast.cli.run": {"typer"},
}
PACKAGES = (
    *("aiohttp", "anyio", "click", "cramjam", "dask", "fastapi", "fsspec", "grpc", "kafka", "kubernetes", "lightgbm"),
    *("lz4", "matplotlib", "numpy", "opentelemetry", "pandas", "prometheus_client", "pyarrow", "pydantic", "requests"),
    *("rich", "scipy", "sklearn", "starlette", "statsmodels", "tomli_w", "typer", "uvicorn", "yaml", "zstandard"),
)


def imported(code: str, packages: Sequence[str] = PACKAGES) -> set[str]:
    """Return which packages a new process has imported after this code."""
    script = f"{code}\nimport sys; print(*({set(packages)!r} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


@pytest.mark.parametrize("module", MAY_IMPORT)
def test_a_role_imports_exactly_what_its_list_allows(module: str) -> None:
    optional = {"opentelemetry"}  # newer versions of fastapi import it
    assert imported(f"import {module}") | optional == MAY_IMPORT[module] | optional


def test_the_command_line_imports_no_rich() -> None:
    assert "rich" not in imported("import fleetcast.cli.main")


WORK = """
from fleetcast.service.withheld_imports import withhold_imports
withhold_imports()
import numpy as np
import pyarrow as pa, pyarrow.parquet as pq
from fleetcast.features.period import _find_first_hill
from fleetcast.models.demand.theta import FEW_SERIES, smooth_series
table = pa.table({"a": pa.array(np.arange(9)), "b": pa.array(["x"] * 9)})
sink = pa.BufferOutputStream()
pq.write_table(table, sink)
assert pq.read_table(pa.BufferReader(sink.getvalue())).to_pylist()[8] == {"a": 8, "b": "x"}
assert _find_first_hill(np.cos(np.arange(400) / 9), 0.1) is not None
smooth_series(np.ones((FEW_SERIES, 50)), 0.2)
"""


def test_archive_rhythms_and_the_demand_of_a_small_site_import_neither_pandas_nor_scipy() -> None:
    assert imported(WORK) & {"pandas", "scipy"} == set()


def test_a_role_writes_parquet_without_the_object_stores_of_pyarrow() -> None:
    assert imported(WORK, OBJECT_STORES) == set()
    assert imported("import pyarrow.parquet", OBJECT_STORES)


POOL = """
from fleetcast.service.process_memory import use_one_heap
use_one_heap()
import pyarrow
assert pyarrow.default_memory_pool().backend_name == "system"
"""


def test_pyarrow_uses_the_heap_of_the_role() -> None:
    assert "pyarrow" in imported(POOL)


SHARED = """
import importlib
from fleetcast.cli.run import SHARED_MODULES
for name in SHARED_MODULES:
    importlib.import_module(name)
"""


def test_roles_share_what_numpy_imports_at_the_first_unique() -> None:
    assert imported("import numpy as np; np.unique([1, 1])", ["numpy.ma"]), "drop it from the shared modules"
    assert imported(SHARED, ["numpy.ma"])


FOLDER = """
import tempfile
from pathlib import Path
from fleetcast.ingest.archive.files import ArchiveFiles, FileName
with tempfile.TemporaryDirectory() as folder:
    files, name = ArchiveFiles(folder), FileName("events", "2026-11-21", "", 13, "0", 1, 1)
    files.write_file(name, b"rows")
    assert files.list_files("events") == [name] and files.list_days("events") and files.open(name).read() == b"rows"
    files.remove(name)
"""


def test_an_archive_in_a_folder_needs_no_fsspec() -> None:
    assert imported(FOLDER) & {"fsspec", "zstandard", "lz4"} == set()


TREES = """
from fleetcast.service.withheld_imports import withhold_imports
withhold_imports()
import lightgbm, numpy as np
rng = np.random.default_rng(0)
data = lightgbm.Dataset(rng.random((200, 2)), rng.random(200))
trees = lightgbm.train({"verbosity": -1, "num_threads": 1}, data, 2)
assert np.isfinite(lightgbm.Booster(model_str=trees.model_to_string()).predict(rng.random((5, 2)))).all()
"""


def test_trees_are_served_without_pandas_and_scikit_learn() -> None:
    assert imported(TREES) & {"pandas", "sklearn", "matplotlib"} == set()


PLUGIN = """
from fleetcast.service.withheld_imports import withhold_imports
from fleetcast.service.plugins import load_plugin
withhold_imports()
load_plugin("pipeline.forecasters", "fleetcast.service.plugins:load_plugin")
try:
    import pandas
except ModuleNotFoundError:
    pass
else:
    raise SystemExit("pandas was found")
load_plugin("pipeline.forecasters", "json:loads")
import pandas
"""


def test_a_plugin_may_import_what_it_likes() -> None:
    assert "pandas" in imported(PLUGIN)
