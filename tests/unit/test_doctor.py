"""The doctor: what recorded facts of several machines mean, and how facts are gathered."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import io
import json
import os
import sys
import tempfile
import time
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from clock import stretched
from hpcdask.bootstrap.ranks import Rank
from hpcdask.comm.fabric import Fabric, Interface, Port
from hpcdask.comm.ucx_config import UcxInstall
from hpcdask.doctor import command, gpus, nccl, node, nodes, queue, report
from hpcdask.doctor.collect import Gathering
from hpcdask.doctor.findings import Finding
from hpcdask.doctor.gpus import GpusFacts
from hpcdask.doctor.launch import Launch, Route
from hpcdask.doctor.nodes import RankFacts
from hpcdask.doctor.queue import QueueFacts
from hpcdask.errors import installing

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


def a_gpu(index: int, **changes: Any) -> Facts:
    near = list(range(64)) if index < 4 else list(range(64, 128))
    return {
        "uuid": f"GPU-{index}",
        "sliced": False,
        "index": index,
        "name": "NVIDIA H200",
        "memory": 140 * GIB,
        "free": 139 * GIB,
        "cores": near,
        "numa": index // 4,
        "compute_mode": 0,
        "pcie_width": 16,
        "pcie_max_width": 16,
        "pcie_max_gen": 5,
        "clock_limits": 1,
        "nvlinks": 18,
        "ecc_uncorrected": 0,
        "retirement_pending": False,
        "remap_failed": False,
        "persistence": 1,
        "processes": [],
        **changes,
    }


def facts_of(cards: list[Facts], ucx: UcxInstall = PYPI, **more: Any) -> Facts:
    """What one rank gathered on a node of 128 cores with these GPUs, on ext4, without a job."""
    uuids = [card["uuid"] for card in cards if not card["sliced"]]
    pairs = [(a, b) for i, a in enumerate(uuids) for b in uuids[i + 1 :]]
    fabric = Fabric(
        interfaces=(Interface("eth0", "10.1.0.7", "ethernet", 100_000),),
        nvlink=tuple(pairs),
        ucx=ucx,
        gpus=tuple(uuids),
    )
    driver = {"driver": "580.65.06", "cuda": [13, 0]} if cards else {}
    folder = {"path": "/dev/shm", "writable": True, "size": 1000 * GIB, "free": 990 * GIB}
    return {
        "process": {
            "pinned": list(range(128)),
            "cores": list(range(128)),
            "memory": 2000 * GIB,
            "host_memory": 2000 * GIB,
            "env": {},
            "config": {},
            "nofile": [1_048_576, 1_048_576],
            "memlock": [INFINITE, INFINITE],
            "nproc": [INFINITE, INFINITE],
        },
        "gpus": {"device_files": bool(cards), "gpus": cards, **driver},
        "fabric": json.loads(json.dumps(dataclasses.asdict(fabric))),
        "software": {
            "python": "3.12.4",
            "executable": "/opt/env/bin/python",
            "kernel": "5.14.0",
            "packages": dict(CUDA13),
            "unfit": [],
        },
        "mpi": {"version": "4.1.1", "library": "Open MPI v5.0.8", "error": ""},
        "name": {"name": "node1", "addresses": ["10.1.0.7"], "error": ""},
        "shared_memory": {**folder, "type": "tmpfs"},
        "scratch": {**folder, "path": "/scratch", "source": "TMPDIR", "type": "ext4"},
        "queue": {"system": "", "job": None, "request": "", "gpus": {}},
        "ports": None,
        "configuration": {"findings": []},
        **more,
    }


def nvlink_box() -> Facts:
    return facts_of([a_gpu(index) for index in range(8)])


def infiniband_node() -> Facts:
    """A node of a cluster with UCX from PyPI, which has no InfiniBand."""
    facts = facts_of([a_gpu(index) for index in range(4)])
    port = Port("mlx5_0:1", "InfiniBand", "ACTIVE", 400_000, True)
    facts["fabric"]["infiniband"] = [dataclasses.asdict(port)]
    return facts


def mig_box() -> Facts:
    cards = [
        a_gpu(0, uuid=f"MIG-{n}", sliced=True, name="NVIDIA H200 MIG 1g.18gb", memory=16 * GIB,
              free=16 * GIB, pcie_width=None)
        for n in range(3)
    ]  # fmt: skip
    return facts_of(cards)


def laptop() -> Facts:
    facts = facts_of([], NO_UCX, mpi={"version": ""})
    facts["software"]["packages"] = {"dask": "2026.8.0", "distributed": "2026.8.0"}
    facts["process"] |= {"nofile": [1024, 1_048_576], "memlock": [8 << 20, 8 << 20]}
    return facts


def rank_facts(report: Facts) -> RankFacts:
    problems = {name: one["problem"] for name, one in report.items() if one and "problem" in one}
    known = {name: one for name, one in report.items() if name not in problems}
    return RankFacts.from_json(json.loads(json.dumps({**known, "problems": problems})))


def heard(*reports: Facts, hosts: list[str] | None = None, launcher: str = "none") -> Launch:
    """A launch of which these ranks reported, on one node unless `hosts` says otherwise."""
    hosts = hosts or ["node1"] * len(reports)
    rank = Rank(0, len(hosts), 0, hosts.count(hosts[0]), hosts[0], launcher, "test")
    known = dict(enumerate(map(rank_facts, reports)))
    return Launch(rank, 60, "10.1.0.7:4000", dict(enumerate(hosts)), known)


def examine(*reports: Facts, **more: Any) -> report.Report:
    return command.build(heard(*copy.deepcopy(reports), **more))


def only(made: report.Report, topic: str) -> Finding:
    found = [finding for finding in made.every() if finding.topic == topic]
    assert len(found) == 1, [(one.topic, one.value) for one in made.every()]
    return found[0]


def bad(made: report.Report) -> list[str]:
    return [finding.topic for finding in made.every() if finding.status not in ("ok", "note")]


# Whole machines


def test_an_nvlink_box_is_well():
    made = examine(nvlink_box())
    assert bad(made) == []
    assert made.exit_code == 0
    assert made.verdict == "ok: nothing keeps Dask from running at full speed on these GPUs"
    assert only(made, "NVLink").value == "between all GPUs"
    assert only(made, "GPUs").value == "8 x NVIDIA H200, 140.00 GiB"
    assert only(made, "PCIe").value == "gen 5 x16"
    assert only(made, "NVLink links").value == "18 up on each"
    assert only(made, "protocol").value.startswith("auto would choose ucx")


@pytest.mark.parametrize("tls", ["tcp", "tcp,sm,cuda_copy", "^cuda_ipc", "^cuda"])
def test_ucx_tls_without_cuda_ipc_is_slow(tls):
    facts = nvlink_box()
    facts["process"]["env"]["UCX_TLS"] = facts["fabric"]["ucx"]["tls"] = tls
    made = examine(facts)
    found = only(made, "UCX_TLS")
    assert found.status == "warning"
    assert "slow" in found.value
    assert "NVLink is not used" in found.value
    assert "Unset UCX_TLS" in found.advice
    assert made.exit_code == 1
    assert made.verdict == "slow: Dask runs, but not at full speed (UCX_TLS)"


def test_infiniband_that_ucx_cannot_use():
    made = examine(infiniband_node(), infiniband_node(), hosts=["node1", "node2"])
    found = [one for one in made.every() if one.topic == "UCX and InfiniBand"]
    assert len(found) == 2
    assert all("slow: " in one.value for one in found)
    assert "RAPIDS_LIBUCX_PREFER_SYSTEM_LIBRARY=true" in found[0].advice
    assert made.exit_code == 1
    facts = infiniband_node()
    facts["fabric"]["ucx"] |= {"source": "system", "transports": ["cma", "cuda", "ib", "rdmacm"]}
    assert bad(examine(facts, facts, hosts=["node1", "node2"])) == []


def test_infiniband_wants_locked_memory():
    facts = infiniband_node()
    facts["fabric"]["ucx"]["transports"] = ["cuda", "ib"]
    facts["process"]["memlock"] = [8 << 20, INFINITE]
    found = only(examine(facts), "locked memory")
    assert (found.status, found.value) == ("error", "8.00 MiB")
    assert "ulimit -l unlimited" in found.advice
    facts["fabric"]["infiniband"] = []
    assert bad(examine(facts)) == []


def test_a_mig_box():
    made = examine(mig_box())
    assert bad(made) == []
    assert only(made, "NVLink").value == "not between MIG slices"
    assert only(made, "GPUs").value == "3 x NVIDIA H200 MIG 1g.18gb, 16.00 GiB"
    assert only(made, "protocol").value.startswith("auto would choose tcp: MIG")


def test_a_laptop_is_fine_without_a_gpu():
    made = examine(laptop())
    assert (bad(made), made.exit_code) == ([], 0)
    assert made.verdict == "ok: Dask runs here, on the CPU"
    found = only(made, "GPUs")
    assert found.value == "no NVIDIA GPU here"
    assert "hpcdask doctor" in found.advice
    assert not [one for one in made.every() if one.topic in ("driver", "rmm", "NVLink", "cupy")]


@pytest.mark.parametrize(
    ("variables", "has"),
    [
        ({"SLURM_STEP_GPUS": "0,1"}, "SLURM_STEP_GPUS=0,1"),
        ({"SLURM_JOB_GPUS": "0", "SLURM_GPUS_PER_NODE": "1"}, "SLURM_JOB_GPUS=0"),
        ({"SLURM_GPUS_ON_NODE": "2"}, "SLURM_GPUS_ON_NODE=2"),
        ({"PBS_NGPUS": "0"}, ""),
        ({"SLURM_GPU_BIND": "none"}, ""),
    ],
)
def test_a_job_with_gpus_and_no_driver_in_sight(variables, has):
    """In a container that was started without --nv it was told to request GPUs."""
    facts = laptop()
    facts["queue"] |= {"system": "SLURM", "job": "7.r0", "request": "srun --gpus-per-task=1"}
    facts["queue"]["gpus"] = variables
    found = only(examine(facts), "GPUs")
    assert found.status == "warning"
    assert ("apptainer exec --nv" in found.advice) is bool(has)
    assert ("Request them" in found.advice) is not bool(has)
    assert has in found.value


@pytest.mark.parametrize("group", sorted(nvlink_box()))
def test_the_rest_is_reported_without_a_group_of_facts(group):
    made = examine(nvlink_box() | {group: {"problem": "boom"}})
    assert made.exit_code == 2
    assert only(made, group.replace("_", " ")).value == "boom"
    assert "boom" in made_text(made)


# Single findings


def one_changed(change: Any, base: Any = nvlink_box) -> report.Report:
    facts = base()
    change(facts)
    return examine(facts)


def gpu_changed(**changes: Any) -> Any:
    def change(facts: Facts) -> None:
        facts["gpus"]["gpus"][3] |= changes

    return change


def packages_changed(**versions: str | None) -> Any:
    def change(facts: Facts) -> None:
        for name, version in versions.items():
            name = name.replace("_", "-")
            facts["software"]["packages"].pop(name, None)
            if version:
                facts["software"]["packages"][name] = version

    return change


def with_env(**variables: str) -> Any:
    return lambda facts: facts["process"]["env"].update(variables)


def changed(group: str, **values: Any) -> Any:
    return lambda facts: facts[group].update(values)


PROCESS = {"pid": 77, "name": "python", "user": "eve", "memory": 3 * GIB}


@pytest.mark.parametrize(
    ("change", "topic", "status", "words"),
    [
        (gpu_changed(ecc_uncorrected=2), "memory errors", "warning", "GPU 3: 2 uncorrected"),
        (gpu_changed(remap_failed=True), "memory errors", "error", "GPU 3"),
        (gpu_changed(retirement_pending=True), "memory errors", "warning", "waits"),
        (gpu_changed(pcie_width=8), "PCIe", "warning", "slow: GPU 3: x8 of x16"),
        (gpu_changed(compute_mode=3), "compute mode", "warning", "exclusive"),
        (gpu_changed(compute_mode=2), "compute mode", "error", "prohibited"),
        (gpu_changed(clock_limits=0x41), "clocks", "warning", "heat"),
        (gpu_changed(nvlinks=17), "NVLink links", "warning", "slow: GPU 3: 17 of 18 links up"),
        (gpu_changed(free=10 * GIB), "free memory", "warning", "10.00 GiB of 140.00 GiB"),
        (gpu_changed(processes=[PROCESS]), "other processes", "warning",
         "77 (python of eve, 3.00 GiB, on GPU 3)"),
        (changed("process", cores=list(range(4))), "NUMA", "warning", "slow: GPU 4-7"),
        (changed("process", cores=[0, 64]), "cores", "warning", "for 8 workers"),
        (changed("process", memory=16 * GIB), "host memory", "warning", "2.00 GiB for each"),
        (changed("process", nofile=[256, 4096]), "open files", "error", "256 (at most 4096)"),
        (changed("process", nproc=[1024, 1024]), "processes", "warning", "1024"),
        (changed("scratch", type="lustre"), "scratch", "warning", "on the network"),
        (changed("scratch", type="fuse.sshfs"), "scratch", "warning", "on the network"),
        (changed("scratch", type="tmpfs"), "scratch", "warning", "in memory"),
        (changed("scratch", writable=False), "scratch", "error", "cannot be written"),
        (changed("scratch", free=GIB), "scratch", "warning", "1.00 GiB free"),
        (changed("shared_memory", size=64 << 20, free=64 << 20), "/dev/shm", "warning",
         "64.00 MiB"),
        (changed("shared_memory", writable=False), "/dev/shm", "error", "cannot be written"),
        (changed("name", error="unknown"), "host name", "warning", "no address"),
        (packages_changed(distributed="2026.6.0"), "dask", "error", "2026.6.0"),
        (packages_changed(dask="2026.8.0"), "dask", "error", "2026.8.0"),
        (changed("software", unfit=["dask==2026.6.0"]), "dask-cuda", "warning", "dask==2026.6.0"),
        (packages_changed(cupy_cuda12x="14.2.0"), "one CUDA", "error", "cupy-cuda12x, "),
        (packages_changed(cuda_bindings=None), "cuda-bindings", "error", "not installed"),
        (packages_changed(rmm_cu13=None), "rmm", "warning", "not installed"),
        (packages_changed(rmm_cu13=None, rmm_cu12="26.10.0"), "one CUDA", "error", "rmm-cu12"),
        (changed("mpi", library="MPICH Version: 4.3"), "mpi4py", "ok", "4.1.1 with MPICH"),
        (with_env(CUDA_LAUNCH_BLOCKING="1"), "CUDA_LAUNCH_BLOCKING", "warning", "slow: "),
        (with_env(UCX_LOG_LEVEL="debug"), "UCX_LOG_LEVEL", "warning", "slow: "),
        (with_env(UCX_NET_DEVICES="ib7"), "UCX_NET_DEVICES", "error", "no ib7"),
        (changed("process", config={"distributed-ucxx.nvlink": False}),
         "distributed-ucxx.nvlink", "warning", "slow: "),
        (changed("process", config={"distributed.comm.compression": "lz4"}),
         "distributed.comm.compression", "warning", "slow: "),
        (lambda facts: facts["fabric"]["ucx"].update(transports=["cma"]), "UCX and NVLink",
         "warning", "slow: "),
        (lambda facts: facts["fabric"].update(ucx=dataclasses.asdict(NO_UCX)), "UCX",
         "warning", "cannot be used"),
    ],
)  # fmt: skip
def test_a_fault_is_found(change, topic, status, words):
    found = only(one_changed(change), topic)
    assert found.status == status
    assert words in found.value
    assert found.advice or status == "ok"


def test_infiniband_that_the_user_s_settings_leave_out():
    facts = infiniband_node()
    facts["fabric"]["ucx"]["transports"] = ["cuda", "ib", "rdmacm"]
    ib0 = Interface("ib0", "10.2.0.7", "infiniband", 400_000)
    facts["fabric"]["interfaces"].append(dataclasses.asdict(ib0))
    facts["process"]["env"] = {"UCX_TLS": "tcp,cuda", "UCX_NET_DEVICES": "eth0"}
    made = examine(facts)
    assert "InfiniBand is not used" in only(made, "UCX_TLS").value
    assert "InfiniBand is not used" in only(made, "UCX_NET_DEVICES").value
    facts["process"]["env"] = {"UCX_TLS": "rc,cuda", "UCX_NET_DEVICES": "mlx5_0:1,eth0"}
    assert bad(examine(facts)) == []
    facts["fabric"]["infiniband"][0]["accessible"] = False
    assert only(examine(facts), "InfiniBand").value == "mlx5_0:1 cannot be opened"


def test_packages_for_a_newer_cuda_than_the_driver_s():
    def change(facts: Facts) -> None:
        facts["gpus"]["cuda"] = [12, 8]

    made = one_changed(change)
    assert only(made, "cupy").status == "error"
    assert "CUDA 12 at most" in only(made, "cupy").advice
    assert installing("cuda12") in only(made, "cupy").advice


def test_a_gpu_that_is_too_old_for_the_newest_cuda():
    """Its driver runs CUDA 13, whose libraries do not know it, and every kernel failed."""

    def change(facts: Facts) -> None:
        for gpu in facts["gpus"]["gpus"]:
            gpu |= {"name": "Tesla V100", "capability": [7, 0]}

    made = one_changed(change)
    assert only(made, "cupy").status == "error"
    assert only(made, "cupy").advice.startswith("Tesla V100 runs CUDA 12 at most")
    assert installing("cuda12") in only(made, "cupy").advice


def test_the_cuda_of_the_packages_that_are_there_is_kept():
    def change(facts: Facts) -> None:
        old = {name.replace("13", "12"): it for name, it in CUDA13.items() if name != "rmm-cu13"}
        facts["software"]["packages"] = old

    made = one_changed(change)
    assert bad(made) == ["rmm"]
    assert only(made, "rmm").advice.endswith(installing("cuda12"))


def test_mpi4py_of_another_mpi_than_the_launcher():
    facts = nvlink_box()
    facts["mpi"]["library"] = "MPICH Version: 4.3"
    assert only(examine(facts, launcher="openmpi"), "mpi4py").status == "warning"
    assert only(examine(facts, launcher="hydra"), "mpi4py").status == "ok"
    facts["mpi"]["error"] = "cannot load libmpi"
    assert only(examine(facts, launcher="hydra"), "mpi4py").status == "warning"
    assert only(examine(facts), "mpi4py").status == "ok"


# Ranks of one node


def confined(index: int) -> Facts:
    """A rank that a cgroup confines to one of eight GPUs."""
    facts = facts_of([a_gpu(index)])
    facts["fabric"]["hidden_gpus"] = 7
    return facts


def test_ranks_without_a_gpu_of_their_own():
    made = examine(*[facts_of([a_gpu(0)])] * 2)
    assert only(made, "GPU of each rank").status == "error"
    made = examine(*[nvlink_box()] * 4)
    assert "4 without work" in only(made, "GPU of each rank").value


def test_a_cgroup_between_ranks_keeps_nvlink_from_them():
    assert only(examine(confined(0), nvlink_box()), "confined").status == "warning"
    made = examine(confined(0), confined(1))
    found = only(made, "confined")
    assert "slow" in found.value
    assert "--gpu-bind=none" in found.advice
    assert only(made, "GPU of each rank").value == "each sees its own"
    assert made.exit_code == 1
    assert made.verdict.startswith("slow:")


def test_what_differs_between_ranks_names_them():
    slow = nvlink_box()
    slow["process"]["env"]["CUDA_LAUNCH_BLOCKING"] = "1"
    made = examine(*[nvlink_box()] * 6, slow, slow)
    assert only(made, "CUDA_LAUNCH_BLOCKING").ranks == (6, 7)
    assert only(made, "open files").ranks == ()
    assert "[ranks 6-7]" in made_text(made)


# Nodes of one launch


def test_differences_between_nodes():
    other = nvlink_box()
    other["software"]["packages"]["distributed"] = "2026.7.0"
    other["software"]["packages"]["dask"] = "2026.7.0"
    other["software"]["kernel"] = "5.15.0"
    other["gpus"]["driver"] = "570.1"
    made = examine(nvlink_box(), nvlink_box(), other, hosts=["node1", "node2", "node3"])
    rows = {row.what: row for row in made.differences}
    assert set(rows) == {"distributed", "dask", "kernel", "driver"}
    assert rows["distributed"].status == "error"
    assert rows["kernel"].status == "ok"
    assert rows["driver"].values == {"node1": "580.65.06", "node2": "580.65.06", "node3": "570.1"}
    assert made.exit_code == 2
    assert any("(node3)" in one.advice for one in made.every() if one.topic == "driver")
    lines = made_text(made).splitlines()
    (heading,) = [line for line in lines if "node1, node2  " in line and "node3" in line]
    (row,) = [line for line in lines if "570.1" in line and "580.65.06" in line]
    assert heading.index("node3") == row.index("570.1")
    assert examine(nvlink_box(), nvlink_box(), hosts=["node1", "node2"]).differences == []


def test_ranks_that_do_not_arrive_or_end_early_are_named():
    launch_ = heard(laptop(), hosts=["node1", "node2", "node1"])
    del launch_.hosts[2]
    made = command.build(launch_)
    assert made.exit_code == 2
    missing, silent = [one for one in made.every() if one.topic == "ranks"]
    assert missing.value.startswith("rank 2 of 3 did not arrive within 60 s (there are 1 on node1")
    assert "--timeout" in missing.advice
    assert silent.value == "rank 1 on node2 ended, or hung, before reporting"


def test_the_scheduler_s_port():
    launch_ = heard(laptop(), laptop(), hosts=["node1", "node2"])
    launch_.routes = {1: Route("10.1.0.7", {})}
    assert "reached from 1 other node" in only(command.build(launch_), "scheduler's port").value
    launch_.hosts[1] = "node1"  # that it reaches itself proves nothing
    assert not [one for one in command.build(launch_).every() if one.topic == "scheduler's port"]
    launch_.hosts[1] = "node2"
    launch_.routes = {1: Route("192.168.0.1", {"10.1.0.7": "no answer in 5 s"})}
    found = only(command.build(launch_), "scheduler's port")
    assert found.status == "error"
    for words in ("node2", "node1 at 10.1.0.7:4000", "no answer in 5 s", "192.168.0.1"):
        assert words in found.value


@pytest.mark.parametrize(
    ("ahead", "status"), [(0.001, "ok"), (30.0, "warning"), (-30.0, "warning"), (7200.0, "error")]
)
def test_clocks(ahead, status):
    launch_ = heard(laptop(), laptop(), hosts=["node1", "node2"])
    launch_.ahead = {1: ahead}
    found = only(command.build(launch_), "clocks")
    assert found.status == status
    assert f"{abs(ahead):.3f} s" in found.value


# The report


def made_text(made: report.Report) -> str:
    with contextlib.redirect_stdout(io.StringIO()) as out:
        report.print_text(made)
    return out.getvalue()


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
    """It was that of warnings, and an acceptance test went on."""
    launch_ = heard(laptop(), hosts=["knoten-ü"])
    monkeypatch.setattr(sys, "stdout", output)
    assert command.show(launch_, as_json) == command.build(launch_).exit_code == 0


def test_text_is_plain_and_ends_with_the_verdict():
    made = examine(nvlink_box())
    text = made_text(made)
    assert "\x1b" not in text
    lines = text.splitlines()
    assert lines[-1] == made.verdict
    assert all(one.topic in text for one in made.every())


def test_json_has_this_form():
    made = json.loads(report.to_json(examine(nvlink_box(), laptop(), hosts=["node1", "node2"])))
    parts = {"verdict", "exit_code", "ranks", "nodes", "between_nodes", "differences"}
    assert set(made) == parts
    places = [(one["host"], one["ranks"]) for one in made["nodes"]]
    assert places == [("node1", [0]), ("node2", [1])]
    findings = [one for each in made["nodes"] for one in each["findings"]] + made["between_nodes"]
    for finding in findings:
        assert set(finding) == {"group", "topic", "status", "value", "advice", "ranks"}
        assert finding["status"] in ("ok", "note", "warning", "error")
        assert finding["advice"] or finding["status"] == "ok"
    for row in made["differences"]:
        assert set(row) == {"what", "status", "values"}
        assert set(row["values"]) <= {"node1", "node2"}


# Gathering


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_group_that_hangs_or_fails_does_not_keep_the_others():
    def fail() -> str:
        raise OSError("no such thing\nhere")

    others, deadline = set(psutil.Process().children()), stretched(1)
    gathering = Gathering(
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
    assert not gathering.hangs
    assert set(psutil.Process().children()) == others
    assert found == {
        "good": "a",
        "large": "x" * 300_000,
        "nothing": None,
        "problems": {
            "hangs": f"did not answer within {deadline} s",
            "fails": "OSError: no such thing here",
            "dies": "its process has died",
        },
    }


def test_mounts():
    mounts = [
        SimpleNamespace(mountpoint=point, fstype=kind)
        for point, kind in (
            *(("/", "ext4"), ("/home", "nfs4"), ("/mnt/mes données", "lustre")),
            *(("/home/my disk", "xfs"), ("/homely", "tmpfs"), ("/homely", "zfs")),
        )
    ]
    for path, kind in {
        "/home/me/x": "nfs4",
        "/homel": "ext4",
        "/home/my disk/x": "xfs",
        "/mnt/mes données": "lustre",
        "/homely": "zfs",
    }.items():
        assert node.mount_type(path, mounts) == kind
    assert node.is_network("nfs4")
    assert node.is_network("fuse.glusterfs")
    assert not node.is_network("ext4")


def test_scratch_is_where_workers_have_it(monkeypatch, tmp_path):
    """Also where Python takes another folder than that of TMPDIR."""
    monkeypatch.setattr("tempfile.tempdir", None)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    found = node.read_scratch()
    assert (found.path, found.source, found.writable) == (str(tmp_path), "TMPDIR", True)
    monkeypatch.setattr("tempfile.tempdir", None)
    monkeypatch.setenv("TMPDIR", str(tmp_path / "missing"))
    found = node.read_scratch()
    assert found.path == tempfile.gettempdir() != str(tmp_path / "missing")
    assert found.source == f"TMPDIR={tmp_path / 'missing'} cannot be written"


def test_mpi_plugins_of_slurm_s_versions():
    old = "srun: MPI types are...\nsrun: none\nsrun: pmi2\nsrun: pmix_v4\nsrun: pmix\n"
    new = (
        "MPI plugin types are...\n\tnone\n\tpmi2\n\tpmix\nspecific pmix plugin versions: pmix_v4\n"
    )
    assert queue.parse_plugins(old) == ("none", "pmi2", "pmix", "pmix_v4")
    assert queue.parse_plugins(new) == ("none", "pmi2", "pmix")


def test_a_job_of_slurm(monkeypatch, tmp_path):
    """A stand-in for srun: its version, and its plugins."""
    srun = tmp_path / "srun"
    srun.write_text("#!/bin/sh\n[ $1 = --version ] && echo slurm 22.05.8 || echo srun: pmi2\n")
    srun.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    environ = {"SLURM_JOB_ID": "7", "SLURM_GPUS_PER_TASK": "1", "SLURM_STEP_ID": "0"}
    facts = nvlink_box() | {"queue": QueueFacts.read(environ).to_json()}
    made = examine(facts)
    assert bad(made) == []
    assert only(made, "job").value == "SLURM 7"
    assert only(made, "GPUs of the job").value == "SLURM_GPUS_PER_TASK=1"
    assert only(made, "srun").value == "slurm 22.05.8, MPI plugins pmi2"
    assert "--mpi=none" in only(made, "srun and MPI").advice
    assert only(made, "srun and MPI").status == "note"


@pytest.mark.parametrize(
    ("words", "warned"), [("Slurmctld(primary) at here is UP", False), ("Munge failed", True)]
)
def test_a_controller_that_does_not_answer(monkeypatch, tmp_path, words, warned):
    """Stand-ins for srun and scontrol."""
    for name, says in {"srun": "slurm 22.05.8", "scontrol": words}.items():
        (tmp_path / name).write_text(f"#!/bin/sh\necho '{says}'\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    made = examine(nvlink_box() | {"queue": QueueFacts.read({}).to_json()})
    assert bad(made) == ["SLURM"] * warned
    assert not warned or "Munge failed" in only(made, "SLURM").value
    in_job = examine(nvlink_box() | {"queue": QueueFacts.read({"SLURM_JOB_ID": "7"}).to_json()})
    assert bad(in_job) == []


@pytest.mark.parametrize("environ", [{}, {"SLURM_JOB_ID": "7"}], ids=["login node", "job"])
@pytest.mark.parametrize(
    ("script", "value"),
    [
        ("echo srun: error: Unknown host; echo srun: fatal: no source", "srun: fatal: no source"),
        ("true", "prints nothing"),
        ("exec sleep 60", "srun does not answer"),
    ],
)
def test_a_slurm_that_does_not_answer(monkeypatch, tmp_path, environ, script, value):
    srun = tmp_path / "srun"
    srun.write_text(f"#!/bin/sh\n{script}\nexit 1\n")
    srun.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setattr(queue, "COMMAND_DEADLINE_S", 0.5 if "sleep" in script else 60)
    facts = nvlink_box() | {"queue": QueueFacts.read(environ).to_json()}
    found = only(examine(facts), "srun")
    assert found.status == ("warning" if environ else "note")
    assert value in found.value
    assert ("does not work here" in found.value) == (not environ)
    assert "srun --version" in found.advice
    assert environ or examine(facts).exit_code == 0


def test_processes_on_a_gpu_are_named_but_not_the_doctor_s_own(nvml, monkeypatch):
    nvml([{"uuid": "GPU-a", "now": {"processes": [[os.getpid(), 5]]}}])
    (process,) = GpusFacts.read().gpus[0].processes
    assert (process.pid, process.memory) == (os.getpid(), 5)
    assert process.name == psutil.Process().name()
    assert process.user == psutil.Process().username()
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
    assert second.processes[0].name is None
    told = json.loads(json.dumps(found.to_json()))
    assert GpusFacts.from_json(told) == found
    facts = facts_of(told["gpus"]) | {"gpus": told}
    assert sorted(bad(examine(facts))) == ["memory errors", "other processes"]


# Who takes part in an all-reduce over NCCL


def test_each_gpu_is_a_member_once():
    def names(*reports: dict[str, Any], **more: Any) -> list[tuple[int, str]]:
        launch_ = heard(*reports, **more)
        found = nccl.members(nodes.assemble(launch_.reports, launch_.hosts))
        return [(one.rank, one.name) for one in found]

    both = facts_of([a_gpu(0), a_gpu(1)])
    assert names(both) == [(0, "GPU 0 of node1"), (0, "GPU 1 of node1")]
    assert names(both, both) == [(0, "GPU 0 of node1"), (1, "GPU 1 of node1")]
    assert names(both, both, both) == [(0, "GPU 0 of node1"), (0, "GPU 1 of node1")]
    one, other = facts_of([a_gpu(0)]), facts_of([a_gpu(0, uuid="GPU-x")])
    assert names(one, other, hosts=["a", "b"]) == [(0, "GPU 0 of a"), (1, "GPU 0 of b")]
    assert names(facts_of([])) == []


# Proof that the packages load


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
          ("GPUs fails", "error", "ended its process with code -11")]),
        (steps({"step": "ucxx"}, ended=None),
         [("ucxx fails", "error", "did not answer within 30 s")]),
        (steps({"step": "ucxx", "text": "UCX 1.21 loads cma, cuda", "seconds": 2}),
         [("ucxx works", "ok", "UCX 1.21 loads cma, cuda (2.0 s)")]),
        (steps({"step": "ucxx", "text": "UCX 1.21 loads cma", "seconds": 2}),
         [("ucxx works", "warning",
           "slow: UCX 1.21 loads cma, not its CUDA module, so NVLink is not used")]),
        (steps(ended=None), [("Python fails", "error", "did not answer within 30 s")]),
    ],
)  # fmt: skip
def test_what_the_stack_s_steps_mean(facts, expected):
    made = examine(nvlink_box() | {"stack": facts})
    found = [one for one in made.every() if one.group == "stack"]
    assert [(one.topic, one.status, one.value) for one in found] == expected
    assert made.exit_code == {"ok": 0, "warning": 1, "error": 2}[expected[-1][1]]


def test_nodes_of_one_name_are_two():
    """Regression: they were one node, on which two ranks shared the GPUs."""
    launch_ = Launch(Rank(0, 2, 0, 1, "localhost", "srun", "test"), 60)
    for rank, boot in enumerate(("a", "b")):
        launch_.place(rank, "localhost", boot)
        launch_.reports[rank] = rank_facts(nvlink_box())
    made = command.build(launch_)
    assert [node.name for node, _ in made.nodes] == ["localhost", "localhost #2"]
    assert only(made, "ranks").value == "2: 1 on localhost, 1 on localhost #2"
