"""The panel of JupyterLab's Dask extension attaches to detached clusters, by its own manager."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from pathlib import Path

import dask
import pytest
import yaml
from distributed import Client

import hpcdask
from hpcdask.errors import UsageError
from hpcdask.jobs import detached
from hpcdask.jobs.access import load_security
from launching import needs, until

pytestmark = [
    pytest.mark.slow,
    needs("dask_labextension"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # of Jupyter's packages
]

PAGE = (
    (Path(__file__).parents[2] / "docs" / "detached.md")
    .read_text()
    .partition("\n## JupyterLab's Dask extension\n")[2]
)
SNIPPETS = [yaml.safe_load(text) for text in re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)]
#: The page's lines for detached clusters, of processes of this machine.
SNIPPET = SNIPPETS[1]
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
    factory = SNIPPET["labextension"]["factory"]
    assert set(factory["kwargs"]) >= {"name", "system"}
    local = {"labextension": {**SNIPPET["labextension"], "factory": {**factory, "kwargs": LOCAL}}}
    with dask.config.set(dask.config.merge(dask.config.config, local)):
        yield


@pytest.mark.usefixtures("_configured")
def test_the_panel(capfd: pytest.CaptureFixture[str]):
    from dask_labextension.manager import DaskClusterManager

    async def session() -> None:
        async with DaskClusterManager() as manager:
            (listed,) = manager.list_clusters()  # that of "initial", which made it
            assert listed["name"] == SNIPPET["labextension"]["initial"][0]["name"]
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


@pytest.mark.usefixtures("_configured")
def test_it_does_not_run_and_is_not_to_be_made():
    from dask_labextension.manager import make_cluster

    async def session() -> None:
        with pytest.raises(UsageError, match="no detached cluster mine"):
            await make_cluster({})

    with dask.config.set({"labextension.factory.kwargs": {"name": "mine"}}):
        asyncio.run(session())
