"""Rechunks a stand-in for device arrays by P2P; a worker dies in the phase that is named."""

import os
import signal
import sys
import time

import dask
import dask.array as da
import numpy as np
from common import show, stamp
from distributed import Client, get_worker

from device_stand_in import DeviceStandIn

PHASE, FLAG = sys.argv[1], os.path.abspath("killed")
SIDE, HEIGHT = 400, 20


def end_once(phase: str) -> None:
    """End this worker, the first time that this phase is reached."""
    if phase == PHASE:
        try:
            open(FLAG, "x").close()
        except FileExistsError:
            return
        os.kill(os.getpid(), signal.SIGKILL)


def takes_part() -> bool:
    """Whether the shuffle has begun here: before, the death of this worker does not touch it."""
    return bool(get_worker().plugins["shuffle"].shuffle_runs._active_runs)


def before(block, block_id=None):
    if block_id is not None and block_id[0] >= 8 and takes_part():
        end_once("transfer")
    time.sleep(0.05)
    return DeviceStandIn(block)


def after(block, block_id=None):
    if block_id == (0, 12):
        end_once("unpack")
    return block.get()


client = Client()
client.wait_for_workers(2, timeout=180)
numbers = np.arange(SIDE * SIDE).reshape(SIDE, SIDE)
empty = np.empty((0, 0), int)
x = da.from_array(numbers, (HEIGHT, SIDE)).map_blocks(before, dtype=int, meta=empty)
with dask.config.set({"array.chunk-size": "1 B"}):  # else dask joins chunks before
    y = x.rechunk((SIDE, HEIGHT), method="p2p")
found = y.map_blocks(after, dtype=int, meta=empty).compute()
deadline = time.monotonic() + 30
while any(client.run(lambda dask_worker: len(dask_worker.data)).values()):
    assert time.monotonic() < deadline, "shards are left in a worker's store"
    time.sleep(0.1)
show("result", {"right": bool((found == numbers).all()), "killed": os.path.exists(FLAG)})
stamp()
