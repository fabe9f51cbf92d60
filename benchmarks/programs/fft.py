"""`da.fft.fft` along an axis that is rechunked for it."""

import common
import dask.array as da

if __name__ == "__main__":
    options = common.start()
    side, chunk = options.pick(gpu=(30_000, 1_500), cpu=(2_000, 250))

    def prepare():
        return options.persist(options.random.random_sample((side, side), chunks=(chunk, side)))

    def run(x):
        return x, options.persist(da.fft.fft(x.rechunk((side, chunk)), axis=0))

    def check(result):
        x, y = result
        return float(abs(y[0] - x.sum(axis=0)).max().compute()) < 1e-9 * side

    options.measure(run, check, prepare, nbytes=8 * side**2)
