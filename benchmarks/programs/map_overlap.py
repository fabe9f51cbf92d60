"""The mean of each value and its four neighbours, by `map_overlap`."""

import common


def smooth(block):
    total = block.copy()
    total[1:-1, 1:-1] += block[:-2, 1:-1] + block[2:, 1:-1] + block[1:-1, :-2] + block[1:-1, 2:]
    return total / 5


if __name__ == "__main__":
    options = common.start()
    side, chunk = options.pick(gpu=(50_000, 5_000), cpu=(3_000, 500))

    def prepare():
        return options.persist(options.random.random_sample((side, side), chunks=chunk))

    def run(x):
        return x, options.persist(x.map_overlap(smooth, depth=1, boundary="periodic"))

    def check(result):
        x, y = result
        corner = x[0, 0] + x[1, 0] + x[-1, 0] + x[0, 1] + x[0, -1]
        same = abs(float((x.mean() - y.mean()).compute())) < 1e-9
        return same and abs(float((y[0, 0] - corner / 5).compute())) < 1e-12

    options.measure(run, check, prepare, nbytes=8 * side**2)
