"""The decisions of `hpcdask.clusters.job`: single cases, and a simulated, faulty queue."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpcdask.clusters.display import jobs_failed
from hpcdask.clusters.job import (
    Actions,
    Job,
    Policy,
    ends_at,
    expires,
    is_overdue,
    margin_s,
    observe,
    plan,
    went_wrong,
)
from hpcdask.jobs.folder import ClusterFolder
from hpcdask.queues.job_state import OVER, WAITING, JobState, QueueStatus
from hpcdask.spec.names import job_of_worker, worker_name

T = 1_800_000_000.0  # now
CLUSTER = "ab-12"
POLICY = Policy()
HOUR = 3600.0


def names(job: Job, count: int | None = None) -> list[str]:
    return job.worker_names(CLUSTER)[:count]


def pending(id: str, **changes) -> Job:
    return Job(id, **{"size": 1, "submitted": T - 100, **changes})


def running(id: str, **changes) -> Job:
    job = Job(
        id,
        **{
            "size": 1,
            "submitted": T - 100,
            "state": JobState.RUNNING,
            "started": T - 50,
            "arrived_at": T - 50,
            **changes,
        },
    )
    return replace(job, workers=frozenset(names(job)))


def starting(id: str, **changes) -> Job:
    since = {"started": T - 50}
    return pending(id, **{"state": JobState.STARTING, **since, **changes})


def look(job: Job, seen: QueueStatus | JobState | None, workers=(), *, now: float = T) -> Job:
    """Observe with a query."""
    if isinstance(seen, JobState):
        seen = QueueStatus(job.id, seen, restarts=job.restarts)
    return observe(job, {job.id: seen}, dict.fromkeys(workers, 0), now, POLICY)


def overdue(job: Job, now: float = T) -> bool:
    return is_overdue(job, now, POLICY)


def decide(wanted: int, *jobs: Job, now: float = T, **more):
    policy = more.setdefault("policy", POLICY)
    known = [replace(job, expiring=expires(job, now, policy)) for job in jobs]
    return plan(wanted, known, now=now, **more)


# What is known of a job


@pytest.mark.parametrize("cluster", ["ab12", "my-cluster-1", "c.d"])
@pytest.mark.parametrize("job_id", ["4711", "4711_3", "4711[3].pbs-01", "host-7-8"])
def test_the_cluster_finds_the_job_from_the_name(cluster, job_id):
    assert job_of_worker(cluster, worker_name(cluster, job_id, 2, 13)) == job_id


def test_a_job_from_pending_to_completed():
    job = look(pending("7"), QueueStatus("7", JobState.PENDING, reason="Priority"))
    assert (job.state, job.reason) == (JobState.PENDING, "Priority")
    seen = QueueStatus("7", JobState.RUNNING, ends=T + HOUR, nodes="n1")
    job = look(job, seen)
    assert (job.state, job.reason, job.nodes) == (JobState.STARTING, "", "n1")
    assert (job.started, job.ends) == (T, T + HOUR)
    job = look(job, seen, names(job))
    assert (job.state, job.arrived_at) == (JobState.RUNNING, T)
    assert look(job, seen, names(job)) is job
    paused = look(job, replace(seen, reason="SUSPENDED"), names(job))
    assert (paused.state, paused.reason) == (JobState.RUNNING, "SUSPENDED")
    assert look(paused, None, names(job)).reason == "SUSPENDED"  # no answer about it
    assert look(paused, seen, names(job)).reason == ""
    job = look(job, QueueStatus("7", JobState.COMPLETED, exit_code=0))
    assert (job.state, job.exit_code, job.nodes) == (JobState.COMPLETED, 0, "n1")


def test_a_connected_worker_wins_over_a_queue_that_lags():
    job = pending("7", size=2)
    assert look(job, JobState.PENDING, names(job, 1)).state is JobState.STARTING
    assert look(job, JobState.PENDING, names(job)).state is JobState.RUNNING
    assert look(job, None, names(job)).state is JobState.RUNNING
    assert look(job, None, names(job, 1)).state is JobState.STARTING
    early = worker_name(CLUSTER, "7", 1, 0)
    again = look(running("7"), JobState.RUNNING, [early])
    assert (again.state, again.restarts) == (JobState.RUNNING, 1)
    assert look(again, QueueStatus("7", JobState.COMPLETED), [early]).state is JobState.RUNNING


def test_unknown_is_a_state_until_several_queries_agree():
    job = starting("7")
    for _ in range(POLICY.missed_max - 1):
        job = look(job, None)
        assert job.state is JobState.UNKNOWN
    assert look(job, JobState.RUNNING).missed == 0
    assert look(job, JobState.RUNNING).started == job.started
    assert look(job, None, names(job)).state is JobState.RUNNING
    gone = look(job, None)
    assert gone.state is JobState.FAILED
    assert "no longer knows it" in gone.reason
    assert look(replace(job, cancelled=True), None).state is JobState.CANCELLED
    assert look(replace(job, leaving=True), None).state is JobState.COMPLETED


@pytest.mark.parametrize("over", sorted(OVER))
def test_what_is_over_stays_over_unless_its_workers_come(over):
    job = look(running("7"), over)
    assert job.state is over
    for seen in (None, JobState.PENDING, JobState.RUNNING, *OVER):
        assert look(job, seen).state is over
    assert look(job, QueueStatus("7", JobState.RUNNING, restarts=1)).state is JobState.STARTING
    assert look(job, None, names(job)).state is JobState.RUNNING


def test_a_restart_is_a_new_life():
    marks = {"leaving": True, "expiring": True, "cancelled": True, "held": 9}
    old = running("7", size=2, ends=T + 9, **marks)
    waits = QueueStatus("7", JobState.PENDING, restarts=1, reason="BeginTime")
    job = look(old, waits, names(old))
    assert job == Job("7", 2, old.submitted, JobState.REQUEUED, "BeginTime", restarts=1)
    job = look(job, QueueStatus("7", JobState.RUNNING, restarts=1), names(old))
    assert job.arrived_at is None
    assert (job.state, job.workers) == (JobState.STARTING, frozenset())
    assert look(job, QueueStatus("7", JobState.FAILED, restarts=0)).state is JobState.STARTING


def test_workers_that_vanish_make_a_job_lost():
    job = running("7", size=2)
    lost = look(job, JobState.RUNNING, names(job, 1))
    assert (lost.state, lost.incomplete_since, overdue(lost)) == (JobState.LOST, T, False)
    later = look(lost, JobState.RUNNING, now=T + 30)
    assert (later.state, later.incomplete_since, overdue(later, T + 30)) == (
        JobState.LOST,
        T,
        False,
    )
    assert overdue(look(later, JobState.RUNNING, now=T + 60), T + 60)
    back = look(later, JobState.RUNNING, names(job), now=T + 59)
    assert (back.state, back.incomplete_since) == (JobState.RUNNING, None)
    assert look(replace(job, leaving=True), JobState.RUNNING).state is JobState.RUNNING


def test_a_job_whose_node_boots_has_time_to_start():
    job = pending("7")
    boots = QueueStatus("7", JobState.PENDING, reason="CONFIGURING", nodes="n1")
    for late in range(0, 900, 30):
        job = look(job, boots, now=T + late)
        assert (job.state, job.reason, overdue(job, T + late)) == (
            JobState.PENDING,
            "CONFIGURING",
            False,
        )
    job = look(job, JobState.RUNNING, now=T + 900)
    assert (job.state, job.started) == (JobState.STARTING, T + 900)
    boots = replace(boots, state=JobState.REQUEUED, restarts=1)
    job = look(job, boots, now=T + 930)
    assert (job.state, job.reason, job.restarts) == (JobState.REQUEUED, "CONFIGURING", 1)
    assert look(job, boots, now=T + 1500).state is JobState.REQUEUED


def test_a_job_that_the_queue_does_not_know_the_state_of_is_judged_by_its_workers():
    job = running("7")
    assert look(job, JobState.UNKNOWN, names(job)).state is JobState.RUNNING
    lost = look(job, JobState.UNKNOWN)
    assert (lost.state, lost.incomplete_since, lost.missed) == (JobState.LOST, T, 0)
    late = look(lost, JobState.UNKNOWN, now=T + 60)
    assert overdue(late, T + 60)
    assert decide(1, late, now=T + 60) == Actions(submit=1, cancel=("7",))
    assert decide(0, late, now=T + 60) == Actions(cancel=("7",))
    assert look(lost, None).state is JobState.UNKNOWN
    has_nodes = QueueStatus("8", JobState.UNKNOWN, nodes="n1")
    job = look(pending("8"), has_nodes)
    assert (job.state, job.started, overdue(job)) == (JobState.STARTING, T, False)
    assert overdue(look(job, has_nodes, now=T + 300), T + 300)


def test_a_job_without_nodes_whose_state_nobody_knows_is_waited_for():
    """Regression: it was failed, and cancelled, after three queries."""
    job = pending("8")
    for poll in range(10):
        job = look(job, JobState.UNKNOWN, now=T + HOUR * poll)
        assert (job.state, job.missed, overdue(job, T + HOUR * poll)) == (
            JobState.UNKNOWN,
            0,
            False,
        )
    assert decide(1, job, now=T + 10 * HOUR) == Actions()


@pytest.mark.parametrize(("state", "restarts"), [(JobState.REQUEUED, 1), (JobState.PENDING, 0)])
def test_a_job_that_the_queue_failed_to_start_and_holds_is_a_failed_one(tmp_path, state, restarts):
    """Regression: it was waited for without end."""
    before, reason = starting("7"), "launch failed"
    seen = QueueStatus("7", state, reason=reason, restarts=restarts, stuck=True)
    job = look(before, seen)
    assert (job.state, job.reason, overdue(job)) == (JobState(state), reason, True)
    assert job.died == T
    assert decide(1, job) == Actions(submit=1, cancel=("7",))
    cancelled = look(replace(job, cancelled=True), None, now=T + 9)
    assert cancelled.died == T
    over = look(cancelled, QueueStatus("7", JobState.CANCELLED, restarts=restarts), now=T + 9)
    assert over.died == T
    folder = ClusterFolder.create("ab-1", "slurm", tmp_path)
    error = jobs_failed([job] * 3, [job], POLICY, folder)
    assert "3 jobs in a row ended before their workers connected" in str(error)
    assert f"The last was job 7: {state}, {reason}" in str(error)


@pytest.mark.parametrize("reason", ["JobHeldUser", "JobHeldAdmin", "Priority", "REQUEUE_HOLD"])
def test_a_hold_that_somebody_wanted_is_respected(reason):
    for state in (JobState.PENDING, JobState.REQUEUED):
        job = look(pending("7"), QueueStatus("7", state, reason=reason), now=T + HOUR)
        assert (job.reason, overdue(job, T + HOUR)) == (reason, False)
        assert decide(1, job, now=T + HOUR) == Actions()


LOST = replace(running("7", state=JobState.LOST, incomplete_since=T - 59), workers=frozenset())

# Counting what went wrong


def counted(*jobs: Job) -> tuple[int, int]:
    starts, died = went_wrong(jobs, T)
    return len(starts), len(died)


def ended(job: Job, state: JobState, exit_code: int | None = None) -> Job:
    return look(job, QueueStatus(job.id, JobState(state), exit_code=exit_code))


@pytest.mark.parametrize(
    ("job", "failed", "died"),
    [
        (ended(starting("7"), JobState.FAILED), 1, 1),
        (ended(pending("7"), JobState.FAILED), 1, 1),
        (ended(starting("7"), JobState.COMPLETED), 1, 1),
        (ended(starting("7"), JobState.TIMEOUT), 1, 1),
        (ended(pending("7"), JobState.CANCELLED), 0, 1),
        (ended(starting("7"), JobState.PREEMPTED), 0, 0),
        (ended(starting("7", cancelled=True), JobState.CANCELLED), 0, 0),
        (ended(starting("7", cancelled=True), JobState.FAILED), 0, 0),
        (ended(running("7"), JobState.FAILED), 0, 1),
        (ended(running("7"), JobState.COMPLETED), 0, 1),
        (ended(running("7", arrived_at=T - 60), JobState.COMPLETED, exit_code=0), 0, 0),
        (ended(running("7", arrived_at=T - 60), JobState.COMPLETED), 0, 1),
        (ended(running("7", arrived_at=T - 60), JobState.FAILED, exit_code=0), 0, 1),
        (ended(running("7", arrived_at=T - 59), JobState.COMPLETED, exit_code=0), 0, 1),
        (ended(running("7"), JobState.CANCELLED), 0, 1),
        (ended(running("7"), JobState.PREEMPTED), 0, 0),
        (ended(running("7"), JobState.TIMEOUT), 0, 0),
        (ended(running("7", expiring=True), JobState.FAILED), 0, 0),
        (ended(running("7", leaving=True), JobState.COMPLETED), 0, 0),
        (ended(running("7", cancelled=True), JobState.CANCELLED), 0, 0),
        (ended(starting("7", leaving=True), JobState.COMPLETED), 0, 0),
        (ended(starting("7", leaving=True, expiring=True), JobState.COMPLETED), 1, 1),
    ],
)
def test_failed_starts_and_deaths(job, failed, died):
    assert counted(job) == (failed, died)
    assert look(job, None) is job


def test_a_job_that_is_given_up_counts_once():
    job = starting("7")
    late = look(job, JobState.RUNNING, now=T + 300)
    assert counted(late) == (1, 1)
    assert counted(ended(late, JobState.FAILED)) == (1, 1)
    assert counted(ended(replace(late, cancelled=True), JobState.CANCELLED)) == (1, 1)
    surplus = replace(job, cancelled=True)
    assert counted(look(surplus, JobState.RUNNING, now=T + 300)) == (0, 0)
    late = look(replace(LOST, incomplete_since=T - 59), JobState.RUNNING, now=T + 1)
    assert counted(ended(replace(late, cancelled=True), JobState.CANCELLED)) == (0, 1)
    assert counted(late, running("8", arrived_at=T + 9)) == (0, 1)


# What to do

PARTLY = starting("7", size=2, workers=frozenset({worker_name(CLUSTER, "7", 0, 1)}))
MIXED = [running("1"), pending("2_9"), pending("2_10"), starting("3"), starting("4")]
BUSY = [running(name, held=held) for name, held in {"1": 9, "2": 7, "3": 8, "4": 9}.items()]
MARKED = [
    pending("1", cancelled=True),
    running("2", leaving=True),
    replace(LOST, id="3", incomplete_since=T - 999, cancelled=True),
    starting("4", started=T - 999, cancelled=True),
    running("5", ends=T + 1, leaving=True),
]
AGAIN = Actions(submit=1, cancel=("7",))
ALL = Actions(cancel=("2_10", "2_9", "4", "3"), retire=("1",))
DECISIONS = {
    "the youngest pending one first": (4, MIXED, {}, Actions(cancel=("2_10",))),
    "then starting ones": (2, MIXED, {}, Actions(cancel=("2_10", "2_9", "4"))),
    "then running ones": (0, MIXED, {}, ALL),
    "a partly started one may hold results": (0, [PARTLY], {}, Actions(retire=("7",))),
    "idle ones first": (2, BUSY, {"idle": ["4"]}, Actions(retire=("4", "2"))),
    "wait until it is clear": (0, [LOST, pending("2", state=JobState.UNKNOWN)], {}, Actions()),
    "none twice": (0, MARKED, {"idle": ["2", "3", "5"]}, Actions()),
    "marked ones do not count": (2, MARKED, {"idle": ["2"]}, Actions(submit=2)),
    "a nanny may bring it back": (1, [LOST], {}, Actions()),
    "or it is lost": (1, [LOST], {"now": T + 1}, AGAIN),
    "workers may take their time": (1, [starting("7")], {"now": T + 249}, Actions()),
    "but not too long": (1, [starting("7")], {"now": T + 250}, AGAIN),
    "workers have left": (0, [replace(LOST, leaving=True)], {}, Actions()),
    "but the job stays": (0, [replace(LOST, leaving=True)], {"now": T + 1}, Actions(cancel=("7",))),
}


@pytest.mark.parametrize(("wanted", "jobs", "more", "expected"), DECISIONS.values(), ids=DECISIONS)
def test_what_is_done(wanted, jobs, more, expected):
    assert decide(wanted, *jobs, **more) == expected


FAILED = [ended(starting(str(number)), JobState.FAILED, exit_code=3) for number in range(3)]


def test_three_that_fail_to_start_in_a_row_stop_the_submissions():
    assert decide(2, *FAILED[:2]).submit == 2
    jobs = *FAILED, running("8"), starting("9", started=T - 999)
    assert decide(4, *jobs) == Actions(cancel=("9",), failed=True)
    assert decide(4, *(replace(job, died=None) for job in jobs)).submit == 3
    assert decide(0, *jobs).retire == ("8",)
    assert decide(1, *FAILED, running("8")) == Actions()
    assert decide(2, *FAILED, running("8", arrived_at=T + 1)) == Actions(submit=1)


def test_too_many_deaths_within_an_hour_stop_the_submissions():
    sixty = [ended(running(str(number)), JobState.FAILED) for number in range(60)]
    assert decide(20, *sixty[1:]).submit == 20
    assert decide(20, *sixty) == Actions(failed=True)
    assert decide(20, *sixty, now=T + HOUR).submit == 20
    assert decide(20, *sixty[:2], policy=replace(POLICY, deaths_max=2)).failed


# Walltime


def lasting(id: str, end: float) -> Job:
    return running(id, started=end - HOUR, ends=end)


def test_a_job_without_walltime_or_that_waits_has_no_end():
    assert ends_at(running("7"), POLICY) == math.inf
    limited = replace(POLICY, walltime_s=9)
    for state in WAITING:
        assert ends_at(pending("7", state=state, ends=T), limited) == math.inf


def test_the_replacement_is_requested_first_and_once():
    job = lasting("7", T + HOUR)
    margin = margin_s(job, POLICY)
    retires = job.ends - margin
    soon = starting("8", started=retires - margin)
    for others, now, expected in [
        ([], retires - margin - 1, Actions()),
        ([], retires - margin + 1, Actions(submit=1)),
        ([pending("8")], retires - 1, Actions()),
        ([soon], retires - margin + 2, Actions()),
        ([running("8")], retires - margin + 2, Actions(retire=("7",))),
        ([pending("8")], retires, Actions(retire=("7",))),
    ]:
        assert decide(1, job, *others, now=now) == expected
    assert decide(1, replace(job, leaving=True), pending("8"), now=retires + 1) == Actions()


def test_a_job_near_its_end_runs_on_when_nothing_more_is_submitted():
    job = lasting("7", T + 230)
    assert decide(1, *FAILED, job) == Actions(failed=True)
    assert decide(1, *FAILED, job, now=T + 110).retire == ("7",)


# A simulated queue

TICK_S = 5.0


@dataclass
class Entry:
    """A job as it really is."""

    id: str
    queued: float
    wait: float
    boot: float
    state: JobState = JobState.PENDING
    restarts: int = 0
    started: float = 0.0
    workers: int = 0
    crippled: bool = False  # its workers do not come back
    hidden: int = 0  # queries that do not show it

    def over(self) -> bool:
        return self.state in OVER


@dataclass
class Site:
    """A queue, a scheduler and who carries out the decisions; `random` makes faults and delays."""

    policy: Policy
    size: int
    walltime: float
    random: Random | None = None
    now: float = T
    wanted: int = 0
    entries: dict[str, Entry] = field(default_factory=dict)
    jobs: dict[str, Job] = field(default_factory=dict)
    marked: set[tuple[str, int]] = field(default_factory=set)
    log: list[Actions] = field(default_factory=list)
    stale: dict[str, QueueStatus] = field(default_factory=dict)

    def tick(self, *, faults: bool, busy: frozenset[int] = frozenset()) -> Actions:
        self.now += TICK_S
        for entry in self.entries.values():
            self.advance(entry)
        if faults:
            self.harm()
        self.look(lag=faults and self.choose(0, 4) == 0, mute=faults and self.choose(0, 4) == 0)
        idle = [name for number, name in enumerate(self.jobs) if number not in busy]
        facts = {"idle": idle, "now": self.now, "policy": self.policy}
        actions = plan(self.wanted, self.jobs.values(), **facts)
        self.check(actions)
        self.carry_out(actions)
        self.log.append(actions)
        return actions

    def choose(self, low: int, high: int) -> int:
        return self.random.randint(low, high) if self.random else low

    def advance(self, entry: Entry) -> None:
        if entry.state in WAITING and self.now >= entry.queued + entry.wait:
            entry.state, entry.started = JobState.RUNNING, self.now
        if entry.state is not JobState.RUNNING:
            return
        if self.now >= entry.started + entry.boot and not entry.crippled:
            entry.workers = self.size
        job = self.jobs[entry.id]
        if job.leaving and not job.workers and job.restarts == entry.restarts:
            entry.state = JobState.COMPLETED
        if self.now >= entry.started + self.walltime:
            entry.state = JobState.TIMEOUT
        if entry.over():
            entry.workers = 0

    def harm(self) -> None:
        alive = [entry for entry in self.entries.values() if not entry.over()]
        if not alive or self.choose(0, 2):
            return
        entry = alive[self.choose(0, len(alive) - 1)]
        kind = self.choose(0, 5)
        if kind == 0:
            ends = JobState.FAILED, JobState.CANCELLED, JobState.PREEMPTED
            entry.state = ends[self.choose(0, 2)]
        elif kind == 1 and entry.state is JobState.RUNNING:
            entry.state, entry.queued = JobState.REQUEUED, self.now
            entry.restarts, entry.crippled = entry.restarts + 1, False
        elif kind == 2:
            entry.hidden = self.choose(1, 5)
        elif kind == 3 and entry.workers:
            entry.crippled = True
            entry.workers = self.choose(0, self.size - 1)
            return
        elif kind == 4 and entry.workers:
            entry.workers = self.choose(0, self.size)  # the nanny starts them again
            entry.boot = self.now + 2 * TICK_S - entry.started
            return
        if entry.state is not JobState.RUNNING:
            entry.workers = 0

    def look(self, *, lag: bool, mute: bool) -> None:
        seen = {}
        for job_id, entry in self.entries.items():
            entry.hidden -= 1
            if entry.hidden < 0:
                ends = entry.started + self.walltime
                seen[job_id] = QueueStatus(job_id, entry.state, restarts=entry.restarts, ends=ends)
        shown, self.stale = (self.stale if lag else seen), seen
        for job_id, before in list(self.jobs.items()):
            entry = self.entries[job_id]
            there = names(replace(before, restarts=entry.restarts), entry.workers)
            held = {} if before.leaving else dict.fromkeys(there, 0)
            answer = {} if mute else {job_id: shown.get(job_id)}
            self.jobs[job_id] = observe(before, answer, held, self.now, self.policy)

    def check(self, actions: Actions) -> None:
        """What holds for all actions."""
        for job_id in (*actions.cancel, *actions.retire):
            key = job_id, self.jobs[job_id].restarts
            # A job that does not end although its workers have left is cancelled after all.
            stays = job_id in actions.cancel and self.jobs[job_id].leaving
            assert stays or key not in self.marked
            assert not self.jobs[job_id].cancelled
            self.marked.add(key)
        for job_id in actions.cancel:
            job = self.jobs[job_id]
            assert job.state is not JobState.RUNNING or job.leaving
            assert job.state not in OVER or job.missed >= self.policy.missed_max
        assert all(self.jobs[job_id].workers for job_id in actions.retire)
        acted = {*actions.cancel, *actions.retire}
        staying = [job for job in self.jobs.values() if job.counts and job.id not in acted]
        assert len(acted) == len(actions.cancel) + len(actions.retire)
        if actions.submit:
            assert len(staying) + actions.submit == self.wanted

    def carry_out(self, actions: Actions) -> None:
        for job_id in actions.cancel:
            self.jobs[job_id] = replace(self.jobs[job_id], cancelled=True)
            if not self.entries[job_id].over():
                self.entries[job_id].state, self.entries[job_id].workers = JobState.CANCELLED, 0
        for job_id in actions.retire:
            self.jobs[job_id] = replace(self.jobs[job_id], leaving=True)
        for _ in range(actions.submit):
            job_id = f"5_{len(self.entries)}"
            wait, boot = self.choose(0, 6) * TICK_S, self.choose(0, 3) * TICK_S
            self.entries[job_id] = Entry(job_id, self.now, wait, boot)
            self.jobs[job_id] = Job(job_id, self.size, self.now)

    def alive(self) -> list[Entry]:
        return [entry for entry in self.entries.values() if not entry.over()]


#: Hypothesis would prefer few and small faults if it drew each of them.
SEEDS = st.integers(0, 2**32)
PATIENT = replace(POLICY, failures_max=10**6, deaths_max=10**6, start_timeout_s=60)


@settings(max_examples=25, deadline=None)
@given(SEEDS, st.integers(1, 3), st.lists(st.integers(0, 6), min_size=1, max_size=3))
def test_after_faults_the_wanted_jobs_run_and_nothing_more_happens(seed, size, targets):
    site = Site(PATIENT, size, 100 * HOUR, Random(seed))
    for site.wanted in targets:
        for _ in range(8):
            site.tick(faults=True, busy=frozenset({site.choose(0, 9)}))
    submitted = sum(actions.submit for actions in site.log)
    ends = sum(not job.counts for job in site.jobs.values())
    assert submitted <= max(targets) + ends
    for _ in range(60):  # longest: to start, to be lost, or to time out
        site.tick(faults=False)
    assert len(site.alive()) == site.wanted
    assert all(entry.workers == size for entry in site.alive())
    assert all(site.tick(faults=False) == Actions() for _ in range(100))
    running = [job for job in site.jobs.values() if job.state is JobState.RUNNING]
    assert len(running) == site.wanted


@pytest.mark.parametrize("wanted", [1, 3, 8])
@pytest.mark.parametrize("walltime", [60.0, 400.0, 1500.0])
def test_walltime_after_walltime_each_job_is_replaced_once(wanted, walltime):
    """With a free queue, the wanted workers are there all the time."""
    site = Site(replace(PATIENT, failures_max=3, deaths_max=1), 1, walltime, wanted=wanted)
    for _ in range(4):
        site.tick(faults=False)
    lives = 4
    while site.now < T + lives * walltime:
        actions = site.tick(faults=False)
        assert not actions.failed
        assert not actions.cancel
        assert sum(entry.workers for entry in site.alive()) >= wanted
        replaced = sum(not job.counts for job in site.jobs.values())
        assert len(site.jobs) == wanted + replaced
    states = {entry.state for entry in site.entries.values()}
    assert states <= {JobState.PENDING, JobState.RUNNING, JobState.COMPLETED}
    # At least 37.5 % of a walltime passes before the replacement is requested.
    assert wanted * (lives - 1) < len(site.entries) <= wanted * (1 + lives / 0.375)
