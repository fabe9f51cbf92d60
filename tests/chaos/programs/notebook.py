"""A notebook whose cluster computes checked batches until the file `stop` says that it is enough.

Its arguments, as JSON: the cluster's keywords, and how the episode wants it.
"""

import json
import sys
import time
from pathlib import Path

import dask.array as da
import numpy as np
from distributed import Client, wait

import hpcdask
from hpcdask.errors import HpcdaskError

OPTIONS = json.loads(sys.argv[2])
COUNT = OPTIONS["n"]


def slow(number: int) -> int:
    time.sleep(0.1)
    return 2 * number


def batch(client: Client, number: int) -> bool:
    futures = client.map(slow, range(number, number + 8), pure=False)
    side = np.arange(400, dtype="f8") + number
    known = side[:, None] * 1000 + side
    x = da.from_array(known, chunks=100).map_blocks(np.copy).persist()
    wait(x)
    right = np.array_equal((x + x.T).compute(), known + known.T)
    return right and client.gather(futures) == [2 * n for n in range(number, number + 8)]


def insist(work):
    """Do it, and where the queue or the jobs fail, tell and ask again, as users do."""
    until = time.monotonic() + 120
    while True:
        try:
            return work()
        except HpcdaskError as error:
            print("said", type(error).__name__, error, flush=True)
            if time.monotonic() > until:
                raise
            time.sleep(1)


def main() -> None:
    with hpcdask.SLURMCUDACluster(**json.loads(sys.argv[1])) as cluster:
        cluster.queue.timeout_s = 20.0
        print("watchdog", flush=True)

        def scale() -> None:
            if OPTIONS["adapt"]:
                cluster.adapt(minimum=COUNT, maximum=COUNT + 1, interval="1s")
            else:
                cluster.scale(COUNT)

        insist(scale)
        with cluster.get_client() as client:

            def compute(number: int) -> bool:
                if cluster.failure is not None:
                    scale()
                return batch(client, number)

            number = more = 0
            while more < 2:
                number += 1
                more += Path("stop").exists()
                if not insist(lambda number=number: compute(number)):
                    print("wrong", number, flush=True)
                    sys.exit(77)
                if number == 1:
                    print("ready", flush=True)
                print("batch", number, flush=True)
            insist(lambda: cluster.wait_for_workers(COUNT, timeout=150))
            print("workers", len(client.nthreads()), flush=True)
    print("done", flush=True)


if __name__ == "__main__":
    main()
