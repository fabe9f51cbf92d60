"""`(x @ x.T).mean()`."""

import common

if __name__ == "__main__":
    options = common.start()
    side, chunk = options.pick(gpu=(24_000, 4_000), cpu=(2_000, 500))

    def prepare():
        return options.persist(options.random.random_sample((side, side), chunks=chunk))

    def run(x):
        return x, float((x @ x.T).mean().compute())

    def check(result):
        x, mean = result
        expected = float((x.sum(axis=0) ** 2).sum().compute()) / side**2
        return abs(mean / expected - 1) < 1e-9

    options.measure(run, check, prepare, nbytes=8 * side**2)
