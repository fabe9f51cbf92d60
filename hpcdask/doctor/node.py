"""Node's name, shared memory and folder for spilled data, and the limits of its processes."""

from __future__ import annotations

import contextlib
import os
import re
import resource
import socket
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from dask.utils import format_bytes

from hpcdask.bootstrap import resources
from hpcdask.logs import plural, spans
from hpcdask.node.scratch import KEY, base_folder, configured_source
from hpcdask.spec.records import Record

from .findings import GIB, Finding, Reporter

if TYPE_CHECKING:
    from .nodes import Node

say, of_process = Reporter("node"), Reporter("process")
#: File systems that other nodes share, so that many workers spill through one server.
NETWORK_FILE_SYSTEMS = {
    "nfs", "nfs4", "lustre", "gpfs", "beegfs", "beegfs_nodev", "ceph", "cephfs", "cifs", "smb3",
    "panfs", "pvfs2", "orangefs", "wekafs", "afs", "9p", "glusterfs", "daos", "quobyte", "vast",
}  # fmt: skip
LOCAL_FUSE = ("fuse.fuse-overlayfs", "fuse.squashfuse")
LEAST_SHARED_MEMORY, LEAST_SCRATCH = GIB, 20 * GIB
#: Variables, and parts of Dask's configuration, that change how fast workers exchange and compute.
VARIABLES = re.compile(
    r"UCX_|DASK_(DISTRIBUTED__COMM|UCX|RMM|TEMPORARY)|CUDA_|CUPY_|NVIDIA_VISIBLE|RAPIDS_LIBUCX"
)
CONFIGURED = (
    "distributed-ucxx.nvlink",
    "distributed-ucxx.infiniband",
    "distributed-ucxx.cuda-copy",
    "distributed.comm.compression",
)
#: Open files of a process that talks to nobody, and more for each worker: two connections to each
#: (data and control), as many from it, and spilled chunks.
FILES, FILES_PER_WORKER = 256, 8
LEAST_PROCESSES, LEAST_MEMLOCK, LEAST_WORKER_MEMORY = 2048, GIB, 8 * GIB


@dataclass(frozen=True)
class NameFacts(Record):
    """Name of a node, and its addresses by the name service or that service's error."""

    name: str
    addresses: tuple[str, ...] = ()
    error: str = ""

    @classmethod
    def read(cls) -> NameFacts:
        """Ask the name service."""
        name = socket.gethostname()
        try:
            addresses = {str(entry[4][0]) for entry in socket.getaddrinfo(name, None)}
            return cls(name, tuple(sorted(addresses)))
        except OSError as error:
            return cls(name, error=error.strerror or str(error))


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
            space, kind = os.statvfs(path), mount_type(path, psutil.disk_partitions(all=True))
            size, free = space.f_frsize * space.f_blocks, space.f_frsize * space.f_bavail
            found = cls(path, False, size, free, kind)
            with tempfile.TemporaryFile(dir=path) as probe:
                probe.write(b"x")
            found = replace(found, writable=True)
        return found


def read_shared_memory() -> FolderFacts:
    """Return the facts of shared memory's file system."""
    return FolderFacts.read("/dev/shm")


def read_scratch() -> FolderFacts:
    """Return the facts of a worker's folder for spilled data, by Dask's configuration or TMPDIR."""
    existing = path = base_folder()
    source = configured_source()
    if not source and (variable := next(filter(os.environ.get, ("TMPDIR", "TEMP", "TMP")), "")):
        named = os.environ[variable]
        is_it = os.path.abspath(named) == path
        source = variable if is_it else f"{variable}={named} cannot be written"
    while not os.path.exists(existing):  # hpcdask makes it, as far as it may
        existing = os.path.dirname(existing)
    return replace(FolderFacts.read(existing), path=path, source=source)


def mount_type(path: str, mounts: Iterable[Any]) -> str:
    """Return the type of the file system of a path, by psutil's partitions."""
    path = os.path.join(os.path.realpath(path), "")
    inside = [one for one in mounts if path.startswith(os.path.join(one.mountpoint, ""))]
    # a later mount hides an earlier one
    return str(max(reversed(inside), key=lambda one: len(one.mountpoint)).fstype) if inside else ""


def is_network(kind: str) -> bool:
    """Return whether a file system lies on other machines."""
    return kind in NETWORK_FILE_SYSTEMS or (kind.startswith("fuse.") and kind not in LOCAL_FUSE)


def check_name(known: NameFacts, node: Node) -> Iterator[Finding]:
    """Yield a finding on whether the node knows its own name."""
    leads = f"leads to {', '.join(known.addresses)}"
    if known.error:
        value = f"{known.name} leads to no address ({known.error})"
        advice = "Add it to /etc/hosts or DNS, or name the network with --interface"
        yield say.warning("host name", value, advice)
    elif all(address.startswith(("127.", "::1")) for address in known.addresses):
        hint = "hpcdask takes the address of a network interface instead"
        yield say.ok("host name", f"{leads}, this node only", hint)
    else:
        yield say.ok("host name", leads)


def check_shared_memory(known: FolderFacts, node: Node) -> Iterator[Finding]:
    """Yield a finding on where UCX, NCCL and Python's multiprocessing exchange data."""
    value = f"{format_bytes(known.free)} free of {format_bytes(known.size)}"
    if not known.writable:
        value = "cannot be written" if known.size else "is not there"
        advice = "Processes exchange data through it: in a container, docker run --ipc=host"
        yield say.error(known.path, value, advice)
    elif known.free < LEAST_SHARED_MEMORY:
        advice = "Remove what is left there; in a container, docker run --ipc=host or --shm-size=8g"
        yield say.warning(known.path, value, advice)
    else:
        yield say.ok(known.path, value)


def check_scratch(known: FolderFacts, node: Node) -> Iterator[Finding]:
    """Yield a finding on whether data can spill, and stays on this node."""
    where = f"{known.path} ({known.source})" if known.source else known.path
    value = f"{where}, {known.type}, {format_bytes(known.free)} free"
    other = "there or" if known.source.startswith(KEY) else "with TMPDIR or"
    name = f"Name a folder on a disk of the node's own, {other} with --local-directory"
    if not known.writable:
        yield say.error("scratch", f"{where} cannot be written", name)
    elif is_network(known.type):
        yield say.slow("scratch", f"on the network: {value}", name)
    elif known.type in ("tmpfs", "ramfs"):
        yield say.warning("scratch", f"in memory: {value}", f"Spilled data stays in memory. {name}")
    elif known.free < LEAST_SCRATCH:
        yield say.warning("scratch", value, f"Little room to spill to. {name}")
    else:
        yield say.ok("scratch", value)


@dataclass(frozen=True)
class ProcessFacts(Record):
    """Cores, bytes, soft and hard limits of a rank, and its settings."""

    pinned: tuple[int, ...]
    cores: tuple[int, ...]
    memory: int
    host_memory: int
    nofile: tuple[int, int]
    memlock: tuple[int, int]
    nproc: tuple[int, int]
    quota: int | None = None
    env: dict[str, str] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def read(cls) -> ProcessFacts:
        """Read the limits of this process."""
        import dask.config
        import psutil

        config = {name: dask.config.get(name, None) for name in CONFIGURED}
        return cls(
            pinned=tuple(sorted(os.sched_getaffinity(0))),
            cores=tuple(sorted(resources.launcher_cores())),
            memory=resources.job_memory(),
            host_memory=int(psutil.virtual_memory().total),
            nofile=resource.getrlimit(resource.RLIMIT_NOFILE),
            memlock=resource.getrlimit(resource.RLIMIT_MEMLOCK),
            nproc=resource.getrlimit(resource.RLIMIT_NPROC),
            quota=resources.cpu_quota(),
            env={name: value for name, value in os.environ.items() if VARIABLES.match(name)},
            config={name: value for name, value in config.items() if value is not None},
        )


def check_process(known: ProcessFacts, node: Node) -> Iterator[Finding]:
    """Yield findings on the limits of one of a node's ranks."""
    yield _cores(known, node)
    yield _memory(known, node)
    yield _files(known, node.all_workers)
    if node.facts.fabric and node.facts.fabric.infiniband:
        yield _memlock(known)
    if 0 <= (soft := known.nproc[0]) < LEAST_PROCESSES:
        advice = (
            f"A worker has dozens of threads: put ulimit -u {LEAST_PROCESSES} into the job script"
        )
        yield of_process.warning("processes", f"at most {soft}, threads included", advice)


def _cores(known: ProcessFacts, node: Node) -> Finding:
    owned, hint = node.cores, ""
    value = f"{len(owned)} ({spans(owned)})"
    if len(known.pinned) < len(known.cores):
        value += f", this process pinned to {spans(known.pinned)} by its launcher"
        hint = "hpcdask.run lifts this pinning"
    if known.quota and known.quota < len(owned):
        value += f", of which a cgroup allows the time of {known.quota}"
    if not node.gpus or len(owned) >= 2 * node.workers:
        return of_process.ok("cores", value, hint)
    value += f" for {plural(node.workers, 'worker')}"
    advice = "Workers communicate in threads: request at least 2 a GPU (srun --cpus-per-task=4)"
    return of_process.warning("cores", value, advice)


def _memory(known: ProcessFacts, node: Node) -> Finding:
    value, each = format_bytes(known.memory), known.memory // node.workers
    if known.memory < known.host_memory:
        value += f" of the host's {format_bytes(known.host_memory)}"
    if not node.gpus or each >= LEAST_WORKER_MEMORY:
        return of_process.ok("host memory", value)
    value += f", {format_bytes(each)} for each worker"
    advice = "Libraries alone take several GB: request more, for example --mem-per-gpu=64G"
    return of_process.warning("host memory", value, advice)


def _files(known: ProcessFacts, workers: int) -> Finding:
    needed = FILES + FILES_PER_WORKER * workers
    soft, hard = ("unlimited" if one == resource.RLIM_INFINITY else one for one in known.nofile)
    value = f"{soft} (at most {hard})"
    if soft == "unlimited" or int(soft) >= needed:
        return of_process.ok("open files", value)
    remedy = f"put ulimit -n {needed} into the job script"
    if hard != "unlimited" and int(hard) < needed:
        remedy = "ask the site's staff for a higher hard limit"
    return of_process.error("open files", value, f"{workers} workers need about {needed}: {remedy}")


def _memlock(known: ProcessFacts) -> Finding:
    soft, hard = known.memlock
    if soft == resource.RLIM_INFINITY:
        return of_process.ok("locked memory", "unlimited")
    remedy = "the site's staff must raise it (in slurmd's unit: LimitMEMLOCK=infinity)"
    if hard == resource.RLIM_INFINITY:
        remedy = "put ulimit -l unlimited into the job script"
    make = of_process.error if soft < LEAST_MEMLOCK else of_process.warning
    advice = f"InfiniBand registers the memory that it sends: {remedy}"
    return make("locked memory", format_bytes(soft), advice)
