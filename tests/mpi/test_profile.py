"""`--profile`: real py-spy beside workers."""

from __future__ import annotations

from pathlib import Path

import pytest

from clock import clock
from running import Site

pytestmark = pytest.mark.mpi

WORK = """
import os, signal, time
from distributed import Client

def burn_visibly(seconds):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        sum(range(1000))
    return os.getpid()

def main():
    client = Client()
    addresses = {}
    def look():
        found = client.scheduler_info()["workers"]
        addresses.update({one["name"]: address for address, one in found.items()})
        return len(found)

    look()
    names, first = sorted(addresses), dict(addresses)
    given = {"pure": False}
    pids = client.gather([client.submit(burn_visibly, 1, workers=[n], **given) for n in names])
    if os.environ.get("KILL"):
        os.kill(pids[0], signal.SIGKILL)
        while look() < len(names) or first[names[0]] == addresses[names[0]]:
            time.sleep(0.05)
        again = client.submit(burn_visibly, 1, workers=[names[0]], pure=False)
        assert again.result(120) != pids[0]

if __name__ == "__main__":
    main()
    raise SystemExit(3)
"""


@pytest.fixture
def program(site: Site) -> Path:
    path = site.folder / "work.py"
    path.write_text(WORK)
    return path


def start(site: Site, program: Path, *options: str, **given: object) -> object:
    return site.run(*options, program, find=False, timeout=120, **given)


def test_a_flame_graph_for_each_life_of_each_worker(site: Site, program: Path) -> None:
    ended = start(
        site, program, "--profile", "py-spy", "--profile-folder", "graphs", env={"KILL": "1"}
    )
    since = clock()
    assert ended.code == 3, str(ended)
    graphs = sorted((site.folder / "graphs").iterdir())
    assert len(graphs) == 3, ended
    assert sum("burn_visibly" in graph.read_text() for graph in graphs) == 3
    assert f"profiles: one file for each worker in {site.folder / 'graphs'}" in ended.err
    site.check_nothing_left(since)
