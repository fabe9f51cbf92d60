"""Times at which a job ends, retires and is replaced."""

from __future__ import annotations

from hpcdask.jobs.state import WAITING

from .job import Job, Policy


def ends_at(job: Job, policy: Policy) -> float | None:
    """Return the unix time of the walltime's end; None if there is none, or the job waits."""
    if job.state in WAITING:
        return None
    if job.ends is not None or job.started is None or policy.walltime_s is None:
        return job.ends
    return job.started + policy.walltime_s


def margin_s(job: Job, policy: Policy) -> float:
    """Return the seconds before the walltime at which the job's workers retire at the latest.

    Twice the time to move their results, at least `margin_min_s`, at most a quarter of the
    walltime.
    """
    margin = max(policy.margin_min_s, 2 * job.held / policy.bandwidth)
    end = ends_at(job, policy)
    if end is None or job.started is None:
        walltime = policy.walltime_s
    else:
        walltime = end - job.started
    return margin if walltime is None else min(margin, max(0.0, walltime) / 4)


def retire_at(job: Job, policy: Policy) -> float | None:
    """Return the unix time at which the job's workers retire even without a replacement."""
    end = ends_at(job, policy)
    return None if end is None else end - margin_s(job, policy)


def expires(job: Job, now: float, policy: Policy) -> bool:
    """Return whether the job's replacement is due: one more margin before the job retires."""
    end = None if job.expiring else ends_at(job, policy)
    return job.expiring if end is None else end - now <= 2 * margin_s(job, policy)
