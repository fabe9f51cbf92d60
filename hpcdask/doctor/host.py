"""Host of a node: name, shared memory, folder for spilled data, job, and limits of processes."""

from __future__ import annotations

import contextlib
import os
import re
import resource
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from dask.utils import format_bytes

from hpcdask.bootstrap import resources
from hpcdask.logs import plural, spans
from hpcdask.node.scratch import KEY, base_folder, configured_source
from hpcdask.queues.registry import how_to_request, job_id, title_and_request
from hpcdask.spec.records import Record

from .report import Finding, Status, slow

if TYPE_CHECKING:
    from .nodes import Node

finding, of_process, of_job = (partial(Finding, one) for one in ("node", "process", "job"))
GIB = 2**30
#: File systems that other nodes share, so that many workers spill through one server.
NETWORK_FILE_SYSTEMS = {
    "nfs", "nfs4", "lustre", "gpfs", "beegfs", "beegfs_nodev", "ceph", "cephfs", "cifs", "smb3",
    "panfs", "pvfs2", "orangefs", "wekafs", "afs", "9p", "glusterfs", "daos", "quobyte", "vast",
}  # fmt: skip
NETWORK_FUSE = re.compile(r"fuse\.(?!fuse-overlayfs$|squashfuse$)")
#: Variables, and parts of Dask's configuration, that change how fast workers exchange and compute.
VARIABLES = re.compile(
    r"UCX_|DASK_(DISTRIBUTED__COMM|UCX|RMM|TEMPORARY)|CUDA_|CUPY_|NVIDIA_VISIBLE|RAPIDS_LIBUCX"
)
LEFT_OUT = "False", "UCX leaves it out", "Remove it (hpcdask's own option is --disable-nvlink)"
#: Variables and keys of Dask's configuration that cost speed: how slow values begin, what is lost,
#: and advice.
SLOW_SETTINGS = {
    "CUDA_LAUNCH_BLOCKING": ("[^0]", "each kernel is waited for", "It is for debugging: unset it"),
    "UCX_LOG_LEVEL": ("debug|trace|data|req", "each message is logged", "Unset it"),
    "distributed-ucxx.nvlink": LEFT_OUT,
    "distributed-ucxx.infiniband": LEFT_OUT,
    "distributed-ucxx.cuda-copy": LEFT_OUT,
    "distributed.comm.compression": ("(?!None|False|auto).", "data is compressed", "Unset it"),
}
#: Open files of a process that talks to nobody, and more for each worker: two connections to each
#: (data and control), as many from it, and spilled chunks.
FILES, FILES_PER_WORKER = 256, 8
LEAST_PROCESSES, LEAST_SCRATCH, LEAST_WORKER_MEMORY = 2048, 20 * GIB, 8 * GIB
UNLIMITED = resource.RLIM_INFINITY
#: Seconds for a command of SLURM.
COMMAND_DEADLINE_S = 8.0
#: Part of an answer where SLURM is installed, and the machine belongs to none.
NO_SLURM = "establish a configuration source"
#: Variables by which the systems tell a job of its GPUs.
GPU_VARIABLES = re.compile(r"(SLURM|PBS|LSB|SGE|FLUX|_CONDOR)_\w*(GPU|GRES|TRES)", re.IGNORECASE)


@dataclass(frozen=True)
class NameFacts(Record):
    """Name of a node, and its addresses by the name service, none if that does not know it."""

    name: str
    addresses: tuple[str, ...] = ()

    @classmethod
    def read(cls) -> NameFacts:
        """Ask the name service."""
        name, found = socket.gethostname(), []
        with contextlib.suppress(OSError):
            found = socket.getaddrinfo(name, None)
        return cls(name, tuple(sorted({str(entry[4][0]) for entry in found})))


@dataclass(frozen=True)
class FolderFacts(Record):
    """Folder with the size and type of its file system; `source` is what names the folder."""

    path: str
    writable: bool = False
    size: int = 0
    free: int = 0
    type: str = ""
    source: str = ""

    @classmethod
    def read(cls, path: str) -> FolderFacts:
        """Read size and type, and write a file."""
        import psutil

        found = cls(path)
        with contextlib.suppress(OSError):
            space, mounts = psutil.disk_usage(path), psutil.disk_partitions(all=True)
            found = cls(path, False, space.total, space.free, mount_type(path, mounts))
            with tempfile.TemporaryFile(dir=path) as probe:
                probe.write(b"x")
            found = replace(found, writable=True)
        return found


def read_scratch() -> FolderFacts:
    """Return the facts of a worker's folder for spilled data, by Dask's configuration or TMPDIR."""
    existing, source = base_folder(), configured_source()
    named = next((name for name in ("TMPDIR", "TEMP", "TMP") if os.environ.get(name)), "")
    if named and not source:
        path = os.environ[named]
        source = named if os.path.abspath(path) == existing else f"{named}={path} cannot be written"
    while not os.path.exists(existing):  # hpcdask makes it, as far as it may
        existing = os.path.dirname(existing)
    return replace(FolderFacts.read(existing), path=base_folder(), source=source)


def mount_type(path: str, mounts: Iterable[Any]) -> str:
    """Return the type of the file system of a path, by psutil's partitions."""
    path = os.path.join(os.path.realpath(path), "")
    inside = [one for one in mounts if path.startswith(os.path.join(one.mountpoint, ""))]
    # a later mount hides an earlier one
    return str(max(reversed(inside), key=lambda one: len(one.mountpoint)).fstype) if inside else ""


def check_name(known: NameFacts, node: Node) -> Iterator[Finding]:
    """Yield a finding on whether the node knows its own name."""
    if known.addresses:
        yield finding("host name", "ok", f"leads to {', '.join(known.addresses)}")
    else:
        advice = "Add it to /etc/hosts or DNS, or name the network with --interface"
        yield finding("host name", "warning", f"{known.name} leads to no address", advice)


def check_shared_memory(known: FolderFacts, node: Node) -> Iterator[Finding]:
    """Yield a finding on where UCX, NCCL and Python's multiprocessing exchange data."""
    value = f"{format_bytes(known.free)} free of {format_bytes(known.size)}"
    if not known.writable:
        advice = "Processes exchange data through it: in a container, docker run --ipc=host"
        yield finding(known.path, "error", "cannot be written", advice)
    elif known.free < GIB:
        advice = "Remove what is left there; in a container, docker run --ipc=host or --shm-size=8g"
        yield finding(known.path, "warning", value, advice)
    else:
        yield finding(known.path, "ok", value)


def check_scratch(known: FolderFacts, node: Node) -> Iterator[Finding]:
    """Yield a finding on whether data can spill, and stays on this node."""
    where = f"{known.path} ({known.source})" if known.source else known.path
    value = f"{where}, {known.type}, {format_bytes(known.free)} free"
    other = "there or" if known.source.startswith(KEY) else "with TMPDIR or"
    advice = f"Name a folder on a disk of the node's own, {other} with --local-directory"
    if not known.writable:
        yield finding("scratch", "error", f"{where} cannot be written", advice)
    elif known.type in NETWORK_FILE_SYSTEMS or NETWORK_FUSE.match(known.type):
        yield slow("node", "scratch", f"on the network: {value}", advice)
    elif known.type in ("tmpfs", "ramfs"):
        advice = f"Spilled data stays in memory. {advice}"
        yield finding("scratch", "warning", f"in memory: {value}", advice)
    elif known.free < LEAST_SCRATCH:
        yield finding("scratch", "warning", value, f"Little room to spill to. {advice}")
    else:
        yield finding("scratch", "ok", value)


@dataclass(frozen=True)
class JobFacts(Record):
    """Job of this process, how to get a GPU, its variables about GPUs, and SLURM's answer or ""."""

    system: str = ""
    job: str | None = None
    request: str = ""
    gpus: dict[str, str] = field(default_factory=dict)
    slurm: str = ""

    @classmethod
    def read(cls) -> JobFacts:
        """Read the job's variables, and ask SLURM: its controller, but not from all of its jobs."""
        (system, _), job = title_and_request(), job_id()
        gpus = {name: value for name, value in os.environ.items() if GPU_VARIABLES.match(name)}
        slurm = _answer("srun", "--version") if job else _answer("scontrol", "ping")
        return cls(system, job, how_to_request(job), gpus, slurm)


def _answer(*command: str) -> str:
    """Return the end of what a command prints, or why it does not answer; empty without it."""
    if not shutil.which(command[0]):
        return ""
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=COMMAND_DEADLINE_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{command[0]} does not answer: {error}"
    return "; ".join(f"{done.stdout}{done.stderr}".splitlines()[-2:]) or "prints nothing"


def check_job(known: JobFacts, node: Node) -> Iterator[Finding]:
    """Yield findings on the job on one node, and on SLURM."""
    if known.job:
        gpus = " ".join(f"{name}={value}" for name, value in sorted(known.gpus.items()))
        value = f"{known.system} {known.job.partition('.r')[0]}"
        yield of_job("job", "ok", f"{value}, {gpus or 'no GPUs by its variables'}")
    if known.slurm.startswith("slurm") or " is UP" in known.slurm:
        yield of_job("SLURM", "ok", known.slurm)
    elif known.slurm:
        advice = "See scontrol ping, and munge -n | unmunge; tell the site's staff"
        none_here = not known.job and NO_SLURM in known.slurm
        value = f"does not work here: {known.slurm}"
        yield of_job("SLURM", "note" if none_here else "warning", value, advice)


@dataclass(frozen=True)
class ProcessFacts(Record):
    """Cores, bytes, limits and settings of a rank; of `locked_memory` the soft and hard limit."""

    cores: tuple[int, ...]
    memory: int
    host_memory: int
    open_files: int
    locked_memory: tuple[int, int]
    processes: int
    quota: int | None = None
    env: dict[str, str] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def read(cls) -> ProcessFacts:
        """Read the limits of this process."""
        import dask.config
        import psutil

        config = {name: dask.config.get(name, None) for name in SLOW_SETTINGS if "." in name}
        return cls(
            cores=tuple(sorted(resources.launcher_cores())),
            memory=resources.job_memory(),
            host_memory=int(psutil.virtual_memory().total),
            open_files=resource.getrlimit(resource.RLIMIT_NOFILE)[1],  # raised to it at the start
            locked_memory=resource.getrlimit(resource.RLIMIT_MEMLOCK),
            processes=resource.getrlimit(resource.RLIMIT_NPROC)[0],
            quota=resources.cpu_quota(),
            env={name: value for name, value in os.environ.items() if VARIABLES.match(name)},
            config=config,
        )


def check_process(known: ProcessFacts, node: Node) -> Iterator[Finding]:
    """Yield findings on the limits of one of a node's ranks."""
    yield _cores(known, node)
    yield _memory(known, node)
    files, needed = known.open_files, FILES + FILES_PER_WORKER * node.all_workers
    if files == UNLIMITED or files >= needed:
        yield of_process("open files", "ok", "unlimited" if files == UNLIMITED else f"{files}")
    else:
        advice = f"{node.all_workers} workers need about {needed}: have the hard limit raised"
        yield of_process("open files", "error", f"at most {files}", advice)
    if 0 <= known.processes < LEAST_PROCESSES:
        value = f"at most {known.processes}, threads included"
        advice = "A worker has dozens of threads: put ulimit -u 2048 into the job script"
        yield of_process("processes", "warning", value, advice)
    soft, hard = known.locked_memory
    if node.facts.fabric and node.facts.fabric.infiniband and soft != UNLIMITED:
        remedy = "the site's staff must raise it (in slurmd's unit: LimitMEMLOCK=infinity)"
        if hard == UNLIMITED:
            remedy = "put ulimit -l unlimited into the job script"
        advice = f"InfiniBand registers the memory that it sends: {remedy}"
        status: Status = "error" if soft < GIB else "warning"
        yield of_process("locked memory", status, format_bytes(soft), advice)


def _cores(known: ProcessFacts, node: Node) -> Finding:
    owned, value = len(node.cores), f"{len(node.cores)} ({spans(node.cores)})"
    if known.quota and known.quota < owned:
        owned = known.quota
        value += f", of which a cgroup allows the time of {owned}"
    if not node.gpus or owned >= 2 * node.workers:
        return of_process("cores", "ok", value)
    value += f" for {plural(node.workers, 'worker')}"
    advice = "Workers communicate in threads: request at least 2 a GPU (srun --cpus-per-task=4)"
    return of_process("cores", "warning", value, advice)


def _memory(known: ProcessFacts, node: Node) -> Finding:
    value, each = format_bytes(known.memory), known.memory // node.workers
    if known.memory < known.host_memory:
        value += f" of the host's {format_bytes(known.host_memory)}"
    if not node.gpus or each >= LEAST_WORKER_MEMORY:
        return of_process("host memory", "ok", value)
    value += f", {format_bytes(each)} for each worker"
    advice = "Libraries alone take several GB: request more, for example --mem-per-gpu=64G"
    return of_process("host memory", "warning", value, advice)
