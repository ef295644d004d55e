"""Slurm's associations, QOS and slurm.conf as queues.toml."""

import math

import pytest

from fleetcast.fleet.errors import ConfigError
from fleetcast.schedulers.imports.slurm import draft_slurm
from tests.schedulers.imports.importing import imported, named, nodes

ROOT = "made|root|||1||||normal\nmade|root||root|1||||normal\n"
ASSOC = (
    ROOT
    + """made|research|root||40|cpu=100,gres/gpu=64|||normal
made|nlp|research||3|gres/gpu:h100=32|||normal
made|nlp||ada|1||||normal
made|nlp||bob|1||||normal
made|vision|research||1|||gres/gpu=8|high,normal
made|vision||ada|2||||normal
made|vision||eve|1||||normal
made|teaching|root||20||||normal
made|teaching||dan|parent||||normal
"""
)
QOS = """normal|0||00:00:00|||1.000000|
high|100|normal|00:02:00|gres/gpu=8|gres/gpu=4|2.000000|DenyOnLimit
"""
CONF = """# as scontrol reads it
ClusterName=made
PriorityType=priority/multifactor
PriorityDecayHalfLife=14-0 # two weeks
PriorityMaxAge=\\
  1-12:00:00
PriorityWeightFairshare=1000
PriorityWeightQOS=10
"""


def test_accounts_are_queues_with_shares_and_limits() -> None:
    tree, notes = imported(draft_slurm, ASSOC, QOS, CONF)
    found = nodes(tree)
    assert {name: node.weight for name, node in found.items()} == {
        **{"research": 40, "teaching": 20, "root": 1, "research/nlp": 3, "research/vision": 1},
        **{"research/vision/ada": 2, "research/vision/eve": 1},
    }
    assert found["research"].limit == {"gpu": 64}
    assert found["research/nlp"].limit == {"H100": 32}
    assert named(notes, "GrpTRES of other") == ["research (cpu=100)"]
    assert named(notes, "MaxTRES") == ["research/vision (gres/gpu=8)"]
    assert named(notes, "which QOS") == ["research/vision (high,normal)"]


def test_users_share_an_account_as_slurm_says() -> None:
    tree, notes = imported(draft_slurm, ASSOC)
    found = nodes(tree)
    assert found["research/nlp"].per_user  # equal shares
    assert not found["research/vision"].per_user  # unequal: a queue each
    assert not found["teaching"].per_user  # parent: all are the account's
    assert named(notes, "users that are queues") == ["root", "research/vision/ada", "research/vision/eve"]
    assert "no slurm.conf among the files: half-life and longest wait are Slurm's defaults, 7 days" in notes
    assert tree.policy.half_life_s == 7 * 86400


def test_qos_are_classes_and_slurm_conf_is_the_policy() -> None:
    tree, notes = imported(draft_slurm, CONF, QOS, ASSOC)  # in any order
    assert (tree.policy.half_life_s, tree.policy.max_wait_s, tree.policy.order) == (14 * 86400, 1.5 * 86400, "fifo")
    assert (tree.classes["high"].priority, tree.classes["high"].preempts) == (100, ("normal",))
    for key, value in (("gracetime", "00:02:00"), ("usagefactor", "2.000000"), ("flags", "DenyOnLimit")):
        assert named(notes, key) == [f"high ({value})"]
    assert not named(notes, "PriorityWeightQOS")
    assert named(notes, "PriorityWeight") == ["fairshare 1000"]


def test_a_header_names_the_columns() -> None:
    text = (
        "Account|Par Name|Cluster|User|Share|GrpTRES|GrpTRESMins|MaxTRES|QOS\nroot||made||1||||\na|root|made||7||||\n"
    )
    assert nodes(imported(draft_slurm, text)[0])["a"].weight == 7


def test_a_budget_is_a_guarantee_with_credits_that_fill_up_to_it() -> None:
    tree, notes = imported(draft_slurm, ROOT + "made|a|root||1||gres/gpu=600000,cpu=5||\n")
    node = nodes(tree)["a"]
    assert node.credits is not None
    assert (node.credits.rate, node.credits.cap_gpu_s) == (1.0, 600_000 * 60)
    bank_of_an_idle_queue = node.guaranteed["gpu"] * tree.policy.half_life_s / math.log(2)
    assert bank_of_an_idle_queue == pytest.approx(node.credits.cap_gpu_s, rel=1e-6)
    assert named(notes, "GrpTRESMins is") == ["a (600000)"]
    assert named(notes, "GrpTRESMins of other") == ["a (cpu=5)"]


def test_a_share_parent_takes_an_account_out_of_its_level() -> None:
    text = ROOT + "made|a|root||parent|gres/gpu=5|||\nmade|b|a||7||||\nmade|a||ada|2||||\n"
    tree, notes = imported(draft_slurm, text)
    assert {name: node.weight for name, node in nodes(tree).items()} == {"b": 7, "root": 1, "ada": 2}
    assert named(notes, "grptres of an account") == ["a (gres/gpu=5)"]


def test_no_decay_and_a_share_of_nothing() -> None:
    tree, notes = imported(draft_slurm, ROOT + "made|a|root||0||||\n", "PriorityDecayHalfLife=0\nPriorityMaxAge=0\n")
    assert nodes(tree)["a"].weight == 1e-6
    assert named(notes, "weight 0 became") == ["a"]
    assert tree.policy.half_life_s == 3600e6


def test_a_class_never_becomes_that_of_a_queue_by_its_name() -> None:
    tree, notes = imported(draft_slurm, ROOT + "made|high|root||1||||\n", QOS + "urgent|5|high||||1|\n")
    assert nodes(tree)["high"].class_name == ""
    assert tree.classes["urgent"].preempts == ("high-class",)
    assert named(notes, "a class with the name") == ["high is high-class"]


def test_a_user_with_the_name_of_an_account_and_one_of_two_partitions() -> None:
    text = ROOT + "made|a|root||1||||\nmade|b|a||1||||\nmade|a||b|2||||\nmade|a||b|3||||\n"
    tree, notes = imported(draft_slurm, text)
    assert nodes(tree)["a/b-user"].weight == 2
    assert named(notes, "a second association") == ["b of a"]


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "file0: is empty"),
        ("a|b|c\n", "file0, line 1: has 3 columns, none of the tables"),
        (ROOT + "made|a|root||1|||\n", "file0, line 3: has 8 columns, the others have 9"),
        (ROOT + "made|a|root||x||||\n", "line 3: share 'x' is neither a number nor parent"),
        (ROOT + "made|a|root||-1||||\n", "line 3: share is -1, must lie in 0..1e\\+09"),
        (ROOT + "made|a|root||nan||||\n", "line 3: share 'nan'"),
        (ROOT + "made|a|root||1|gres/gpu=-4|||\n", r"line 3: gres/gpu \(-4\) is -4"),
        (ROOT + "made|a|root||1|gres/gpu=NaN|||\n", r"line 3: gres/gpu \(NaN\) is nan"),
        (ROOT + "made|a|b||1||||\nmade|b|a||1||||\n", "line 3: is a cycle: a → b → a"),
        (ROOT + "made|a|none||1||||\n", "line 3: account 'a' is below 'none', which has no row"),
        (ROOT + "made|a||ada|1||||\n", "line 3: user 'ada' is in account 'a', which has no row"),
        (ROOT + "made|a|root||1||||\nmade|a|root||1||||\n", "line 4: account 'a' is there twice"),
        (ROOT + "other|a|root||1||||\n", "there are several clusters, made, other: export one"),
        (ROOT + "made|a\x07|root||1||||\n", "no name of a queue"),
        ("PriorityDecayHalfLife=soon\n", "there are no associations"),
        ("PriorityDecayHalfLife\n", "line 1: 'PriorityDecayHalfLife' is neither Key=value"),
    ],
)
def test_bad_files_are_refused_with_file_and_line(text: str, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        imported(draft_slurm, text)


@pytest.mark.parametrize(
    ("other", "why"),
    [
        ("PriorityDecayHalfLife=soon\n", "file1, line 1: 'soon' is no time"),
        ("a|1.5||||||\n", "file1, line 1: priority '1.5' of QOS 'a'"),
        ("a|1||||||\na|1||||||\n", "file1, line 2: QOS 'a' is there twice"),
    ],
)
def test_bad_qos_and_settings_are_refused(other: str, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        imported(draft_slurm, ASSOC, other)


def test_a_tree_that_is_too_deep_is_refused() -> None:
    chain = "".join(f"made|a{n}|{f'a{n - 1}' if n else 'root'}||1||||\n" for n in range(9))
    with pytest.raises(ConfigError, match=r"line 11: queue '.*' is 9 levels deep, at most 8"):
        imported(draft_slurm, ROOT + chain)


def test_two_qos_never_preempt_each_other() -> None:
    """Slurm reads such a table. The later QOS of it loses its preemption."""
    tree, notes = imported(draft_slurm, ROOT, "a|1|b||||1|\nb|2|c||||1|\nc|3|a,c||||1|\n")
    assert {name: found.preempts for name, found in tree.classes.items()} == {"a": ("b",), "b": ("c",), "c": ()}
    assert named(notes, "two classes cannot") == ["c (a)", "c (c)"]
