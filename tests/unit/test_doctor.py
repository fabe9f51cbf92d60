"""The doctor: what recorded facts of several machines mean, and how facts are gathered."""

from __future__ import annotations

import dataclasses
import io
import json
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import click
import psutil
import pytest

from clock import stretched
from hpcdask.bootstrap.ranks import Rank
from hpcdask.comm.fabric import Fabric, Interface, Port
from hpcdask.comm.ucx_config import UcxInstall
from hpcdask.doctor import command, gpus, host, proofs, report
from hpcdask.doctor.gpus import GpusFacts
from hpcdask.doctor.launch import Arrival, Launch
from hpcdask.doctor.nodes import RankFacts
from hpcdask.doctor.report import Finding, Report
from hpcdask.errors import installing
from launching import wait_for

GIB = 2**30
INFINITE = -1
PYPI = UcxInstall("0.52.0", "1.21.0", "package", ("cma", "cuda"))
NO_UCX = UcxInstall(problem="distributed-ucxx and ucxx are not installed: pip install it")
CUDA13 = {
    "hpcdask": "0.1.0",
    "dask": "2026.7.1",
    "distributed": "2026.7.1",
    "dask-cuda": "26.10.0",
    "rapids-dask-dependency": "26.10.0",
    "cupy-cuda13x": "14.2.0",
    "rmm-cu13": "26.10.0",
    "cuda-bindings": "13.0.3",
    "ucxx-cu13": "0.52.0",
    "libucx-cu13": "1.21.0",
    "distributed-ucxx-cu13": "0.52.0",
}
Facts = dict[str, Any]
Change = Callable[[Facts], object]


LINKS = {"pcie_width": 16, "pcie_max_width": 16, "pcie_max_gen": 5, "nvlinks": 18}


def a_gpu(index: int, **changes: Any) -> Facts:
    first = 64 * (index // 4)
    return {
        "uuid": f"GPU-{index}",
        "index": index,
        "name": "NVIDIA H200",
        "memory": 140 * GIB,
        "free": 139 * GIB,
        "cores": list(range(first, first + 64)),
        **LINKS,
        **changes,
    }


def facts_of(cards: list[Facts], ucx: UcxInstall = PYPI, **more: Any) -> Facts:
    """Return what one rank gathered on a node of 128 cores with these GPUs, without a job."""
    uuids = [card["uuid"] for card in cards if card["uuid"].startswith("GPU-")]
    pairs = tuple((a, b) for i, a in enumerate(uuids) for b in uuids[i + 1 :])
    interface = Interface("eth0", "10.1.0.7", "ethernet", 100_000)
    fabric = Fabric(interfaces=(interface,), nvlink=pairs, ucx=ucx, gpus=tuple(uuids))
    driver = {"driver": "580.65.06", "cuda": [13, 0]} if cards else {}
    folder = {"path": "/dev/shm", "writable": True, "size": 1000 * GIB, "free": 990 * GIB}
    return {
        "process": {
            "cores": list(range(128)),
            "memory": 2000 * GIB,
            "host_memory": 2000 * GIB,
            "open_files": 1_048_576,
            "locked_memory": [INFINITE, INFINITE],
            "processes": INFINITE,
            "env": {},
            "config": {},
        },
        "gpus": {"device_files": bool(cards), "gpus": cards, **driver},
        "fabric": json.loads(json.dumps(dataclasses.asdict(fabric))),
        "software": {
            "python": "3.12.4",
            "executable": "/opt/env/bin/python",
            "kernel": "5.14.0",
            "packages": dict(CUDA13),
        },
        "mpi": {"version": "4.1.1", "linked": "Open MPI v5.0.8", "error": ""},
        "name": {"name": "node1", "addresses": ["10.1.0.7"]},
        "shared_memory": {**folder, "type": "tmpfs"},
        "scratch": {**folder, "path": "/scratch", "source": "TMPDIR", "type": "ext4"},
        "queue": {},
        "ports": None,
        "configuration": [],
        **more,
    }


def nvlink_box() -> Facts:
    return facts_of([a_gpu(index) for index in range(8)])


def infiniband_node() -> Facts:
    """Return a node whose UCX, of conda, uses its InfiniBand."""
    ucx = dataclasses.replace(PYPI, source="system", transports=("cma", "cuda", "ib", "rdmacm"))
    facts = facts_of([a_gpu(index) for index in range(4)], ucx)
    known = Port("mlx5_0:1", "InfiniBand", "ACTIVE", 400_000, True)
    facts["fabric"]["infiniband"] = [dataclasses.asdict(known)]
    return facts


def mig_box() -> Facts:
    slices = {"name": "NVIDIA H200 MIG 1g.18gb", "memory": 16 * GIB, "free": 16 * GIB}
    return facts_of(
        [a_gpu(0, uuid=f"MIG-{n}", pcie_width=None, nvlinks=0, **slices) for n in range(3)]
    )


def laptop() -> Facts:
    facts = facts_of([], NO_UCX, mpi={"version": ""})
    facts["software"]["packages"] = {"dask": "2026.8.0", "distributed": "2026.8.0"}
    facts["process"] |= {"open_files": 4096, "locked_memory": [8 << 20, 8 << 20]}
    return facts


def rank_facts(facts: Facts) -> RankFacts:
    problems = {name: one["problem"] for name, one in facts.items() if one and "problem" in one}
    known = {name: one for name, one in facts.items() if name not in problems}
    return RankFacts.from_json(json.loads(json.dumps({**known, "problems": problems})))


def launched(*ranks: Facts, hosts: str = "", launcher: str = "none") -> Launch:
    """Return a launch of which these ranks reported, all on node1 unless `hosts` names others."""
    names = hosts.split() or ["node1"] * len(ranks)
    rank = Rank(0, len(names), 0, names.count(names[0]), names[0], launcher, "test")
    launch = Launch(rank, 60, "10.1.0.7:4000")
    launch.arrivals = {number: Arrival(name, "10.1.0.7") for number, name in enumerate(names)}
    for number, facts in enumerate(ranks):
        launch.arrivals[number].facts = rank_facts(facts)
    return launch


def examine(*ranks: Facts, **more: Any) -> Report:
    made = launched(*ranks, **more).report()
    assert all(one.advice for one in made.every() if one.status != "ok")
    return made


def of_topic(made: Report, topic: str) -> list[Finding]:
    return [finding for finding in made.every() if finding.topic == topic]


def only(made: Report, topic: str) -> Finding:
    found = of_topic(made, topic)
    assert len(found) == 1, [(one.topic, one.value) for one in made.every()]
    return found[0]


def bad(made: Report) -> list[str]:
    return [finding.topic for finding in made.every() if finding.status not in ("ok", "note")]


def text_of(made: Report) -> str:
    return click.unstyle(report.to_text(made))


# Machines that are well


ON_GPUS = "ok: nothing keeps Dask from running at full speed on these GPUs"


@pytest.mark.parametrize(
    ("machine", "verdict", "gpus", "nvlink", "protocol"),
    [
        (nvlink_box, ON_GPUS, "8 x NVIDIA H200, 140.00 GiB, PCIe gen 5 x16, 18 NVLinks",
         ["between all GPUs"], "ucx"),
        (mig_box, ON_GPUS, "3 x NVIDIA H200 MIG 1g.18gb, 16.00 GiB", ["not between MIG slices"],
         "tcp: MIG"),
        (laptop, "ok: Dask runs here, on the CPU", "no NVIDIA GPU here", [], "tcp: workers comp"),
    ],
)  # fmt: skip
def test_machines_that_are_well(machine, verdict, gpus, nvlink, protocol):
    made = examine(machine())
    assert (bad(made), made.exit_code, made.verdict) == ([], 0, verdict)
    assert only(made, "GPUs").value == gpus
    assert [one.value for one in of_topic(made, "NVLink")] == nvlink
    assert only(made, "protocol").value.startswith(f"auto would choose {protocol}")
    assert machine is not laptop or not of_topic(made, "driver") + of_topic(made, "cupy")


# Faults of a node


def gpu(number: int = 3, **changes: Any) -> Change:
    return lambda facts: facts["gpus"]["gpus"][number].update(changes)


def every_gpu(**changes: Any) -> Change:
    return lambda facts: [one.update(changes) for one in facts["gpus"]["gpus"]]


def packages(**versions: str | None) -> Change:
    def change(facts: Facts) -> None:
        for name, version in versions.items():
            facts["software"]["packages"].pop(name := name.replace("_", "-"), None)
            if version:
                facts["software"]["packages"][name] = version

    return change


def of_cuda_12(facts: Facts) -> None:
    there = facts["software"]["packages"]
    facts["software"]["packages"] = {name.replace("13", "12"): there[name] for name in there}
    del facts["software"]["packages"]["rmm-cu12"]


def env(**variables: str) -> Change:
    return lambda facts: facts["process"]["env"].update(variables)


def ucx(**changes: Any) -> Change:
    return lambda facts: facts["fabric"]["ucx"].update(changes)


def port(**changes: Any) -> Change:
    return lambda facts: facts["fabric"]["infiniband"][0].update(changes)


def group(name: str, **changes: Any) -> Change:
    return lambda facts: facts[name].update(changes)


PROCESSES = ["77 (python of eve, 3.00 GiB)", "78 (not visible here)"]
#: On the nodes of the name: change, topic, status, words of the value, words of value or advice.
FAULTS: dict[Callable[[], Facts], list[tuple[Change, str, str, str, str]]] = {
    nvlink_box: [
        # GPUs
        (gpu(ecc_uncorrected=2), "memory errors", "warning", "2 uncorrected", "(GPU 3)"),
        (gpu(remap_failed=True), "memory errors", "error", "not be remapped", "(GPU 3)"),
        (gpu(retirement_pending=True), "memory errors", "warning", "waits", "(GPU 3)"),
        (gpu(pcie_width=8), "PCIe", "warning", "slow: x8 of x16 lanes", "(GPU 3)"),
        (gpu(compute_mode=3), "compute mode", "warning", "exclusive", "nvidia-smi -c 0"),
        (gpu(compute_mode=2), "compute mode", "error", "prohibited", "(GPU 3)"),
        (gpu(clock_limits=0x49), "clocks", "warning", "slow: ", "slowdown, temperature"),
        (every_gpu(clock_limits=0x80), "clocks", "warning", "slow: ", "power brake ->"),
        (gpu(nvlinks=17), "NVLink links", "warning", "slow: 17 of 18 links up", "(GPU 3)"),
        (gpu(free=10 * GIB), "free memory", "warning", "10.00 GiB of 140", "(GPU 3)"),
        (gpu(processes=PROCESSES), "other processes", "warning", "; ".join(PROCESSES), "kill PID"),
        (group("process", cores=[0, 1, 2, 3]), "NUMA", "warning", "slow: ", "(GPU 4-7)"),
        (group("fabric", nvlink=[["GPU-0", "GPU-1"]]), "NVLink", "ok", "1 of 28 pairs", "topo -m"),
        # Limits and folders
        (group("process", cores=[0, 64]), "cores", "warning", "for 8 workers", "request"),
        (group("process", quota=4), "cores", "warning", "the time of 4", "request"),
        (group("process", memory=16 * GIB), "host memory", "warning", "2.00 GiB for", "--mem"),
        (group("process", open_files=256), "open files", "error", "at most 256", "320"),
        (group("process", processes=1024), "processes", "warning", "1024", "ulimit -u"),
        (group("scratch", type="lustre"), "scratch", "warning", "on the network", "TMPDIR"),
        (group("scratch", type="fuse.sshfs"), "scratch", "warning", "network", "TMPDIR"),
        (group("scratch", type="tmpfs"), "scratch", "warning", "in memory", "stays in mem"),
        (group("scratch", writable=False), "scratch", "error", "cannot be written", "disk"),
        (group("scratch", free=GIB), "scratch", "warning", "1.00 GiB free", "Little room"),
        (group("shared_memory", free=64 << 20), "/dev/shm", "warning", "64.00 MiB", "--shm-size"),
        (group("shared_memory", writable=False), "/dev/shm", "error", "cannot be", "--ipc=host"),
        (group("name", addresses=[]), "host name", "warning", "node1 leads to no", "DNS"),
        # Packages
        (packages(distributed="2026.6.0"), "dask", "error", "2026.6.0", "CVE-2026-23528"),
        (packages(dask="2026.8.0"), "dask", "error", "2026.8.0", "dask==2026.7.1"),
        (packages(cupy_cuda12x="14.2.0"), "one CUDA", "error", "cupy-cuda12x, ", "new env"),
        (packages(rmm_cu13=None, rmm_cu12="26"), "one CUDA", "error", "rmm-cu12", "new"),
        (packages(cuda_bindings=None), "cuda-bindings", "error", "not installed", "start"),
        (packages(cupy_cuda13x=None), "cupy", "warning", "not installed", installing("cuda13")),
        (of_cuda_12, "rmm", "warning", "not installed", installing("cuda12")),
        (group("gpus", cuda=[12, 8]), "cupy", "error", "for CUDA 13",
         f"CUDA 12 at most: pip uninstall cupy-cuda13x; {installing('cuda12')}"),
        (every_gpu(name="Tesla V100", capability=[7, 0]), "cupy", "error", "for CUDA 13",
         f"Tesla V100 runs CUDA 12 at most: pip uninstall cupy-cuda13x; {installing('cuda12')}"),
        (group("gpus", cuda=[11, 4]), "cupy", "error", "for CUDA 13", "need a driver for"),
        # Links
        (group("fabric", interfaces=[]), "interfaces", "warning", "none", "ip addr"),
        (ucx(transports=["cma"]), "UCX and NVLink", "warning", "slow: ", "unset RAPIDS"),
        (group("fabric", ucx=dataclasses.asdict(NO_UCX)), "UCX", "warning", "cannot", "pip"),
        # Settings
        (env(UCX_TLS="tcp"), "UCX_TLS", "warning", "slow: ", "NVLink is not used"),
        (env(UCX_TLS="tcp,cuda_copy"), "UCX_TLS", "warning", "slow: ", "Unset UCX_TLS"),
        (env(UCX_TLS="^cuda_ipc"), "UCX_TLS", "warning", "slow: ", "NVLink is not used"),
        (env(CUDA_LAUNCH_BLOCKING="1"), "CUDA_LAUNCH_BLOCKING", "warning", "slow", "unset"),
        (env(UCX_LOG_LEVEL="DEBUG"), "UCX_LOG_LEVEL", "warning", "slow: ", "Unset it"),
        (group("process", config={"distributed-ucxx.nvlink": False}), "distributed-ucxx.nvlink",
         "warning", "slow: ", "--disable-nvlink"),
        (group("process", config={"distributed.comm.compression": "lz4"}),
         "distributed.comm.compression", "warning", "slow: with lz4", "Unset it"),
    ],
    infiniband_node: [
        (group("process", locked_memory=[8 << 20, INFINITE]), "locked memory", "error", "8.00",
         "ulimit -l unlimited"),
        (group("process", locked_memory=[2 * GIB] * 2), "locked memory", "warning", "2.0", "site"),
        (ucx(transports=["cuda"]), "UCX and InfiniBand", "warning", "slow: ", "RAPIDS_LIBUCX_"),
        (port(accessible=False), "InfiniBand", "warning", "mlx5_0:1 cannot be", "/dev/infini"),
        (port(state="DOWN"), "InfiniBand", "warning", "mlx5_0:1 DOWN", "No port is active"),
        (env(UCX_TLS="tcp,cuda"), "UCX_TLS", "warning", "slow: ", "InfiniBand is not"),
        (env(UCX_NET_DEVICES="eth0"), "UCX_NET_DEVICES", "warning", "InfiniBand", "port: mlx5"),
    ],
    laptop: [
        (group("gpus", device_files=True), "GPUs", "warning", "none of this node's", "cpu"),
    ],
}  # fmt: skip


@pytest.mark.parametrize(
    ("base", "change", "topic", "status", "value", "more"),
    [
        pytest.param(base, *fault, id=f"{fault[1]}: {fault[3]}")
        for base, faults in FAULTS.items()
        for fault in faults
    ],
)
def test_a_fault_is_found(base, change, topic, status, value, more):
    facts = base()
    change(facts)
    made = examine(facts)
    found = only(made, topic)
    assert found.status == status
    assert value in found.value
    assert more in f"{found.value} -> {found.advice}"
    assert (topic in made.verdict) is (status != "ok")


@pytest.mark.parametrize(
    ("base", "change"),
    [
        (laptop, group("process", locked_memory=[8 << 20, 8 << 20])),
        (infiniband_node, env(UCX_TLS="rc,cuda", UCX_NET_DEVICES="mlx5_0:1,eth0")),
        (nvlink_box, env(CUDA_LAUNCH_BLOCKING="0", UCX_LOG_LEVEL="warn")),
        (nvlink_box, group("process", config={"distributed.comm.compression": "auto"})),
        (infiniband_node, env()),
    ],
)
def test_what_is_no_fault(base, change):
    facts = base()
    change(facts)
    assert bad(examine(facts)) == []


@pytest.mark.parametrize("group", sorted(nvlink_box()))
def test_the_rest_is_reported_without_a_group_of_facts(group):
    made = examine(nvlink_box() | {group: {"problem": "boom"}})
    assert made.exit_code == 2
    assert only(made, group.replace("_", " ")).value == "boom"
    assert "boom" in text_of(made)


@pytest.mark.parametrize(
    ("launcher", "mpi", "status"),
    [
        ("hydra", {"linked": "Open MPI v5.0.11"}, "warning"),
        ("openmpi", {"linked": "MPICH Version: 4.3"}, "ok"),  # whose ranks meet without MPI
        ("srun", {"error": "cannot load libmpi"}, "ok"),
        ("hydra", {"linked": "MPICH Version: 4.3"}, "ok"),
        ("hydra", {"error": "cannot load libmpi"}, "warning"),
        ("none", {"error": "cannot load libmpi"}, "ok"),
    ],
)
def test_mpi4py_loads_the_mpi_of_the_launcher(launcher, mpi, status):
    facts = nvlink_box()
    facts["mpi"] |= mpi
    found = only(examine(facts, launcher=launcher), "mpi4py")
    assert (found.status, next(iter(mpi.values())) in found.value) == (status, True)


# Ranks of one node


def confined(index: int) -> Facts:
    """Return the facts of a rank that a cgroup confines to one of eight GPUs."""
    facts = facts_of([a_gpu(index)])
    facts["fabric"]["hidden_gpus"] = 7
    return facts


@pytest.mark.parametrize(
    ("ranks", "status", "value"),
    [
        ([facts_of([a_gpu(0)])] * 2, "error", "2 workers for GPUs but only 1"),
        ([nvlink_box()] * 4, "warning", "4 without work"),
        ([nvlink_box()] * 8, "ok", "each sees all and takes its own"),
        ([facts_of([a_gpu(0)]), facts_of([a_gpu(1)])], "ok", "each sees its own"),
    ],
)
def test_each_rank_has_a_gpu_of_its_own(ranks, status, value):
    found = only(examine(*ranks), "GPU of each rank")
    assert (found.status, value in found.value) == (status, True), found


def test_a_cgroup_between_ranks_keeps_nvlink_from_them():
    assert only(examine(confined(0), nvlink_box()), "confined").status == "warning"
    made = examine(confined(0), confined(1))
    assert "--gpu-bind=none" in only(made, "confined").advice
    assert only(made, "GPU of each rank").value == "each sees its own"
    assert made.exit_code == 1
    assert made.verdict.startswith("slow: ")
    assert "belong to other jobs" in only(examine(confined(0)), "confined").value


def test_what_differs_between_ranks_names_them():
    slow = nvlink_box()
    slow["process"]["env"]["CUDA_LAUNCH_BLOCKING"] = "1"
    made = examine(*[nvlink_box()] * 6, slow, slow)
    assert only(made, "CUDA_LAUNCH_BLOCKING").ranks == (6, 7)
    assert only(made, "open files").ranks == ()
    assert "[ranks 6-7]" in text_of(made)


# Nodes of one launch


def test_differences_between_nodes():
    other = nvlink_box()
    packages(dask="2026.7.0", distributed="2026.7.0", rmm_cu13=None)(other)
    other["gpus"]["driver"] = "570.1"
    other["process"]["env"]["UCX_MAX_RNDV_RAILS"] = "1"
    made = examine(nvlink_box(), nvlink_box(), other, hosts="node1 node2 node3")
    found = {one.topic: one for one in made.between_nodes if "differ" in one.group}
    assert {topic: one.status for topic, one in found.items()} == {
        "dask": "error", "distributed": "error", "rmm-cu13": "warning", "driver": "warning",
        "settings": "warning",
    }  # fmt: skip
    assert found["driver"].value == "580.65.06 on node1, node2; 570.1 on node3"
    assert found["rmm-cu13"].value.endswith("; missing on node3")
    assert all(one.advice.endswith("leave out node3") for one in found.values())
    assert made.exit_code == 2
    assert not examine(nvlink_box(), nvlink_box(), hosts="node1 node2").exit_code


def test_ranks_that_do_not_arrive_or_end_early_are_named():
    launch = launched(laptop(), hosts="node1 node2 node1")
    del launch.arrivals[2]
    made = launch.report()
    assert made.exit_code == 2
    missing, silent = of_topic(made, "ranks")
    assert missing.value.startswith("rank 2 of 3 did not arrive within 60 s (there are 1 on node1")
    assert "--timeout" in missing.advice
    assert silent.value == "rank 1 on node2 ended, or hung, before reporting"


def test_the_scheduler_s_port():
    launch = launched(laptop(), laptop(), hosts="node1 node2")
    assert "reached from 1 other node" in only(launch.report(), "scheduler's port").value
    launch.arrivals[1] = Arrival("node2", "192.168.0.1", {"10.1.0.7": "no answer in 5 s"})
    found = only(launch.report(), "scheduler's port")
    assert found.status == "error"
    for words in ("node2", "node1 at 10.1.0.7:4000", "no answer in 5 s", "192.168.0.1"):
        assert words in found.value
    launch.arrivals[1].host = "node1"  # that it reaches itself proves nothing
    assert not of_topic(launch.report(), "scheduler's port")


@pytest.mark.parametrize(
    ("ahead", "status"), [(0.001, "ok"), (30.0, "warning"), (-30.0, "warning"), (7200.0, "error")]
)
def test_clocks(ahead, status):
    launch = launched(laptop(), laptop(), hosts="node1 node2")
    launch.arrivals[1].ahead = ahead
    found = only(launch.report(), "clocks")
    assert found.status == status
    assert f"{abs(ahead):.3f} s" in found.value


def test_nodes_of_one_name_are_two():
    """Regression: they were one node, on which two ranks shared the GPUs."""
    launch = Launch(Rank(0, 2, 0, 1, "localhost", "srun", "test"), 60)
    for rank, boot in enumerate(("a", "b")):
        launch.place(rank, "localhost", boot, facts=rank_facts(nvlink_box()))
    made = launch.report()
    assert [node.name for node, _ in made.nodes] == ["localhost", "localhost #2"]
    assert only(made, "ranks").value == "2: 1 on localhost, 1 on localhost #2"


# The report


class Narrow(io.StringIO):
    """A standard output of seven bits."""

    encoding = "ascii"

    def write(self, text: str) -> int:
        return super().write(text.encode("ascii").decode())


class Full(io.StringIO):
    """One on a full disk."""

    def write(self, text: str) -> int:
        raise OSError(28, "No space left on device")


@pytest.mark.parametrize("output", [None, Full(), Narrow()])
@pytest.mark.parametrize("as_json", [False, True])
def test_the_exit_code_is_that_of_the_findings_whatever_becomes_of_the_text(
    monkeypatch, output, as_json
):
    """Regression: it was that of warnings, and an acceptance test went on."""
    launch = launched(laptop(), hosts="knoten-ü")
    monkeypatch.setattr(sys, "stdout", output)
    assert command.show(launch, as_json) == launch.report().exit_code == 0
    if isinstance(output, Narrow):
        assert "knoten-\\" in output.getvalue()


def test_text_has_all_topics_and_ends_with_the_verdict():
    made = examine(nvlink_box(), laptop(), hosts="node1 node2")
    text = text_of(made)
    assert text.splitlines()[-1] == made.verdict
    assert all(one.topic in text for one in made.every())
    (line,) = [line for line in text.splitlines() if "driver" in line and "runs CUDA 13.0" in line]
    assert line.endswith(" [node1]")


def test_json_has_this_form():
    made = json.loads(report.to_json(examine(nvlink_box(), laptop(), hosts="node1 node2")))
    assert set(made) == {"verdict", "exit_code", "ranks", "nodes", "between_nodes"}
    places = [(one["host"], one["ranks"]) for one in made["nodes"]]
    assert places == [("node1", [0]), ("node2", [1])]
    for finding in [*made["nodes"][0]["findings"], *made["between_nodes"]]:
        assert set(finding) == {"group", "topic", "status", "value", "advice", "ranks"}
        assert finding["status"] in ("ok", "note", "warning", "error")


# Gathering


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_group_that_hangs_or_fails_does_not_keep_the_others():
    def fail() -> str:
        raise OSError("no such thing\nhere")

    deadline = stretched(1)
    gathering = command.Gathering(
        {
            "good": lambda: "a",
            "large": lambda: "x" * 300_000,
            "hangs": lambda: time.sleep(600),
            "fails": fail,
            "dies": lambda: os._exit(3),
            "nothing": lambda: None,
        },
        deadline,
    )
    found = gathering.results()
    wait_for(lambda: not multiprocessing.active_children(), 30, "its processes to be gone")
    assert found.pop("problems") == {
        "hangs": f"did not answer within {deadline} s",
        "fails": "OSError: no such thing here",
        "dies": "its process has died",
    }
    assert found == {"good": "a", "large": "x" * 300_000, "fails": None, "nothing": None}


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/home/me/x", "nfs4"),
        ("/homel", "ext4"),
        ("/home/my disk/x", "xfs"),
        ("/mnt/mes données", "lustre"),
        ("/homely", "zfs"),
    ],
)
def test_the_file_system_of_a_folder(path, kind):
    points = "/ ext4,/home nfs4,/mnt/mes données lustre,/home/my disk xfs,/homely tmpfs,/homely zfs"
    mounts = (point.rpartition(" ") for point in points.split(","))
    mounts = [SimpleNamespace(mountpoint=point, fstype=fstype) for point, _, fstype in mounts]
    assert host.mount_type(path, mounts) == kind


def test_scratch_is_where_workers_have_it(monkeypatch, tmp_path):
    """Also where Python takes another folder than that of TMPDIR."""
    monkeypatch.setattr("tempfile.tempdir", None)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    found = host.read_scratch()
    assert (found.path, found.source, found.writable) == (str(tmp_path), "TMPDIR", True)
    monkeypatch.setattr("tempfile.tempdir", None)
    monkeypatch.setenv("TMPDIR", str(tmp_path / "missing"))
    found = host.read_scratch()
    assert found.path == tempfile.gettempdir() != str(tmp_path / "missing")
    assert found.source == f"TMPDIR={tmp_path / 'missing'} cannot be written"


@pytest.fixture
def job(monkeypatch, tmp_path):
    """Return what the doctor finds in a job of SLURM, or outside, with stand-ins for commands."""

    def look(variables: dict[str, str], facts: Facts, **scripts: str) -> Report:
        for name, script in scripts.items():
            (tmp_path / name).write_text(f"#!/bin/sh\n{script}\n")
            (tmp_path / name).chmod(0o755)
        monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep if scripts else None)
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        return examine(facts | {"queue": host.JobFacts.read().to_json()})

    return look


IN_JOB = {"SLURM_JOB_ID": "7"}


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        ({"SLURM_STEP_GPUS": "0,1"}, ("has GPUs (SLURM_STEP_GPUS=0,1)", "apptainer exec --nv")),
        ({"SLURM_GPU_BIND": "none"}, ("got none: request them", "--device cpu")),
    ],
    ids=["a container without --nv", "none requested"],
)
def test_a_job_without_a_gpu_in_sight(job, variables, words):
    found = only(job(IN_JOB | variables, laptop()), "GPUs")
    assert found.status == "warning"
    assert all(word in found.advice for word in words)


def test_a_job_of_slurm(job):
    made = job(IN_JOB | {"SLURM_GPUS_PER_TASK": "1"}, nvlink_box(), srun="echo slurm 22.05.8")
    assert bad(made) == []
    assert only(made, "job").value == "SLURM 7, SLURM_GPUS_PER_TASK=1"
    assert only(made, "SLURM").value == "slurm 22.05.8"


def test_slurm_s_controller_is_asked_outside_of_jobs(job):
    made = job({}, nvlink_box(), scontrol="echo Slurmctld at here is UP", srun="exit 1")
    assert (only(made, "SLURM").status, made.exit_code) == ("ok", 0)


@pytest.mark.parametrize("inside", [False, True], ids=["login node", "job"])
@pytest.mark.parametrize(
    ("script", "value", "status"),
    [
        ("echo Munge encode failed", "Munge encode failed", "warning"),
        ("true", "prints nothing", "warning"),
        ("exec sleep 60", " does not answer", "warning"),
        ("echo fatal: Could not establish a configuration source", "fatal: Could", "note"),
    ],
)
def test_a_slurm_that_does_not_answer(job, monkeypatch, inside, script, value, status):
    monkeypatch.setattr(host, "COMMAND_DEADLINE_S", 0.5 if "sleep" in script else 60)
    variables, command = (IN_JOB, "srun") if inside else ({}, "scontrol")
    found = only(job(variables, nvlink_box(), **{command: f"{script}\nexit 1"}), "SLURM")
    assert (found.status, value in found.value) == ("warning" if inside else status, True)


def test_processes_on_a_gpu_are_named_but_not_the_doctor_s_own(nvml, monkeypatch):
    nvml([{"uuid": "GPU-a", "now": {"processes": [[os.getpid(), 5]]}}])
    own = psutil.Process()
    found = GpusFacts.read().gpus[0].processes
    assert found == (f"{own.pid} ({own.name()} of {own.username()}, 5 B)",)
    monkeypatch.setattr(gpus, "OWN", psutil.Process().cmdline()[-1])
    assert GpusFacts.read().gpus[0].processes == ()


def test_what_nvml_tells(nvml, monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    now = {"used": GIB, "remapped": [0, 0, 1, 0], "processes": [[2**22 + 7, None]]}
    first = {"uuid": "GPU-a", "cores": [0, 1], "now": {**now, "links": [1, 0, 1, 1]}}
    nvml([first, {"uuid": "GPU-b", "now": now}])
    found = GpusFacts.read()
    assert (found.driver, found.cuda) == ("580.65.06", (13, 0))
    first, second = found.gpus
    assert (first.uuid, first.cores, first.free) == ("GPU-a", (0, 1), 79 * GIB)
    assert first.retirement_pending
    assert first.pcie_width is None  # the stand-in has no such call
    assert (first.nvlinks, second.nvlinks) == (3, 0)
    assert second.index == 1
    assert second.processes == (f"{2**22 + 7} (not visible here)",)
    facts = facts_of([dataclasses.asdict(one) for one in found.gpus])
    assert sorted(bad(examine(facts))) == ["memory errors", "other processes"]


# Proofs


def test_each_gpu_takes_part_once_in_an_all_reduce_over_nccl():
    def names(*ranks: Facts, **more: Any) -> list[tuple[int, str]]:
        return [*proofs.members(launched(*ranks, **more).nodes()).values()]

    both = facts_of([a_gpu(0), a_gpu(1)])
    assert names(both) == [(0, "GPU 0 of node1"), (0, "GPU 1 of node1")]
    assert names(both, both) == [(0, "GPU 0 of node1"), (1, "GPU 1 of node1")]
    assert names(both, both, both) == [(0, "GPU 0 of node1"), (0, "GPU 1 of node1")]
    one, other = facts_of([a_gpu(0)]), facts_of([a_gpu(0, uuid="GPU-x")])
    assert names(one, other, hosts="a b") == [(0, "GPU 0 of a"), (1, "GPU 0 of b")]
    assert names(facts_of([])) == []


def steps(*lines: Facts, ended: int | None = 0) -> Facts:
    return {"steps": list(lines), "ended": ended}


DONE = {"step": "cupy", "text": "14.2.0", "seconds": 1.0}


@pytest.mark.parametrize(
    ("facts", "expected"),
    [
        (steps({"step": "cupy"}, DONE), [("cupy works", "ok", "14.2.0 (1.0 s)")]),
        (steps({"step": "cupy"}, {"step": "cupy", "error": "ImportError: x", "seconds": 1.0}),
         [("cupy fails", "error", "ImportError: x")]),
        (steps({"step": "cupy"}, DONE, {"step": "GPUs"}, ended=-11),
         [("cupy works", "ok", "14.2.0 (1.0 s)"),
          ("GPUs fails", "error", "its process ended with code -11")]),
        (steps({"step": "ucxx"}, ended=None),
         [("ucxx fails", "error", "no answer within 30 s")]),
        (steps({"step": "ucxx", "text": "UCX 1.21 loads cma, cuda", "seconds": 2}),
         [("ucxx works", "ok", "UCX 1.21 loads cma, cuda (2.0 s)")]),
        (steps({"step": "ucxx", "text": "UCX 1.21 loads cma", "seconds": 2}),
         [("ucxx works", "warning",
           "slow: UCX 1.21 loads cma, not its CUDA module, so NVLink is not used")]),
        (steps(ended=None), [("Python fails", "error", "no answer within 30 s")]),
    ],
)  # fmt: skip
def test_what_the_stack_s_steps_mean(facts, expected):
    made = examine(nvlink_box() | {"stack": facts})
    found = [one for one in made.every() if one.group == "stack"]
    assert [(one.topic, one.status, one.value) for one in found] == expected
    assert made.exit_code == {"ok": 0, "warning": 1, "error": 2}[expected[-1][1]]
