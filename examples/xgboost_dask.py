"""XGBoost's own Dask interface: boosted trees, trained by all workers at once.

pip install xgboost
mpirun -n 4 python -m hpcdask.run examples/xgboost_dask.py
"""

import sys

import dask.array as da
import xgboost.dask
from distributed import Client

ROWS, COLUMNS, ROUNDS = 200_000, 8, 40

client = Client()
n_workers = len(client.nthreads())
x = da.random.default_rng(0).random((ROWS, COLUMNS), chunks=(ROWS // n_workers, COLUMNS)).persist()
y = x[:, 0] * x[:, 1] + x[:, 2]

# Its ranks find each other in its own way, and it brings in the workers that have the chunks
data = xgboost.dask.DaskQuantileDMatrix(client, x, y)
trained = xgboost.dask.train(client, {"eta": 0.3, "max_depth": 6}, data, num_boost_round=ROUNDS)
found = xgboost.dask.predict(client, trained, x)

error = float(abs(found - y).mean().compute())
print(f"boosted trees: {ROUNDS} of {ROWS} rows, on {n_workers} workers, mean error {error:.4f}")
if error > 0.02:
    sys.exit("wrong: an error below 0.02 was expected")
