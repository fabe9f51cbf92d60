"""Steps of each workload: announce it, warm up, time it, check it, record it.

What is timed is what a user waits for: from the call that computes a graph, already built, to the
result in the client, optimisation, scheduling and transfer included. Each repeat has a graph of
its own with other random numbers, so that nothing is remembered from the one before.
"""

from __future__ import annotations

import contextlib
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import distributed

from hpcdask.bench.cluster import Cluster, wait_with_workers
from hpcdask.bench.limits import Work
from hpcdask.bench.records import Case, announce, describe
from hpcdask.workloads import Check, count_tasks

PROGRESS_INTERVAL_S = 0.5


@dataclass(frozen=True)
class Timed:
    """Seconds of each timed run, results and number of Dask tasks of the last."""

    seconds: list[float]
    results: Any
    n_tasks: int


@dataclass(frozen=True)
class Workload:
    """A computation with a known answer, for a cluster.

    ``build`` makes the collections of a repeat from the input, which may be ``held`` by the
    workers, and its number; ``finish`` the result and the checks. ``warm_up`` makes less than a
    whole run.
    """

    case: Case
    build: Callable[[Any, int], Sequence[Any]]
    finish: Callable[[Any, Timed], tuple[dict[str, Any], list[Check]]]
    input: Any = None
    held: bool = False
    warm_up: Callable[[int], Sequence[Any]] | None = None
    work: Work | None = None


def run(workload: Workload, cluster: Cluster, repeats: int) -> dict[str, Any]:
    """Return the record that the command prints as JSON."""
    x, client = workload.input, cluster.client
    # input errors come before the first line of output
    if workload.warm_up is None:
        workload.build(x, 0)
    else:
        workload.warm_up(0)
    announce(workload.case, cluster)
    if workload.held:
        x = hold(client, x)
    if workload.warm_up is not None:
        measure(client, workload.warm_up, 0, n_warmup=1)
    n_warmup = 1 if workload.warm_up is None else 0
    timed = measure(client, lambda i: workload.build(x, i), repeats, n_warmup=n_warmup)
    result, checks = workload.finish(x, timed)
    return record(workload.case, cluster, timed, result, checks, work=workload.work)


def record(
    case: Case,
    cluster: Cluster,
    timed: Timed,
    result: dict[str, Any],
    checks: list[Check],
    *,
    work: Work | None = None,
) -> dict[str, Any]:
    """Put a measurement in the form that is written as JSON; sizes in bytes, times in seconds."""
    seconds = timed.seconds
    median = statistics.median(seconds)
    return {
        "workload": case.workload,
        "form": case.form,
        "label": case.label,
        "shape": list(case.shape),
        "dtype": case.dtype,
        "chunks": {"count": case.n_chunks, "largest": list(case.largest)},
        "bytes": case.nbytes,
        "seconds": seconds,
        "seconds_median": median,
        "seconds_min": min(seconds),
        "seconds_max": max(seconds),
        "GB/s": case.nbytes / median / 1e9,
        "dask_tasks": timed.n_tasks,
        "result": result,
        "checks": [check.as_dict() for check in checks],
        **({"work": asdict(work)} if work is not None else {}),
        **describe(cluster),
    }


def measure(
    client: distributed.Client,
    build: Callable[[int], Sequence[Any]],
    repeats: int,
    *,
    n_warmup: int = 0,
) -> Timed:
    """Time ``repeats`` computations of the collections that ``build`` makes of their number.

    Warm-up runs are whole runs, which are not reported.
    """
    seconds: list[float] = []
    results: Any = None
    n_tasks = 0
    for index in range(n_warmup + repeats):
        results = None
        collections = build(index)
        n_tasks = count_tasks(*collections)
        title = "warm-up" if index < n_warmup else f"run {index - n_warmup + 1} of {repeats}"
        with progress(client, title, n_tasks):
            start = time.perf_counter()
            results = compute(client, collections)
            elapsed = time.perf_counter() - start
        if index >= n_warmup:
            seconds.append(elapsed)
    return Timed(seconds, results, n_tasks)


def compute(client: distributed.Client, collections: Sequence[Any]) -> Any:
    """Compute collections, and return their results."""
    futures = client.compute(list(collections))
    wait_with_workers(client, futures)
    return client.gather(futures)


def hold(client: distributed.Client, x: Any) -> Any:
    """Return a dask array whose chunks are in the memory of the workers."""
    x = x.persist()
    with progress(client, "input", x.npartitions):
        wait_with_workers(client, x)
    return x


@contextlib.contextmanager
def progress(client: distributed.Client, title: str, n_tasks: int) -> Iterator[None]:
    """Show a bar of finished Dask tasks while the block runs, if stderr is a terminal.

    A thread asks the scheduler for its counters; the computation does not know of it.
    """
    if not sys.stderr.isatty():
        yield
        return
    from rich.console import Console
    from rich.progress import Progress as Bar

    done = threading.Event()
    with Bar(console=Console(stderr=True), transient=True, refresh_per_second=4) as bar:
        row = bar.add_task(title, total=n_tasks)

        def follow() -> None:
            while not done.wait(PROGRESS_INTERVAL_S):
                with contextlib.suppress(Exception):  # a bar must not end a measurement
                    n_left = client.run_on_scheduler(_unfinished)
                    bar.update(row, completed=max(0, n_tasks - n_left))

        thread = threading.Thread(target=follow, name="hpcdask-progress", daemon=True)
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join(timeout=5)


def _unfinished(dask_scheduler: Any) -> int:
    states = ("waiting", "queued", "processing", "no-worker")
    groups = dask_scheduler.task_groups.values()
    return sum(group.states[state] for group in groups for state in states)
