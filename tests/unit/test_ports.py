"""Ports from a range: what is understood, which is taken, what is said when there is none."""

from __future__ import annotations

import contextlib
import socket
from dataclasses import replace
from types import SimpleNamespace

import dask
import pytest
from click.testing import CliRunner

from hpcdask import cli
from hpcdask.bootstrap.ranks import Rank
from hpcdask.comm.ucx_config import ucx_environment
from hpcdask.doctor.links import PortFacts, check_range
from hpcdask.errors import ClusterError, UsageError
from hpcdask.node.placement import Inventory
from hpcdask.runner.plan import make_plan
from hpcdask.security import ports
from hpcdask.spec.parsing import parse_port_range
from hpcdask.spec.specs import RunSpec, WorkerSpec
from listeners import free_range, is_free, text


def bound(port: int) -> socket.socket:
    """Listen as a server of another program does."""
    return socket.create_server(("", port))


# What is understood


@pytest.mark.parametrize("given", ["20000-20999", "20000:20999", " 20000 - 20999 "])
def test_a_range(given):
    assert parse_port_range(given, "--port-range") == "20000-20999"
    assert WorkerSpec(port_range=given).to_argv() == ["--port-range", "20000-20999"]


@pytest.mark.parametrize(
    "given", ["", "20000", "20999-20000", "80-90", "60000-70000", "a-b", 20000, "-1-5", "1-2-3"]
)
def test_no_range(given):
    with pytest.raises(UsageError) as caught:
        WorkerSpec(port_range=given)
    for word in ("--port-range: ", repr(given), "20000-20999", "20000:20999", "1024", "65535"):
        assert word in str(caught.value)
    with pytest.raises(UsageError, match=r"^port_range: "):
        WorkerSpec.from_keywords({"port_range": given})


def test_dask_s_configuration_is_the_default():
    with dask.config.set({"hpcdask.port-range": "30000:30100"}):
        assert WorkerSpec().configured().port_range == "30000-30100"
        assert WorkerSpec(port_range="20000-20999").configured().port_range == "20000-20999"
    with (
        dask.config.set({"hpcdask.port-range": "many"}),
        pytest.raises(UsageError, match=r"^hpcdask\.port-range: 'many' is not a range"),
    ):
        WorkerSpec().configured()
    assert WorkerSpec().configured().port_range is None


def test_ucx_gets_it_by_its_own_variable():
    spec = WorkerSpec(port_range="20000-20999")
    assert ucx_environment(spec, {}) == {"UCX_TCP_PORT_RANGE": "20000-20999"}
    assert ucx_environment(spec, {"UCX_TCP_PORT_RANGE": "1-2"}) == {}


# Which is taken


def test_taken_ports_are_left_out_until_none_is_free():
    free = free_range(3)
    with contextlib.ExitStack() as stack:
        for _ in free:
            stack.enter_context(ports.choose(bound, text(free)))
        assert not any(map(is_free, free))
        with pytest.raises(ClusterError) as caught:
            ports.choose(bound, text(free))
    for word in (f"all 3 ports of {text(free)}", socket.gethostname(), "needs 3", "--port-range"):
        assert word in str(caught.value)


# Too few


@pytest.mark.parametrize(("size", "fits"), [(14, False), (15, True)])
def test_a_range_that_cannot_be_enough_for_a_node(size, fits):
    spec = RunSpec(device="cpu", port_range=f"20000-{19999 + size}")
    seen = {rank: Inventory(rank, "node1", rank, (), (0, 1), 1 << 34) for rank in range(4)}
    rank = Rank(0, 4, 0, 4, "node1", "openmpi", "1")
    told = "20000-20013 has 14 ports, and 4 workers on node1 need at least 15"
    with contextlib.nullcontext() if fits else pytest.raises(UsageError, match=told):
        made = make_plan(spec, rank, seen, job=None)
        assert len(made.placements) == 4


# The doctor


def test_the_doctor_counts_free_ports():
    free = free_range(8)
    assert PortFacts.read() is None
    with ports.within(text(free)), bound(free[3]):
        facts = PortFacts.read()
    assert facts == PortFacts(text(free), 8, 7)

    def check(facts: PortFacts, workers: int) -> tuple[str, str]:
        (found,) = check_range(facts, SimpleNamespace(workers=workers))
        return found.status, found.value

    enough = "7 of 8 ports are free, enough for the scheduler and 1 worker, with ucx 0"
    assert check(facts, 1) == ("ok", f"{text(free)}: {enough}")
    assert check(facts, 2) == ("error", f"{text(free)}: {enough}")
    status, value = check(replace(facts, size=1000, free=999), 1)
    assert (status, value.endswith("332 workers, with ucx 199")) == ("ok", True)


def test_a_batch_script_has_the_range_that_is_configured_where_it_is_made():
    def submit(*words: str) -> str:
        command = ["submit", "--dry-run", "--system", "slurm", *words, "-m", "timeit"]
        return CliRunner().invoke(cli.main, command).output

    assert "--port-range" not in submit()
    with dask.config.set({"hpcdask.port-range": "20000:20099"}):
        assert "-m hpcdask.run --port-range 20000-20099 -m timeit" in submit()
        assert "-m hpcdask.run --port-range=30000-30099 -m" in submit(
            "--run", "--port-range=30000-30099"
        )
    with dask.config.set({"hpcdask.port-range": "20000-20013"}):
        assert "has 14 ports, and 4 workers on the first node need" in submit("--gpus-per-node=4")
