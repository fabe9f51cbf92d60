"""What a detached cluster saves before it ends: by idle time, SIGTERM and shutdown."""

from __future__ import annotations

import os
import signal
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import dask.array as da
import numpy as np
import psutil
import pytest
from dask import bag
from distributed import Client, LocalCluster, wait

import hpcdask
from hpcdask.errors import UsageError
from hpcdask.jobs import detached
from hpcdask.jobs.detached import ControlRecord
from hpcdask.jobs.folder import ClusterFolder
from launching import describe, end, leftovers, needs, wait_for

pytestmark = [pytest.mark.slow, needs("zarr"), needs("pyarrow")]

ONE = {"device": "cpu", "cores": 1, "processes": 1, "memory": "1GiB", "poll_interval": 0.3}


@pytest.fixture
def base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where clusters keep their files; at the end no process may be left."""
    marker = f"HPCDASK_TEST={uuid.uuid4().hex}"
    monkeypatch.setenv(*marker.split("="))
    yield tmp_path / "clusters"
    try:
        wait_for(lambda: not leftovers(marker), 30, "all to be gone")
    finally:
        left = leftovers(marker)
        end(left)
        assert not left, describe(left)


@pytest.fixture
def results(tmp_path: Path) -> Path:
    folder = tmp_path / "results"
    folder.mkdir()
    return folder


def make(base: Path, **keywords):
    given = {**ONE, "shared_temp_directory": str(base), "n_workers": 1, **keywords}
    return hpcdask.LocalCUDAJobCluster(name="mine", detached=True, **given)


def why() -> str:
    """Waits for the cluster's end."""
    folder = detached.find("mine")
    wait_for(lambda: ClusterFolder.open(folder.path).ended, 120, "its end")
    return ControlRecord.read(folder).why


def numbers() -> da.Array:
    x = da.arange(1000, chunks=300).persist()
    wait(x)
    return x


def test_at_the_idle_end(base: Path, results: Path):
    """The notebook is long gone; the second list takes the place of the first."""
    import pandas as pd
    from dask import dataframe as dd

    with make(base, idle_timeout="5s") as cluster, cluster.get_client() as client:
        x = numbers()
        cluster.save_before_end(results, gone=x, x=x)
        table = dd.from_pandas(pd.DataFrame({"a": range(10)}), npartitions=2).persist()
        cluster.save_before_end(results, x=x, table=table)
        assert client.list_datasets() == ("save_before_end/table", "save_before_end/x")
        shown = f"x not saved yet, table not saved yet, in {results}"
        wait_for(lambda: f"before its end: {shown}" in repr(cluster), 30, "it to be shown")
        assert shown in cluster._repr_html_()
    assert "nobody used it for 5 s (idle_timeout). Before its end: x saved at " in why()
    assert sorted(os.listdir(results)) == ["table", "x"]
    assert np.array_equal(hpcdask.load(results / "x").compute(), np.arange(1000))
    assert hpcdask.load(results / "table").a.sum().compute() == 45


def test_at_sigterm_while_it_computes(base: Path, results: Path):
    """What others compute does not matter; what is not computed in time is not saved."""

    def slow(block: np.ndarray) -> np.ndarray:
        time.sleep(1000)
        return block

    with make(base, n_workers=2) as cluster, cluster.get_client() as client:
        x = numbers()
        late = da.ones(4).map_blocks(slow, meta=np.empty(0)).persist()
        cluster.save_before_end(results, late=late, x=x)
        wait_for(lambda: any(client.processing().values()), 60, "it to compute")
        psutil.Process(detached.find("mine").owner.pid).send_signal(signal.SIGTERM)
        told = why()
    assert "SIGTERM" in told
    assert "x saved at " in told
    assert "late not saved: that takes longer than the 20 s it had" in told
    assert os.listdir(results) == ["x"]
    assert hpcdask.load(results / "x").sum().compute() == 499500


def test_shutdown_after_a_failed_save(base: Path, results: Path, capfd: pytest.CaptureFixture[str]):
    """One that is in the way, and one that is replaced."""
    hpcdask.save(da.zeros(3), results / "x")
    with make(base) as cluster, cluster.get_client():
        x = numbers()
        cluster.save_before_end(results, x=x, y=x)
        (results / "y").mkdir()
        cluster.shutdown()
    assert f"y not saved: {results}/y is there" in why()
    assert len(hpcdask.load(results / "x")) == 1000


def test_what_is_refused(base: Path, results: Path):
    with make(base) as cluster, cluster.get_client() as client:
        x = da.ones(4)
        with pytest.raises(UsageError, match=r"x is not persisted: x = x\.persist\(\)"):
            cluster.save_before_end(results, x=x)
        with pytest.raises(UsageError, match="no Bag"):
            cluster.save_before_end(results, x=bag.from_sequence([1]).persist())
        y = client.persist(x)
        with pytest.raises(UsageError, match=r"there is no folder .*nowhere: make it first"):
            cluster.save_before_end(results / "nowhere", y=y)
        with LocalCluster(n_workers=0, dashboard_address=":0") as other, Client(other) as elsewhere:
            z = elsewhere.persist(x)
            with pytest.raises(UsageError, match="z is persisted in another cluster"):
                cluster.save_before_end(results, z=z)
        cluster.save_before_end(results, y=y)
        cluster.save_before_end(results)
        assert client.list_datasets() == ()
        cluster.shutdown()
    assert "Before its end" not in why()
    assert os.listdir(results) == []
