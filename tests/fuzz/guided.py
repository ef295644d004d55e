"""Fuzz the decoders guided by coverage: inputs that reach new code are kept, and changed further.

    python -m tests.fuzz.guided --seconds 600               # all decoders, one after the other, each for its share
    python -m tests.fuzz.guided --decoder pages --seconds 60
    python -m tests.fuzz.guided --decoder pages --input var/guided/pages/crash-1f3a  # one input again

It prints one JSON line for each decoder, and ends with 1 if one failed. Inputs are kept below `var/guided`, so that the
next run goes on where this one stopped. atheris, which it needs, is in the development set on Linux.
"""

import argparse
import importlib
import json
import random
import re
import subprocess
import sys
from pathlib import Path

FOLDER = Path("var/guided")
PRODUCT = [
    f"fleetcast.{name}"
    for name in ("fleet", "clients", "ingest", "features", "models", "placement", "schedulers", "service")
]
MAX_BYTES = 65_536
SLOWEST_S = 20
_DONE = re.compile(r"Done (\d+) runs? in")
_COVERAGE = re.compile(r"cov: (\d+)")
_ARTIFACT = re.compile(r"Test unit written to (\S+)")


def main() -> int:
    """Run the decoders in processes of their own: libFuzzer ends the process that it runs in."""
    options = _options()
    seed = options.seed or random.SystemRandom().randrange(1, 2**31)
    names = options.decoder or _all_names()
    failed = False
    for name in names:
        row = _fuzz(name, max(1, options.seconds // len(names)), options.runs, seed, options.input)
        print(json.dumps(row), flush=True)
        failed |= row["failure"] is not None
    return int(failed)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz.guided", description="Fuzz the decoders by coverage.")
    parser.add_argument("--decoder", action="append", help="only this one; may be repeated (default: all)")
    parser.add_argument("--seconds", type=int, default=600, help="for all of them together (default 600)")
    parser.add_argument("--runs", type=int, default=-1, help="inputs for each decoder at most (default: no bound)")
    parser.add_argument("--seed", type=int, default=0, help="of the changes (default: a new one, which is printed)")
    parser.add_argument("--input", type=Path, help="decode this file once, with one --decoder")
    options = parser.parse_args()
    if options.input is not None and (len(options.decoder or ()) != 1 or not options.input.is_file()):
        parser.error("--input names an existing file and needs one --decoder")
    if options.seconds < 1:
        parser.error(f"--seconds is {options.seconds}, it must be at least 1")
    return options


def _all_names() -> list[str]:
    from tests.fuzz.test_decoders import DECODERS

    return sorted(DECODERS)


def _fuzz(name: str, seconds: int, runs: int, seed: int, file: Path | None) -> dict[str, object]:
    """Fuzz one decoder. Returns its runs, the code blocks that they reached, and the failure if there was one."""
    folder = FOLDER / name.replace(":", "-").replace(" ", "-")
    folder.mkdir(parents=True, exist_ok=True)
    bounds = (f"-max_total_time={seconds}", f"-runs={runs}", f"-seed={seed}", f"-timeout={SLOWEST_S}")
    kept = (f"-max_len={MAX_BYTES}", f"-artifact_prefix={folder}/", str(file or folder))
    command = [sys.executable, "-m", "tests.fuzz.guided_decoder", name, *bounds, *kept]
    ended = subprocess.run(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False, errors="replace"
    )
    said = ended.stdout
    done, coverage, artifact = _DONE.search(said), _COVERAGE.findall(said), _ARTIFACT.search(said)
    failure = None
    if ended.returncode:
        again = f"python -m tests.fuzz.guided --decoder {name} --input {artifact[1]}" if artifact else ""
        failure = {"why": said[-4000:], "replay": again}
    return {
        "decoder": name,
        "seed": seed,
        "runs": int(done[1]) if done else 0,
        "blocks": int(coverage[-1]) if coverage else 0,
        "inputs": sum(1 for _ in folder.iterdir()),
        "failure": failure,
    }


def load(name: str) -> object:
    """Return a decoder by its name, or by `module:NAME`."""
    module, _, attribute = name.partition(":")
    if attribute:
        return getattr(importlib.import_module(module), attribute)
    from tests.fuzz.test_decoders import DECODERS

    if name not in DECODERS:
        sys.exit(f"no decoder {name!r}; there are {', '.join(sorted(DECODERS))}")
    return DECODERS[name]


if __name__ == "__main__":
    sys.exit(main())
