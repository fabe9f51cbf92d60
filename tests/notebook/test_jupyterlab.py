"""JupyterLab's Dask extension: the page's configuration on a real SLURM, and the panel."""

from __future__ import annotations

import asyncio
import importlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import dask
import pytest
import yaml
from distributed import Client

import hpcdask
from hpcdask.errors import UsageError
from hpcdask.jobs import detached
from hpcdask.jobs.access import load_security
from launching import needs, until
from slurm_login import Login, login
from slurm_site import SlurmSite

PAGE = (
    (Path(__file__).parents[2] / "docs" / "detached.md")
    .read_text()
    .partition("\n## JupyterLab's Dask extension\n")[2]
)
SNIPPET, DETACHED = map(yaml.safe_load, re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL))
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


@pytest.mark.slurm
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


@pytest.mark.slurm
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


# The panel

#: The page's lines for detached clusters, of processes of this machine.
LOCAL = {
    "name": "mine",
    "system": "local",
    "device": "cpu",
    "cores": 1,
    "memory": "512MiB",
    "poll_interval": 0.3,
}


@pytest.fixture
def _configured(marker: str) -> Iterator[None]:
    async def defaults() -> None:  # it makes a future when it is imported
        import dask_labextension.config  # noqa: F401

    asyncio.run(defaults())
    factory = DETACHED["labextension"]["factory"]
    assert set(factory["kwargs"]) >= {"name", "system"}
    local = {"labextension": {**DETACHED["labextension"], "factory": {**factory, "kwargs": LOCAL}}}
    with dask.config.set(dask.config.merge(dask.config.config, local)):
        yield


def in_the_panel(test: Any) -> Any:
    """Run a test with the extension, as the page configures it."""
    for mark in (
        pytest.mark.slow,
        needs("dask_labextension"),
        pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # of Jupyter's packages
        pytest.mark.usefixtures("_configured"),
    ):
        test = mark(test)
    return test


@in_the_panel
def test_the_panel(capfd: pytest.CaptureFixture[str]):
    from dask_labextension.manager import DaskClusterManager

    async def session() -> None:
        async with DaskClusterManager() as manager:
            (listed,) = manager.list_clusters()  # that of "initial", which made it
            assert listed["name"] == DETACHED["labextension"]["initial"][0]["name"]
            assert "adapt" not in listed
            again = await manager.start_cluster()  # "+ NEW" attaches to the same
            assert again["scheduler_address"] == listed["scheduler_address"]
            assert again["dashboard_link"].startswith("http://")
            scaled = await manager.scale_cluster(again["id"], 1)
            assert scaled["workers"] in (0, 1)
            await until(lambda: manager.get_cluster(listed["id"])["workers"] == 1, 120, "a worker")
            model = manager.get_cluster(listed["id"])
            assert (model["cores"], model["memory"]) == (1, "512.00 MiB")
            adapted = manager.adapt_cluster(again["id"], 0, 2)
            assert adapted["adapt"] == {"minimum": 0, "maximum": 2}
            manager.adapt_cluster(again["id"], 2, 1)
            told: list[str] = []
            await until(lambda: told.append(capfd.readouterr().err) or "maximum" in "".join(told))
            address = listed["scheduler_address"]
            security = load_security({"address": address})
            async with Client(address, security=security, asynchronous=True) as client:
                assert await client.submit(sum, [1, 2]) == 3
            await manager.close_cluster(again["id"])
            assert [one["id"] for one in manager.list_clusters()] == [listed["id"]]

    asyncio.run(session())
    assert detached.find("mine").ended is None  # the panel only detaches
    with hpcdask.attach("mine") as cluster:
        cluster.shutdown()


@in_the_panel
def test_it_does_not_run_and_is_not_to_be_made():
    from dask_labextension.manager import make_cluster

    async def session() -> None:
        with pytest.raises(UsageError, match="no detached cluster mine"):
            await make_cluster({})

    with dask.config.set({"labextension.factory.kwargs": {"name": "mine"}}):
        asyncio.run(session())
