"""Exchanges data between workers and checks it, until the file `stop` says that it is enough.

Its arguments: how many workers there are to be at the end, and `numpy` or `cupy`.
"""

import importlib
import os
import sys
import time
from pathlib import Path

import dask.array as da
import numpy as np
from distributed import Client, wait

SIDE, CHUNK = {"numpy": (1000, 125), "cupy": (16_000, 2000)}[sys.argv[2]]


def block(number: int, kind: str, location: list[tuple[int, int]]):
    """A block of x, whose values tell where it is and in which exchange."""
    xp = importlib.import_module(kind)
    rows, columns = (xp.arange(*part, dtype="f8") for part in location)
    return 1000.0 * number + rows[:, None] * SIDE + columns


def make(number: int, kind: str, block_info: dict | None = None):
    return block(number, kind, block_info[None]["array-location"])


def check(part, number: int, kind: str, block_info: dict | None = None) -> np.ndarray:
    """Whether a block of x + x.T is what it should be."""
    location = block_info[0]["array-location"]
    known = block(number, kind, location) + block(number, kind, location[::-1]).T
    return np.array([[bool((part == known).all())]])


def exchange(client: Client, number: int, kind: str) -> bool:
    chunks = da.core.normalize_chunks(CHUNK, (SIDE, SIDE))
    meta = np.empty((0, 0))
    x = da.map_blocks(make, number, kind, chunks=chunks, dtype="f8", meta=meta).persist()
    wait(x)
    found = (x + x.T).map_blocks(check, number, kind, chunks=(1, 1), dtype=bool, meta=meta)
    return bool(found.compute().all())


def fill() -> str:
    """Take device memory until none is left."""
    import cupy

    kept = []
    while True:
        kept.append(cupy.empty(2**28, dtype="u1"))


def main() -> None:
    kind = sys.argv[2]
    began = time.monotonic()
    client = Client()
    wanted = max(int(sys.argv[1]), len(client.nthreads()))
    print("pids", os.getpid(), client.run_on_scheduler(os.getpid), flush=True)
    print("ready", flush=True)
    number = more = 0
    while more < 2:
        number += 1
        more += Path("stop").exists()
        if Path("full device").exists():
            Path("full device").unlink()
            error = client.submit(fill, pure=False).exception()
            print("explained" if "out of device memory" in str(error) else f"bad {error}")
        if not exchange(client, number, kind):
            print("wrong", number, flush=True)
            sys.exit(77)
        print("exchange", number, flush=True)
        if time.monotonic() - began > 400:
            sys.exit(78)
    while (there := len(client.nthreads())) < wanted:
        if Path("fewer").exists() or time.monotonic() - began > 460:
            break
        time.sleep(0.1)
    print("workers", there, "of", wanted, flush=True)
    client.close()
    print("done", flush=True)


if __name__ == "__main__":
    main()
