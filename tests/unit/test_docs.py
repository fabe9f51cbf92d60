"""The programs in the documentation run as they stand there."""

from __future__ import annotations

import re
from pathlib import Path

import dask
import pytest
from distributed import Client, LocalCluster

from hpcdask.workloads.made_genotypes import write_genotypes

DOCS = Path(__file__).parents[2] / "docs"


def programs(page: str) -> list[str]:
    text = (DOCS / page).read_text()
    return re.findall(r"^```python\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with a small store, and a cluster for programs in it."""
    folder = tmp_path_factory.mktemp("docs")
    with (
        LocalCluster(
            n_workers=1, threads_per_worker=2, processes=False, dashboard_address=":0"
        ) as cluster,
        dask.config.set({"scheduler-address": cluster.scheduler_address}),
        Client(cluster) as client,
    ):
        written = write_genotypes(folder / "genotypes.zarr", (500, 60), chunks=(100, 60), n_slots=2)
        client.compute(written).result()
        yield folder


@pytest.mark.parametrize(
    "program", programs("workloads.md"), ids=range(len(programs("workloads.md")))
)
def test_workloads(folder, monkeypatch, program):
    monkeypatch.chdir(folder)
    names: dict = {}
    exec(compile(program, "workloads.md", "exec"), names)
    if "client" in names:
        names["client"].close()
