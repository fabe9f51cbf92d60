"""Bring results into the program: an array of host or device chunks, or 2,000 of 1 kB (`small`)."""

import common
import dask.array as da
import numpy as np
from distributed import wait


def block(number):
    return np.full(125, number, "f8")


if __name__ == "__main__":
    options = common.start(what="host", count=2_000)
    client = options.client
    side = options.pick(gpu=16_000, cpu=7_072)
    module = options.xp if options.what == "device" else np
    random = da.random.RandomState(RandomState=module.random.RandomState)

    def make_array():
        x = options.persist(random.random_sample((side, side), chunks=(side // 16, side)))
        return x, float(x.sum().compute())

    def gather_array(made):
        x, total = made
        return x.compute(), total

    def is_whole(result):
        x, total = result
        return x.shape == (side, side) and abs(float(x.sum()) / total - 1) < 1e-9

    def make_small():
        futures = client.map(block, range(options.count), pure=False)
        wait(futures)
        return futures

    def are_right(results):
        return [float(found[-1]) for found in results] == list(range(options.count))

    if options.what == "small":
        options.measure(client.gather, are_right, make_small)
    else:
        options.measure(gather_array, is_whole, make_array, nbytes=8 * side**2)
