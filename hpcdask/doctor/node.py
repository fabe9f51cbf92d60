"""The node's own: its name, shared memory, and the folder that data spills to."""

from __future__ import annotations

import contextlib
import os
import re
import socket
import tempfile
from collections.abc import Iterator

from .findings import GIB, Facts, Finding, Reporter, amount

GROUP = "node"
#: File systems that other nodes share, so that many workers spill through one server.
NETWORK_FILE_SYSTEMS = {
    "nfs", "nfs4", "lustre", "gpfs", "beegfs", "beegfs_nodev", "ceph", "cephfs", "cifs", "smb3",
    "panfs", "pvfs2", "orangefs", "wekafs", "afs", "9p", "glusterfs", "daos", "quobyte", "vast",
}  # fmt: skip
MEMORY_FILE_SYSTEMS = {"tmpfs", "ramfs"}
LEAST_SHARED_MEMORY = GIB
LEAST_SCRATCH = 20 * GIB


def read_name() -> Facts:
    """This node's name, and whether it leads to an address."""
    name = socket.gethostname()
    try:
        addresses = sorted({entry[4][0] for entry in socket.getaddrinfo(name, None)})
        return {"name": name, "addresses": addresses, "error": ""}
    except OSError as error:
        return {"name": name, "addresses": [], "error": error.strerror or str(error)}


def read_shared_memory(path: str = "/dev/shm") -> Facts:
    """Size of the shared memory's file system."""
    return _folder(path)


def read_scratch() -> Facts:
    """The folder that a worker would spill to, by Dask's configuration or TMPDIR."""
    import dask.config

    configured = dask.config.get("temporary-directory", None)
    variable = next((name for name in ("TMPDIR", "TEMP", "TMP") if os.environ.get(name)), "")
    path = os.path.abspath(configured or os.environ.get(variable) or tempfile.gettempdir())
    source = "temporary-directory of Dask's configuration" if configured else variable
    existing = path
    while not os.path.exists(existing):  # hpcdask makes it, as far as it may
        existing = os.path.dirname(existing)
    return {**_folder(existing), "path": path, "source": source}


def _folder(path: str) -> Facts:
    known: Facts = {"path": path, "writable": False, "size": 0, "free": 0, "type": ""}
    with contextlib.suppress(OSError):
        space = os.statvfs(path)
        known["size"], known["free"] = (
            space.f_frsize * space.f_blocks,
            space.f_frsize * space.f_bavail,
        )
        with open("/proc/self/mounts", errors="surrogateescape") as file:  # as in realpath
            known["type"] = mount_type(os.path.realpath(path), file)
        with tempfile.TemporaryFile(dir=path) as probe:
            probe.write(b"x")
            known["writable"] = True
    return known


def mount_type(path: str, mounts: Iterator[str] | list[str]) -> str:
    """The type of the file system that holds a path, by the lines of ``/proc/self/mounts``."""
    best, kind = "", ""
    for line in mounts:
        _, point, name, *_ = line.split(" ")
        point = re.sub(r"\\([0-7]{3})", lambda octal: chr(int(octal[1], 8)), point)  # a space: \040
        inside = path == point or path.startswith(point.rstrip("/") + "/")
        if inside and len(point) >= len(best):  # a later mount hides an earlier one
            best, kind = point, name
    return kind


def is_network(kind: str) -> bool:
    """Whether a file system lies on other machines."""
    return kind in NETWORK_FILE_SYSTEMS or (
        kind.startswith("fuse.") and kind not in ("fuse.fuse-overlayfs", "fuse.squashfuse")
    )


def check_name(facts: Facts) -> list[Finding]:
    """Does the node know its own name?"""
    say, known = Reporter(GROUP), facts["name"]
    if known["error"]:
        return [
            say.warning(
                "host name",
                f"{known['name']} leads to no address ({known['error']})",
                "Add it to /etc/hosts or DNS, or name the network with --interface",
            )
        ]
    addresses = ", ".join(known["addresses"])
    if all(address.startswith(("127.", "::1")) for address in known["addresses"]):
        return [
            say.ok(
                "host name",
                f"leads to {addresses}, this node only",
                "hpcdask takes the address of a network interface instead",
            )
        ]
    return [say.ok("host name", f"leads to {addresses}")]


def check_shared_memory(facts: Facts) -> list[Finding]:
    """UCX, NCCL and Python's multiprocessing exchange data here."""
    say, known = Reporter(GROUP), facts["shared memory"]
    topic, value = known["path"], f"{amount(known['free'])} free of {amount(known['size'])}"
    if not known["writable"]:
        return [
            say.error(
                topic,
                "cannot be written" if known["size"] else "is not there",
                "Processes of this node exchange data through it: in a container, mount the host's "
                "(docker run --ipc=host)",
            )
        ]
    if known["free"] < LEAST_SHARED_MEMORY:
        return [
            say.warning(
                topic,
                value,
                "Remove what is left there, or in a container start it with more (docker run "
                "--ipc=host or --shm-size=8g)",
            )
        ]
    return [say.ok(topic, value)]


def check_scratch(facts: Facts) -> list[Finding]:
    """Can data spill, and does it stay on this node?"""
    say, known = Reporter(GROUP), facts["scratch"]
    source = f" ({known['source']})" if known["source"] else ""
    value = f"{known['path']}{source}, {known['type']}, {amount(known['free'])} free"
    name = "Name a folder on a disk of the node's own, with --local-directory or TMPDIR"
    if not known["writable"]:
        return [say.error("scratch", f"{known['path']}{source} cannot be written", name)]
    if is_network(known["type"]):
        return [say.slow("scratch", f"on the network: {value}", name)]
    if known["type"] in MEMORY_FILE_SYSTEMS:
        return [
            say.warning("scratch", f"in memory: {value}", f"Spilled data stays in memory. {name}")
        ]
    if known["free"] < LEAST_SCRATCH:
        return [say.warning("scratch", value, f"Little room to spill to. {name}")]
    return [say.ok("scratch", value)]
