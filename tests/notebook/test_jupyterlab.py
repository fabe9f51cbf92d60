"""The page's configuration for JupyterLab's Dask extension, as it stands, on a real SLURM."""

from __future__ import annotations

import asyncio
import importlib
import re
from pathlib import Path
from typing import Any

import dask
import pytest
import yaml

import hpcdask
from slurm_login import Login, login
from slurm_site import SlurmSite

pytestmark = [pytest.mark.slurm]

PAGE = (
    (Path(__file__).parents[2] / "docs" / "detached.md")
    .read_text()
    .partition("\n## JupyterLab's Dask extension\n")[2]
)
SNIPPET = yaml.safe_load(re.search(r"```yaml\n(.*?)```", PAGE, re.DOTALL)[1])
# Dask merges a file into what it has; set() would replace all of "distributed".
CONFIGURED = dask.config.merge(dask.config.config, SNIPPET)
CLIENT = re.search(r"```python\n(.*?)```", PAGE, re.DOTALL)[1]
FOR_CPU = {"device": "cpu", "gpus_per_job": 1}
ADDRESS = re.search(r'"(tls://.+?)"', CLIENT)[1]


@pytest.fixture
def user(site: SlurmSite, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    with login(site, tmp_path, monkeypatch) as user:
        yield user


async def new_cluster() -> hpcdask.SLURMCUDACluster:
    """What the extension's button "New" does."""
    factory = dask.config.get("labextension.factory")
    kwargs = {name.replace("-", "_"): value for name, value in factory["kwargs"].items()}
    cluster_class = getattr(importlib.import_module(factory["module"]), factory["class"])
    return await cluster_class(*factory["args"], **kwargs, asynchronous=True)


def test_the_snippet(user: Login, site: SlurmSite, tmp_path: Path):
    assert set(SNIPPET) == {"labextension", "distributed"}
    assert set(SNIPPET["labextension"]) == {"factory", "default", "initial"}

    async def as_it_stands() -> str:
        cluster = await new_cluster()
        async with cluster:
            assert type(cluster) is hpcdask.SLURMCUDACluster
            assert cluster.dashboard_link.startswith("http://")
            assert cluster.scheduler_info["workers"] == {}
            return cluster.job_script()

    with dask.config.set(CONFIGURED):
        script = tmp_path / "script.sh"
        script.write_text(asyncio.run(as_it_stands()))
    for line in ("-p gpu", "--cpus-per-task=8", "--mem=12G", "-t 02:00:00", "--gres=gpu:1"):
        assert f"#SBATCH {line}\n" in script.read_text()
    site.run("sbatch", "--test-only", script)


def test_workers_come_and_a_kernel_gets_in(user: Login):
    async def session() -> None:
        cluster = await new_cluster()
        async with cluster:
            adapt = dask.config.get("labextension.default.adapt")
            adaptive = cluster.adapt(**adapt)
            assert (adaptive.minimum, adaptive.maximum) == (0, 8)
            assert await asyncio.to_thread(kernel, cluster.scheduler_address) == 42
            workers: dict[str, Any] = cluster.scheduler_info["workers"]
            assert {(w["nthreads"], w["memory_limit"]) for w in workers.values()} == {
                (8, 12 * 2**30)
            }

    # The GPUs of the tests' SLURM are none
    on_cpu = {f"labextension.factory.kwargs.{k}": v for k, v in FOR_CPU.items()}
    with dask.config.set(CONFIGURED), dask.config.set(on_cpu):
        asyncio.run(session())


def kernel(address: str) -> int:
    """The page's cell, and a computation."""
    names: dict[str, Any] = {}
    exec(CLIENT.replace(ADDRESS, address), names)
    with names["client"] as client:
        return client.submit(sum, [20, 22]).result(timeout=180)
