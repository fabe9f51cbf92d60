"""What one cluster's job control costs, by the number of its jobs; `scale.py` starts this.

The scheduler, the controller, the cluster's folder and the queue of this machine are the real ones.
The only GPU of that queue is taken, so that its jobs wait and no process starts. A first line of
JSON names the workers that `scale.py` has register as stand-ins; the last one has the costs.

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
from collections.abc import Iterator
from pathlib import Path

from stand_ins import until

import hpcdask
from hpcdask.clusters.controller import Controller, Group
from hpcdask.clusters.job import Policy
from hpcdask.clusters.options import ClusterOptions
from hpcdask.clusters.scheduler import make_security, start_scheduler
from hpcdask.comm.peers import TOPIC
from hpcdask.jobs.discovery import survey
from hpcdask.jobs.folder import ClusterFolder
from hpcdask.logs import set_log_level
from hpcdask.process import raise_descriptor_limit
from hpcdask.queues import local
from hpcdask.queues.local import DIRECTIVE, LocalQueue

REPEATS = 5
#: With more jobs than that, these only wait.
MOST_WORKERS = 1000

Costs = dict[str, float]


@contextlib.contextmanager
def timed(costs: Costs, name: str, times: int = 1) -> Iterator[None]:
    """Note the processor time of this process for what is done so many times."""
    start = time.process_time()
    yield
    costs[name] = (time.process_time() - start) / times


def print_aside(text: str) -> None:
    """Print what a notebook would show."""
    print(text, file=sys.stderr)


async def measure(jobs: int, place: Path) -> Costs:
    """Submit, query, survey, let workers come, shrink, and end."""
    cluster, costs = f"scale-{os.getpid()}", {"jobs": float(jobs)}
    folder = ClusterFolder.create(cluster, "local", base=place)
    asked = {"name": "scale", "tag": f"hpcdask:{cluster}", "gpus": 1, "folder": str(place)}
    folder.write_script(f"#!/bin/bash\n{DIRECTIVE}{json.dumps(asked)}\ntrue\n")
    keywords = {"device": "cpu", "scheduler_options": {"dashboard_address": "127.0.0.1:0"}}
    options = ClusterOptions.read(hpcdask.LocalCUDAJobCluster, keywords)
    security = make_security(None, str(folder.keys), print_aside)
    scheduler = await start_scheduler(options, security, str(place))
    queue = LocalQueue([cluster])
    controller = Controller(scheduler, queue, folder, poll_interval_s=5.0, say=print_aside)
    group = controller.groups[""] = Group(controller, "", 1, Policy(), {})
    controller.start()
    try:
        with timed(costs, "submit_s"):
            await group.scale(jobs)
        await until(lambda: len(folder.report().jobs) == jobs)
        with timed(costs, "query_s", REPEATS):
            for _ in range(REPEATS):
                await controller.ask(controller.live())
        await measure_reconcile(costs, "reconcile_waiting_s", controller, group)
        with timed(costs, "survey_s", REPEATS):
            for _ in range(REPEATS):
                clusters, _ = await survey(str(place))
        (rows,) = (list(one.reports()) for one in clusters if one.name == cluster)
        assert len(rows) == jobs, rows[:3]
        if jobs <= MOST_WORKERS:
            await measure_workers(costs, controller, group, str(folder.keys))
    finally:
        with timed(costs, "close_s"):
            await controller.close()
        await scheduler.close()
    return costs


async def measure_reconcile(costs: Costs, name: str, controller: Controller, group: Group) -> None:
    """Compare what is wanted with what the queue has, without a difference."""
    ids = controller.live()
    seen = await controller.ask(ids)
    with timed(costs, name, REPEATS):
        for _ in range(REPEATS):
            controller.observe(seen)
            group.act()


async def measure_workers(costs: Costs, controller: Controller, group: Group, keys: str) -> None:
    """Let the jobs' workers come, decide again, and shrink to half."""
    step, steps = controller.step, []

    def counted() -> None:
        start = time.process_time()
        step()
        steps.append(time.process_time() - start)

    names = [name for job in group.jobs.values() for name in job.worker_names(group.prefix)]
    scheduler = controller.scheduler
    controller.step = counted  # type: ignore[method-assign]
    with timed(costs, "join_s"):
        asked = {"names": names, "scheduler": scheduler.address, "keys": keys}
        print(json.dumps(asked), flush=True)
        await until(lambda: all(job.workers for job in group.jobs.values()))
    controller.step = step  # type: ignore[method-assign]
    # one that leaves before its first heartbeat would be unknown
    await until(lambda: len(scheduler.get_events(TOPIC)) >= len(names))
    costs |= {"join_steps": len(steps), "join_steps_s": sum(steps)}
    await measure_reconcile(costs, "reconcile_running_s", controller, group)
    with timed(costs, "shrink_s"):
        group.want(len(names) // 2)
        await until(lambda: len(scheduler.workers) <= len(names) // 2)


def main() -> None:
    """Print the costs as JSON."""
    jobs, place = int(sys.argv[1]), Path(sys.argv[2])
    set_log_level("CRITICAL")
    raise_descriptor_limit()
    taken = {local.JOB: "taken", local.GPUS: f"scale-{os.getpid()}"}
    holder = subprocess.Popen(["sleep", "infinity"], env={**os.environ, **taken})
    try:
        print(json.dumps(asyncio.run(measure(jobs, place))), flush=True)
    finally:
        holder.kill()


if __name__ == "__main__":
    main()
