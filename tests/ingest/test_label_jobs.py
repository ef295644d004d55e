"""Jobs that only labels tell of: when they begin, move and end, and when they give way."""

from collections.abc import Mapping

import msgspec
import pytest

from fleetcast.features.job_fold import JobFold
from fleetcast.fleet.entities import Entities
from fleetcast.fleet.events import Finished, JobEvent, Started, Submitted
from fleetcast.fleet.requests import RankPlacement
from fleetcast.fleet.samples import EntityKind
from fleetcast.ingest.gpu_labels import JobLabel, ObservedJobLabels
from fleetcast.ingest.label_jobs import LabelJobs, LabelledGpus

T0 = 1_789_000_000_000
A, B = JobLabel("ml/a", "ml", "a"), JobLabel("ml/b", "ml", "b")


class Labels:
    """Two nodes with two GPUs each, and the jobs that follow from what their pages say."""

    def __init__(self) -> None:
        self.entities = Entities()
        for node in ("n1", "n2"):
            for gpu in (0, 1):
                self.entities.add_to_node(EntityKind.GPU, node, gpu)
        self.gpus, self.jobs, self.fold = LabelledGpus(self.entities), LabelJobs(), JobFold()

    def page(
        self, at_s: float, jobs: Mapping[int, tuple[JobLabel, ...]], gpus: tuple[int, ...] = (0, 1, 2, 3)
    ) -> list[JobEvent]:
        self.gpus.apply_labels(ObservedJobLabels(self.ms(at_s), (0, 1, 2, 3), jobs))
        return self.tick(at_s)

    def tick(self, at_s: float) -> list[JobEvent]:
        events = self.jobs.make_events(self.gpus.list_current_holds(self.ms(at_s)), self.fold.jobs, self.ms(at_s))
        for event in events:
            self.fold.apply(event)
        return events

    def ms(self, at_s: float) -> int:
        return T0 + round(at_s * 1000)

    def running(self) -> dict[str, list[tuple[str, tuple[int, ...]]]]:
        return {row.job: [(rank.node, rank.gpus) for rank in row.ranks] for row in self.fold.jobs.list_running()}

    def restart(self) -> None:
        """What a snapshot keeps, in new objects."""
        for name, new in (("gpus", LabelledGpus(self.entities)), ("jobs", LabelJobs())):
            about, arrays = getattr(self, name).dump()
            new.load(msgspec.msgpack.decode(msgspec.msgpack.encode(about)), arrays)
            setattr(self, name, new)


@pytest.fixture
def labels() -> Labels:
    made = Labels()
    made.page(0, {})
    return made


def test_a_job_begins_with_its_label_on_all_nodes_and_ends_when_it_was_last_seen(labels: Labels) -> None:
    for at_s in (15, 30, 45):
        labels.page(at_s, {0: (A,), 1: (A,), 3: (A,)})
    assert labels.running() == {"ml/a": [("n1", (0, 1)), ("n2", (1,))]}
    for at_s in (60, 75, 90, 105, 120):
        labels.page(at_s, {})
    ended = labels.fold.jobs.get("ml/a")
    assert ended is not None
    assert (ended.state, ended.source, ended.queue, ended.run_s) == ("finished", "labels", "ml", 30.0)
    assert labels.fold.demand.compute_duration_quantiles()["all"]["n"] == 1


def test_lost_pages_and_one_page_without_the_label_end_nothing(labels: Labels) -> None:
    labels.page(15, {0: (A,)})
    assert labels.tick(900) == [], "nobody answered for a quarter of an hour"
    labels.page(915, {})
    labels.page(930, {0: (A,)})
    assert labels.running() == {"ml/a": [("n1", (0,))]}
    assert labels.fold.jobs.get("ml/a").attempt == 1  # type: ignore[union-attr]


def test_an_exporter_that_is_away_for_half_an_hour_holds_nothing(labels: Labels) -> None:
    labels.page(15, {0: (A,)})
    labels.tick(1900)
    assert labels.running() == {}


def test_another_label_takes_the_gpu_within_a_minute_and_a_job_grows_and_shrinks(labels: Labels) -> None:
    labels.page(15, {0: (A,), 1: (A,)})
    labels.page(30, {0: (A,), 1: (B,)})
    assert labels.running() == {"ml/a": [("n1", (0, 1))]}, "the labels may take turns"
    for at_s in range(45, 90, 15):
        labels.page(at_s, {0: (A,), 1: (B,)})
    assert labels.running() == {"ml/a": [("n1", (0,))], "ml/b": [("n1", (1,))]}
    begun = labels.fold.jobs.get("ml/b")
    assert begun is not None
    assert begun.started_ms == labels.ms(30)
    for at_s in range(90, 180, 15):
        labels.page(at_s, {0: (B,), 1: (B,)})
    assert labels.running() == {"ml/b": [("n1", (0, 1))]}


def test_a_job_of_the_same_name_is_the_next_attempt(labels: Labels) -> None:
    labels.page(15, {0: (A,)})
    for at_s in range(30, 120, 15):
        labels.page(at_s, {})
    labels.page(300, {0: (A,)})
    assert [(row.attempt, row.started_ms) for row in labels.fold.jobs.list_running()] == [(2, labels.ms(300))]


def test_what_ran_when_its_exporter_was_first_heard_teaches_no_run_time() -> None:
    labels = Labels()
    for at_s in (0, 15):
        labels.page(at_s, {0: (A,)})
    for at_s in range(30, 120, 15):
        labels.page(at_s, {})
    ended = labels.fold.jobs.get("ml/a")
    assert ended is not None
    assert ended.has_unseen_start
    assert (ended.state, labels.fold.demand.compute_duration_quantiles()["all"], len(labels.fold.runs)) == (
        "finished",
        None,
        0,
    )


def test_jobs_of_several_labels_hold_the_gpu_together_and_are_counted(labels: Labels) -> None:
    labels.page(15, {0: (B,)})
    labels.page(30, {0: (A, B)})
    labels.page(45, {0: (B, A), 1: (B, A)})
    assert labels.running() == {"ml/b": [("n1", (0, 1))], "ml/a": [("n1", (0, 1))]}
    assert labels.gpus.count_gpus() == {"labelled": 2, "shared": 2, "divided": 0}


def test_labels_of_mig_instances_hold_no_whole_gpu_and_are_counted(labels: Labels) -> None:
    labels.gpus.apply_labels(ObservedJobLabels(labels.ms(15), (0, 1), {}, divided=(0,)))
    assert labels.tick(15) == []
    assert labels.gpus.count_gpus()["divided"] == 1


def test_the_same_and_older_pages_change_nothing_nor_does_a_restart(labels: Labels) -> None:
    labels.page(15, {0: (A,)})
    labels.page(30, {0: (A,)})
    labels.restart()
    assert labels.page(30, {0: (B,)}) == labels.page(15, {}) == labels.page(45, {0: (A,)}) == []
    assert labels.running() == {"ml/a": [("n1", (0,))]}


def real(job: str, sequence: int = 3, attempt: int = 1, node: str = "n1") -> Started:
    ranks = (RankPlacement(0, node, (0,)),)
    return Started(job=job, attempt=attempt, sequence=sequence, time_ms=T0 + 5000, ranks=ranks)


def test_real_events_of_the_same_job_win_before_and_after(labels: Labels) -> None:
    labels.page(15, {0: (A,), 1: (A,)})
    labels.fold.apply(Submitted(job="ml/a", sequence=1, time_ms=T0, queue="gold"))
    labels.fold.apply(real("ml/a"))
    assert labels.page(30, {0: (A,), 1: (A,)}) == []
    (row,) = labels.fold.jobs.list_running()
    assert (row.source, row.queue, row.started_ms, row.gpus) == ("events", "gold", T0 + 5000, 1)
    labels.fold.apply(Finished(job="ml/a", sequence=1 << 20, time_ms=labels.ms(35)))
    assert labels.page(45, {0: (A,), 1: (A,)}) == [], "its labels last a little longer than the job"
    assert labels.running() == {}
    labels.fold.apply(real("ml/b"))
    assert labels.page(60, {0: (B,)}) == []


def test_real_events_of_another_attempt_or_of_the_pods_owner_end_the_labels_attempt(labels: Labels) -> None:
    part = JobLabel("ml/set-part", "ml", "set-part-0-x7k2p")
    labels.page(15, {0: (part,)})
    labels.fold.apply(real("ml/set"))
    (event,) = labels.page(30, {0: (part,)})
    assert (event.job, event.sequence < 0) == ("ml/set-part", True)
    assert list(labels.running()) == ["ml/set"]
    assert labels.page(45, {0: (part,)}) == []
    assert labels.fold.demand.compute_duration_quantiles()["all"] is None, "it did not end, somebody else told of it"
