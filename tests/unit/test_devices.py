"""Which GPUs a process sees, which one is whose, and what memory and cores belong to it."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import dask
import pytest

from hpcdask.bootstrap.ranks import Rank
from hpcdask.bootstrap.resources import cpu_quota, job_memory
from hpcdask.comm.transport import Choice
from hpcdask.errors import DeviceError, MissingExtra, UsageError
from hpcdask.gpu import context, driver
from hpcdask.gpu import nvml as nvml_module
from hpcdask.gpu.devices import Gpu, visible_gpus
from hpcdask.node.placement import Inventory, WorkerPlacement, place_workers
from hpcdask.node.scratch import scratch_folder
from hpcdask.runner.plan import assign_devices, make_plan
from hpcdask.spec.specs import RunSpec
from launching import needs

FAKES = str(Path(__file__).parents[1] / "fakes")

FOUR = [
    {"uuid": "GPU-aaaa1111-0000", "name": "Fake A", "memory": 80 << 30, "cores": [0, 1]},
    {"uuid": "GPU-aabb2222-0000", "name": "Fake A", "memory": 80 << 30, "cores": [2, 3]},
    {"uuid": "GPU-cccc3333-0000", "name": "Fake B", "memory": 40 << 30, "cores": None},
    {"uuid": "GPU-dddd4444-0000", "name": "Fake B", "memory": 40 << 30},
]

SLICE = {"name": "Fake A MIG 3g.40gb", "memory": 40 << 30}

MIG = [
    {"uuid": "GPU-aaaa1111-0000", "name": "Fake A", "memory": 80 << 30, "mig": []},
    {
        "uuid": "GPU-aabb2222-0000",
        "memory": 80 << 30,
        "cores": [2, 3],
        "mig": [{"uuid": "MIG-1111", **SLICE}, None, {"uuid": "MIG-2222", **SLICE}, None],
    },
]


def uuids(environ: dict[str, str]) -> list[str]:
    return [gpu.uuid for gpu in visible_gpus(environ)]


A, B, C, D = (gpu["uuid"] for gpu in FOUR)
WHOLE, FIRST, SECOND = "GPU-aaaa1111-0000", "MIG-1111", "MIG-2222"


@pytest.mark.parametrize(
    ("node", "visible", "expected"),
    [
        (FOUR, None, [A, B, C, D]),
        (FOUR, "0", [A]),
        (FOUR, "2,0", [C, A]),
        (FOUR, " 1 , 3 ", [B, D]),
        (FOUR, A, [A]),
        (FOUR, f"{D},{A}", [D, A]),
        (FOUR, "GPU-cccc", [C]),
        (FOUR, "GPU-aab,GPU-d", [B, D]),
        (FOUR, "0,9,1", [A]),  # CUDA stops at the first that does not exist
        (FOUR, "9,0", []),
        (FOUR, "0,", [A]),  # nor is an empty entry all of them
        (FOUR, ",", []),
        (FOUR, "1,,3", [B]),
        (FOUR, "GPU-d,", [D]),
        (FOUR, "GPU-a", []),  # two begin like this
        (FOUR, "G", []),
        (FOUR, "0,-1,1", [A]),
        (FOUR, "GPU-eeee,0", []),
        (FOUR, "", []),
        (FOUR, "-1", []),
        (FOUR, "NoDevFiles", []),
        (MIG, None, [WHOLE, FIRST, SECOND]),
        (MIG, SECOND, [SECOND]),
        (MIG, f"{SECOND},{FIRST}", [SECOND, FIRST]),
        (MIG, "MIG-11", [FIRST]),
        (MIG, "1:1", [SECOND]),
        (MIG, "1.0", [FIRST]),
        (MIG, "1:2", []),
        (MIG, "0", [WHOLE]),
        (MIG, "1", [FIRST, SECOND]),
        ([{**FOUR[0], "forbidden": True}, *FOUR[1:]], None, [B, C, D]),  # by a cgroup
    ],
)
def test_visible_gpus(nvml, node, visible, expected):
    nvml(node)
    assert uuids({} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}) == expected


@pytest.mark.parametrize(
    ("visible", "expected"), [(None, None), ("1", None), ("0,1", None), ("0,2", [A, C]), (D, [D])]
)
def test_a_broken_gpu_stops_those_only_who_want_it(nvml, visible, expected):
    """The advice to leave it out did not help."""
    nvml([FOUR[0], {**FOUR[1], "lost": True}, *FOUR[2:]])
    environ = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    if expected is not None:
        assert uuids(environ) == expected
        return
    with pytest.raises(DeviceError, match="GPU 1 of this node cannot be used: GPU is lost"):
        visible_gpus(environ)


def test_device_files_but_no_nvml(nvml, monkeypatch):
    monkeypatch.setattr(nvml_module, "has_nvidia_driver", lambda: True)
    with pytest.raises(DeviceError, match=r"NVML does not start.*nvidia-smi.*--device cpu"):
        visible_gpus({})
    monkeypatch.setitem(sys.modules, "pynvml", None)
    with pytest.raises(MissingExtra, match=r"nvidia-ml-py.*pip install \"cupy-cuda"):
        visible_gpus({})
    monkeypatch.setattr(nvml_module, "has_nvidia_driver", lambda: False)
    assert visible_gpus({}) == []


@pytest.mark.parametrize("library", [False, True])
def test_windows_has_its_file_for_every_gpu(monkeypatch, library):
    """A laptop without an NVIDIA GPU needed --device cpu."""
    there = {"/dev/dxg", driver.WINDOWS_NVML} if library else {"/dev/dxg"}
    monkeypatch.setattr(driver.os.path, "exists", there.__contains__)
    monkeypatch.setattr(driver.glob, "glob", lambda _: [])
    assert driver.has_nvidia_driver() is library


# --- which one is mine ----------------------------------------------------------------------------


def views(*seen: tuple[str, list[int]]) -> list[Inventory]:
    """One view per rank: its host, and the numbers of the GPUs it sees."""
    local: Counter[str] = Counter()
    result = []
    for rank, (host, numbers) in enumerate(seen):
        gpus = tuple(Gpu(f"{host}-{number}", "Fake", 80 << 30) for number in numbers)
        result.append(Inventory(rank, host, local[host], gpus, (0, 1), 1 << 30))
        local[host] += 1
    return result


def assigned(
    *seen: tuple[str, list[int]], job: str | None = "7.r0", by_hand: bool = False, **asked
) -> list[str | None]:
    """The devices of all ranks, without their hosts; None is the CPU."""
    inventories = views(*seen)
    chosen = assign_devices(inventories, RunSpec(**asked), by_hand=by_hand, job=job)
    assert sorted(chosen) == [one.rank for one in inventories]
    assert all(
        gpu is None or gpu in inventories[rank].gpus for rank in chosen for gpu in chosen[rank]
    )
    return [gpu and gpu.uuid.partition("-")[2] for rank in sorted(chosen) for gpu in chosen[rank]]


@pytest.mark.parametrize(
    ("seen", "around", "taken"),
    [
        ([("n1", [0, 1, 2, 3])] * 4, {}, ["0", "1", "2", "3"]),
        ([("n1", [0, 1, 2, 3])] * 2, {}, ["0", "1"]),
        ([("n1", [2]), ("n1", [0]), ("n1", [1])], {}, ["2", "0", "1"]),
        ([("n1", [0, 1]), ("n1", [0])], {}, ["1", "0"]),
        ([("n1", [0, 1]), ("n2", [0, 1])] * 2 + [("n3", [5])], {}, ["0", "0", "1", "1", "5"]),
        ([("n1", [2, 0])], {"by_hand": True, "job": None}, ["2", "0"]),
        ([("n1", [0, 1])] * 3, {"device": "cpu"}, [None] * 3),
        ([("n1", [])] * 2, {"job": None}, [None] * 2),
    ],
    ids=str,
)
def test_each_rank_takes_one_of_the_gpus_that_it_sees(seen, around, taken):
    assert assigned(*seen, **around) == taken


def test_too_few_distinct():
    with pytest.raises(DeviceError) as caught:
        assigned(*[("n1", [0, 1])] * 2, *[("n2", [0, 1])] * 3)
    for word in ("n2", "3 workers", "2 distinct GPUs", "at most 2", "--oversubscribe"):
        assert word in str(caught.value)
    assert "n1" not in str(caught.value)
    # two ranks are confined to one GPU, and another sits idle: that too is one GPU too few
    with pytest.raises(DeviceError, match="n1"):
        assigned(("n1", [0]), ("n1", [0]), ("n1", [0, 1, 2]))


@pytest.mark.parametrize("ranks", [3, 4, 5, 7, 8])
def test_oversubscribe_shares_evenly(ranks):
    shares = Counter(assigned(*[("n1", [0, 1])] * ranks, oversubscribe=True))
    assert set(shares) == {"0", "1"}
    assert max(shares.values()) - min(shares.values()) <= 1


GIVEN = (
    r"This job \(7\) has GPUs \(SLURM_STEP_GPUS=0,1\): see nvidia-smi there.*apptainer exec --nv"
)


@pytest.mark.parametrize(
    ("device", "environ", "words"),
    [
        ("auto", {"SLURM_JOB_ID": "7"}, r"\(7\).*#SBATCH --gpus-per-node=1.*--gpus-per-task=1"),
        ("cuda", {"SLURM_JOB_ID": "7"}, r"\(7\).*#SBATCH --gpus-per-node=1"),
        ("auto", {"SLURM_JOB_ID": "7", "SLURM_STEP_GPUS": "0,1"}, GIVEN),
        ("auto", {"PBS_JOBID": "7"}, "ngpus=1"),
        ("auto", {"LSB_JOBID": "7"}, "#BSUB -gpu"),
        ("auto", {"OAR_JOB_ID": "7"}, "oarsub"),
        ("cuda", {}, "nvidia-smi.*CUDA_VISIBLE_DEVICES"),
    ],
    ids=str,
)
def test_no_gpu(monkeypatch, device, environ, words):
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(DeviceError, match=words) as caught:
        assigned(("n1", []), ("n2", []), device=device, job="7.r1" if environ else None)
    for word in ("n1", "n2", "--device cpu"):
        assert word in str(caught.value)


# --- cores and memory -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("owned", "near", "expected"),
    [
        ([0, 1, 2, 3], (2, 3, 4), [2, 3]),
        ([3, 1], (7, 8), [1, 3]),
        ([1, 0], (), [0, 1]),
        ([5, 4], None, [4, 5]),
    ],
)
def test_worker_cores(owned, near, expected):
    gpu = None if near is None else Gpu("GPU-0", "Fake", 1, near)
    view = Inventory(0, "n1", 0, (gpu,) if gpu else (), tuple(owned), 1 << 30)
    spec, choice = RunSpec(), Choice("tcp", "")
    (place,) = place_workers(spec, {"a": gpu}, [view], [gpu], choice, None)
    assert list(place.cores) == expected


MIB = 1 << 20


@pytest.fixture
def machine(tmp_path):
    """A function that writes recorded files under a root, which it returns."""

    def write(files: dict[str, str]) -> str:
        for name, text in files.items():
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text + "\n")
        return f"{tmp_path}/"

    return write


JOB_V2 = "system.slice/slurmstepd.scope/job_11"

JOB_V1 = "uid_1000/job_11"


@pytest.mark.parametrize(
    ("environ", "group", "limits", "mebibytes"),
    [
        ({}, f"0::/{JOB_V2}/step_0/user", {JOB_V2: 100, "system.slice": 200}, 100),
        ({}, f"7:memory:/slurm/{JOB_V1}/step_0", {f"{JOB_V1}/step_0": 100, JOB_V1: 150}, 100),
        ({}, "0::/", {"": 100}, 100),
        ({}, "0::/user.slice", {"user.slice": "max"}, None),
        ({"SLURM_MEM_PER_NODE": "100"}, "0::/a", {"a": 80}, 80),
        ({"SLURM_MEM_PER_NODE": "60"}, "0::/a", {"a": 80}, 60),
        ({"SLURM_MEM_PER_CPU": "50", "SLURM_CPUS_ON_NODE": "3"}, "0::/", {}, 150),
        ({"SLURM_MEM_PER_NODE": "0"}, "0::/", {}, None),  # all of the node's memory
    ],
)
def test_the_least_limit_of_memory_counts(machine, environ, group, limits, mebibytes):
    folder = "memory/slurm/" if ":memory:" in group else ""
    name = "memory.limit_in_bytes" if folder else "memory.max"
    files = {
        f"sys/fs/cgroup/{folder}{where}/{name}": str(limit * MIB if limit != "max" else limit)
        for where, limit in limits.items()
    }
    limit = job_memory(environ, machine({"proc/self/cgroup": group, **files}))
    assert limit == (mebibytes * MIB if mebibytes else job_memory({}, machine({})))


@pytest.mark.parametrize(
    ("group", "files", "quota"),
    [
        ("0::/job", {}, None),
        ("0::/job", {"cpu.max": "max 100000"}, None),
        ("0::/job", {"cpu.max": "50000 100000"}, 1),
        ("0::/job", {"cpu.max": "400000 100000", "job/cpu.max": "250000 100000"}, 2),
        (
            "4:cpu,cpuacct:/a",
            {"cpu/a/cpu.cfs_quota_us": "300000", "cpu/a/cpu.cfs_period_us": "100000"},
            3,
        ),
    ],
)
def test_the_cpu_time_of_a_container(machine, group, files, quota):
    """Docker's --cpus, and a pod's limits, bound the number of workers."""
    written = {f"sys/fs/cgroup/{name}": text for name, text in files.items()}
    assert cpu_quota(machine({"proc/self/cgroup": group, **written})) == quota


def placements(rank: Rank, seen: dict[int, Inventory]) -> list[list[WorkerPlacement]]:
    return list(make_plan(RunSpec(device="cpu"), rank, seen, job=None).placements.values())


def test_workers_share_the_cpu_time_that_there_is():
    view = Inventory(0, "n1", 0, (), tuple(range(64)), 1 << 30, quota=4)
    by_hand = Rank(0, 1, 0, 1, "n1", "none", "")
    (places,) = placements(by_hand, {0: view})
    assert len(places) * places[0].nthreads == 4
    mates = {i: dataclasses.replace(view, rank=i, local_index=i) for i in range(2)}
    ranks = Rank(0, 2, 0, 2, "n1", "mpi", "")
    for (place,) in placements(ranks, mates):
        assert place.nthreads == 2


def test_the_scratch_folder_s_variables_are_the_node_s(tmp_path, monkeypatch):
    """Queues' directives and configuration files name them, and no shell expands them."""
    monkeypatch.setenv("NODE_DISK", str(tmp_path))
    monkeypatch.setenv("HOME", str(tmp_path))
    for words in ("$NODE_DISK/a", "${NODE_DISK}/a", "~/a"):
        folder = scratch_folder(words, lambda path: None)
        assert os.path.dirname(folder) == str(tmp_path / "a")
    with pytest.raises(UsageError, match=r"\$NO_DISK is not set on"):
        scratch_folder("$NO_DISK/a", lambda path: None)


@pytest.mark.parametrize("folder", ["/proc/none", "$NO_DISK/a"])
def test_a_scratch_folder_s_error_says_who_named_it(tmp_path, monkeypatch, folder):
    (tmp_path / "site.yaml").write_text(f"temporary-directory: {folder}\n")
    monkeypatch.setattr(dask.config, "paths", [str(tmp_path)])
    with dask.config.set({"temporary-directory": folder}):
        with pytest.raises(UsageError) as caught:
            scratch_folder(None, lambda path: None)
        assert str(caught.value).startswith(f"temporary-directory of {tmp_path}/site.yaml: ")
        assert "TMPDIR" not in str(caught.value)
    with pytest.raises(UsageError, match=r"^--local-directory: .*"):
        scratch_folder(folder, lambda path: None)


# Without NVML

CLOSED = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  {}  Sat Aug 19 01:15:15 UTC 2023\n"

OPEN = "NVRM version: NVIDIA UNIX Open Kernel Module for aarch64  {}  Release Build\n"


@pytest.mark.parametrize(
    ("version", "model", "packages", "expected"),
    [
        ("", "", [], "cuda13"),
        (CLOSED.format("580.65.06"), "NVIDIA H200", [], "cuda13"),
        (OPEN.format("590.44.01"), "NVIDIA GH200 480GB", [], "cuda13"),
        (CLOSED.format("535.104.05"), "NVIDIA A100-SXM4-80GB", [], "cuda12"),
        (OPEN.format("570.172.08"), "NVIDIA H200", [], "cuda12"),
        (CLOSED.format("580.65.06"), "Tesla V100-SXM2-32GB", [], "cuda12"),
        (CLOSED.format("580.65.06"), "NVIDIA H200", ["cupy-cuda12x"], "cuda12"),
        ("", "", ["rmm-cu12"], "cuda12"),
        ("", "", ["cupy-cuda13x", "rmm-cu12"], "cuda13"),
        (CLOSED.format("535.104.05"), "", ["cupy-cuda13x"], "cuda12"),
    ],
)
def test_the_extra_that_messages_name(tmp_path, monkeypatch, version, model, packages, expected):
    """It was CUDA 13's everywhere, whose libraries neither older drivers nor V100 run."""

    def installed(name: str) -> str:
        if name in packages:
            return "1.0"
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", installed)
    folder = tmp_path / "proc/driver/nvidia/gpus/0000:17:00.0"
    folder.mkdir(parents=True)
    (folder / "information").write_text(f"Model: \t\t {model}\n" if model else "")
    if version:
        (tmp_path / "proc/driver/nvidia/version").write_text(f"{version}GCC version: gcc 11.4.0\n")
    assert driver.cuda_extra(f"{tmp_path}/") == expected


# The process that asks

PROBE = """
import multiprocessing
from hpcdask import errors
from hpcdask.node import host_agent

if __name__ == "__main__":
    host_agent.answer_deadline_s = lambda: SECONDS
    multiprocessing.set_forkserver_preload(["change"])
    try:
        gpus, fabric = host_agent.wait_for_probe(host_agent.start_probe())
        print([gpu.uuid for gpu in gpus], fabric.nvlink, len(fabric.gpus))
    except errors.DeviceError as error:
        print(error)
"""


@pytest.fixture
def probed(tmp_path: Path) -> Callable[..., str]:
    """Return a function that gives the report of a probe, after a change of what it calls."""

    def run(change: str = "", deadline: float = 60, **environ: str) -> str:
        (tmp_path / "change.py").write_text(
            "import os, time\nfrom hpcdask.gpu import devices, driver, nvml\n"
            "from hpcdask.node import host_agent\ndriver.has_nvidia_driver = lambda: False\n"
            f"{change}"
        )
        program = tmp_path / "program.py"
        program.write_text(PROBE.replace("SECONDS", str(deadline)))
        path = os.pathsep.join([FAKES, str(tmp_path), os.environ.get("PYTHONPATH", "")])
        done = subprocess.run(
            [sys.executable, program],
            capture_output=True,
            text=True,
            timeout=600,
            env={**os.environ, "PYTHONPATH": path, **environ},
            check=False,
        )
        assert done.returncode == 0, done.stderr
        assert not done.stderr
        return done.stdout.strip()

    return run


def test_a_report_of_gpus_and_what_joins_them(probed):
    gpus = [{**FOUR[0], "nvlink": [B]}, {**FOUR[1], "nvlink": [A]}, FOUR[2]]
    environ = {"FAKE_NVML": json.dumps(gpus), "CUDA_VISIBLE_DEVICES": "2,0"}
    assert probed(**environ) == f"{[C, A]} {((A, B),)} 3"
    gpus[0]["nvlink"] = None
    assert probed(FAKE_NVML=json.dumps(gpus)) == f"{[A, B, C]} () 3"
    assert probed(FAKE_NVML=json.dumps(gpus), CUDA_VISIBLE_DEVICES="") == "[] () 0"


@needs("cuda")
def test_a_context_on_a_device_that_a_dying_process_still_has(monkeypatch):
    from cuda.bindings import driver

    fine, refused = driver.CUresult.CUDA_SUCCESS, driver.CUresult.CUDA_ERROR_DEVICE_UNAVAILABLE
    init, retain, current = mock.Mock(return_value=(fine,)), mock.Mock(), mock.Mock()
    current.return_value = (fine,)
    monkeypatch.setattr(driver, "cuInit", init)
    monkeypatch.setattr(driver, "cuDeviceGet", lambda ordinal: (fine, 0))
    monkeypatch.setattr(driver, "cuDevicePrimaryCtxRetain", retain)
    monkeypatch.setattr(driver, "cuCtxSetCurrent", current)

    retain.side_effect = [(refused, None), (refused, None), (fine, "context")]
    context.make_context()
    current.assert_called_once_with("context")

    monkeypatch.setattr(context, "RELEASE_S", 0.1)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", A)
    retain.side_effect = lambda device: (refused, None)
    says = f"cuDevicePrimaryCtxRetain says CUDA_ERROR_DEVICE_UNAVAILABLE of GPU {A}. See nvidia-smi"
    with pytest.raises(DeviceError, match=says):
        context.make_context()
    init.side_effect = RuntimeError("No libcuda.so.1.")
    with pytest.raises(DeviceError, match=r": No libcuda.so.1. In a container"):
        context.make_context()


def test_a_report_of_what_went_wrong(probed):
    assert "NVML does not start" in probed("nvml.has_nvidia_driver = lambda: True")
    broken = [{"uuid": A, "bus": None}, {"uuid": B}]
    assert "the NVIDIA driver fails: TypeError" in probed(FAKE_NVML=json.dumps(broken))
    assert "has died" in probed("host_agent.visible_gpus = lambda: os.kill(os.getpid(), 9)")


def test_a_driver_that_hangs(probed):
    said = probed("host_agent.visible_gpus = lambda: time.sleep(1)", deadline=0.1)
    assert "did not answer within 0.1 s: see whether nvidia-smi works" in said
