"""The node's own: its name, shared memory, and the folder that data spills to."""

from __future__ import annotations

import contextlib
import os
import re
import socket
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from dask.utils import format_bytes

from hpcdask.node.scratch import KEY, base_folder, configured_source
from hpcdask.spec.records import Record

from .findings import GIB, Finding, Reporter

if TYPE_CHECKING:
    from .nodes import Node

say = Reporter("node")
#: File systems that other nodes share, so that many workers spill through one server.
NETWORK_FILE_SYSTEMS = {
    "nfs", "nfs4", "lustre", "gpfs", "beegfs", "beegfs_nodev", "ceph", "cephfs", "cifs", "smb3",
    "panfs", "pvfs2", "orangefs", "wekafs", "afs", "9p", "glusterfs", "daos", "quobyte", "vast",
}  # fmt: skip
LEAST_SHARED_MEMORY, LEAST_SCRATCH = GIB, 20 * GIB


@dataclass(frozen=True)
class NameFacts(Record):
    """Name of a node, and the addresses that it leads to, or why it leads to none."""

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
        """Look at a folder."""
        found = cls(path)
        with contextlib.suppress(OSError):
            space = os.statvfs(path)
            size, free = space.f_frsize * space.f_blocks, space.f_frsize * space.f_bavail
            with open("/proc/self/mounts", errors="surrogateescape") as file:  # as in realpath
                found = cls(path, False, size, free, mount_type(os.path.realpath(path), file))
            with tempfile.TemporaryFile(dir=path) as probe:
                probe.write(b"x")
            found = replace(found, writable=True)
        return found


def read_shared_memory() -> FolderFacts:
    """Look at the file system of shared memory."""
    return FolderFacts.read("/dev/shm")


def read_scratch() -> FolderFacts:
    """Look at the folder that a worker would spill to, by Dask's configuration or TMPDIR."""
    existing = path = base_folder()
    variable = next((name for name in ("TMPDIR", "TEMP", "TMP") if os.environ.get(name)), "")
    source = configured_source() or variable
    if source and source == variable and os.path.abspath(os.environ[variable]) != path:
        source = f"{variable}={os.environ[variable]} cannot be written"
    while not os.path.exists(existing):  # hpcdask makes it, as far as it may
        existing = os.path.dirname(existing)
    return replace(FolderFacts.read(existing), path=path, source=source)


def mount_type(path: str, mounts: Iterable[str]) -> str:
    """Return the type of the file system of a path, by the lines of ``/proc/self/mounts``."""
    best, kind = "", ""
    for line in mounts:
        _, point, name, *_ = line.split(" ")
        point = re.sub(r"\\([0-7]{3})", lambda octal: chr(int(octal[1], 8)), point)  # a space: \040
        inside = path == point or path.startswith(point.rstrip("/") + "/")
        if inside and len(point) >= len(best):  # a later mount hides an earlier one
            best, kind = point, name
    return kind


def is_network(kind: str) -> bool:
    """Return whether a file system lies on other machines."""
    local = ("fuse.fuse-overlayfs", "fuse.squashfuse")
    return kind in NETWORK_FILE_SYSTEMS or (kind.startswith("fuse.") and kind not in local)


def check_name(known: NameFacts, node: Node) -> Iterator[Finding]:
    """Yield a finding on whether the node knows its own name."""
    leads = f"leads to {', '.join(known.addresses)}"
    if known.error:
        yield say.warning(
            "host name",
            f"{known.name} leads to no address ({known.error})",
            "Add it to /etc/hosts or DNS, or name the network with --interface",
        )
    elif all(address.startswith(("127.", "::1")) for address in known.addresses):
        hint = "hpcdask takes the address of a network interface instead"
        yield say.ok("host name", f"{leads}, this node only", hint)
    else:
        yield say.ok("host name", leads)


def check_shared_memory(known: FolderFacts, node: Node) -> Iterator[Finding]:
    """Yield a finding on where UCX, NCCL and Python's multiprocessing exchange data."""
    value = f"{format_bytes(known.free)} free of {format_bytes(known.size)}"
    if not known.writable:
        yield say.error(
            known.path,
            "cannot be written" if known.size else "is not there",
            "Processes of this node exchange data through it: in a container, mount the host's "
            "(docker run --ipc=host)",
        )
    elif known.free < LEAST_SHARED_MEMORY:
        yield say.warning(
            known.path,
            value,
            "Remove what is left there, or in a container start it with more (docker run "
            "--ipc=host or --shm-size=8g)",
        )
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
