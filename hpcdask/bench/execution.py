"""Measurements on a cluster: the steps of each workload, and a whole run with its lines and files.

A time is what a user waits for: from the call that computes a built graph to the result in the
client. Each repeat has a graph with other random numbers, so that nothing is remembered.

Where no cluster is given or surrounds the program, it starts itself again as the program of the
runner, which makes a cluster of this machine, or of the ranks of ``mpirun`` and ``srun``.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import shlex
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import click
import dask
import psutil
from dask.utils import format_bytes, format_time
from distributed import CancelledError, Client, KilledWorker
from distributed.comm import CommClosedError

from hpcdask.bench import rates
from hpcdask.bench.cluster import Cluster, inspect, wait
from hpcdask.bench.measurement import Measurement
from hpcdask.bench.startup import AHEAD, age
from hpcdask.bootstrap.environment import interpreter
from hpcdask.client.connect import connect
from hpcdask.errors import ClusterError, UsageError, root_cause
from hpcdask.gpu.monitor import monitor_of
from hpcdask.gpu.usage import RunUsage
from hpcdask.logs import say, text_table
from hpcdask.workloads import Check, Device, WorkloadError, count_tasks

#: Bytes for each GPU, and the most in all; the same for each thread without GPUs: all workloads
#: together take a minute, unless the number of Dask tasks or a file system decides.
SIZES: dict[str, tuple[float, float, float, float]] = {
    "array, tuned": (250e9, math.inf, 200e6, math.inf),
    "array, stock": (50e9, 400e9, 200e6, 32e9),
    "operation": (2e9, 100e9, 32e6, 32e9),
    "svd, tuned": (25e9, math.inf, 100e6, math.inf),
    "svd, stock": (2.5e9, 20e9, 100e6, 20e9),
    "svd exact": (800e6, 25e9, 200e6, 25e9),
    "zarr": (100e6, 4e9, 100e6, 4e9),
}
# Workers need scratch arrays beside their input; Dask pauses those without a GPU at 0.8.
USABLE_FRACTION: dict[Device, float] = {"cuda": 0.8, "cpu": 0.3}
#: Processes of Open MPI above a rank, which gives each rank a terminal of its own.
OPEN_MPI = {"mpirun", "mpiexec", "prterun", "orterun", "prted", "orted"}
#: Columns with room in 80 characters.
HEADS = ("workload", "size", "median", "rate", "limit", "of the limit", "")


@dataclass(frozen=True)
class Timed:
    """Seconds of each timed run, results and number of Dask tasks of the last."""

    seconds: tuple[float, ...]
    results: Any
    dask_tasks: int

    def of(self, draft: Measurement, checks: Sequence[Check], **more: Any) -> Measurement:
        """Return the whole measurement."""
        how: dict[str, Any] = {"seconds": self.seconds, "dask_tasks": self.dask_tasks}
        return replace(draft, checks=tuple(checks), **how, **more)


def suitable(cluster: Cluster, name: str) -> int:
    """Return the size in bytes by which a workload takes seconds on a cluster."""
    of_gpu, most_on_gpus, of_thread, most = SIZES[name]
    if cluster.device == "cuda":
        return int(min(of_gpu * sum(cluster.facts["devices"].values()), most_on_gpus))
    return int(min(of_thread * cluster.n_slots, most))


def check_room(cluster: Cluster, nbytes: int, advice: str = "", *, copies: int = 1) -> None:
    """Raise UsageError if the workers cannot hold an array of so many bytes, and its copies."""
    usable = int(USABLE_FRACTION[cluster.device] * cluster.memory_nbytes) // copies
    if nbytes > usable:
        raise UsageError(
            f"an array of {format_bytes(nbytes)} does not fit {cluster}: --size "
            f"{usable // 10**6}MB is the most{advice}"
        )


def announce(cluster: Cluster, chunks: tuple[tuple[int, ...], ...], **identity: Any) -> Measurement:
    """Say what is measured on an array, and return what is known of the measurement so far."""
    draft = Measurement(shape=tuple(map(sum, chunks)), **identity, **cluster.facts)
    say(
        f"{draft.label}: {format_bytes(draft.nbytes)} {draft.dtype} on {cluster}, "
        f"{math.prod(map(len, chunks))} chunks of {' x '.join(str(max(one)) for one in chunks)}"
    )
    return draft


def hold(cluster: Cluster, x: Any, *, evenly: bool = False) -> Any:
    """Return an array in the workers' memory.

    `evenly`: each worker holds as many chunks of rows. One with more is late, or sends one away.
    """
    addresses, n_chunks = [worker.address for worker in cluster.workers], x.numblocks[0]
    place = lambda key: addresses[key[1] * len(addresses) // n_chunks]  # noqa: E731
    with dask.annotate(**({"workers": place, "allow_other_workers": True} if evenly else {})):
        x = x.persist()
    wait(cluster, x)
    return x


def measure(cluster: Cluster, build: Callable[[int], Sequence[Any]], repeats: int) -> Timed:
    """Time computations of what ``build`` makes of their number, after one that does not count."""
    seconds: list[float] = []
    for index in range(1 + repeats):
        results = None  # the workers may forget those before
        collections = build(index)
        start = time.perf_counter()
        results = compute(cluster, collections)
        seconds.append(time.perf_counter() - start)
    return Timed(tuple(seconds[1:]), results, count_tasks(*collections))


def compute(cluster: Cluster, collections: Sequence[Any]) -> Any:
    """Compute collections, and return their results."""
    futures = cluster.client.compute(list(collections))
    wait(cluster, futures)
    return cluster.client.gather(futures)


# --- a run ----------------------------------------------------------------------------------------


def execute(
    workloads: Sequence[Callable[[Cluster], Measurement]],
    *,
    device: str,
    scheduler_file: str | None,
    json_file: Path | None,
    report_file: Path | None,
    leave_out: bool = False,
) -> int:
    """Measure the workloads on the cluster, and print each result as soon as there is one.

    Return 1 if a result is wrong. `leave_out` goes on after a workload that cannot be measured.
    """
    if scheduler_file is None and dask.config.get("scheduler-address", None) is None:
        _surround(device)
    found: list[Measurement] = []
    known: dict[str, float] = {}
    failed = False
    try:
        with _as_ours(), connect(scheduler_file) if scheduler_file else Client() as client:
            for workload in workloads:
                cluster = inspect(client, device)
                try:
                    one = _with_usage(workload, cluster)
                except (UsageError, WorkloadError, KilledWorker, MemoryError) as exc:
                    if not leave_out:
                        raise
                    say(f"left out: {exc}")
                    failed = failed or isinstance(exc, (KilledWorker, MemoryError))
                    continue
                if one.work:
                    known = known or rates.measure(cluster)  # bad input is known by now
                    one = replace(one, rates=known)
                found.append(one)
                _tell(one, json_file)
                if report_file:  # each time, since the run may be ended at any moment
                    from hpcdask.bench import report  # Bokeh takes half a second to import

                    text = report.html(found, shlex.join(["hpcdask", "bench", *_words()]))
                    report_file.write_text(text, encoding="utf-8")
    finally:
        if found and report_file:
            say(f"report: {report_file}")
        if found and is_terminal():
            show(found)
    return int(failed or any(one.failed for one in found))


def _surround(device: str) -> None:
    """Become the program of the runner, which makes a cluster of this machine or these ranks."""
    options = [] if device == "auto" else ["--device", device]
    command = [*interpreter(), "-m", "hpcdask.run", *options, "-m", "hpcdask.bench", *_words()]
    sys.stdout.flush()
    os.environ[AHEAD] = repr(age())
    os.execv(command[0], command)


def _words() -> Sequence[str]:
    """Return the words of the command line after ``hpcdask bench``."""
    words: Sequence[str] = click.get_current_context().find_root().obj
    return words


@contextlib.contextmanager
def _as_ours() -> Iterator[None]:
    """Raise errors of input, cluster and files as errors of hpcdask."""
    try:
        yield
    except (KilledWorker, MemoryError) as exc:
        raise ClusterError(f"{type(exc).__name__}: {exc}") from exc
    except (CancelledError, CommClosedError, TimeoutError) as exc:
        raise ClusterError(
            f"the measurement lost its cluster ({root_cause(exc)}): see the log of its scheduler, "
            f"and whether its job or run has ended"
        ) from exc
    except (WorkloadError, OSError) as exc:
        raise UsageError(str(exc)) from exc


def _with_usage(workload: Callable[[Cluster], Measurement], cluster: Cluster) -> Measurement:
    """Measure a workload, and what the GPUs do meanwhile."""
    cluster.client.run_on_scheduler(_start_lap)
    found = workload(cluster)
    usage = cluster.client.run_on_scheduler(_end_lap)
    return replace(found, gpus=usage and RunUsage.from_json(usage))


async def _start_lap(dask_scheduler: Any) -> None:
    await monitor_of(dask_scheduler).start_lap()


async def _end_lap(dask_scheduler: Any) -> dict[str, Any] | None:
    usage = await monitor_of(dask_scheduler).lap()
    return None if usage is None else usage.to_json()


# --- lines and tables -----------------------------------------------------------------------------


def is_terminal() -> bool:
    """Return whether standard output, below Open MPI's mpirun that of mpirun, is a terminal."""
    above = [process.pid for process in psutil.Process().parents() if process.name() in OPEN_MPI]
    with contextlib.suppress(OSError):  # another user's process, or gone
        where = os.readlink(f"/proc/{above[0]}/fd/1") if above else "/dev/tty"
        return sys.stdout.isatty() and where.startswith("/dev/")
    return False


def _tell(found: Measurement, json_file: Path | None) -> None:
    """Print a measurement in a line, and as JSON unless on a terminal; append it to a file."""
    text = json.dumps(found.to_json())
    if not is_terminal():
        click.echo(text)
    if json_file is not None:
        with json_file.open("a", encoding="utf-8") as file:
            file.write(text + "\n")
    phases = {name: format_time(seconds) for name, seconds in found.phases.items()}
    say("; ".join(f"{head} {cell}" for head, cell in (found.cells() | phases).items() if cell))
    for complaint in found.failed:
        say(f"check failed: {complaint}")


def show(found: Sequence[Measurement]) -> None:
    """Print a table with a row for each measurement."""
    rows = [one.cells() | {"": "wrong" * bool(one.failed)} for one in found]
    click.echo("\n" + text_table([HEADS, *([row[head] for head in HEADS] for row in rows)]))
