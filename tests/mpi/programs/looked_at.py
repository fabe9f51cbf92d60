"""Compute until a file is there; prints where the dashboard is."""

import time
from pathlib import Path

import dask.array as da
from dask.distributed import Client


def main() -> None:
    with Client() as client:
        print("dashboard", client.dashboard_link, flush=True)
        deadline = time.monotonic() + 600
        while not Path("seen").exists() and time.monotonic() < deadline:
            x = da.random.default_rng(1).random((12_000, 12_000), chunks=1000)
            (x + x.T)[::2, ::2].std().compute()


if __name__ == "__main__":
    main()
