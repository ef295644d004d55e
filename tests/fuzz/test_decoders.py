"""No decoder crashes, hangs or eats the memory, whatever it is given."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.fuzz.bounds import examples, prompt
from tests.fuzz.door_decoders import DOORS
from tests.fuzz.mutants import mutants

DECODERS = DOORS


@pytest.mark.parametrize("name", DECODERS)
def test_the_seeds_are_decoded(name: str) -> None:
    for seed in DECODERS[name].seeds:
        DECODERS[name].decode(seed)


@pytest.mark.parametrize("name", DECODERS)
@examples(150)
@given(st.data())
def test_anything_is_decoded_or_refused(name: str, data: st.DataObject) -> None:
    decoder = DECODERS[name]
    body = data.draw(mutants(decoder.seeds, decoder.words) | st.binary(max_size=200))
    with prompt():
        decoder.decode(body)
