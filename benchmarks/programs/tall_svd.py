"""`da.linalg.svd(x)` of a tall matrix with few columns."""

import common
import dask
import dask.array as da
from distributed import Client

if __name__ == "__main__":
    options = common.parse()
    client = Client()
    client.wait_for_workers(options.workers)
    rows, columns, chunk = options.pick(gpu=(8_000_000, 100, 400_000), cpu=(200_000, 20, 25_000))
    random = da.random.RandomState(RandomState=options.xp.random.RandomState)

    def prepare():
        x = random.random_sample((rows, columns), chunks=(chunk, columns)).persist()
        options.finish(client, x)
        return x

    def run(x):
        u, s, v = dask.persist(*da.linalg.svd(x))
        options.finish(client, u, s, v)
        return x, u, s, v

    def check(result):
        x, u, s, v = result
        return float(abs((u * s) @ v - x).max().compute()) < 1e-9

    options.measure(run, check, prepare, nbytes=8 * rows * columns)
