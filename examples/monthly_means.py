"""Climate data: the mean of each calendar month over ten years, with xarray and flox.

pip install xarray flox
mpirun -n 4 python -m hpcdask.run examples/monthly_means.py
"""

import sys

import dask.array as da
import numpy as np
import pandas as pd
import xarray as xr
from distributed import Client

client = Client()
time = pd.date_range("2001-01-01", "2010-12-31")
months = time.month.to_numpy()
# A map of each day: what the month adds to a gradient from south to north.
day = da.from_array(months.astype(float), chunks=180)[:, None, None]
north = da.linspace(-90, 90, 90, chunks=45)[None, :, None]
maps = xr.DataArray(day + north + da.zeros((1, 1, 180)), {"time": time}, ("time", "lat", "lon"))
means = maps.groupby("time.month").mean().compute()

n_workers = len(client.nthreads())
print(f"monthly means of {maps.nbytes / 1e6:.0f} MB, on {n_workers} workers: {means.shape}")
expected = np.arange(1, 13)[:, None] + np.linspace(-90, 90, 90)
if not np.allclose(means, expected[:, :, None]):
    sys.exit("wrong: month + latitude was expected")
