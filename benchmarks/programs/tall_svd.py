"""`da.linalg.svd(x)` of a tall matrix with few columns."""

import common
import dask.array as da

if __name__ == "__main__":
    options = common.start()
    rows, columns, chunk = options.pick(gpu=(8_000_000, 100, 400_000), cpu=(200_000, 20, 25_000))

    def prepare():
        return options.persist(options.random.random_sample((rows, columns), (chunk, columns)))

    def run(x):
        return x, *options.persist(*da.linalg.svd(x))

    def check(result):
        x, u, s, v = result
        return float(abs((u * s) @ v - x).max().compute()) < 1e-9

    options.measure(run, check, prepare, nbytes=8 * rows * columns)
