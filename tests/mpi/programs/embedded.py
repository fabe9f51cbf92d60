"""A program that every rank starts: `embedded.py HOW END`."""

import os
import signal
import sys

how, end = sys.argv[1:3]
if "mpi" in how:
    from mpi4py import MPI  # noqa: F401 - initialises MPI in this process
from distributed import Client  # noqa: E402

import hpcdask  # noqa: E402


def work(client: Client) -> None:
    print(
        "workers", len(client.run(int)), "sum", client.submit(sum, [1, 2, 3]).result(), flush=True
    )
    print("hashes", len(set(client.run(hash, "x").values())), flush=True)
    if end == "raise":
        raise ValueError("on purpose")
    if end == "exit":
        sys.exit(7)
    if end == "kill":
        os.kill(os.getpid(), signal.SIGKILL)


if how.startswith("runner"):
    with hpcdask.Runner(device="cpu", nthreads=1) as runner, Client(runner) as client:
        work(client)
else:
    hpcdask.initialize(device="cpu", nthreads=1, worker_options={"resources": {"A": 1}})
    work(Client())
