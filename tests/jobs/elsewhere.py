"""A program on a login node, for test_namespaces.py: its jobs run on nodes elsewhere.

``python elsewhere.py SHARED COMMAND COMMAND`` prints, in JSON, what its cluster saw. With GANG=1 in
the environment it has a gang instead, until a node is lost.
COMMAND is the shell's way into a node: a stand-in for what a queue does with a script.
"""

import itertools
import json
import os
import sys
import threading
import time
from pathlib import Path

import numpy as np

import hpcdask
from hpcdask.client.gang import RankContext
from hpcdask.errors import GangError
from hpcdask.queues.local import LocalQueue

LOGIN_ONLY = Path("/tmp/on-the-login-node")


class NodesQueue(LocalQueue):
    """Processes of this machine, each in one of the nodes in turn."""

    def __init__(self, commands: list[str]) -> None:
        super().__init__()
        self._commands = enumerate(itertools.cycle(commands))

    async def submit(self, script: str, count: int) -> list[str]:
        """Start the script as it is, on a node."""
        ids = []
        for number, command in itertools.islice(self._commands, count):
            ids += await super().submit(wrapped(script, number, command), 1)
        return ids


def wrapped(script: str, number: int, command: str) -> str:
    """A script with the same directives that runs this one on a node."""
    outer = Path(f"{script}.{number}")
    directives = Path(script).read_text().splitlines()[:2]
    outer.write_text("\n".join([*directives, f"exec {command} bash {script}", ""]))
    return str(outer)


class NodesCluster(hpcdask.LocalCUDAJobCluster):
    """A cluster on them."""

    def _make_queue(self, job_keywords: dict) -> NodesQueue:
        return NodesQueue(sys.argv[2:])


def look(dask_worker) -> dict:
    """What a worker sees of its node."""
    return {
        "address": dask_worker.address,
        "nanny": dask_worker.nanny,
        "host": os.uname().nodename,
        "scratch": dask_worker.local_directory,
        "sees the login node's /tmp": LOGIN_ONLY.exists(),
        "fetched from": [transfer["who"] for transfer in dask_worker.transfer_incoming_log],
    }


def cluster() -> NodesCluster:
    """Two jobs, one on each node."""
    made = NodesCluster(
        device="cpu",
        cores=1,
        processes=1,
        memory="512MiB",
        poll_interval=0.3,
        interface="fast0",
        scheduler_options={"interface": "login-slow"},
        shared_temp_directory=sys.argv[1],
    )
    made.scale(2)
    return made


def stay(context: RankContext, shared: str) -> None:
    """Say that it runs, and do not end."""
    Path(shared, f"runs-{os.uname().nodename}").touch()
    threading.Event().wait()


def lose_a_node() -> None:
    """Tell how a gang ends."""
    with cluster() as made, made.get_client() as client:
        client.wait_for_workers(2, timeout=180)
        try:
            hpcdask.gang(stay, client=client, shared={"shared": sys.argv[1]}, timeout=300, grace=1)
        except GangError as error:
            print(json.dumps([str(error), error.host, time.time()]), flush=True)


def main() -> None:
    """Exchange an array."""
    LOGIN_ONLY.touch()
    with cluster() as made, made.get_client() as client:
        client.wait_for_workers(2, timeout=180)
        first, second = client.nthreads()
        array = client.submit(np.arange, 1_000_000, workers=[first])
        total = client.submit(np.sum, array, workers=[second])
        seen = {
            "scheduler": made.scheduler.address,
            "total": int(total.result(timeout=180)),
            "workers": list(client.run(look).values()),
            "logs": list(made.job_logs().values()),
        }
    seen["states"] = [job.state for job in made.jobs()]
    print(json.dumps(seen))


if __name__ == "__main__":
    if "GANG" in os.environ:
        lose_a_node()
    else:
        main()
