"""A program on a login node, for test_two_hosts.py: its jobs run on a node elsewhere.

``python elsewhere.py SHARED NODE LOGIN_LINK NODE_LINK`` prints, in JSON, what its cluster saw. With
a fifth word, ``gang``, it has a gang instead, until the node is lost. NODE is the shell's way into
the node: a stand-in for what a queue does with a script.
"""

import json
import os
import sys
import tempfile
import threading
from pathlib import Path

import numpy as np

import hpcdask
from hpcdask.client.gang import RankContext
from hpcdask.errors import GangError
from hpcdask.queues.local import LocalQueue

shared, node, login_link, node_link, *what = sys.argv[1:]


submit_here = LocalQueue.submit


async def submit(queue: LocalQueue, script: str, count: int) -> list[str]:
    """Submit what runs the script on the node."""
    return await submit_here(queue, wrapped(script), count)


def wrapped(script: str) -> str:
    """Write a script with the same directives that runs this one on the node."""
    outer = Path(f"{script}.outer")
    directives = Path(script).read_text().splitlines()[:2]
    outer.write_text("\n".join([*directives, f"exec {node} bash {script}", ""]))
    return str(outer)


def look(dask_worker, path: str) -> dict:
    """What a worker sees of its node."""
    return {
        "address": dask_worker.address,
        "nanny": dask_worker.nanny,
        "host": os.uname().nodename,
        "sees the login node's files": os.path.exists(path),
        "fetched from": [transfer["who"] for transfer in dask_worker.transfer_incoming_log],
    }


def stay(context: RankContext, shared: str) -> None:
    """Say that it runs, and do not end."""
    Path(shared, f"runs-{context.rank}").touch()
    threading.Event().wait()


def compute(cluster: hpcdask.LocalCUDAJobCluster, client) -> None:
    """Exchange an array."""
    first, second = client.nthreads()
    array = client.submit(np.arange, 1_000_000, workers=[first])
    total = client.submit(np.sum, array, workers=[second])
    with tempfile.NamedTemporaryFile() as own:
        seen = {
            "scheduler": cluster.scheduler.address,
            "total": int(total.result(timeout=180)),
            "workers": list(client.run(look, path=own.name).values()),
            "logs": list(cluster.job_logs().values()),
        }
    print(json.dumps(seen))


def lose_the_node(client) -> None:
    """Tell how a gang ends."""
    try:
        hpcdask.gang(stay, client=client, shared={"shared": shared}, timeout=300, grace=1)
    except GangError as error:
        print(json.dumps([str(error), error.host]), flush=True)


if __name__ == "__main__":
    LocalQueue.submit = submit
    with (
        hpcdask.LocalCUDAJobCluster(
            device="cpu",
            cores=1,
            processes=1,
            memory="512MiB",
            poll_interval=0.3,
            interface=node_link,
            scheduler_options={"interface": login_link},
            shared_temp_directory=f"{shared}/clusters",
            n_workers=2,
        ) as cluster,
        cluster.get_client() as client,
    ):
        client.wait_for_workers(2, timeout=180)
        if what:
            lose_the_node(client)
        else:
            compute(cluster, client)
