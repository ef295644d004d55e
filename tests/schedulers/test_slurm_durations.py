from fleetcast.schedulers.adapter import Seen
from fleetcast.schedulers.slurm_durations import DAY_MS, FILE, MINUTES, RETENTION_DAYS, UNTIL, VALID_S, JobDurations
from fleetcast.schedulers.weather import JobOutlook, Weather
from tests.schedulers.small_fleet import NOW_MS, job

TODAY, NOW_S = NOW_MS // DAY_MS, NOW_MS // 1000


def told(jobs: dict[str, JobOutlook] | None, seen: Seen | None = None) -> dict[str, str | None]:
    """What is wished of each key, less the time that is renewed each time here."""
    weather = Weather(1, NOW_MS, NOW_MS, None, None, jobs)
    return {write.key: write.value for write in JobDurations().wishes(weather, seen or {}) if write.key != FILE}


def test_a_name_of_a_user_gets_the_forecast_of_its_newest_job() -> None:
    older, newer = job(started_ms=1), job(started_ms=2, run_p50_s=61.0, run_p90_s=10.0)
    other = job(user="bob", started_ms=1)
    assert told({"1": newer, "2": older, "3": other}) == {"ada train": f"2 1 {TODAY}", "bob train": f"60 90 {TODAY}"}
    assert told({"1": newer, "2": job(state="queued", started_ms=None)}) == {"ada train": f"60 90 {TODAY}"}


def test_who_has_no_name_no_forecast_or_a_limit_that_cuts_it_short_is_left_out() -> None:
    assert told({"1": job(name=""), "2": job(user=""), "3": job(run_p90_s=None), "4": job(limit_s=5400.0)}) == {}
    assert told({"1": job(limit_s=9000.0)}) == {"ada train": f"60 90 {TODAY}"}


def test_a_small_change_waits_and_a_name_that_still_runs_is_renewed_once_a_week() -> None:
    def wishes(held: str) -> dict[str, str | None]:
        return told({"1": job()}, {"ada train": {MINUTES: held}})

    assert wishes(f"66 99 {TODAY}") == wishes(f"60 90 {TODAY - 6}") == {}
    assert wishes(f"60 90 {TODAY - 7}") == wishes(f"90 90 {TODAY}") == wishes("nonsense")
    assert wishes("nonsense") == {"ada train": f"60 90 {TODAY}"}


def test_names_that_were_not_seen_for_long_go_and_there_are_never_too_many() -> None:
    old = {"eve old": {MINUTES: f"1 2 {TODAY - RETENTION_DAYS}"}}
    assert told({"1": job()}, old) == {"ada train": f"60 90 {TODAY}", "eve old": None}
    many = {f"eve {number:05}": {MINUTES: f"1 2 {TODAY - number % 2}"} for number in range(20_000)}
    assert told({"1": job()}, many) == {"ada train": f"60 90 {TODAY}", "eve 19999": None}


def test_rows_say_until_when_they_count_and_nothing_once_jobs_are_not_known() -> None:
    def until(jobs: dict[str, JobOutlook] | None, held: str | None) -> object:
        seen = {FILE: {UNTIL: held}} if held else {}
        wishes = JobDurations().wishes(Weather(1, NOW_MS, NOW_MS, None, None, jobs), seen)
        return [write.value for write in wishes if write.field == UNTIL]

    renewed = [str(NOW_S + VALID_S)]
    assert until({}, None) == until({}, str(NOW_S + 60)) == until({}, "soon") == until({}, str(2 * NOW_S)) == renewed
    assert until({}, str(NOW_S + VALID_S // 2)) == []
    assert until(None, str(NOW_S + 60)) == [None]
    assert told(None, {"ada train": {MINUTES: "60 90 1"}}) == {}


def test_a_withdrawal_takes_all_of_it_back() -> None:
    seen = {FILE: {UNTIL: "1"}, "ada train": {MINUTES: "60 90 1"}}
    assert [write.key for write in JobDurations().wishes(None, seen)] == [FILE, "ada train"]
