"""All-reduces of torch between all workers' GPUs, by `hpcdask.gang`, or between plain processes.

python -m hpcdask.run benchmarks/all_reduce.py gang WORKERS NBYTES REPEATS
python benchmarks/all_reduce.py processes WORKERS NBYTES REPEATS
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

CALLS = 10


def all_reduces(context: Any, nbytes: int, repeats: int) -> tuple[list[float], bool]:
    """Return a rank's seconds of an all-reduce, and whether all of them were right."""
    import torch
    from torch import distributed

    on_gpu = context.device != "cpu"
    if on_gpu:
        torch.cuda.set_device(context.device)
    distributed.init_process_group("nccl" if on_gpu else "gloo")
    size, seconds, right = distributed.get_world_size(), [], True
    numbers = torch.empty(nbytes // 4, device=context.device)
    for _ in range(repeats + 1):
        numbers.fill_(1.0)
        distributed.barrier()
        if on_gpu:
            torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(CALLS):
            distributed.all_reduce(numbers)
        if on_gpu:
            torch.cuda.synchronize()
        seconds.append((time.perf_counter() - start) / CALLS)
        right = right and bool((numbers == float(size) ** CALLS).all())
    distributed.destroy_process_group()
    return seconds[1:], right  # the first connects the ranks


def in_gang(workers: int, nbytes: int, repeats: int) -> list[Any]:
    """Call the function on all workers of the cluster around this program."""
    from distributed import Client

    import hpcdask

    with Client() as client:
        client.wait_for_workers(workers, timeout=120)
        shared = {"nbytes": nbytes, "repeats": repeats}
        return list(hpcdask.gang(all_reduces, client=client, shared=shared, timeout="2min"))


def in_processes(workers: int, nbytes: int, repeats: int) -> list[Any]:
    """Call the function in as many plain processes, each on a GPU of its own."""
    from hpcdask.gpu.driver import has_nvidia_driver

    gpus = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(workers)))).split(",")
    device = "cuda:0" if has_nvidia_driver() else "cpu"
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    code = (
        "import json, types, all_reduce; "
        f"context = types.SimpleNamespace(device={device!r}); "
        f"print(json.dumps(all_reduce.all_reduces(context, {nbytes}, {repeats})))"
    )
    started = []
    for rank in range(workers):
        place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": str(workers)}
        place |= {"RANK": str(rank), "CUDA_VISIBLE_DEVICES": gpus[rank] if device != "cpu" else ""}
        process = subprocess.Popen(
            [sys.executable, "-c", code],
            cwd=Path(__file__).resolve().parent,
            env=os.environ | place,
            stdout=subprocess.PIPE,
            text=True,
        )
        started.append(process)
    return [json.loads(one.communicate(timeout=120)[0].splitlines()[-1]) for one in started]


if __name__ == "__main__":
    call = {"gang": in_gang, "processes": in_processes}[sys.argv[1]]
    found = call(*map(int, sys.argv[2:]))
    correct = all(right for _, right in found)
    for every in zip(*(seconds for seconds, _ in found), strict=True):
        line = {"phase": "later", "seconds": max(every), "correct": correct}  # the slowest rank's
        print(json.dumps(line), flush=True)
