"""Which jobs a cluster gives up when Dask names workers that are not needed."""

from __future__ import annotations

from hpcdask.clusters.job import Job, Policy, worker_names
from hpcdask.clusters.state import ClusterState
from hpcdask.jobs.state import JobState

SIZE = 4


def make(*states: JobState, connected: int = SIZE, wanted: int | None = None) -> ClusterState:
    """One job of four workers for each state; so many are connected where one is running."""
    state = ClusterState(None, "ab", size=SIZE, policy=Policy(), say=print)
    for number, said in enumerate(states):
        job = Job(f"{number}", SIZE, 0.0, said)
        state.jobs[job.id] = job
        if said is JobState.RUNNING:
            state.mark(job.id, workers=frozenset(names(state, number)[:connected]))
    state.wanted = len(states) if wanted is None else wanted
    return state


def names(state: ClusterState, *numbers: int) -> list[str]:
    return [name for n in numbers for name in worker_names(state.cluster, state.jobs[f"{n}"])]


def strike(state: ClusterState, *names: str) -> list[str]:
    return sorted(job.id for job in state.drop(names))


def test_any_names_of_pending_jobs_are_as_good_as_those_of_whole_jobs():
    state = make(*[JobState.PENDING] * 5)
    spread = [name for name in names(state, 0, 1, 2, 3) if not name.endswith("-0")]
    assert strike(state, *spread, *names(state, 4)) == ["1", "2", "3", "4"]
    assert state.wanted == 1


def test_less_than_a_job_is_kept():
    state = make(JobState.PENDING, JobState.PENDING)
    assert strike(state, *names(state, 0, 1)[2:5]) == []
    assert state.wanted == 2


def test_what_is_not_submitted_goes_first_then_the_youngest_that_waits():
    state = make(JobState.PENDING, JobState.PENDING, JobState.STARTING, wanted=5)
    named = [*state.names()[1:9], *state.names()[-4:]]
    assert strike(state, *named) == ["1"]
    assert state.wanted == 2
    state.mark("1", cancelled=True)
    assert strike(state, *names(state, 2)) == ["0"]
    assert state.wanted == 1


def test_connected_workers_go_with_their_job():
    state = make(JobState.RUNNING, JobState.RUNNING, JobState.PENDING)
    assert strike(state, *names(state, 0), *names(state, 1)[:3]) == ["0"]
    assert state.wanted == 2


def test_workers_that_a_job_still_awaits_are_counted():
    state = make(JobState.RUNNING, JobState.PENDING, JobState.PENDING, connected=1)
    named = [*names(state, 0)[1:], *names(state, 1)[1:], *names(state, 2)[2:]]
    assert strike(state, *named) == ["1", "2"]
    assert state.wanted == 1


def test_names_of_jobs_that_are_gone_do_not_count():
    state = make(JobState.CANCELLED, JobState.PENDING, wanted=1)
    assert strike(state, *names(state, 0)) == []
    assert state.wanted == 1


def test_jobs_near_their_walltime_do_not_count():
    """Dask took those that came for them for too many, cancelled them, and asked for others."""
    state = make(JobState.RUNNING, JobState.RUNNING, JobState.PENDING, JobState.PENDING, wanted=2)
    for old in ("0", "1"):
        state.mark(old, expiring=True)
    assert sorted(state.names()) == sorted(names(state, 2, 3))
    assert strike(state, *names(state, 0)) == []
    assert state.wanted == 2
    assert strike(state, *names(state, 2)) == ["3"]
    assert state.wanted == 1
