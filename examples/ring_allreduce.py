"""A collective step on all workers at once: a ring all-reduce, as NCCL and Gloo do it.

mpirun -n 4 python -m hpcdask.run examples/ring_allreduce.py
"""

import json
import socket
import sys
import threading
import time

import numpy as np
from distributed import Client

import hpcdask

LENGTH, DEADLINE_S = 100_000, 60


def reach(address: str, port: int) -> socket.socket:
    """Connect to a rank that may not listen yet."""
    deadline = time.monotonic() + DEADLINE_S
    while True:
        try:
            return socket.create_connection((address, port))
        except ConnectionRefusedError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)


def neighbours(context) -> tuple[socket.socket, socket.socket]:
    """Sockets from the rank before and to the one after; rank 0 tells all where each listens."""
    if context.rank == 0:
        own = socket.create_server((context.master_addr, 0))
        table = {0: own.getsockname()}
        with socket.create_server((context.master_addr, context.master_port)) as meeting:
            members = [meeting.accept()[0].makefile("rw") for _ in range(context.world_size - 1)]
        table |= dict(json.loads(member.readline()) for member in members)
        for member in members:
            print(json.dumps(sorted(table.items())), file=member, flush=True)
    else:
        with reach(context.master_addr, context.master_port) as connection:
            own = socket.create_server((connection.getsockname()[0], 0))
            with connection.makefile("rw") as master:
                print(json.dumps([context.rank, own.getsockname()]), file=master, flush=True)
                table = dict(json.loads(master.readline()))
    with own:
        after = reach(*table[(context.rank + 1) % context.world_size])
        return own.accept()[0], after


def all_reduce(context, array: np.ndarray) -> np.ndarray:
    """Sum the arrays of all ranks: each part goes around once to be added, and once complete."""
    size, rank = context.world_size, context.rank
    parts = np.array_split(array.copy(), size)
    before, after = neighbours(context)
    with before, after, before.makefile("rb") as incoming:
        for step in range(2 * (size - 1)):
            sending = threading.Thread(target=after.sendall, args=(parts[(rank - step) % size],))
            sending.start()
            part = parts[(rank - step - 1) % size]
            received = np.frombuffer(incoming.read(part.nbytes), part.dtype)
            part[:] = part + received if step < size - 1 else received
            sending.join()
    return np.concatenate(parts)


if __name__ == "__main__":
    client = Client()
    size = len(client.nthreads())
    arrays = [np.arange(LENGTH) * (rank + 1) for rank in range(size)]
    totals = hpcdask.gang(all_reduce, arrays, client=client, timeout="5min")
    right = all(np.array_equal(total, sum(arrays)) for total in totals)
    print(f"all-reduce of {LENGTH} numbers, on {size} workers: {int(totals[0].sum())}")
    if not right:
        sys.exit("wrong: the ranks' sums differ from that of the program")
