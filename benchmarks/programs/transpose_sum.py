"""`x + x.T`.

The matrix is new each time: of the same one, workers still have what they fetched before.
"""

import common

if __name__ == "__main__":
    options = common.start()
    side, chunk = options.pick(gpu=(50_000, 5_000), cpu=(3_000, 500))

    def prepare():
        return options.persist(options.random.random_sample((side, side), chunks=chunk))

    def run(x):
        return x, options.persist(x + x.T)

    def check(result):
        x, y = result
        corner = x[:chunk, -chunk:] + x[-chunk:, :chunk].T
        return float(abs(y[:chunk, -chunk:] - corner).max().compute()) == 0

    options.measure(run, check, prepare, nbytes=8 * side**2)
