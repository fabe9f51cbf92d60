"""`da.fft.fft` along an axis that is rechunked for it."""

import common
import dask.array as da
from distributed import Client

if __name__ == "__main__":
    options = common.parse()
    client = Client()
    client.wait_for_workers(options.workers)
    side, chunk = options.pick(gpu=(30_000, 1_500), cpu=(2_000, 250))
    random = da.random.RandomState(RandomState=options.xp.random.RandomState)

    def prepare():
        x = random.random_sample((side, side), chunks=(chunk, side)).persist()
        options.finish(client, x)
        return x

    def run(x):
        y = da.fft.fft(x.rechunk((side, chunk)), axis=0).persist()
        options.finish(client, y)
        return x, y

    def check(result):
        x, y = result
        return float(abs(y[0] - x.sum(axis=0)).max().compute()) < 1e-9 * side

    options.measure(run, check, prepare, nbytes=8 * side**2)
