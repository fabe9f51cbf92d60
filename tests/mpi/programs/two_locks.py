"""Two Dask tasks that each hold a lock of Dask and wait for the other one."""

import time
from pathlib import Path

from dask.distributed import Client, Lock


def work(first, second):
    with Lock(first):
        Path(first + ".there").touch()
        while not Path(second + ".there").exists():
            time.sleep(0.01)
        with Lock(second):
            return first


if __name__ == "__main__":
    client = Client()
    futures = [client.submit(work, *pair, pure=False) for pair in (("a", "b"), ("b", "a"))]
    print(client.gather(futures))
