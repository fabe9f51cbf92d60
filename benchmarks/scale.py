"""Costs of a worker and a job for rank 0, the scheduler and the job control, by their number.

Rank 0, its scheduler and the job control are the real ones; ranks, workers and jobs are stand-ins
in this process, which speak the real protocols (`stand_ins.py`). Costs are processor time and
counts, which a busy machine changes little.

    python benchmarks/scale.py --json benchmarks/results/scale/cpu.json
    python benchmarks/scale.py --write-docs benchmarks/results/scale/cpu.json
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import datetime
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import dask
import distributed
import numpy as np
import psutil
from stand_ins import (
    CORES,
    MEMORY,
    PATIENCE_S,
    PER_NODE,
    StandInRank,
    StandInWorker,
    stand_in_rank,
    together,
    until,
)

import hpcdask
from hpcdask.bootstrap.ranks import Rank, detect
from hpcdask.gpu.devices import Gpu
from hpcdask.node.placement import Inventory
from hpcdask.process import raise_descriptor_limit
from hpcdask.runner.link import Rendezvous
from hpcdask.runner.plan import make_plan
from hpcdask.security.credentials import load_credentials, to_security
from hpcdask.spec.specs import RunSpec

HERE = Path(__file__).parent
PAGE = HERE / "scale.md"
BEGIN, END = "<!-- written by benchmarks/scale.py -->\n", "<!-- end -->\n"
WORKERS = (50, 100, 200, 400, 700, 1000)
JOBS = (100, 200, 500, 1000, 2000)
#: Steps below this size are mostly what does not depend on the number.
LEAST_FITTED = 100
#: Variables of launchers and queueing systems, which this launch must not inherit.
LAUNCHER_WORDS = ("SLURM_", "OMPI_", "PMI", "PMIX_", "MPI_", "PALS_", "MV2_", "HPCDASK_RANK")
#: Rows of the tables: a cost, in words, and its unit. "all" is not divided by the number.
ROWS = {
    "workers": (
        ("dial_rank0_s", "rank 0: TLS handshake on the link", "ms"),
        ("plan_rank0_s", "rank 0: report, plan, order", "ms"),
        ("join_rank0_s", "rank 0: handling a registration", "ms"),
        ("end_rank0_s", "rank 0: the end", "ms"),
        ("plan_gpus_s", "the plan alone, with GPUs", "ms"),
        ("join_scheduler_s", "scheduler: registration", "ms"),
        ("end_scheduler_s", "scheduler: the end", "ms"),
        ("rank0_rss", "rank 0: memory", "MB"),
        ("scheduler_rss", "scheduler: memory", "MB"),
        ("rank0_descriptors", "rank 0: descriptors", ""),
        ("scheduler_descriptors", "scheduler: descriptors", ""),
        ("beats_per_s", "heartbeats per second, all", ""),
        ("beat_scheduler_share", "scheduler: core share of heartbeats, all", "%"),
    ),
    "jobs": (
        ("submit_s", "submission", "µs"),
        ("query_s", "query of the queue", "µs"),
        ("reconcile_waiting_s", "one reconcile, jobs wait", "µs"),
        ("reconcile_running_s", "one reconcile, jobs run", "µs"),
        ("survey_s", "survey, as in `hpcdask list`", "µs"),
        ("join_steps_s", "job control, while workers connect", "ms"),
        ("join_s", "job control and scheduler, while workers connect", "ms"),
        ("shrink_s", "half of the jobs retire", "ms"),
        ("close_s", "close", "µs"),
    ),
}
FACTORS = {"ms": 1e3, "µs": 1e6, "MB": 1e-6, "%": 100.0, "": 1.0}

Costs = dict[str, float]


# --- a launch -------------------------------------------------------------------------------------


def seconds(process: psutil.Process) -> float:
    """Return the processor time of a process so far, also of one that was not waited for."""
    times = process.cpu_times()
    return float(times.user + times.system)


def state_of(name: str, process: psutil.Process, suffix: str = "") -> Costs:
    """Return the memory and descriptors of a process."""
    found = {"rss": process.memory_info().rss, "descriptors": process.num_fds()}
    return {f"{name}_{key}{suffix}": value for key, value in found.items()}


async def settle(process: psutil.Process) -> None:
    """Wait until a process has worked off what it was told: an idle moment."""
    async with asyncio.timeout(PATIENCE_S):
        used = -1.0
        while seconds(process) - used >= 0.04:
            used = seconds(process)
            await asyncio.sleep(0.5)


def listener_on(port: int, parent: psutil.Process) -> psutil.Process:
    """Return the process of a launch that listens on a port."""
    for process in parent.children(recursive=True):
        with contextlib.suppress(psutil.Error):
            for one in process.net_connections("tcp"):
                if one.status == psutil.CONN_LISTEN and one.laddr.port == port:
                    return process
    raise LookupError(f"no process listens on port {port}")


@contextlib.contextmanager
def launched(size: int, folder: Path) -> Iterator[tuple[psutil.Process, Rank]]:
    """Yield the process of rank 0 of a launch of `srun` without other ranks, and the rank."""
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith(LAUNCHER_WORDS)
    }
    environment["DASK_HPCDASK__SHARED_DIRECTORY"] = str(folder)
    environment["PYTHONPATH"] = f"{HERE.parent}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    step = {
        "SLURM_JOB_ID": str(os.getpid()),
        "SLURM_STEP_ID": "0",
        "SLURM_STEP_NUM_TASKS": str(size),
        "SLURM_PROCID": "0",
        "SLURM_LOCALID": "0",
        "SLURM_NODEID": "0",
        "SLURM_STEP_TASKS_PER_NODE": f"{PER_NODE}(x{-(-size // PER_NODE)})",
    }
    rank = detect(step)
    assert rank is not None
    options = ["--device", "cpu", "--timeout", f"{PATIENCE_S:g}"]
    options += ["--scheduler-file", str(folder / "cluster.json")]
    command = [sys.executable, "-m", "hpcdask.run", *options]
    with (
        open(folder / "rank0.log", "w+") as log,
        dask.config.set({"hpcdask.shared-directory": str(folder)}),
    ):
        process = subprocess.Popen(
            command,
            env=environment | step,
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
        )
        try:
            yield psutil.Process(process.pid), rank
        except BaseException:
            log.seek(0)
            print(log.read(), file=sys.stderr)
            raise
        finally:
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(20)
            process.kill()
            process.wait()


async def measure_launch(workers: int, beat_s: float) -> Costs:
    """Measure a launch, from the first rank that connects to the end of the run."""
    costs: Costs = {"workers": workers}
    size = workers + 1
    with (
        tempfile.TemporaryDirectory(prefix="scale-") as place,
        launched(size, Path(place)) as (rank0, rank),
    ):
        note = await until(Rendezvous(rank).fetch)
        leader = listener_on(note.port, rank0)  # rank 0's agent
        await settle(leader)
        costs |= state_of("rank0", leader, "_alone")

        ranks = [StandInRank(stand_in_rank(one, size, rank.launch_id)) for one in range(1, size)]
        used = seconds(leader)
        await together(rank.connect() for rank in ranks)
        await settle(leader)
        costs["dial_rank0_s"] = seconds(leader) - used

        used = seconds(leader)
        await asyncio.gather(*(rank.report() for rank in ranks))
        await settle(leader)
        costs["plan_rank0_s"] = seconds(leader) - used

        crew = [rank.worker for rank in ranks]
        scheduler = listener_on(int(crew[0].scheduler.rpartition(":")[2]), rank0)
        costs |= state_of("scheduler", scheduler, "_alone")
        used, its = seconds(leader), seconds(scheduler)
        await together(worker.join() for worker in crew)
        await until(Path(place, "cluster.json").exists)
        await settle(leader)
        costs["join_rank0_s"] = seconds(leader) - used
        costs["join_scheduler_s"] = seconds(scheduler) - its

        its, beats = seconds(scheduler), sum(worker.beats for worker in crew)
        await asyncio.gather(*(worker.beat_for(beat_s) for worker in crew))
        costs["beats_per_s"] = (sum(worker.beats for worker in crew) - beats) / beat_s
        costs["beat_scheduler_share"] = (seconds(scheduler) - its) / beat_s
        costs |= state_of("rank0", leader) | state_of("scheduler", scheduler)

        ends = asyncio.gather(*(rank.end() for rank in ranks))
        rank0.send_signal(signal.SIGTERM)
        costs |= await measure_end(leader, scheduler)
        await ends
    return costs


async def measure_end(leader: psutil.Process, scheduler: psutil.Process) -> Costs:
    """Measure the end of a run: processor time until rank 0 is gone."""
    first = last = {"end_rank0_s": seconds(leader), "end_scheduler_s": seconds(scheduler)}
    with contextlib.suppress(psutil.Error):
        while leader.status() != psutil.STATUS_ZOMBIE:
            with contextlib.suppress(psutil.Error):
                its = max(last["end_scheduler_s"], seconds(scheduler))
                last = {"end_rank0_s": seconds(leader), "end_scheduler_s": its}
            await asyncio.sleep(0.01)
    return {name: last[name] - first[name] for name in first}


def measure_plan(workers: int) -> Costs:
    """Measure the plan alone: on nodes of four GPUs, one rank for each."""
    cores, inventories = tuple(range(CORES)), {}
    for index in range(workers):
        rank = stand_in_rank(index, workers, "")
        names = [f"GPU-{rank.host}-{number}" for number in range(PER_NODE)]
        gpus = tuple(Gpu(name, "stand-in", 2**36, cores) for name in names)
        where = index, rank.host, rank.local_index
        inventories[index] = Inventory(*where, gpus, cores, MEMORY)
    spec, first = RunSpec(protocol="tcp", rmm_pool_size="0"), stand_in_rank(0, workers, "")
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stderr(nowhere):
        start = time.process_time()
        make_plan(spec, first, inventories, job="1")
        return {"plan_gpus_s": time.process_time() - start}


# --- a cluster of jobs ----------------------------------------------------------------------------


async def measure_jobs(jobs: int) -> Costs:
    """Measure the job control of one cluster, in a process of its own."""
    with tempfile.TemporaryDirectory(prefix="scale-") as place:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, str(HERE / "scale_jobs.py"), str(jobs), place),
            env={**os.environ, "HOME": place},
            stdout=subprocess.PIPE,
            limit=2**24,
        )
        assert process.stdout is not None
        crew: list[StandInWorker] = []
        costs: Costs = {}
        async with asyncio.timeout(2 * PATIENCE_S):
            async for line in process.stdout:
                told = json.loads(line)
                if "names" not in told:
                    costs = told
                    continue
                security = to_security(load_credentials(told["keys"]))
                names = enumerate(told["names"])
                crew = [StandInWorker(one, i, told["scheduler"], security) for i, one in names]
                await together(worker.join() for worker in crew)
            if await process.wait():
                raise SystemExit(f"{HERE / 'scale_jobs.py'} failed")
        await asyncio.gather(*(worker.leave() for worker in crew))
    return costs


# --- the page -------------------------------------------------------------------------------------


def exponent(points: Sequence[tuple[float, float]]) -> str:
    """Return the power of the number with which a cost grows: least squares of logarithms."""
    fitted = [(n, cost) for n, cost in points if n >= LEAST_FITTED and cost > 0]
    return f"{np.polyfit(*np.log(np.array(fitted)).T, 1)[0]:.2f}" if len(fitted) > 1 else ""


def number(value: float) -> str:
    """Write two digits or more."""
    return f"{value:.0f}" if value >= 100 else f"{value:.2g}"


def table(by: str, records: Sequence[Costs]) -> str:
    """Return the costs of one more, a column for each number, and the exponent of the whole."""
    lines = [["", *(f"{one[by]:,.0f}" for one in records), "exponent"]]
    lines.append(["---"] * len(lines[0]))
    for name, words, unit in ROWS[by]:
        costs = {one[by]: one[name] - one.get(f"{name}_alone", 0) for one in records if name in one}
        each = {n: costs[n] * FACTORS[unit] / (1 if ", all" in words else n) for n in costs}
        shown = [number(each[one[by]]) if one[by] in each else "-" for one in records]
        lines.append([f"{words}, {unit}".removesuffix(", "), *shown, exponent([*costs.items()])])
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def page(results: dict[str, Any]) -> str:
    """Return the text of the page, with the tables in their place."""
    found = results["versions"]
    about = (
        f"{found['cores']} CPU cores, no GPU; {found['date']}; hpcdask {found['hpcdask']}, "
        f"distributed {found['distributed']}, Python {found['python']}, Linux {found['kernel']}."
    )
    before, _, rest = PAGE.read_text().partition(BEGIN)
    return (
        f"{before}{BEGIN}\nA launch, per worker ({about})\n\n"
        f"{table('workers', results['launches'])}\nA cluster of jobs, per job\n\n"
        f"{table('jobs', results['jobs'])}\n{END}{rest.partition(END)[2]}"
    )


async def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Measure each number of workers and of jobs, and print what is found."""
    results: dict[str, Any] = {
        "versions": {
            "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
            "hpcdask": hpcdask.__version__,
            "distributed": distributed.__version__,
            "python": platform.python_version(),
            "kernel": platform.release().split("-")[0],
            "cores": str(len(os.sched_getaffinity(0))),
        },
        "launches": [],
        "jobs": [],
    }
    for workers in options.workers:
        record = await measure_launch(workers, options.beat) | measure_plan(workers)
        results["launches"].append(record)
        print(json.dumps(record), flush=True)
    for jobs in options.jobs:
        results["jobs"].append(await measure_jobs(jobs))
        print(json.dumps(results["jobs"][-1]), flush=True)
    return results


def main() -> None:
    """Measure, or write the page from what was measured."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--workers", type=int, nargs="*", default=WORKERS, help="numbers of them")
    parser.add_argument("--jobs", type=int, nargs="*", default=JOBS, help="numbers of them")
    parser.add_argument("--beat", type=float, default=20.0, help="seconds of heartbeats")
    parser.add_argument("--json", type=Path, help="where to write the results")
    parser.add_argument("--write-docs", type=Path, help="write the page from these results")
    options = parser.parse_args()
    if options.write_docs:
        PAGE.write_text(page(json.loads(options.write_docs.read_text())))
        return
    raise_descriptor_limit()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # what was started ends first
    results = asyncio.run(measure(options))
    if options.json:
        options.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
