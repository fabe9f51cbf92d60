"""A run whose ports come from a range: all that its processes listen on."""

from __future__ import annotations

import signal

import pytest

from launching import name_of, needs, wait_for
from listeners import free_range, listening_ports, text
from running import Site

pytestmark = pytest.mark.mpi
LAUNCHERS = ("mpirun", "mpiexec", "prte", "orte", "hydra_pmi")


def of_run(site: Site) -> list[int]:
    """Ports of all processes of a run, without those of the launcher and its daemons.

    MPICH's launcher leaves its sockets to the ranks.
    """
    processes = site.processes()
    theirs = [one for one in processes if name_of(one).startswith(LAUNCHERS)]
    own = listening_ports(theirs)
    found = listening_ports(processes)
    return [port for sock, port in found.items() if sock not in own]


@pytest.mark.parametrize(
    ("site", "options", "workers"),
    [
        *(("openmpi", (), 2), ("mpich", (), 2), ("alone", (), 1)),
        pytest.param("openmpi", ("--protocol", "ucx"), 2, marks=needs("ucxx")),
    ],
    indirect=["site"],
)
def test_all_listen_in_the_range(site: Site, options: tuple[str, ...], workers: int):
    ports = free_range(80)
    env = {"UCX_TLS": "tcp,self,sm"}
    words = ("--port-range", text(ports), "--workers-min", "1", *options, "waits.py")
    run = site.start(*words, env=env)
    run.line("ready")
    each = 5 if options else 3  # and the scheduler, and its dashboard
    found = wait_for(
        lambda: len(listening := of_run(site)) >= each * workers + 2 and listening,
        what="all to listen",
    )
    assert set(found) <= set(ports), found
    run.signal(signal.SIGTERM)
    ended = run.end()
    assert not ended.errors, ended


def test_too_small_a_range_is_refused_before_workers_start(site: Site):
    ports = free_range(8)
    (error,) = site.run("--port-range", text(ports), "waits.py", code=2).errors
    assert f"{text(ports)} has 8 ports, and 2 workers on" in error
    assert "need at least 9" in error
