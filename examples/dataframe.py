"""DataFrames: join orders with customers, and add up the orders of each region.

    pip install "dask[dataframe]"
    mpirun -n 4 python -m hpcdask.run examples/dataframe.py [pandas|cudf]

Without an argument it takes cuDF where all workers have it, else pandas.
"""

import importlib.util
import sys

import dask
import dask.dataframe as dd
import numpy as np
import pandas as pd
from distributed import Client

N_PARTS, ORDERS, CUSTOMERS = 8, 50_000, 1_000  # rows of each part
REGIONS = np.array(["north", "east", "south", "west"])


def customers(part: int) -> pd.DataFrame:
    """Make one part of the table of customers."""
    number = np.arange(part * CUSTOMERS, (part + 1) * CUSTOMERS)
    return pd.DataFrame({"customer": number, "region": REGIONS[number % 4]})


def orders(part: int) -> pd.DataFrame:
    """Make one part of the table of orders, in which customer c orders for c % 100 each time."""
    customer = np.random.default_rng(part).permutation(ORDERS) % (N_PARTS * CUSTOMERS)
    return pd.DataFrame({"customer": customer, "amount": customer % 100})


def has_cudf() -> bool:
    """Tell whether this process could import cuDF."""
    return importlib.util.find_spec("cudf") is not None


client = Client()
found = client.run(has_cudf)
backend = sys.argv[1] if len(sys.argv) > 1 else "cudf" if all(found.values()) else "pandas"
with dask.config.set({"dataframe.backend": backend}):
    # The parts are made on the workers, as they would be read there from files.
    left, right = (dd.from_map(make, range(N_PARTS)).to_backend() for make in (orders, customers))
    result = left.merge(right, on="customer").groupby("region").amount.agg(["count", "sum"])
    table = result.compute()
table = (table.to_pandas() if hasattr(table, "to_pandas") else table).sort_index()

print(f"{backend}, on {len(found)} workers: {table['sum'].to_dict()}")
c = np.arange(ORDERS) % (N_PARTS * CUSTOMERS)
expected = {name: N_PARTS * int((c[c % 4 == i] % 100).sum()) for i, name in enumerate(REGIONS)}
if table["sum"].to_dict() != expected or table["count"].sum() != N_PARTS * ORDERS:
    sys.exit(f"wrong: {expected} was expected")
