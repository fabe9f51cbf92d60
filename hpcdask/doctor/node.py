"""The node's own: its name, shared memory, and the folder that data spills to."""

from __future__ import annotations

import contextlib
import os
import re
import socket
import tempfile
from collections.abc import Iterable, Iterator

from hpcdask.node.scratch import KEY, base_folder, configured_source

from .findings import GIB, Facts, Finding, Reporter, amount

say = Reporter("node")
#: File systems that other nodes share, so that many workers spill through one server.
NETWORK_FILE_SYSTEMS = {
    "nfs", "nfs4", "lustre", "gpfs", "beegfs", "beegfs_nodev", "ceph", "cephfs", "cifs", "smb3",
    "panfs", "pvfs2", "orangefs", "wekafs", "afs", "9p", "glusterfs", "daos", "quobyte", "vast",
}  # fmt: skip
LEAST_SHARED_MEMORY, LEAST_SCRATCH = GIB, 20 * GIB


def read_name() -> Facts:
    """This node's name, and whether it leads to an address."""
    name = socket.gethostname()
    try:
        addresses = sorted({entry[4][0] for entry in socket.getaddrinfo(name, None)})
        return {"name": name, "addresses": addresses, "error": ""}
    except OSError as error:
        return {"name": name, "addresses": [], "error": error.strerror or str(error)}


def read_shared_memory() -> Facts:
    """Size of the shared memory's file system."""
    return _folder("/dev/shm")


def read_scratch() -> Facts:
    """The folder that a worker would spill to, by Dask's configuration or TMPDIR."""
    existing = path = base_folder()
    variable = next((name for name in ("TMPDIR", "TEMP", "TMP") if os.environ.get(name)), "")
    source = configured_source() or variable
    if source and source == variable and os.path.abspath(os.environ[variable]) != path:
        source = f"{variable}={os.environ[variable]} cannot be written"
    while not os.path.exists(existing):  # hpcdask makes it, as far as it may
        existing = os.path.dirname(existing)
    return {**_folder(existing), "path": path, "source": source}


def _folder(path: str) -> Facts:
    known: Facts = {"path": path, "writable": False, "size": 0, "free": 0, "type": ""}
    with contextlib.suppress(OSError):
        space = os.statvfs(path)
        known["size"] = space.f_frsize * space.f_blocks
        known["free"] = space.f_frsize * space.f_bavail
        with open("/proc/self/mounts", errors="surrogateescape") as file:  # as in realpath
            known["type"] = mount_type(os.path.realpath(path), file)
        with tempfile.TemporaryFile(dir=path) as probe:
            probe.write(b"x")
            known["writable"] = True
    return known


def mount_type(path: str, mounts: Iterable[str]) -> str:
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
    """Return whether a file system lies on other machines."""
    local = ("fuse.fuse-overlayfs", "fuse.squashfuse")
    return kind in NETWORK_FILE_SYSTEMS or (kind.startswith("fuse.") and kind not in local)


def check_name(facts: Facts) -> Iterator[Finding]:
    """Does the node know its own name?"""
    known = facts["name"]
    leads = f"leads to {', '.join(known['addresses'])}"
    if known["error"]:
        yield say.warning(
            "host name",
            f"{known['name']} leads to no address ({known['error']})",
            "Add it to /etc/hosts or DNS, or name the network with --interface",
        )
    elif all(address.startswith(("127.", "::1")) for address in known["addresses"]):
        hint = "hpcdask takes the address of a network interface instead"
        yield say.ok("host name", f"{leads}, this node only", hint)
    else:
        yield say.ok("host name", leads)


def check_shared_memory(facts: Facts) -> Iterator[Finding]:
    """UCX, NCCL and Python's multiprocessing exchange data here."""
    known = facts["shared memory"]
    topic, value = known["path"], f"{amount(known['free'])} free of {amount(known['size'])}"
    if not known["writable"]:
        yield say.error(
            topic,
            "cannot be written" if known["size"] else "is not there",
            "Processes of this node exchange data through it: in a container, mount the host's "
            "(docker run --ipc=host)",
        )
    elif known["free"] < LEAST_SHARED_MEMORY:
        yield say.warning(
            topic,
            value,
            "Remove what is left there, or in a container start it with more (docker run "
            "--ipc=host or --shm-size=8g)",
        )
    else:
        yield say.ok(topic, value)


def check_scratch(facts: Facts) -> Iterator[Finding]:
    """Can data spill, and does it stay on this node?"""
    topic, known = "scratch", facts["scratch"]
    source = f" ({known['source']})" if known["source"] else ""
    where = f"{known['path']}{source}"
    value = f"{where}, {known['type']}, {amount(known['free'])} free"
    other = "there or" if known["source"].startswith(KEY) else "with TMPDIR or"
    name = f"Name a folder on a disk of the node's own, {other} with --local-directory"
    if not known["writable"]:
        yield say.error(topic, f"{where} cannot be written", name)
    elif is_network(known["type"]):
        yield say.slow(topic, f"on the network: {value}", name)
    elif known["type"] in ("tmpfs", "ramfs"):
        yield say.warning(topic, f"in memory: {value}", f"Spilled data stays in memory. {name}")
    elif known["free"] < LEAST_SCRATCH:
        yield say.warning(topic, value, f"Little room to spill to. {name}")
    else:
        yield say.ok(topic, value)
