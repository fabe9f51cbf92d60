"""`(x @ x.T).mean()`."""

import common
import dask.array as da
from distributed import Client

if __name__ == "__main__":
    options = common.parse()
    client = Client()
    client.wait_for_workers(options.workers)
    side, chunk = options.pick(gpu=(24_000, 4_000), cpu=(2_000, 500))
    random = da.random.RandomState(RandomState=options.xp.random.RandomState)

    def prepare():
        x = random.random_sample((side, side), chunks=chunk).persist()
        options.finish(client, x)
        return x

    def run(x):
        return x, float((x @ x.T).mean().compute())

    def check(result):
        x, mean = result
        expected = float((x.sum(axis=0) ** 2).sum().compute()) / side**2
        return abs(mean / expected - 1) < 1e-9

    options.measure(run, check, prepare, nbytes=8 * side**2)
