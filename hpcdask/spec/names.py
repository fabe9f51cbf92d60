"""Names of groups and workers, and tags of jobs. The standard library only: a watchdog is small."""

from __future__ import annotations

import re


def group_id(cluster: str, group: str) -> str:
    """Return the beginning of the workers' names of a group, and the end of its jobs' tag.

    It is the cluster's id where the cluster has no groups, so that their name is empty.
    """
    return f"{cluster}.{group}" if group else cluster


def parse_tag(tag: str) -> tuple[str, str]:
    """Return cluster and group of a job's tag."""
    cluster, _, group = tag.removeprefix("hpcdask:").partition(".")
    return cluster, group


def worker_name(group: str, job_id: str, restarts: int, number: int) -> str:
    """Return the name of worker `number`, from 0 over all nodes, in a life of a group's job."""
    return f"{group}-{job_id}-{restarts}-{number}"


def job_of_worker(group: str, name: str) -> str | None:
    """Return the job id in a `worker_name`; None for other names."""
    found = re.fullmatch(rf"{re.escape(group)}-(.+)-\d+-\d+", name, re.ASCII)
    return found and found[1]
