"""Make one measurement on one kind of cluster: a line of JSON a run. `peers.py` starts it."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Iterable
from typing import Any

#: As peers.py names them, and how the bench does; what is not here has a measurement of its own.
WORKLOADS = ["array", "svd", "packed"]
CASES = ["startup", "tasks", "jobs", "transfer", "transpose", "allreduce", *WORKLOADS]
KINDS = ["runner", "dask-mpi", "local-cuda", "local", "jobs", "dask-jobqueue", "processes"]


def noop(_: int) -> None:
    """Do nothing: an empty Dask task."""


def has_context() -> bool:
    """Return whether the worker holds a CUDA context."""
    from distributed.diagnostics.nvml import has_cuda_context

    return bool(has_cuda_context().has_context)


def make_jobs(kind: str, jobs: int) -> tuple[Any, float]:
    """Ask SLURM for jobs of one worker each; the client once all are there, and how long it took.

    The clock starts when the cluster object is there. `JOB_KEYWORDS` in the environment are
    keywords for both, as JSON.
    """
    import tempfile

    device = os.environ.get("JOB_DEVICE", "cuda")
    keywords = json.loads(os.environ.get("JOB_KEYWORDS", "{}"))
    folder = tempfile.mkdtemp(dir=os.environ.get("JOB_FOLDER"))
    cluster: Any
    if kind == "jobs":
        from hpcdask import SLURMCUDACluster

        cluster = SLURMCUDACluster(
            gpus_per_job=1, device=device, shared_temp_directory=folder, **keywords
        )
    else:
        from dask_jobqueue import SLURMCluster

        command = {"worker_command": "dask_cuda.cli"} if device == "cuda" else {}
        cluster = SLURMCluster(
            job_extra_directives=["--gres=gpu:1"],
            processes=1,
            log_directory=folder,
            **command,
            **keywords,
        )
    start = time.perf_counter()
    cluster.scale(jobs)
    client = cluster.get_client()
    client.wait_for_workers(jobs, timeout=120)
    return client, time.perf_counter() - start


def make_cluster(kind: str, workers: int) -> Any:
    """Make a peer's cluster on this machine. dask-mpi has no object: `Client()` finds it.

    `PEER_KEYWORDS` in the environment are keywords of LocalCUDACluster, as JSON.
    """
    if kind == "dask-mpi":
        from dask_mpi import initialize

        initialize(nthreads=1)
        return None
    if kind == "local-cuda":
        from dask_cuda import LocalCUDACluster
        from dask_cuda.utils import get_n_gpus

        cluster = LocalCUDACluster if workers <= get_n_gpus() else sharing_gpus()
        keywords = json.loads(os.environ.get("PEER_KEYWORDS", "{}"))
        return cluster(n_workers=workers, **keywords)
    from distributed import LocalCluster

    return LocalCluster(n_workers=workers, threads_per_worker=1)


def tell(first: Iterable[float], later: Iterable[float], *, correct: bool, **more: Any) -> None:
    """Print a line for each run, with its seconds."""
    for phase, several in (("first", first), ("later", later)):
        for seconds in several:
            line = {"phase": phase, "seconds": seconds, "correct": correct, **more}
            print(json.dumps(line), flush=True)


def make_client(kind: str, workers: int) -> Any:
    """Return a client of the cluster that this program has around it, or makes."""
    from distributed import Client

    return Client(None if kind == "runner" else make_cluster(kind, workers))


def sharing_gpus() -> type:
    """Return LocalCUDACluster, but with several workers on each GPU."""
    from dask_cuda import LocalCUDACluster

    class Sharing(LocalCUDACluster):  # type: ignore[misc]
        """Cluster that hands the GPUs round again when each has a worker."""

        def new_worker_spec(self) -> dict[int, Any]:
            workers, gpus = self.worker_spec, self.cuda_visible_devices
            next_gpu = gpus[len(workers) % len(gpus)]
            self.worker_spec = dict.fromkeys(gpu for gpu in gpus if gpu != next_gpu)
            try:
                (spec,) = super().new_worker_spec().values()
            finally:
                self.worker_spec = workers
            return {len(workers): spec}

    return Sharing


def fill(number: float, count: int) -> Any:
    """Make an array on the device."""
    import cupy

    return cupy.full(count, number)


def ends(block: Any) -> float:
    """Return a number from both ends of what arrived."""
    return float(block[0]) + float(block[-1])


def block(block_id: Any = None, side: int = 0, number: int = 0) -> Any:
    """Make a chunk of a matrix on the device, with values that tell where it belongs."""
    import cupy

    return cupy.full((side, side), 10.0 * block_id[0] + block_id[1] + 1000.0 * number)


def last_transfer(dask_worker: Any) -> float:
    """Return the seconds of the last transfer that this worker received, by its own log."""
    return float(dask_worker.transfer_incoming_log[-1]["duration"])


def measure_transfers(client: Any, repeats: int) -> None:
    """Time arrays of 2.1 GB from one worker to another, each made anew and kept."""
    from distributed import wait

    source, target = sorted(client.nthreads())[:2]
    count, kept, seconds = 2_100_000_000 // 8, [], []
    for number in range(repeats + 1):
        kept.append(client.submit(fill, float(number), count, workers=[source], pure=False))
        wait(kept[-1])
        got = client.submit(ends, kept[-1], workers=[target], pure=False).result()
        if got != 2.0 * number:
            raise SystemExit(f"{got} arrived instead of {2.0 * number}")
        seconds.append(client.run(last_transfer, workers=[target])[target])
    tell(seconds[:1], seconds[1:], correct=True, GB=count * 8 / 1e9)


def measure_transpose(client: Any, nbytes: int, repeats: int) -> None:
    """Time x + x.T of a float64 matrix in chunks of 0.5 GB, made anew each time.

    Of the same matrix once more, each worker would still have what it fetched before.
    """
    import dask.array as da
    import numpy as np
    from distributed import wait

    side = 8000
    count = round((nbytes / 8) ** 0.5 / side)
    chunks = ((side,) * count,) * 2
    numbers = 11.0 * np.arange(count)
    seconds, correct = [], True
    x = y = None
    for number in range(repeats + 1):
        x = y = None
        x = da.map_blocks(
            block, chunks=chunks, dtype=float, side=side, number=number, meta=np.empty((0, 0))
        ).persist()
        wait(x)
        start = time.perf_counter()
        y = (x + x.T).persist()
        wait(y)
        seconds.append(time.perf_counter() - start)
        corners = y[::side, ::side].map_blocks(lambda part: part.get(), meta=np.empty((0, 0)))
        expected = numbers[:, None] + numbers + 2000.0 * number
        correct = correct and bool((corners.compute() == expected).all())
    tell(seconds[:1], seconds[1:], correct=correct, GB=x.nbytes / 1e9)


def all_reduces(context: Any, nbytes: int, repeats: int) -> tuple[list[float], bool]:
    """Return a rank's seconds of an all-reduce of torch, and whether all of them were right."""
    import torch
    from torch import distributed

    on_gpu, calls = context.device != "cpu", 10
    if on_gpu:
        torch.cuda.set_device(context.device)
    distributed.init_process_group("nccl" if on_gpu else "gloo")
    size, seconds, right = distributed.get_world_size(), [], True
    numbers = torch.empty(nbytes // 4, device=context.device)
    for number in range(repeats + 1):
        numbers.fill_(1.0)
        distributed.barrier()
        if on_gpu:
            torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(calls):
            distributed.all_reduce(numbers)
        if on_gpu:
            torch.cuda.synchronize()
        if number:  # the first connects the ranks
            seconds.append((time.perf_counter() - start) / calls)
        right = right and bool((numbers == float(size) ** calls).all())
    distributed.destroy_process_group()
    return seconds, right


def measure_all_reduces(kind: str, workers: int, nbytes: int, repeats: int) -> None:
    """Time all-reduces between all, in a gang or in plain processes: the slowest rank's."""
    if kind == "processes":
        found = in_processes(workers, nbytes, repeats)
    else:
        import hpcdask

        client = make_client(kind, workers)
        client.wait_for_workers(workers, timeout=120)
        shared = {"nbytes": nbytes, "repeats": repeats}
        found = hpcdask.gang(all_reduces, client=client, shared=shared, timeout="2min")
        client.close()
    seconds = [max(several) for several in zip(*(one for one, _ in found), strict=True)]
    tell([], seconds, correct=all(right for _, right in found))


def in_processes(workers: int, nbytes: int, repeats: int) -> list[Any]:
    """Call the same function in as many plain processes, each on a GPU of its own."""
    import socket
    import subprocess

    from hpcdask.gpu.driver import has_nvidia_driver

    gpus = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(workers)))).split(",")
    device = "cuda:0" if has_nvidia_driver() else "cpu"
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
    code = (
        "import json, types, measure; "
        f"context = types.SimpleNamespace(device={device!r}); "
        f"print(json.dumps(measure.all_reduces(context, {nbytes}, {repeats})))"
    )
    started = [
        subprocess.Popen(
            [sys.executable, "-c", code],
            cwd=os.path.dirname(os.path.abspath(__file__)),
            env={
                **os.environ,
                **place,
                "RANK": str(rank),
                "WORLD_SIZE": str(workers),
                "CUDA_VISIBLE_DEVICES": gpus[rank] if device != "cpu" else "",
            },
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(workers)
    ]
    return [json.loads(one.communicate(timeout=120)[0].splitlines()[-1]) for one in started]


def measure_workload(client: Any, options: argparse.Namespace) -> Any:
    """Measure a workload as `hpcdask bench` does."""
    from dask.utils import parse_bytes

    from hpcdask.bench.arrays import run_array, run_svd
    from hpcdask.bench.cluster import inspect

    cluster, nbytes = inspect(client, "auto"), parse_bytes(options.size)
    how = {"form": options.form, "repeats": options.repeats}
    if options.case == "array":
        return run_array(cluster, nbytes, **how)
    packed = options.case == "packed" and options.form == "tuned"  # stock has no such thing
    return run_svd(cluster, nbytes, packed=packed, **how)


def main() -> None:
    """Parse, measure, print."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--cluster", choices=KINDS)
    parser.add_argument("--case", choices=CASES)
    parser.add_argument("--workers", type=int)
    parser.add_argument("--size", default="2TB")
    parser.add_argument("--form", default="tuned")
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    if options.case == "jobs":
        client, seconds = make_jobs(options.cluster, options.workers)
        tell([seconds], [], correct=True)
        client.close()
        client.cluster.close()
        return
    if options.case == "allreduce":
        from dask.utils import parse_bytes

        how = options.workers, parse_bytes(options.size), options.repeats
        measure_all_reduces(options.cluster, *how)
        return
    client = make_client(options.cluster, options.workers)
    client.wait_for_workers(options.workers, timeout=120)
    if options.case == "startup":
        ready_s = time.time() - float(os.environ["LAUNCHED"])
        needs = os.environ.get("NEEDS_CONTEXT")
        tell([ready_s], [], correct=not needs or all(client.run(has_context).values()))
    elif options.case == "tasks":
        from distributed import wait

        wait(client.map(noop, range(1000), pure=False))
        seconds = []
        for _ in range(options.repeats):
            start = time.perf_counter()
            wait(client.map(noop, range(10_000), pure=False))
            seconds.append(time.perf_counter() - start)
        tell([], seconds, correct=True)
    elif options.case in ("transfer", "transpose"):
        from hpcdask.bench.cluster import wait_until_warm

        wait_until_warm(client)
        if options.case == "transfer":
            measure_transfers(client, options.repeats)
        else:
            from dask.utils import parse_bytes

            measure_transpose(client, parse_bytes(options.size), options.repeats)
    else:
        found = measure_workload(client, options)
        tell([], found.seconds, correct=not found.failed)
    client.close()


if __name__ == "__main__":
    main()
    sys.stdout.flush()
