"""Works with the cluster in many ways; at the top level, with no guard."""

import os
from dataclasses import dataclass

import dask.array as da
import neighbour
from common import show
from dask import delayed
from distributed import Client

print("top level", flush=True)


@dataclass
class Point:
    x: int


def double(point: Point) -> Point:
    return Point(2 * point.x)


client = Client()
found = {
    "workers": len(client.nthreads()),
    "submit": client.submit(double, Point(1)).result().x,
    "map": [point.x for point in client.gather(client.map(double, [Point(x) for x in range(3)]))],
    "delayed": delayed(lambda x: x + 1)(1).compute(),
    "array": int(da.arange(100, chunks=10).sum().compute()),
    "remote": client.submit(os.getpid).result() != os.getpid(),
    "second client": Client().submit(sum, [1, 2]).result(),
    "held back": client.scheduler_comm.interval,
    "module beside the script": client.submit(neighbour.triple, 3).result(),
}
show("found", found)
