"""Measure the bundled workloads on the cluster that surrounds the program.

Started by ``python -m hpcdask.workloads.array`` and ``python -m hpcdask.workloads.svd``, usually
inside ``python -m hpcdask.run -m …``. One JSON line per measurement goes to stdout, everything
else to stderr.

What is timed is what a user waits for: from the call that computes a graph, already built, to the
result in the client, optimisation, scheduling and transfer included. Each repeat has a graph of
its own with other random numbers, so that nothing is remembered from the one before.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import os
import platform
import statistics
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import click
import dask
import distributed
import numpy as np
from dask.utils import parse_bytes

from hpcdask.workloads import (
    CUPY_INSTALL,
    Check,
    Device,
    Form,
    WorkloadError,
    count_tasks,
    to_host,
)
from hpcdask.workloads import array as array_workload
from hpcdask.workloads import svd as svd_workload

__all__ = [
    "Cluster",
    "InputError",
    "array_command",
    "inspect",
    "main",
    "run_array",
    "run_svd",
    "svd_command",
]

WORKER_TIMEOUT_S = 60.0
PROGRESS_INTERVAL_S = 0.5
# Room for scratch arrays and the results beside a persisted input.
USABLE_FRACTION = 0.8
SIZE_FORMS = "a number of bytes with a unit, such as 200GB, 64GiB or 2TB"


class InputError(click.ClickException):
    """The request cannot be measured; one line on stderr, exit code 2."""

    exit_code = 2

    def show(self, file: Any = None) -> None:
        """Print the message as one line on stderr."""
        say(f"error: {self.format_message()}")


class Cluster:
    """The workers of a cluster as a workload sees them.

    Parameters
    ----------
    client
        Connected to the cluster.
    device
        What the workers compute on.
    devices
        Name and number of workers on it, such as ``{"NVIDIA H200": 8}``.
    n_slots
        Worker threads in all.
    memory_nbytes
        Memory of all devices, or of all workers without a GPU, in bytes.
    cupy
        Version of CuPy on the workers.
    """

    def __init__(
        self,
        client: distributed.Client,
        device: Device,
        devices: dict[str, int],
        n_slots: int,
        memory_nbytes: int,
        cupy: str | None,
    ) -> None:
        self.client = client
        self.device = device
        self.devices = devices
        self.n_slots = n_slots
        self.memory_nbytes = memory_nbytes
        self.cupy = cupy

    def __str__(self) -> str:
        names = ", ".join(f"{count} x {name}" for name, count in self.devices.items())
        return f"{names} ({f'CuPy {self.cupy}' if self.cupy else f'NumPy {np.__version__}'})"


def say(text: str) -> None:
    """Print one line for the user on stderr."""
    click.echo(f"hpcdask: {text}", err=True)


# --- the cluster --------------------------------------------------------------------------------


def probe() -> dict[str, Any]:
    """Tell what this worker can compute on; runs on workers."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    gpu = bool(visible) if visible is not None else _nvml_count() > 0
    found: dict[str, Any] = {"host": platform.node(), "gpu": gpu, "cuda": False, "why": ""}
    try:
        import cupy

        properties = cupy.cuda.runtime.getDeviceProperties(cupy.cuda.Device().id)
        found.update(
            cuda=True,
            cupy=cupy.__version__,
            name=properties["name"].decode(),
            memory=cupy.cuda.Device().mem_info[1],
        )
    except ImportError as exc:
        found["why"] = f"CuPy is missing ({exc}): {CUPY_INSTALL}"
    except Exception as exc:  # the CUDA errors are CuPy's own classes
        found["why"] = f"{type(exc).__name__}: {exc}"
    return found


def _nvml_count() -> int:
    import ctypes

    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return 0
    count = ctypes.c_uint(0)
    if nvml.nvmlInit_v2() or nvml.nvmlDeviceGetCount_v2(ctypes.byref(count)):
        return 0
    nvml.nvmlShutdown()
    return count.value


def choose_device(found: dict[str, dict[str, Any]], wanted: str) -> Device:
    """Decide what to compute on from what the workers said.

    Parameters
    ----------
    found
        Worker address to the answer of :func:`probe`.
    wanted
        ``"auto"``, ``"cuda"`` or ``"cpu"``.

    Raises
    ------
    InputError
        A worker that should compute on its GPU cannot, or only some workers have one.
    """
    if wanted == "cpu":
        return "cpu"
    lacking = {address: f for address, f in found.items() if not f["cuda"]}
    if not lacking:
        return "cuda"
    for address, answer in lacking.items():
        if answer["gpu"]:
            where = f"worker {address} on {answer['host']}"
            raise InputError(f"{where} sees a GPU but cannot use it: {answer['why']}")
    if wanted == "auto" and len(lacking) == len(found):
        return "cpu"
    names = ", ".join(f"{address} on {f['host']} ({f['why']})" for address, f in lacking.items())
    raise InputError(
        f"{len(lacking)} of {len(found)} workers have no CUDA device: {names}; "
        "start all of them on GPUs, or pass --device cpu"
    )


def inspect(client: distributed.Client, wanted: str = "auto") -> Cluster:
    """Ask all workers of a cluster what they compute on.

    Raises
    ------
    InputError
        No worker within a minute, or see :func:`choose_device`.
    """
    try:
        client.wait_for_workers(1, timeout=WORKER_TIMEOUT_S)
    except TimeoutError as exc:
        raise InputError(f"the cluster has no worker after {WORKER_TIMEOUT_S:g} s") from exc
    found = client.run(probe)
    device = choose_device(found, wanted)
    info = client.scheduler_info(n_workers=-1)["workers"]
    n_slots = sum(worker["nthreads"] for worker in info.values())
    if device == "cuda":
        names = Counter(answer["name"] for answer in found.values())
        memory = sum(answer["memory"] for answer in found.values())
        version = ", ".join(sorted({answer["cupy"] for answer in found.values()}))
        return Cluster(client, device, dict(names), n_slots, memory, version)
    limits = [worker["memory_limit"] or 0 for worker in info.values()]
    # A worker without a limit may use all it finds: nothing to compare with.
    memory = sum(limits) if all(limits) else sys.maxsize
    return Cluster(client, device, {"cpu": len(found)}, n_slots, memory, None)


def connect(workload: str, scheduler_file: str | None) -> distributed.Client:
    """Connect to the cluster of a scheduler file, or to the one that surrounds this program."""
    if scheduler_file is not None:
        from hpcdask import connect as connect_file

        client: distributed.Client = connect_file(scheduler_file)
        return client
    if dask.config.get("scheduler-address", None) is None:
        raise InputError(
            f"no cluster: start this with `python -m hpcdask.run -m hpcdask.workloads.{workload}`, "
            "or pass --scheduler-file"
        )
    return distributed.Client()


# --- measuring ----------------------------------------------------------------------------------


def measure(
    cluster: Cluster, build: Callable[[int], Sequence[Any]], repeats: int, n_warmup: int = 0
) -> tuple[list[float], Any, int]:
    """Time ``repeats`` computations.

    Parameters
    ----------
    cluster
        Where.
    build
        Repeat number to the collections to compute together.
    repeats
        Timed runs, after ``n_warmup`` runs that are not reported.

    Returns
    -------
    seconds, results, n_tasks
        Of each timed run; the results of the last, and its number of Dask tasks.
    """
    seconds: list[float] = []
    results: Any = None
    n_tasks = 0
    for index in range(n_warmup + repeats):
        results = None
        collections = build(index)
        n_tasks = count_tasks(*collections)
        title = "warm-up" if index < n_warmup else f"run {index - n_warmup + 1} of {repeats}"
        with progress(cluster.client, title, n_tasks):
            start = time.perf_counter()
            results = cluster.client.gather(cluster.client.compute(list(collections)))
            elapsed = time.perf_counter() - start
        if index >= n_warmup:
            seconds.append(elapsed)
    return seconds, results, n_tasks


@contextlib.contextmanager
def progress(client: distributed.Client, title: str, n_tasks: int) -> Iterator[None]:
    """Show a bar of finished Dask tasks while the block runs, if stderr is a terminal.

    A thread asks the scheduler for its counters twice a second; the computation does not know of
    it.
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


def run_array(
    cluster: Cluster,
    nbytes: int,
    *,
    form: Form = "tuned",
    repeats: int = 3,
    chunk_nbytes: int | None = None,
) -> dict[str, Any]:
    """Measure the array workload.

    Parameters
    ----------
    cluster
        From :func:`inspect`.
    nbytes
        Size of the float64 array in bytes; it is streamed, so it need not fit in memory.
    form
        ``"tuned"`` or ``"stock"``.
    repeats
        Timed runs, after one on a few chunks.
    chunk_nbytes
        Bound of a chunk of the tuned form in bytes.

    Returns
    -------
    dict
        The record that the command prints as JSON.

    Raises
    ------
    WorkloadError
        A size that is too small, or a client without GPU for the stock form on CuPy.
    """
    device, n = cluster.device, array_workload.side(nbytes)
    if form == "tuned":
        rows = array_workload.chunk_rows(
            n, device=device, n_slots=cluster.n_slots, max_nbytes=chunk_nbytes
        )
        n_chunks, chunk = len(rows), (max(rows), n)

        def build(index: int) -> Sequence[Any]:
            return [array_workload.tuned(rows, n, device=device, seed=index)]

        def build_warmup(index: int) -> Sequence[Any]:
            few = rows[: 2 * cluster.n_slots]
            return [array_workload.tuned(few, n, device=device, seed=repeats + index)]
    else:
        edge = min(n, array_workload.STOCK_CHUNK)
        n_chunks, chunk = (-(-n // edge)) ** 2, (edge, edge)
        few_side = min(n, edge * (1 + int((2 * cluster.n_slots) ** 0.5)))

        def build(index: int) -> Sequence[Any]:
            return [array_workload.stock(n, device=device)]

        def build_warmup(index: int) -> Sequence[Any]:
            return [array_workload.stock(few_side, device=device)]

    build_warmup(0)  # input errors come before the first line of output
    announce("array", (n, n), 8, "float64", cluster, form, n_chunks, chunk)
    measure(cluster, build_warmup, 1)
    seconds, (result,), n_tasks = measure(cluster, build, repeats)
    if form == "tuned":
        total, count = float(result[0]), int(result[1])
    else:
        total, count = float(result), (n // 2) ** 2
    return record(
        cluster,
        "array",
        form,
        (n, n),
        "float64",
        8 * n * n,
        (n_chunks, chunk),
        seconds,
        n_tasks,
        {"sum": total, "count": count},
        array_workload.check(total, count, (n, n)),
    )


def run_svd(
    cluster: Cluster,
    nbytes: int,
    k: int = 10,
    *,
    form: Form = "tuned",
    repeats: int = 3,
    chunk_nbytes: int | None = None,
) -> dict[str, Any]:
    """Measure singular values and right vectors of a planted uint8 matrix held by the workers.

    Parameters
    ----------
    cluster
        From :func:`inspect`.
    nbytes
        Size of the matrix in bytes; it has to fit the memory of the devices.
    k
        Number of singular triplets, which is also the rank of the matrix.
    form, repeats, chunk_nbytes
        As for :func:`run_array`; the run before the timed ones is a whole one.

    Returns
    -------
    dict
        The record that the command prints as JSON.

    Raises
    ------
    InputError
        The matrix does not fit.
    WorkloadError
        A size that is too small, ``k`` out of range, or a client without GPU for the stock form
        on CuPy.
    """
    device, shape = cluster.device, svd_workload.shape_for(nbytes)
    nbytes = shape[0] * shape[1]
    usable = int(USABLE_FRACTION * cluster.memory_nbytes)
    if nbytes > usable:
        raise InputError(
            f"an input of {decimal_bytes(nbytes)} does not fit {cluster}: "
            f"--size {usable // 10**6}MB is the most"
        )
    if form == "tuned":
        rows = svd_workload.chunk_rows(
            shape, device=device, n_slots=cluster.n_slots, max_nbytes=chunk_nbytes
        )
        chunks: tuple[tuple[int, ...], tuple[int, ...]] = (rows, (shape[1],))
    else:
        chunks = dask.array.core.normalize_chunks(svd_workload.STOCK_CHUNKS, shape)
    n_chunks = len(chunks[0]) * len(chunks[1])
    x, expected = svd_workload.planted(
        shape, k, chunks=chunks, device=device, cupy_meta=form == "stock" and device == "cuda"
    )

    def decompose(index: int) -> tuple[Any, Any, Any]:
        if form == "tuned":
            return svd_workload.svd_rows(x, k, seed=index, device=device)
        return svd_workload.stock(x, k, device=device)

    decompose(0)
    announce("svd", shape, 1, "uint8", cluster, form, n_chunks, (max(chunks[0]), max(chunks[1])))
    x = x.persist()
    with progress(cluster.client, "input", n_chunks):
        distributed.wait(x)
    seconds, results, n_tasks = measure(
        cluster, lambda index: decompose(index)[1:], repeats, n_warmup=1
    )
    s, v = (to_host(result) for result in results)
    checks = _check_svd(cluster, x, decompose(repeats + 1), (s, v), expected)
    return record(
        cluster,
        "svd",
        form,
        shape,
        "uint8",
        nbytes,
        (n_chunks, (max(chunks[0]), max(chunks[1]))),
        seconds,
        n_tasks,
        {"k": k, "singular_values": s.tolist()},
        checks,
    )


def _check_svd(
    cluster: Cluster, x: Any, triplets: tuple[Any, Any, Any], timed: tuple[Any, Any], expected: Any
) -> list[Check]:
    # u is not part of what is timed, so it comes from a decomposition of its own, with its s and
    # v. 64 rows from the start, the middle and the end leave the workers, not the whole of u.
    u, s, v = triplets
    starts = sorted({0, x.shape[0] // 2, max(0, x.shape[0] - 64)})
    parts = [part for a in starts for part in (x[a : a + 64], u[a : a + 64])]
    fetched = cluster.client.gather(cluster.client.compute([s, v, u.T @ u, *parts]))
    s, v, gram, *blocks = (to_host(a) for a in fetched)
    rows, u_rows = np.concatenate(blocks[0::2]), np.concatenate(blocks[1::2])
    checks = svd_workload.check(s, v, gram, rows, u_rows, expected)
    timed_checks = svd_workload.check(*timed, gram, rows, u_rows, expected)
    return [timed_checks[0], checks[1], timed_checks[2], checks[3]]


# --- reporting ----------------------------------------------------------------------------------


def announce(
    name: str,
    shape: tuple[int, int],
    itemsize: int,
    dtype: str,
    cluster: Cluster,
    form: str,
    n_chunks: int,
    chunk: tuple[int, int],
) -> None:
    """Say in one line what is about to be measured, and on what."""
    size = decimal_bytes(shape[0] * shape[1] * itemsize)
    say(f"{name} {size} {dtype} on {cluster}, {form}, {n_chunks} chunks of {chunk[0]} x {chunk[1]}")


def decimal_bytes(nbytes: int) -> str:
    """Write a size in powers of a thousand: ``2.0 TB``."""
    for power, unit in ((12, "TB"), (9, "GB"), (6, "MB"), (3, "kB")):
        if nbytes >= 10**power:
            return f"{nbytes / 10**power:.1f} {unit}"
    return f"{nbytes} B"


def record(
    cluster: Cluster,
    workload: str,
    form: str,
    shape: tuple[int, int],
    dtype: str,
    nbytes: int,
    chunks: tuple[int, tuple[int, int]],
    seconds: list[float],
    n_tasks: int,
    result: dict[str, Any],
    checks: list[Check],
) -> dict[str, Any]:
    """Put a measurement in the form that is written as JSON; sizes in bytes, times in seconds."""
    median = statistics.median(seconds)
    versions = {"python": platform.python_version(), "numpy": np.__version__, "cupy": cluster.cupy}
    for package in ("dask", "distributed", "hpcdask"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[package] = importlib.metadata.version(package)
    return {
        "workload": workload,
        "form": form,
        "shape": list(shape),
        "dtype": dtype,
        "chunks": {"count": chunks[0], "largest": list(chunks[1])},
        "bytes": nbytes,
        "seconds": seconds,
        "seconds_median": median,
        "seconds_min": min(seconds),
        "seconds_max": max(seconds),
        "GB/s": nbytes / median / 1e9,
        "dask_tasks": n_tasks,
        "devices": cluster.devices,
        "workers": sum(cluster.devices.values()),
        "threads": cluster.n_slots,
        "result": result,
        "checks": [check.as_dict() for check in checks],
        "versions": versions,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def report(line: dict[str, Any], json_file: str | None) -> int:
    """Print a record, append it to a file, and return the exit code: 1 if a check failed."""
    text = json.dumps(line)
    click.echo(text)
    if json_file is not None:
        with Path(json_file).open("a", encoding="utf-8") as file:
            file.write(text + "\n")
    say(
        f"median {line['seconds_median']:.3f} s, min {line['seconds_min']:.3f} s, "
        f"max {line['seconds_max']:.3f} s of {len(line['seconds'])}; {line['GB/s']:.1f} GB/s, "
        f"{line['dask_tasks']} Dask tasks"
    )
    failed = [check for check in line["checks"] if not check["ok"]]
    for check in failed:
        say(
            f"check failed: {check['name']} is {check['value']}, "
            f"expected {check['expected']} within {check['tolerance']}"
        )
    return 1 if failed else 0


# --- command line -------------------------------------------------------------------------------


class Size(click.ParamType):  # type: ignore[type-arg]
    """A number of bytes with a unit."""

    name = "size"

    def convert(self, value: Any, param: Any, ctx: Any) -> int:
        """Parse ``200GB`` and the like."""
        try:
            nbytes = int(parse_bytes(value))
        except (ValueError, OverflowError):
            nbytes = 0
        if nbytes < 1:
            raise InputError(f"--size {value!r} is not a size: {SIZE_FORMS}")
        return nbytes


def common_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options that both commands have."""
    for option in (
        click.option(
            "--json",
            "json_file",
            type=click.Path(dir_okay=False),
            metavar="FILE",
            help="Append the JSON line to this file.",
        ),
        click.option("--scheduler-file", metavar="FILE", help="Use the cluster of this file."),
        click.option("--chunk-size", type=Size(), help="Largest chunk of the tuned form."),
        click.option("--repeats", type=click.IntRange(1), default=3, show_default=True),
        click.option(
            "--device",
            type=click.Choice(["auto", "cuda", "cpu"]),
            default="auto",
            show_default=True,
        ),
        click.option(
            "--form", type=click.Choice(["tuned", "stock"]), default="tuned", show_default=True
        ),
    ):
        command = option(command)
    return command


def _execute(
    workload: str,
    scheduler_file: str | None,
    device: str,
    json_file: str | None,
    run: Callable[[Cluster], dict[str, Any]],
) -> None:
    try:
        with connect(workload, scheduler_file) as client:
            code = report(run(inspect(client, device)), json_file)
    except WorkloadError as exc:
        raise InputError(str(exc)) from exc
    except OSError as exc:
        raise InputError(f"{type(exc).__name__}: {exc}") from exc
    if code:
        raise SystemExit(code)


@click.command("array")
@click.option("--size", type=Size(), default="2TB", show_default=True, help="Bytes of float64.")
@common_options
def array_command(
    size: int,
    form: Form,
    device: str,
    repeats: int,
    chunk_size: int | None,
    scheduler_file: str | None,
    json_file: str | None,
) -> None:
    """Time (normal(10, 1) + 1)[::2, ::2].sum() of a square float64 array."""
    _execute(
        "array",
        scheduler_file,
        device,
        json_file,
        lambda cluster: run_array(
            cluster, size, form=form, repeats=repeats, chunk_nbytes=chunk_size
        ),
    )


@click.command("svd")
@click.option("--size", type=Size(), default="200GB", show_default=True, help="Bytes of uint8.")
@click.option("--k", type=int, default=10, show_default=True, help="Singular values wanted.")
@common_options
def svd_command(
    size: int,
    k: int,
    form: Form,
    device: str,
    repeats: int,
    chunk_size: int | None,
    scheduler_file: str | None,
    json_file: str | None,
) -> None:
    """Time the truncated SVD of a tall uint8 matrix held by the workers."""
    _execute(
        "svd",
        scheduler_file,
        device,
        json_file,
        lambda cluster: run_svd(
            cluster, size, k, form=form, repeats=repeats, chunk_nbytes=chunk_size
        ),
    )


def main(workload: str, argv: Sequence[str] | None = None) -> int:
    """Run the command of a workload.

    Parameters
    ----------
    workload
        ``"array"`` or ``"svd"``.
    argv
        Arguments; those of the process by default.

    Returns
    -------
    int
        Exit code: 0, 1 for a wrong result, 2 for bad input.
    """
    command = {"array": array_command, "svd": svd_command}[workload]
    try:
        command.main(
            list(argv) if argv is not None else None,
            prog_name=f"python -m hpcdask.workloads.{workload}",
            standalone_mode=False,
        )
    except click.ClickException as exc:
        say(f"error: {exc.format_message()}")
        return 2
    except SystemExit as exc:
        return exc.code if isinstance(exc.code, int) else 1
    return 0
