"""Whatever a draft holds, the file is one that the placer takes."""

import string

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleetcast.fleet.errors import ConfigError
from fleetcast.placement.queues.queues_file import read_queues
from fleetcast.schedulers.imports.agreement import correct_draft
from fleetcast.schedulers.imports.draft import ANY, Draft, DraftClass, DraftQueue, SourceLine
from fleetcast.schedulers.imports.slurm import draft_slurm
from fleetcast.schedulers.imports.toml_text import format_draft

LINE = SourceLine("f", 1)
amounts = st.dictionaries(st.sampled_from([ANY, "H100"]), st.floats(0, 1e9) | st.sampled_from([0.1, 0.2, 0.3, 8.0]))
names = st.text(string.ascii_letters + '"\\# é', min_size=1, max_size=3)
queues = st.builds(
    DraftQueue,
    st.just(LINE),
    st.floats(0, 1e9),
    *(amounts, amounts, amounts, amounts),
    credits=st.none() | st.just((1.0, 5.0)),
    says=st.text(max_size=9),
    is_closed=st.booleans(),
)


@given(st.dictionaries(st.lists(names, min_size=1, max_size=3).map(tuple), queues, max_size=6), st.text(), names)
def test_the_placer_takes_what_is_written(tree: dict[tuple[str, ...], DraftQueue], text: str, name: str) -> None:
    draft = Draft(text, classes={name: DraftClass(5, ("gone",))})
    draft.add_queue("one", DraftQueue(LINE))
    for parts, queue in tree.items():
        for depth in range(1, len(parts)):
            if (above := "/".join(parts[:depth])) not in draft.queues:
                draft.add_queue(above, DraftQueue(LINE))
        if (path := "/".join(parts)) not in draft.queues:
            draft.add_queue(path, queue)
    draft.add_remark(text, text)
    correct_draft(draft)
    written = format_draft(draft, [text])
    read = read_queues(written)
    assert {node.name for node in read.nodes[1:]} == set(draft.queues)
    assert written == format_draft(draft, [text])


def test_guarantees_are_lowered_to_the_limit_above_and_raised_to_the_sum_below() -> None:
    draft = Draft("x")
    draft.add_queue("a", DraftQueue(LINE, limit={ANY: 10.0}, guaranteed={ANY: 4.0}, lend={ANY: 99.0}))
    draft.add_queue("a/b", DraftQueue(LINE, guaranteed={ANY: 15.0}))
    draft.add_queue("a/c", DraftQueue(LINE, guaranteed={ANY: 5.0}, limit={ANY: 3.0}))
    correct_draft(draft)
    given_now = {path: queue.guaranteed[ANY] for path, queue in draft.queues.items()}
    assert given_now["a/b"] / given_now["a/c"] == pytest.approx(5, rel=1e-5)
    assert given_now["a/b"] + given_now["a/c"] == given_now["a"] <= 10
    assert draft.queues["a"].lend == {ANY: given_now["a"]}


@given(st.text(st.sampled_from("ab|=,\n1-: \x07gresgpu/."), max_size=120))
def test_any_text_is_a_tree_or_refused(text: str) -> None:
    try:
        draft = draft_slurm({"f": "x|root|||1||||\n" + text}, str.upper)
        correct_draft(draft)
    except ConfigError:
        return
    if draft.queues:
        read_queues(format_draft(draft, ["f"]))
