"""Tags of jobs, by which they belong to a cluster, and to a group of it.

The standard library only: a watchdog is small.
"""

from __future__ import annotations


def group_id(cluster: str, group: str) -> str:
    """Return the beginning of the workers' names of a group, and the end of its jobs' tag.

    It is the cluster's id where the cluster has no groups, so that their name is empty.
    """
    return f"{cluster}.{group}" if group else cluster


def parse_tag(tag: str) -> tuple[str, str]:
    """Return cluster and group of a job's tag."""
    cluster, _, group = tag.removeprefix("hpcdask:").partition(".")
    return cluster, group
