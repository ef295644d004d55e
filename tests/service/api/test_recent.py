"""Recent identities: exact while they are remembered, bounded in streams and in gaps."""

from hypothesis import given
from hypothesis import strategies as st

from fleetcast.service.api.recent import MAX_RUNS, RecentIdentities


def job(name: str, sequence: int) -> tuple[str, str, int, int]:
    return "job", name, 1, sequence


@given(st.lists(st.integers(0, 40), max_size=60))
def test_it_holds_what_was_added_and_nothing_else(sequences: list[int]) -> None:
    recent = RecentIdentities()
    for sequence in sequences:
        recent.add_identity(job("a", sequence))
    assert [n for n in range(42) if job("a", n) in recent] == sorted(set(sequences))
    assert job("b", 1) not in recent


def test_the_stream_longest_unused_is_forgotten_first() -> None:
    recent = RecentIdentities(max_streams=2)
    for name in ("a", "b", "a", "c"):
        recent.add_identity(job(name, 1))
    assert [name for name in "abc" if job(name, 1) in recent] == ["a", "c"]


def test_gaps_are_bounded_and_the_newest_stay() -> None:
    recent = RecentIdentities()
    for sequence in range(0, 4 * MAX_RUNS, 2):
        recent.add_identity(job("a", sequence))
    assert job("a", 0) not in recent
    assert job("a", 4 * MAX_RUNS - 2) in recent
