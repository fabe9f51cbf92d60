"""The sum of an array of many small chunks (10,000)."""

import common
import dask.array as da

CHUNK = 1_000

if __name__ == "__main__":
    options = common.start(count=10_000)
    size = CHUNK * options.count

    def run():
        return float(da.ones(size, chunks=CHUNK).map_blocks(options.xp.asarray).sum().compute())

    options.measure(run, lambda total: total == size)
