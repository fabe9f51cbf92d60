"""Empty Dask tasks by `dask.delayed` (5,000)."""

import common
import dask


@dask.delayed
def nothing(_):
    return None


if __name__ == "__main__":
    options = common.start(count=5_000)

    def run():
        return dask.compute(*[nothing(number) for number in range(options.count)])

    options.measure(run, lambda results: results == (None,) * options.count)
