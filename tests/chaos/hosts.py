"""What a fault needs root for: two hosts that are network namespaces, and small disks."""

from __future__ import annotations

import contextlib
import os
import shlex
import subprocess
import uuid
from collections.abc import Iterator
from pathlib import Path

from launching import Launcher, mpich_launcher, openmpi_launcher

SUBNET = "10.213.{}.{}"


def missing() -> str:
    """Say why this machine cannot have them; nothing where it can."""
    if os.geteuid() != 0:
        return "no other network or disk: needs root"
    name = f"hd-probe-{os.getpid()}"
    try:
        _ip("netns", "add", name)
        _ip("netns", "delete", name)
    except (OSError, subprocess.CalledProcessError) as error:
        return f"no network namespaces here: {error}"
    return ""


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)


#: Started in namespaces of its own: a host has its name, its shared memory, its boot id (by which
#: UCX tells hosts apart) and, where it is given one, its GPU.
HOST = """#!/bin/bash
hostname "$1"
mount -t tmpfs tmpfs /dev/shm
mount --bind "$0.$1" /proc/sys/kernel/random/boot_id
[[ -z $2 ]] || export CUDA_VISIBLE_DEVICES=$2
shift 2
exec "$@"
"""


class Hosts:
    """Two hosts with a cable between them, `a` and `b`; `wrapper` starts a command on one.

    With `gpus`, each has one of this machine's GPUs.
    """

    def __init__(self, folder: Path, *, gpus: bool = False) -> None:
        third = os.getpid() % 200 + 20
        self.addresses = [SUBNET.format(third, 1), SUBNET.format(third, 2)]
        self.names = [f"hd-{side}-{os.getpid()}" for side in "ab"]
        self.links = [f"hd{side}{os.getpid()}"[:15] for side in "ab"]
        self.wrapper, self._inner = folder / "on-host", folder / "host"
        self._gpus = ["0", "1"] if gpus else ["", ""]

    def __enter__(self) -> Hosts:
        try:
            for name in self.names:
                _ip("netns", "add", name)
            _ip("link", "add", self.links[0], "type", "veth", "peer", "name", self.links[1])
            for name, link, address in zip(self.names, self.links, self.addresses, strict=True):
                _ip("link", "set", link, "netns", name)
                _ip("-n", name, "address", "add", f"{address}/24", "dev", link)
                for device in ("lo", link):
                    _ip("-n", name, "link", "set", device, "up")
                _ip("-n", name, "route", "add", "default", "dev", link)
        except BaseException:
            self.__exit__()
            raise
        for name in self.names:
            Path(f"{self._inner}.{name}").write_text(f"{uuid.uuid4()}\n")
        self._inner.write_text(HOST)
        first, second = (shlex.join(self.prefix(number)) for number in (0, 1))
        self.wrapper.write_text(  # called as ssh is: options, host, command
            f"#!/bin/bash\nwhile [[ $1 == -* ]]; do shift; done\nhost=$1; shift\n"
            f'[[ $host == {self.addresses[0]} ]] && exec {first} bash -c "$*"\n'
            f'exec {second} bash -c "$*"\n'
        )
        for script in (self.wrapper, self._inner):
            script.chmod(0o700)
        return self

    def prefix(self, number: int) -> list[str]:
        """Return the words before a command that starts it on one of the hosts."""
        name = self.names[number]
        own = ["ip", "netns", "exec", name, "unshare", "--uts", "--ipc", "--mount"]
        return [*own, str(self._inner), name, self._gpus[number]]

    def __exit__(self, *error: object) -> None:
        self.join(up=True)
        for name in self.names:
            with contextlib.suppress(subprocess.CalledProcessError):
                _ip("netns", "delete", name)  # and its end of the cable

    def join(self, *, up: bool) -> None:
        """Plug the cable in, or out."""
        with contextlib.suppress(subprocess.CalledProcessError):
            _ip("-n", self.names[1], "link", "set", self.links[1], "up" if up else "down")
            if up:
                _ip("-n", self.names[1], "route", "replace", "default", "dev", self.links[1])


def over(hosts: Hosts, name: str) -> Launcher:
    """Return a launcher on the first host that starts a rank on each, by a stand-in for ssh."""
    if name == "mpich":
        launcher = mpich_launcher()
        way = ["-launcher", "ssh", "-launcher-exec", str(hosts.wrapper), "-ppn", "1"]
        way += ["-hosts", ",".join(hosts.addresses)]
    else:
        launcher = openmpi_launcher()
        way = ["--prtemca", "plm_ssh_agent", str(hosts.wrapper), "--map-by", "ppr:1:node"]
        way += ["--host", ",".join(hosts.addresses)]
    launcher.prefix = [*hosts.prefix(0), *launcher.prefix, *way]
    return launcher


@contextlib.contextmanager
def disk(folder: Path, mebibytes: int) -> Iterator[None]:
    """A disk of its own, with little room, at an empty folder."""
    options = ("-t", "tmpfs", "-o", f"size={mebibytes}m,mode=0700", "hpcdask-chaos")
    subprocess.run(["mount", *options, folder], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", folder], check=True)
