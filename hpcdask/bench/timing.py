"""Time a computation on a cluster, with a bar that shows how far it is."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import distributed

from hpcdask.bench.timeline import recorded
from hpcdask.workloads import count_tasks

PROGRESS_INTERVAL_S = 0.5


@dataclass(frozen=True)
class Timed:
    """What `measure` found: the seconds of each timed run, the results and Dask tasks of the last.

    The timeline is of one more run, if that was asked for.
    """

    seconds: list[float]
    results: Any
    n_tasks: int
    timeline: dict[str, Any] | None = None


def measure(
    client: distributed.Client,
    build: Callable[[int], Sequence[Any]],
    repeats: int,
    *,
    n_warmup: int = 0,
    timeline: bool = False,
) -> Timed:
    """Time ``repeats`` computations of the collections that ``build`` makes of their number.

    The warm-up are whole runs too, which are not reported; the timeline is of one more run.
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
            results = client.gather(client.compute(list(collections)))
            elapsed = time.perf_counter() - start
        if index >= n_warmup:
            seconds.append(elapsed)
    if not timeline:
        return Timed(seconds, results, n_tasks)
    collections = build(n_warmup + repeats)
    with recorded(client) as found, progress(client, "timeline", n_tasks):
        client.gather(client.compute(list(collections)))
    return Timed(seconds, results, n_tasks, found)


def hold(client: distributed.Client, x: Any) -> Any:
    """Return a dask array whose chunks are in the memory of the workers."""
    x = x.persist()
    with progress(client, "input", x.npartitions):
        distributed.wait(x)
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
