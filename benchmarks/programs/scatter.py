"""Send a host array to the workers: by `client.scatter`, or in a graph (`from_array`)."""

import common
import dask.array as da
import numpy as np

if __name__ == "__main__":
    options = common.start(what="scatter")
    client = options.client
    side = options.pick(gpu=16_000, cpu=7_072)
    rng = np.random.default_rng()

    def prepare():
        return rng.random((side, side))

    def scatter(x):
        futures = client.scatter(np.array_split(x, 16))
        return x, lambda: sum(client.gather(client.map(np.sum, futures)))

    def sum_of_graph(x):
        total = float(da.from_array(x, chunks=(side // 16, side)).sum().compute())
        return x, lambda: total

    def check(result):
        x, total = result
        return abs(total() / float(x.sum()) - 1) < 1e-9

    run = sum_of_graph if options.what == "from_array" else scatter
    options.measure(run, check, prepare, nbytes=8 * side**2)
