"""Rechunk rows into columns."""

import common

if __name__ == "__main__":
    options = common.start(method=None)
    side, chunk = options.pick(gpu=(50_000, 1_000), cpu=(3_000, 375))

    def prepare():
        return options.persist(options.random.random_sample((side, side), chunks=(chunk, side)))

    def run(x):
        return x, options.persist(x.rechunk((side, chunk), method=options.method))

    def check(result):
        x, y = result
        return float(abs(x[chunk].compute() - y[chunk].compute()).max()) == 0

    options.measure(run, check, prepare, nbytes=8 * side**2)
