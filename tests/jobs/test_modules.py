"""Functions that the workers cannot import, and functions that end the process."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from distributed import Client, LocalCluster, wait

import hpcdask

MODULE = """
class Number:
    def __init__(self, value):
        self.value = value

def double(number):
    return 2 * number.value

def fail():
    raise Own("text")

class Own(Exception):
    pass
"""


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    folder = tmp_path_factory.mktemp("modules")
    options = {"device": "cpu", "cores": 1, "processes": 1, "memory": "512MiB"}
    with (
        hpcdask.LocalCUDAJobCluster(**options, shared_temp_directory=str(folder)) as cluster,
        cluster.get_client() as client,
    ):
        cluster.scale(2)
        client.wait_for_workers(2, timeout=120)
        yield client


@pytest.fixture
def inlib(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[object]:
    """A module from a folder that the program adds after its client has connected."""
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "inlib.py").write_text(MODULE)
    monkeypatch.syspath_prepend(str(tmp_path / "src"))
    yield importlib.import_module("inlib")
    sys.modules.pop("inlib")


def test_a_module_that_workers_lack_fails_its_task_alone(client: Client, inlib) -> None:
    """Regression: each attempt ended a worker, and three such calls the cluster."""
    sys.path.remove(str(Path(inlib.__file__).parent))
    before = sorted(client.nthreads())
    kept = client.scatter([1, 2, 3])
    for _ in range(5):
        with pytest.raises(ModuleNotFoundError, match="inlib"):
            client.submit(inlib.double, 1, pure=False).result(timeout=60)
        with pytest.raises(ModuleNotFoundError, match="inlib"):
            client.submit(len, [inlib.Number(1)], pure=False).result(timeout=60)
    assert client.gather(client.map(lambda x: x + 1, kept)) == [2, 3, 4]
    assert sorted(client.nthreads()) == before


def test_a_cluster_of_others_stays_as_it_is(client: Client) -> None:
    """Regression: clients of any cluster in the program sent it a plug-in of hpcdask."""
    own = {"n_workers": 1, "processes": False, "dashboard_address": ":0"}
    with LocalCluster(**own) as cluster, Client(cluster, set_as_default=False):
        (worker,) = cluster.workers.values()
        assert not [name for name in worker.plugins if name.startswith("hpcdask")]


def test_a_task_that_calls_sys_exit_fails_alone(client: Client) -> None:
    """Regression: it ended four workers, one after the other, and gave KilledWorker."""
    before = sorted(client.nthreads())
    with pytest.raises(RuntimeError, match=r"called sys.exit\(3\)"):
        client.submit(lambda: sys.exit(3), pure=False).result(timeout=60)
    assert client.submit(sum, [1, 2], pure=False).result(timeout=60) == 3
    assert sorted(client.nthreads()) == before


def test_workers_import_from_a_folder_that_a_client_s_program_adds_later(
    client: Client, inlib
) -> None:
    four = client.submit(inlib.double, inlib.Number(2), workers=max(client.nthreads()))
    assert four.result(timeout=60) == 4


def test_a_client_brings_the_program_s_folders_of_modules(client: Client, inlib) -> None:
    with Client(client.scheduler.address, security=client.security) as later:
        four = later.submit(inlib.double, inlib.Number(2), workers=min(later.nthreads()))
        assert four.result(timeout=60) == 4


def test_a_task_that_recurses_too_deeply_fails(client: Client) -> None:
    """Regression: the client waited for ever, as stock distributed's does."""

    def recurse() -> int:
        return recurse() + 1

    with pytest.raises(Exception, match="maximum recursion"):
        client.submit(recurse, pure=False).result(timeout=60)


def test_a_result_that_cannot_be_read_fails_the_tasks_that_need_it(client: Client) -> None:
    """Regression: they waited for ever, as in https://github.com/dask/distributed/issues/6705."""

    def fail() -> None:
        raise ValueError("unreadable result")

    class Unreadable:
        def __reduce__(self):
            return fail, ()

    here, there = sorted(client.nthreads())
    made = [client.submit(make, workers=here, pure=False) for make in (Unreadable, list)]
    wait(made, timeout=60)
    needs = [client.submit(lambda *_: 1, one, workers=there, pure=False) for one in made]
    both = client.submit(lambda *_: 1, *made, workers=there, pure=False)
    for failing in (needs[0], both, made[0]):
        with pytest.raises(ValueError, match="unreadable result"):
            failing.result(timeout=60)
    assert needs[1].result(timeout=60) == 1
    assert sorted(client.nthreads()) == sorted([here, there])
