"""Arrays over two hosts, against NumPy; prints which hosts the workers have."""

import json
import sys
import time

import dask
import dask.array as da
import numpy as np
from dask.distributed import Client, wait

SIDE = 2000


def main() -> None:
    with Client() as client:
        workers = client.scheduler_info()["workers"].values()
        print("hosts", json.dumps(sorted(one["host"] for one in workers)), flush=True)
        x = da.random.default_rng(1).random((SIDE, SIDE), chunks=(500, 500)).persist()
        wait(x)
        numbers = x.compute()
        results = dask.compute((x + x.T).sum(), da.linalg.svd(x[:, :500].rechunk((500, 500)))[1])
        np.testing.assert_allclose(results[0], 2 * numbers.sum())
        expected = np.linalg.svd(numbers[:, :500], compute_uv=False)
        np.testing.assert_allclose(results[1], expected)
        rows = x.rechunk((SIDE, 20), method="p2p")
        np.testing.assert_array_equal(rows.compute(), numbers)
        print("computed", flush=True)
        while "stay" in sys.argv:
            print("computed", client.submit(abs, time.time()).result(), flush=True)
            time.sleep(0.1)


if __name__ == "__main__":
    main()
