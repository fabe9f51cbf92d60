"""`x + x.T`.

The matrix is new each time: of the same one, workers still have what they fetched before.
"""

import common
import dask.array as da
from distributed import Client

if __name__ == "__main__":
    options = common.parse()
    client = Client()
    client.wait_for_workers(options.workers)
    side, chunk = options.pick(gpu=(50_000, 5_000), cpu=(3_000, 500))
    random = da.random.RandomState(RandomState=options.xp.random.RandomState)

    def prepare():
        x = random.random_sample((side, side), chunks=chunk).persist()
        options.finish(client, x)
        return x

    def run(x):
        y = (x + x.T).persist()
        options.finish(client, y)
        return x, y

    def check(result):
        x, y = result
        corner = x[:chunk, -chunk:] + x[-chunk:, :chunk].T
        return float(abs(y[:chunk, -chunk:] - corner).max().compute()) == 0

    options.measure(run, check, prepare, nbytes=8 * side**2)
