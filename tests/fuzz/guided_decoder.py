"""One decoder under libFuzzer, in a process of its own: `python -m tests.fuzz.guided_decoder NAME OPTIONS CORPUS`."""

import hashlib
import logging
import sys
from pathlib import Path
from typing import cast

import atheris

from tests.fuzz.guided import PRODUCT, load

with atheris.instrument_imports(include=[*PRODUCT, sys.argv[1].partition(":")[0]]):
    decoder = load(sys.argv[1])

from tests.fuzz.decoder import Decoder  # behind the instrumented imports


def main() -> None:
    """Write the seeds and words of the decoder, then hand over to libFuzzer."""
    own = cast(Decoder, decoder)
    corpus = Path(sys.argv[-1])
    arguments = [sys.argv[0], *sys.argv[2:]]
    if corpus.is_dir():
        for seed in own.seeds:
            (corpus / f"seed-{hashlib.sha1(seed).hexdigest()}").write_bytes(seed)
        words = corpus.parent / f"{corpus.name}.dict"
        words.write_text("".join(f'"{_escaped(word)}"\n' for word in own.words if word), "ascii")
        if own.words:
            arguments.insert(1, f"-dict={words}")
    logging.disable(logging.CRITICAL)
    atheris.Setup(arguments, own.decode)
    atheris.Fuzz()


def _escaped(word: bytes) -> str:
    return "".join(f"\\x{byte:02X}" for byte in word)


if __name__ == "__main__":
    main()
