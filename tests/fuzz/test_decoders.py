"""No decoder crashes, hangs or eats the memory, whatever it is given."""

import logging
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.fuzz.bounds import EFFORT, examples, frugal, prompt
from tests.fuzz.door_decoders import DOORS
from tests.fuzz.file_decoders import FILES
from tests.fuzz.health_decoders import HEALTH
from tests.fuzz.http_decoders import HTTP
from tests.fuzz.infiniband_decoders import INFINIBAND
from tests.fuzz.kafka_decoders import KAFKA
from tests.fuzz.kubernetes_decoders import KUBERNETES
from tests.fuzz.ledger_decoders import LEDGER
from tests.fuzz.mutants import WORDS, mutants
from tests.fuzz.prometheus_decoders import PROMETHEUS
from tests.fuzz.slurm_decoders import SLURM
from tests.fuzz.text_decoders import TEXTS

READERS = {**FILES, **TEXTS, **LEDGER, **KAFKA, **INFINIBAND, **SLURM, **KUBERNETES}
DECODERS = {**DOORS, **HTTP, **HEALTH, **PROMETHEUS, **READERS}
LONG = 6_000 if EFFORT < 1 else 12_000 if EFFORT == 1 else 30_000


@pytest.fixture(autouse=True)
def _no_log() -> Iterator[None]:
    """A line for each refused target would be all that a failure shows."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


@pytest.mark.parametrize("name", DECODERS)
@examples(80)
@given(st.data())
def test_anything_is_decoded_or_refused(name: str, data: st.DataObject) -> None:
    decoder = DECODERS[name]
    body = data.draw(mutants(decoder.seeds, decoder.words) | st.binary(max_size=200))
    with prompt():
        decoder.decode(body)


@pytest.mark.hypothesis  # `make explore` runs it with every body
@pytest.mark.parametrize("name", DECODERS)
def test_what_goes_on_for_long_costs_its_length(name: str) -> None:
    """A seed over and over, and a word over and over: alone and behind a good beginning.

    Below strength 1 words are alone and behind a good beginning in turn.
    """
    decoder = DECODERS[name]
    bodies = [long for seed in decoder.seeds if (long := over_and_over(seed))]
    for number, word in enumerate(dict.fromkeys((*decoder.words, *WORDS))):
        both = [over_and_over(word), decoder.seeds[0] + over_and_over(word)]
        bodies += both if EFFORT >= 1 else [both[number % 2]]
    for body in dict.fromkeys(bodies):
        with prompt(), frugal(decoder.base_bytes + decoder.times * len(body)):
            decoder.decode(body)


def over_and_over(word: bytes) -> bytes:
    return word * (LONG // len(word)) if word else b""
