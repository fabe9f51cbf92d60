"""A Prefect flow whose tasks run on the cluster.

    pip install prefect prefect-dask "fastapi<0.150"
    mpirun -n 4 python -m hpcdask.run examples/prefect_flow.py

The program and all workers report to Prefect's server: start one that they reach, and set
PREFECT_API_URL. Without it, each of them starts a server of its own.
"""

import sys

from distributed import Client, get_worker
from prefect import flow, task
from prefect_dask import DaskTaskRunner

client = Client()


@task
def square(number: int) -> tuple[int, str]:
    """Square a number, and tell which worker did it."""
    return number**2, get_worker().address


# Prefect connects by itself: it needs the address of this cluster, and its keys.
@flow(
    task_runner=DaskTaskRunner(
        address=client.scheduler.address, client_kwargs={"security": client.security}
    )
)
def sum_of_squares(count: int) -> tuple[int, int]:
    """Add the squares on the client; return the number of workers that took part too."""
    results = square.map(range(count)).result()
    return sum(value for value, _ in results), len({address for _, address in results})


total, n_workers = sum_of_squares(20)
print(f"sum of squares {total}, on {n_workers} workers")
if total != 2470:
    sys.exit("wrong: 2470 was expected")
