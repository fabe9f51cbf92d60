"""Data-parallel training with torch: one rank on each worker, each on its own GPU or on cores.

mpirun -n 4 python -m hpcdask.run examples/torch_ddp.py
"""

import sys

from distributed import Client

import hpcdask

STEPS, ROWS, COLUMNS = 200, 512, 8


def draw(seed: int):
    """Make rows, as Dask tasks do that come before: where there is a GPU, with CuPy on it."""
    import torch

    if torch.cuda.is_available():
        import cupy as xp
    else:
        import numpy as xp
    return xp.random.default_rng(seed).standard_normal((ROWS, COLUMNS), dtype="float32")


def train(context, rows, steps: int) -> list[float]:
    """Fit a linear model to this rank's rows, in step with the other ranks; return its weights."""
    import torch
    import torch.distributed
    from torch.nn.parallel import DistributedDataParallel

    device = torch.device(context.device)  # not the local rank: a worker sees its own GPU only
    on_gpu = device.type == "cuda"
    if on_gpu:
        torch.cuda.set_device(device)
    torch.distributed.init_process_group(
        "nccl" if on_gpu else "gloo",
        init_method=f"tcp://{context.master_addr}:{context.master_port}",
        rank=context.rank,
        world_size=context.world_size,
    )
    try:
        x = torch.as_tensor(rows, device=device)  # the memory of CuPy's array, without a copy
        y = x @ torch.arange(1.0, COLUMNS + 1, device=device)[:, None]
        model = torch.nn.Linear(COLUMNS, 1, bias=False).to(device)
        ddp = DistributedDataParallel(model, device_ids=[device] if on_gpu else None)
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
        for _ in range(steps):
            optimizer.zero_grad()
            torch.nn.functional.mse_loss(ddp(x), y).backward()
            optimizer.step()
        return model.weight.detach().cpu().flatten().tolist()
    except BaseException:
        torch.distributed.group.WORLD.abort()  # to destroy it may wait for the other ranks
        raise
    finally:
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    client = Client()
    rows = client.map(draw, range(len(client.nthreads())))
    weights = hpcdask.gang(train, rows, client=client, shared={"steps": STEPS}, timeout="10min")
    print(f"weights on {len(weights)} workers: {[round(weight, 2) for weight in weights[0]]}")
    if any(abs(found - n) > 0.01 for one in weights for n, found in enumerate(one, start=1)):
        sys.exit("wrong: the weights are not 1 to 8")
