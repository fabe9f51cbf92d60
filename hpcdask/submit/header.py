"""A whole allocation as one job of dask-jobqueue, whose Job classes write the header."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import dask.config

from hpcdask.clusters.configuration import import_job_class
from hpcdask.clusters.keywords import job_keywords
from hpcdask.clusters.options import JobOptions, read_job_options
from hpcdask.queues.base import Queue
from hpcdask.queues.helpers import walltime_text

from .request import BatchRequest

#: dask-jobqueue's classes want to know it; the lines that it makes are left out again.
NO_MEMORY = "1GiB"


async def read(queue: Queue, asked: BatchRequest) -> JobOptions:
    """Return the job with dask-jobqueue's header, made one of a whole allocation.

    Raises UsageError if the queueing system cannot express it.
    """
    job_cls = import_job_class(queue.jobqueue)
    name = job_cls.default_config_name()
    site: Mapping[str, Any] = dask.config.get(f"jobqueue.{name}")
    # a directive may have been pasted with its prefix
    bare = [line.strip().removeprefix(queue.prefix).strip() for line in asked.directives]
    asked = dataclasses.replace(asked, directives=tuple(bare))
    own_gpus = any(queue.requested_gpus(line) is not None for line in bare)
    keywords = await _keywords(queue, asked, site, job_keywords(job_cls))
    return read_job_options(
        job_cls,
        queue,
        name,
        gpus_per_job=None if own_gpus else asked.gpus_per_node,
        gpu_type=None,
        nodes_per_job=1,
        protocol=None,
        given={**keywords, "device": "auto"},
    )


async def _keywords(
    queue: Queue, asked: BatchRequest, site: Mapping[str, Any], known: set[str]
) -> dict[str, Any]:
    """Return keywords of dask-jobqueue's Job class, which takes those in `known`."""
    # GPUs in the configuration are those of a worker's job
    configured = map(str, site.get("job-extra-directives") or ())
    directives = [line for line in configured if queue.requested_gpus(line) is None]
    directives += asked.directives
    prologue = [*(site.get("job-script-prologue") or ()), *asked.prologue]
    account = "account" if "account" in known else "project"  # its old name
    keywords = {
        "cores": asked.cores,
        "memory": asked.memory or NO_MEMORY,
        "job_name": asked.name,
        "job_extra_directives": directives,
        "job_script_prologue": prologue if asked.prologue else None,
        "queue": asked.queue,
        "walltime": asked.walltime,
        account: asked.account,
        **await queue.allocation(asked, directives, site),
    }
    if not keywords["walltime"] and site.get("walltime") is not None:
        walltime_text(site["walltime"])
    skipped = [*keywords.get("job_directives_skip", ()), *(site.get("job-directives-skip") or ())]
    keywords["job_directives_skip"] = list(dict.fromkeys(skipped))
    return {key: value for key, value in keywords.items() if value not in (None, "")}
