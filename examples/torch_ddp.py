"""Data-parallel training with torch: one rank on each worker, each on its own GPU or on cores.

mpirun -n 4 python -m hpcdask.run examples/torch_ddp.py
"""

import sys

from distributed import Client

import hpcdask

STEPS, ROWS, COLUMNS = 200, 512, 8


def train(context, seed: int, steps: int) -> list[float]:
    """Fit a linear model to this rank's rows, in step with the other ranks; return its weights."""
    import torch
    import torch.distributed
    from torch.nn.parallel import DistributedDataParallel

    device = torch.device(context.device)  # not the local rank: a worker sees its own GPU only
    on_gpu = device.type == "cuda"
    if on_gpu:
        torch.cuda.set_device(device)
    # RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT are in the environment
    torch.distributed.init_process_group("nccl" if on_gpu else "gloo")
    try:
        generator = torch.Generator().manual_seed(seed)
        x = torch.randn(ROWS, COLUMNS, generator=generator).to(device)
        y = x @ torch.arange(1.0, COLUMNS + 1, device=device)[:, None]
        model = torch.nn.Linear(COLUMNS, 1, bias=False).to(device)
        ddp = DistributedDataParallel(model, device_ids=[device] if on_gpu else None)
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
        for _ in range(steps):
            optimizer.zero_grad()
            torch.nn.functional.mse_loss(ddp(x), y).backward()
            optimizer.step()
        return model.weight.detach().cpu().flatten().tolist()
    finally:
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    client = Client()
    seeds = range(len(client.nthreads()))
    weights = hpcdask.gang(train, seeds, client=client, shared={"steps": STEPS}, timeout="10min")
    print(f"weights on {len(weights)} workers: {[round(weight, 2) for weight in weights[0]]}")
    if any(abs(found - n) > 0.01 for one in weights for n, found in enumerate(one, start=1)):
        sys.exit("wrong: the weights are not 1 to 8")
