"""A program that every rank starts: `embedded.py HOW END`."""

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time

#: What is meant for ranks alone, of what programs get that Dask tasks start.
FOR_RANKS = "env | grep -E '^HPCDASK_RANK='"

how, end = sys.argv[1:3]
if "mpi" in how:
    from mpi4py import MPI  # noqa: F401 - initialises MPI in this process

    for name in [name for name in os.environ if name.startswith(("OMPI_", "PM", "MPI_"))]:
        del os.environ[name]  # some launchers leave it to MPI to say which rank this is
from distributed import Client, Worker, WorkerPlugin  # noqa: E402

import hpcdask  # noqa: E402


def work(client: Client) -> None:
    print(
        "workers", len(client.run(int)), "sum", client.submit(sum, [1, 2, 3]).result(), flush=True
    )
    print("hashes", len(set(client.run(hash, "x").values())), flush=True)
    print("hands on", set(client.run(subprocess.getoutput, FOR_RANKS).values()), flush=True)
    if end == "shutdown":
        client.shutdown()
        sys.exit(5)
    if end == "raise":
        raise ValueError("on purpose")
    if end == "exit":
        sys.exit(7)
    if end == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if end == "fork":
        for _ in range(2):
            fork(client)
    if end == "interrupts":
        for _ in range(2):
            interrupt()
        compute_later(client)
    if end == "interrupted":
        try:
            print("ready", flush=True)
            time.sleep(600)
        except KeyboardInterrupt:
            compute_later(client)


def compute_later(client: Client) -> None:
    """So often that what has begun to end would have ended."""
    sums = {client.submit(sum, [1, 2], pure=False).result(timeout=180) for _ in range(100)}
    print("later sum", *sums, flush=True)


def fork(client: Client) -> None:
    """Make a process that lives on and has all that this one has, and one that ends."""
    if not os.fork():
        signal.alarm(600)
        while os.getppid() == parent:
            time.sleep(0.1)
        os._exit(0)
    if not os.fork():
        runner.close()
        os._exit(0)
    os.wait()
    compute_later(client)


def interrupt() -> None:
    """What Ctrl-C is for all processes of a terminal, to somebody who goes on."""
    try:
        os.killpg(0, signal.SIGINT)
        time.sleep(600)
    except KeyboardInterrupt:
        time.sleep(0.5)  # what comes together counts once


parent = os.getpid()


def with_runner() -> None:
    global runner
    with hpcdask.Runner(device="cpu", nthreads=1) as runner, Client(runner) as client:
        work(client)


class Teardown(WorkerPlugin):
    """Holds the end of its worker up for a second."""

    async def teardown(self, worker: Worker) -> None:
        await asyncio.sleep(1)


async def close_in_a_loop() -> None:
    with hpcdask.Runner(device="cpu", nthreads=1) as runner:
        client = await Client(runner, asynchronous=True)
        await client.register_plugin(Teardown())
        await client.close()
        closing, turns = asyncio.ensure_future(runner.close()), 0
        while not closing.done():
            turns += 1
            await asyncio.sleep(0.01)
        print("turns", turns, flush=True)


if how == "runner-thread":
    thread = threading.Thread(target=with_runner)
    thread.start()
    thread.join()
elif how == "runner-loop":
    asyncio.run(close_in_a_loop())
elif how.startswith("runner"):
    with_runner()
else:
    hpcdask.initialize(
        device="cpu", nthreads=1, protocol=None, worker_options={"resources": {"A": 1}}
    )
    work(Client())
