"""Rechunk rows into columns."""

import common
import dask.array as da
from distributed import Client

if __name__ == "__main__":
    options = common.parse(method=None)
    client = Client()
    client.wait_for_workers(options.workers)
    side, chunk = options.pick(gpu=(50_000, 1_000), cpu=(3_000, 375))
    random = da.random.RandomState(RandomState=options.xp.random.RandomState)

    def prepare():
        x = random.random_sample((side, side), chunks=(chunk, side)).persist()
        options.finish(client, x)
        return x

    def run(x):
        y = x.rechunk((side, chunk), method=options.method).persist()
        options.finish(client, y)
        return x, y

    def check(result):
        x, y = result
        return float(abs(x[chunk].compute() - y[chunk].compute()).max()) == 0

    options.measure(run, check, prepare, nbytes=8 * side**2)
