"""Costs of a worker and a job for rank 0, the scheduler and the job control, by their number.

Rank 0, its scheduler and the job control are the real ones; ranks, workers and jobs are stand-ins
that speak the real protocols (`stand_ins.py`), hundreds in one process. Costs are processor time
and counts, which a busy machine changes little.

    python benchmarks/scale.py --json benchmarks/results/scale/cpu.json
    python benchmarks/scale.py --write-docs benchmarks/results/scale/cpu.json
"""

from __future__ import annotations

import argparse
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
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import distributed
import numpy as np
import psutil
from companies import PATIENCE_S, Companies, shares
from scale_docs import PAGE, page
from stand_ins import AT_ONCE, CORES, MEMORY, PER_NODE, stand_in_rank

import hpcdask
from hpcdask.bootstrap.ranks import Rank, detect
from hpcdask.comm.fabric import Fabric
from hpcdask.gpu.devices import Gpu
from hpcdask.node.placement import Inventory
from hpcdask.process import raise_descriptor_limit
from hpcdask.runner.plan import make_plan
from hpcdask.spec.specs import RunSpec

HERE = Path(__file__).parent
WORKERS = (50, 100, 200, 400, 700, 1000)
JOBS = (100, 200, 500, 1000, 2000)
#: Steps below this size are mostly what does not depend on the number.
LEAST_FITTED = 100
#: Variables of launchers and queueing systems, which this launch must not inherit.
LAUNCHER_WORDS = ("SLURM_", "OMPI_", "PMI", "PMIX_", "MPI_", "PALS_", "MV2_", "HPCDASK_RANK")


def seconds(process: psutil.Process) -> float:
    """Return the processor time of a process so far, also of one that was not waited for."""
    times = process.cpu_times()
    return float(times.user + times.system)


def settle(*processes: psutil.Process) -> None:
    """Wait until they have worked off what they were told: an idle moment."""
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        before = [seconds(one) for one in processes]
        time.sleep(0.5)
        if all(seconds(one) - was < 0.04 for one, was in zip(processes, before, strict=True)):
            return


def wait_for(condition: Callable[[], Any], what: str) -> Any:
    """Wait for something to be true, and return it."""
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        if found := condition():
            return found
        time.sleep(0.05)
    raise TimeoutError(f"waited {PATIENCE_S:g} s for {what}")


def state_of(process: psutil.Process) -> dict[str, float]:
    """Return the memory and descriptors of a process."""
    return {"rss": process.memory_info().rss, "descriptors": process.num_fds()}


def listener_on(port: int, parent: psutil.Process) -> psutil.Process | None:
    """Return the process of a launch that listens on a port."""
    for process in parent.children(recursive=True):
        with contextlib.suppress(psutil.Error):
            for one in process.net_connections("tcp"):
                if one.status == psutil.CONN_LISTEN and one.laddr.port == port:
                    return process
    return None


@contextlib.contextmanager
def launched(workers: int, folder: Path) -> Iterator[tuple[psutil.Process, Companies, str, int]]:
    """Yield rank 0, with a worker, of a launch of `srun` without its nodes; its id and size."""
    size, job = workers + 1, str(os.getpid())
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith(LAUNCHER_WORDS)
    }
    environment |= {
        "DASK_HPCDASK__SHARED_DIRECTORY": str(folder),
        "PYTHONPATH": os.pathsep.join([str(HERE.parent), os.environ.get("PYTHONPATH", "")]),
    }
    step = {
        "SLURM_JOB_ID": job,
        "SLURM_STEP_ID": "0",
        "SLURM_STEP_NUM_TASKS": str(size),
        "SLURM_PROCID": "0",
        "SLURM_LOCALID": "0",
        "SLURM_NODEID": "0",
        "SLURM_STEP_TASKS_PER_NODE": f"{PER_NODE}(x{-(-size // PER_NODE)})",
    }
    options = ["--device", "cpu", "--timeout", f"{PATIENCE_S:g}"]
    options += ["--scheduler-file", str(folder / "cluster.json")]
    with open(folder / "rank0.log", "wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "hpcdask.run", *options],
            env=environment | step,
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
        )
        companies = Companies(environment)
        try:
            rank = detect(step)
            assert rank is not None
            yield psutil.Process(process.pid), companies, rank.launch_id, size
        except BaseException:
            print((folder / "rank0.log").read_text(), file=sys.stderr)
            raise
        finally:
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(20)
            process.kill()
            process.wait()
            companies.close()


def measure_launch(workers: int, beat_s: float) -> dict[str, float]:
    """Measure a launch, from the first rank that dials to the end of the run."""
    found: dict[str, float] = {"workers": workers}
    with (
        tempfile.TemporaryDirectory(prefix="scale-") as place,
        launched(workers, Path(place)) as (rank0, companies, launch_id, size),
    ):
        parts = shares(1, size - 1)
        for _ in parts:
            companies.start()
        wait_for(lambda: list(Path(place).glob(".hpcdask-*/note.json")), "rank 0's note")
        (note,) = Path(place).glob(".hpcdask-*/note.json")
        leader = listener_on(json.loads(note.read_text())["port"], rank0)  # rank 0's agent
        assert leader is not None
        settle(leader)
        found |= {f"rank0_{key}_alone": value for key, value in state_of(leader).items()}

        used = seconds(leader)
        companies.tell(
            [
                {"do": "ranks_dial", "first": first, "last": last, "size": size}
                | {"launch_id": launch_id, "most": AT_ONCE}
                for first, last in parts
            ]
        )
        companies.answers()
        settle(leader)
        found["dial_rank0_s"] = seconds(leader) - used

        used = seconds(leader)
        companies.do("ranks_report")
        (address, *_) = companies.do("ranks_order")
        settle(leader)
        found["plan_rank0_s"] = seconds(leader) - used
        scheduler = listener_on(int(address.rpartition(":")[2]), rank0)
        assert scheduler is not None
        found |= {f"scheduler_{key}_alone": value for key, value in state_of(scheduler).items()}

        used, its = seconds(leader), seconds(scheduler)
        companies.do("workers_join", most=AT_ONCE)
        wait_for((Path(place) / "cluster.json").exists, "the cluster to be ready")
        settle(leader)
        found["join_rank0_s"] = seconds(leader) - used
        found["join_scheduler_s"] = seconds(scheduler) - its

        used, its = seconds(leader), seconds(scheduler)
        beats = companies.do("workers_beat", seconds=beat_s)
        found["beats_per_s"] = sum(one["beats"] for one in beats) / beat_s
        found["longest_beat_s"] = max(one["longest_s"] for one in beats)
        found["beat_scheduler_share"] = (seconds(scheduler) - its) / beat_s
        found["beat_rank0_share"] = (seconds(leader) - used) / beat_s
        found |= {f"rank0_{key}": value for key, value in state_of(leader).items()}
        found |= {f"scheduler_{key}": value for key, value in state_of(scheduler).items()}
        found |= measure_end(rank0, leader, scheduler, companies)
    return found


def measure_end(
    rank0: psutil.Process,
    leader: psutil.Process,
    scheduler: psutil.Process,
    companies: Companies,
) -> dict[str, float]:
    """Measure the end of a run, by a signal: processor time until both are gone."""
    began = {"end_rank0_s": seconds(leader), "end_scheduler_s": seconds(scheduler)}
    last = dict(began)
    companies.tell([{"do": "ranks_end"}] * len(companies._lines))
    rank0.send_signal(signal.SIGTERM)
    with contextlib.suppress(psutil.Error):
        while leader.status() != psutil.STATUS_ZOMBIE:
            with contextlib.suppress(psutil.Error):
                last["end_scheduler_s"] = max(last["end_scheduler_s"], seconds(scheduler))
            last["end_rank0_s"] = seconds(leader)
            time.sleep(0.01)
    companies.answers()
    return {name: last[name] - began[name] for name in began}


def measure_plan(workers: int) -> dict[str, float]:
    """Measure the plan alone: on nodes of four GPUs, one rank for each."""
    inventories, fabrics = {}, {}
    for index in range(workers):
        rank = stand_in_rank(index, workers, "")
        gpus = tuple(
            Gpu(f"GPU-{rank.host}-{number}", "stand-in", 2**36, tuple(range(CORES)))
            for number in range(PER_NODE)
        )
        inventories[index] = Inventory(
            index, rank.host, rank.local_index, gpus, tuple(range(CORES)), MEMORY
        )
        fabrics[index] = Fabric()
    first: Rank = stand_in_rank(0, workers, "")
    spec = RunSpec(protocol="tcp", rmm_pool_size="0")
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stderr(nowhere):
        start = time.process_time()
        make_plan(spec, first, inventories, fabrics, job="1")
        return {"plan_gpus_s": time.process_time() - start}


def measure_jobs(jobs: int) -> dict[str, float]:
    """Measure the job control of one cluster, in a process of its own."""
    with tempfile.TemporaryDirectory(prefix="scale-") as place:
        command = [sys.executable, str(HERE / "scale_jobs.py"), str(jobs), place]
        done = subprocess.run(
            command,
            env={**os.environ, "HOME": place},
            stdout=subprocess.PIPE,
            check=True,
            timeout=2 * PATIENCE_S,
        )
    return dict(json.loads(done.stdout))


def exponent(points: Sequence[tuple[float, float]]) -> float | None:
    """Return the power of the number with which a cost grows: least squares of logarithms."""
    fitted = [(n, cost) for n, cost in points if n >= LEAST_FITTED and cost > 0]
    if len(fitted) < 2:
        return None
    return float(np.polyfit(*np.log(np.array(fitted)).T, 1)[0])


def fits(records: Sequence[dict[str, float]], by: str) -> dict[str, float]:
    """Return the exponent of each cost that is no bare number of before."""
    names = [name for name in records[0] if name != by and not name.endswith("_alone")]
    found = {}
    for name in names:
        base = f"{name}_alone"
        points = [(one[by], one[name] - one.get(base, 0)) for one in records if name in one]
        power = exponent(points)
        if power is not None:
            found[name] = round(power, 2)
    return found


def versions() -> dict[str, str]:
    """Return the versions of what is measured, and the machine."""
    return {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "hpcdask": hpcdask.__version__,
        "distributed": distributed.__version__,
        "python": platform.python_version(),
        "kernel": platform.release().split("-")[0],
        "cores": str(len(os.sched_getaffinity(0))),
    }


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
    results: dict[str, Any] = {"versions": versions(), "launches": [], "jobs": []}
    for workers in options.workers:
        record = measure_launch(workers, options.beat) | measure_plan(workers)
        results["launches"].append(record)
        print(json.dumps(record), flush=True)
    for jobs in options.jobs:
        record = measure_jobs(jobs)
        results["jobs"].append(record)
        print(json.dumps(record), flush=True)
    results["exponents"] = {}
    for kind, by in (("launches", "workers"), ("jobs", "jobs")):
        if results[kind]:
            results["exponents"] |= fits(results[kind], by)
    for name, power in results["exponents"].items():
        print(f"{name:28} grows with the power {power:.2f} of the number")
    if options.json:
        options.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
