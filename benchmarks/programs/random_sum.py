"""`(x + 1)[::2, ::2].sum()` of random normal numbers."""

import common

if __name__ == "__main__":
    options = common.start()
    side, chunk = options.pick(gpu=(200_000, 10_000), cpu=(4_000, 1_000))

    def run():
        x = options.random.normal(10, 1, size=(side, side), chunks=chunk)
        return float((x + 1)[::2, ::2].sum().compute())

    def check(total):
        return abs(total / (side / 2) ** 2 - 11) < 12 / side  # six standard errors

    options.measure(run, check, nbytes=8 * side**2)
