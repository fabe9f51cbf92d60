"""When a job ends, retires, is replaced."""

from __future__ import annotations

import math
import re

from hpcdask.jobs.state import WAITING

from .job import Job, Policy

#: Fraction of the golden ratio: its multiples, modulo 1, spread evenly however many are taken.
GOLDEN = (math.sqrt(5) - 1) / 2


def ends_at(job: Job, policy: Policy) -> float | None:
    """Unix time at which the job's walltime is over; None if it has none or waits."""
    if job.state in WAITING:
        return None
    if job.ends is not None or job.started is None or policy.walltime_s is None:
        return job.ends
    return job.started + policy.walltime_s


def margin_s(job: Job, policy: Policy) -> float:
    """Seconds before its walltime at which the job's workers retire at the latest.

    Twice the time to move what they hold, at least `margin_min_s`, at most a quarter of it all.
    """
    margin = max(policy.margin_min_s, 2 * job.held / policy.bandwidth)
    end = ends_at(job, policy)
    if end is None or job.started is None:
        walltime = policy.walltime_s
    else:
        walltime = end - job.started
    return margin if walltime is None else min(margin, max(0.0, walltime) / 4)


def retire_at(job: Job, policy: Policy) -> float | None:
    """Unix time at which the job's workers retire even if no replacement has come.

    Jobs that start together must not retire together: each does it up to half a margin early, as
    the numbers in its id say, whatever becomes of the others.
    """
    end = ends_at(job, policy)
    return None if end is None else end - margin_s(job, policy) * (1 + _share(job.id) / 2)


def _share(job_id: str) -> float:
    """A number in [0, 1) that is different, and evenly spread, for jobs with successive ids."""
    return sum(map(int, re.findall(r"\d+", job_id))) * GOLDEN % 1


def expires(job: Job, now: float, policy: Policy) -> bool:
    """Whether its replacement is due: one more margin before it retires."""
    end = None if job.expiring else ends_at(job, policy)
    if end is None:
        return job.expiring
    left, margin = end - now, margin_s(job, policy)
    if left > 2.5 * margin:  # no stagger is longer, and few jobs get past this line
        return False
    return left <= margin * (2 + _share(job.id) / 2)
