"""What one cluster's job control costs, by the number of its jobs; `scale.py` starts this.

The scheduler, the controller, the cluster's folder and the queue of this machine are the real ones.
The only GPU of that queue is taken, so that its jobs wait and no process starts; the workers that
register in their names are stand-ins.

    python benchmarks/scale_jobs.py JOBS FOLDER
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
from companies import PATIENCE_S, Companies, shares
from stand_ins import AT_ONCE

import hpcdask
from hpcdask.clusters.controller import Controller
from hpcdask.clusters.job import Policy
from hpcdask.clusters.options import ClusterOptions
from hpcdask.clusters.scheduler import ClusterScheduler
from hpcdask.jobs.discovery import survey
from hpcdask.jobs.folder import ClusterFolder
from hpcdask.logs import set_log_level
from hpcdask.process import raise_descriptor_limit
from hpcdask.queues import local
from hpcdask.queues.local import DIRECTIVE, LocalQueue
from hpcdask.security.credentials import load_credentials

REPEATS = 5
#: With more jobs than that, these only wait.
MOST_WORKERS = 1000


class Steps:
    """How often the controller decides, how many jobs it looks at in all, and what that takes."""

    def __init__(self, controller: Controller) -> None:
        self.count, self.seen, self.seconds = 0, 0, 0.0
        step: Callable[[], None] = controller.step

        def counted() -> None:
            start = time.process_time()
            step()
            self.seconds += time.process_time() - start
            self.count += 1
            self.seen += len(controller.jobs())

        controller.step = counted  # type: ignore[method-assign]


@contextlib.contextmanager
def timed(found: dict[str, float], name: str, times: int = 1) -> Iterator[None]:
    """Note the processor time of this process for what is done so many times."""
    start = time.process_time()
    yield
    found[name] = (time.process_time() - start) / times


async def until(condition: Callable[[], Any], what: str) -> None:
    """Wait for something to be true."""
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"waited {PATIENCE_S:g} s for {what}")
        await asyncio.sleep(0.05)


async def measure(jobs: int, place: Path) -> dict[str, float]:
    """Submit, watch, survey, let workers come, shrink, and end."""
    cluster = f"scale-{os.getpid()}"
    found: dict[str, float] = {"jobs": jobs}
    folder = ClusterFolder.create(cluster, "local", base=place)
    asked = {"tag": f"hpcdask:{cluster}", "gpus": 1, "folder": str(place)}
    folder.write_script(f"#!/bin/bash\n{DIRECTIVE}{json.dumps(asked)}\ntrue\n")
    keywords = {"device": "cpu", "scheduler_options": {"dashboard_address": "127.0.0.1:0"}}
    options = ClusterOptions.read(hpcdask.LocalCUDAJobCluster, keywords)
    scheduler = ClusterScheduler(options, print_aside)
    scheduler.make_scratch()
    scheduler.save_keys(str(folder.keys))
    await scheduler.start()
    assert scheduler.server is not None
    queue = LocalQueue([cluster])
    controller = Controller(scheduler.server, queue, folder, poll_interval_s=5.0, say=print_aside)
    group = controller.add_group("", 1, Policy())
    steps = Steps(controller)
    controller.start()

    with timed(found, "submit_s"):
        await group.scale(jobs)
    await until(lambda: len(folder.report().jobs) == jobs, "the reports of the jobs")
    ids = group.live()
    with timed(found, "query_s", REPEATS):
        for _ in range(REPEATS):
            seen = await controller.ask(ids)
    with timed(found, "reconcile_waiting_s", REPEATS):
        for _ in range(REPEATS):
            controller.observe(set(ids), seen)
            group.act()
    with timed(found, "survey_s", REPEATS):
        for _ in range(REPEATS):
            clusters, _ = await survey(str(place))
            rows = [row for one in clusters if one.name == cluster for row in one.reports()]
    assert len(rows) == jobs, rows[:3]

    companies = Companies({**os.environ})
    try:
        if jobs <= MOST_WORKERS:
            await measure_workers(controller, steps, companies, found, str(folder.keys))
    finally:
        await asyncio.to_thread(companies.close)
        with timed(found, "close_s"):
            await controller.close()
        await scheduler.close()
    return found


async def measure_workers(
    controller: Controller,
    steps: Steps,
    companies: Companies,
    found: dict[str, float],
    keys: str,
) -> None:
    """Let the jobs' workers come, decide again, and shrink to half."""
    group, scheduler = controller.groups[""], controller.scheduler
    names = [name for job in group.jobs.values() for name in job.worker_names(group.prefix)]
    jobs, workers = len(names), scheduler.workers
    known = {"scheduler": scheduler.address, "credentials": load_credentials(keys)}
    parts = shares(0, jobs)
    for _ in parts:
        companies.start()
    orders = [
        {"do": "workers_are", "names": names[first:last], "first": first, **known}
        for first, last in parts
    ]
    companies.tell(orders)
    await asyncio.to_thread(companies.answers)
    before = steps.count, steps.seen, steps.seconds
    with timed(found, "join_s"):
        await asyncio.to_thread(companies.do, "workers_join", most=AT_ONCE)
        await until(lambda: all(job.workers for job in group.jobs.values()), "workers to be seen")
    counts = steps.count - before[0], steps.seen - before[1]
    found["join_steps"], found["join_steps_jobs"] = counts
    found["join_steps_s"] = steps.seconds - before[2]

    ids = group.live()
    seen = await controller.ask(ids)
    with timed(found, "reconcile_running_s", REPEATS):
        for _ in range(REPEATS):
            controller.observe(set(ids), seen)
            group.act()
    group.wanted = jobs // 2  # what to give up, without doing it
    with timed(found, "closable_s"):
        group._plan()
    group.wanted = jobs
    this = psutil.Process()
    found["rss"], found["descriptors"] = this.memory_info().rss, this.num_fds()
    with timed(found, "shrink_s"):
        group.want(jobs // 2)
        await until(lambda: len(workers) <= jobs // 2, "workers to retire")


def print_aside(text: str) -> None:
    """What a notebook would show."""
    print(text, file=sys.stderr)


def main() -> None:
    """Print the record as JSON."""
    jobs, place = int(sys.argv[1]), Path(sys.argv[2])
    set_log_level("CRITICAL")
    raise_descriptor_limit()
    taken = {local.JOB: "taken", local.GPUS: f"scale-{os.getpid()}"}
    holder = subprocess.Popen(["sleep", "infinity"], env={**os.environ, **taken})
    try:
        print(json.dumps(asyncio.run(measure(jobs, place))), flush=True)
    except Exception:
        traceback.print_exc()
        os._exit(1)  # threads may wait for stand-ins that wait, too
    finally:
        holder.kill()


if __name__ == "__main__":
    main()
