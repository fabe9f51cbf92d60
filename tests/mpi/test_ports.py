"""A run whose ports come from a range: all that its processes listen on."""

from __future__ import annotations

import signal

import pytest

from launching import name_of, needs, wait_for
from listeners import free_range, listening_ports, text
from running import Site

pytestmark = pytest.mark.mpi
LAUNCHERS = ("mpirun", "mpiexec", "prte", "orte", "hydra_pmi")
under = pytest.mark.parametrize("site", ["openmpi", "mpich", "alone"], indirect=True)


def of_run(site: Site) -> list[int]:
    """Ports of all processes of a run, without those of the launcher and its daemons.

    MPICH's launcher leaves its sockets to the ranks.
    """
    processes = site.processes()
    theirs = [one for one in processes if name_of(one).startswith(LAUNCHERS)]
    own = listening_ports(theirs)
    found = listening_ports(processes)
    return [port for sock, port in found.items() if sock not in own]


@under
def test_all_listen_in_the_range(site: Site):
    ports = free_range(60)
    run = site.start("--port-range", text(ports), "--workers-min", "1", "waits.py")
    run.line("ready")
    workers = 2 if site.launcher.name != "no launcher" else 1
    all_of_them = 3 * workers + 2  # scheduler, dashboard
    found = wait_for(
        lambda: len(listening := of_run(site)) >= all_of_them and listening,
        what="all to listen",
    )
    assert set(found) <= set(ports), found
    run.signal(signal.SIGTERM)
    ended = run.end()
    assert not ended.errors, ended


def test_too_small_a_range_is_refused_before_workers_start(site: Site):
    ports = free_range(8)
    ended = site.run("--port-range", text(ports), "waits.py")
    assert ended.code == 2, ended
    (error,) = ended.errors
    assert f"{text(ports)} has 8 ports, and 2 workers on" in error
    assert "need at least 9" in error


@needs("ucxx")
def test_ucx_listens_in_the_range_too(site: Site):
    ports = free_range(80)
    options = ("--port-range", text(ports), "--protocol", "ucx")
    run = site.start(*options, "waits.py", env={"UCX_TLS": "tcp,self,sm"})
    run.line("ready")
    found = of_run(site)
    assert set(found) <= set(ports), found
    assert len(found) >= 2 * 5 + 2
    run.signal(signal.SIGTERM)
    run.end()
