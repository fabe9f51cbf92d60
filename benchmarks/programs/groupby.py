"""Mean and count by name of a pandas DataFrame in many partitions."""

import common

if __name__ == "__main__":
    common.need("pandas", "pyarrow")
    import dask.datasets
    import pandas as pd

    options = common.start()
    days, seconds = options.pick(gpu=(200, 1), cpu=(20, 10))

    def prepare():
        start = pd.Timestamp("2001-01-01")
        end = start + pd.Timedelta(days=days)
        return options.persist(dask.datasets.timeseries(start, end, freq=f"{seconds}s"))

    def run(frame):
        return len(frame), frame.groupby("name").x.agg(["mean", "count"]).compute()

    def check(result):
        rows, found = result
        return found["count"].sum() == rows > 0 and abs(found["mean"]).max() < 0.1

    options.measure(run, check, prepare)
