"""What joins GPUs and nodes, read from recorded trees, and which UCX a worker would load."""

from __future__ import annotations

import dataclasses
import importlib
import itertools
import json
import socket
import subprocess
import sys
from types import SimpleNamespace

import psutil
import pytest

from hpcdask.comm import fabric, ucx_config
from hpcdask.comm.fabric import Fabric, Interface, Port
from hpcdask.comm.ucx_config import PREFER_SYSTEM, UcxInstall
from hpcdask.errors import installing
from hpcdask.gpu.driver import cuda_extra


def write(root, files):
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return f"{root}/"


# Network interfaces

CARDS = {  # name: (address, up, speed, type in sysfs)
    "lo": ("127.0.0.1", True, 0, 772),
    "eno1": ("10.0.0.7", True, 25_000, 1),
    "eno2": ("10.0.1.7", False, 0, 1),
    "eno3": (None, True, 100_000, 1),
    "usb0": ("169.254.3.1", True, 425, 1),
    "ib0": ("10.1.0.7", True, 200_000, 32),
    "hsn0": ("10.2.0.7", True, 200_000, 1),
    "tun0": ("10.9.0.7", True, 10, 65534),
    "docker0": ("172.17.0.1", True, 10_000, 1),
    "br-0a1b2c3d4e5f": ("172.18.0.1", True, 10_000, 1),
    "br-lan": ("10.3.0.7", True, -1, 1),
    "virbr0": ("192.168.122.1", True, 0, 1),
    "veth12ab": ("10.4.0.7", True, 10_000, 1),
}


@pytest.fixture
def cards(monkeypatch, tmp_path):
    """A mock of psutil's network functions, and the tree that belongs to it."""
    v6 = SimpleNamespace(family=socket.AF_INET6, address="fe80::1")
    addresses = {
        name: [v6] + [SimpleNamespace(family=socket.AF_INET, address=address)] * bool(address)
        for name, (address, *_) in CARDS.items()
    }
    stats = {
        name: SimpleNamespace(isup=up, speed=speed) for name, (_, up, speed, _) in CARDS.items()
    }
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: addresses)
    monkeypatch.setattr(psutil, "net_if_stats", lambda: stats)
    return write(tmp_path, {f"sys/class/net/{n}/type": f"{CARDS[n][3]}\n" for n in CARDS})


def test_interfaces(cards):
    assert fabric.interfaces(cards) == (
        Interface("br-lan", "10.3.0.7", "ethernet", 0),
        Interface("eno1", "10.0.0.7", "ethernet", 25_000),
        Interface("hsn0", "10.2.0.7", "slingshot", 200_000),
        Interface("ib0", "10.1.0.7", "infiniband", 200_000),
        Interface("tun0", "10.9.0.7", "other", 10),
    )


# RDMA devices


def port(device, state, layer="InfiniBand", rate="400 Gb/sec (4X NDR)", number=1):
    folder = f"sys/class/infiniband/{device}/ports/{number}"
    texts = {"state": state, "link_layer": layer, "rate": rate}
    return {f"{folder}/{name}": f"{text}\n" for name, text in texts.items()}


@pytest.mark.parametrize(
    ("addresses", "own", "taken"),
    [
        (["10.0.0.1"], "127.0.1.1", "10.0.0.1"),
        (["10.0.0.1", "10.0.1.1"], "127.0.1.1", "127.0.1.1"),
        ([], "127.0.1.1", "127.0.1.1"),
        (["10.0.0.1"], "192.0.2.1", "192.0.2.1"),
    ],
)
def test_the_only_network_takes_the_place_of_a_loopback_address(monkeypatch, addresses, own, taken):
    """Regression: with Debian's /etc/hosts and no default route, no worker reached 127.0.1.1."""
    found = tuple(Interface(f"eth{n}", one, "ethernet", 0) for n, one in enumerate(addresses))
    monkeypatch.setattr(fabric, "interfaces", lambda: found)
    assert fabric.only_address(own) == taken


def test_infiniband(tmp_path):
    verbs = [f"sys/class/infiniband_verbs/uverbs{number}/ibdev" for number in range(4)]
    root = write(
        tmp_path,
        {
            **port("mlx5_0", "4: ACTIVE"),
            **port("mlx5_1", "1: DOWN", rate="10 Gb/sec (4X SDR)"),
            **port("mlx5_2", "4: ACTIVE", "Ethernet", "2.5 Gb/sec (1X SDR)", number=2),
            **port("mlx5_3", "4: ACTIVE", rate=""),
            **{path: f"mlx5_{number}\n" for number, path in enumerate(verbs)},
            # The container has none for the last
            **{f"dev/infiniband/uverbs{number}": "" for number in range(3)},
        },
    )
    ports = fabric.infiniband(root)
    assert ports == (
        Port("mlx5_0:1", "InfiniBand", "ACTIVE", 400_000, True),
        Port("mlx5_1:1", "InfiniBand", "DOWN", 10_000, True),
        Port("mlx5_2:2", "Ethernet", "ACTIVE", 2_500, True),
        Port("mlx5_3:1", "InfiniBand", "ACTIVE", 0, False),
    )
    assert [one.usable for one in ports] == [True, False, True, False]
    assert fabric.infiniband(f"{root}sys/") == ()


# NVLink


def gpus(count, joined=()):
    """GPUs, of which some are joined by NVLink."""
    made = [{"uuid": f"GPU-{number}", "nvlink": []} for number in range(count)]
    for one, other in joined:
        made[one]["nvlink"].append(f"GPU-{other}")
        made[other]["nvlink"].append(f"GPU-{one}")
    return made


def test_all_gpus_joined_through_switches(nvml):
    nvml(gpus(8, itertools.combinations(range(8), 2)))
    shown, joined = fabric.nvlink_pairs()
    assert shown == tuple(f"GPU-{number}" for number in range(8))
    assert joined == tuple(itertools.combinations(shown, 2))


def test_pairs_joined_by_bridges_and_pairs_that_nvml_does_not_tell(nvml, monkeypatch):
    nvml([*gpus(4, [(0, 1), (2, 3)]), {"uuid": "GPU-4"}])
    shown, joined = fabric.nvlink_pairs()
    assert joined == (("GPU-0", "GPU-1"), ("GPU-2", "GPU-3"))
    assert fabric.nvlink_pairs({"GPU-3"}) == (shown, joined[1:])
    import pynvml

    monkeypatch.delattr(pynvml, "nvmlDeviceGetP2PStatus")  # an old one
    assert fabric.nvlink_pairs() == (shown, ())


def test_slices_and_hidden_gpus_have_no_nvlink(nvml):
    part = {"uuid": "MIG-1", "name": "", "memory": 1}
    others = [{"uuid": "GPU-m", "mig": [part]}, {"uuid": "GPU-h", "forbidden": True}]
    nvml([others[0], *gpus(2, [(0, 1)]), others[1]])
    assert fabric.nvlink_pairs() == (("GPU-0", "GPU-1"), (("GPU-0", "GPU-1"),))


# UCX

MODULES = ["libuct_cuda.so.0", "libuct_cma.so.0.0.0", "libuct_cma.so", "libucm_cuda.so.0"]
SYSTEM_MODULES = ["libuct_ib.so.0", "libuct_ib_mlx5.so.0", "libuct_cuda.so", "libuct_cuda.la"]
PROGRAM = """#!/bin/sh
echo '# Library version: 1.20.0'
echo '# Library path: {folder}/libucs.so.0'
"""


@pytest.fixture
def site(tmp_path, monkeypatch):
    """A folder of packages as pip makes it; a function that adds packages to it."""
    monkeypatch.syspath_prepend(tmp_path / "site")
    sys.path[:] = [path for path in sys.path if "site-packages" not in path]
    monkeypatch.setattr(sys, "prefix", str(tmp_path / "prefix"))
    for name in ("libucx", "ucxx", "distributed_ucxx"):
        monkeypatch.delitem(sys.modules, name, raising=False)

    def add(*packages):
        for name in packages:
            version = "1.21.0" if name == "libucx" else "0.52.0"
            project = name.replace("_", "-")
            metadata = f"Metadata-Version: 2.1\nName: {project}-cu12\nVersion: {version}\n"
            files = {
                f"{name}/__init__.py": "raise SystemError\n",
                f"{name}_cu12-{version}.dist-info/METADATA": metadata,
            }
            if name == "libucx":
                files.update({f"libucx/lib/ucx/{module}": "" for module in MODULES})
            write(tmp_path / "site", files)
        importlib.invalidate_caches()

    return add


def system_ucx(folder):
    """Make a UCX of the system, and return the folder of its `ucx_info`."""
    files = {f"lib/ucx/{module}": "" for module in SYSTEM_MODULES}
    write(folder, {**files, "bin/ucx_info": PROGRAM.format(folder=folder / "lib")})
    (folder / "bin/ucx_info").chmod(0o755)
    return str(folder / "bin")


def test_ucx_of_the_package(site, tmp_path):
    site("distributed_ucxx", "ucxx", "libucx")
    expected = UcxInstall("0.52.0", "1.21.0", "package", ("cma", "cuda"))
    assert ucx_config.installed_ucx({"PATH": system_ucx(tmp_path / "opt")}) == expected
    limited = dataclasses.replace(expected, tls="tcp")
    assert ucx_config.installed_ucx({"UCX_TLS": "tcp", PREFER_SYSTEM: "False"}) == limited


def test_ucx_of_the_system(site, tmp_path):
    site("distributed_ucxx", "ucxx", "libucx")
    expected = UcxInstall("0.52.0", "1.20.0", "system", ("cuda", "ib", "ib_mlx5"))
    environ = {"PATH": system_ucx(tmp_path / "opt"), PREFER_SYSTEM: "1"}
    assert ucx_config.installed_ucx(environ) == expected
    found = ucx_config.installed_ucx({"PATH": "/nowhere", PREFER_SYSTEM: "1"})
    assert f"load its module, or unset {PREFER_SYSTEM}" in found.problem
    assert not found.missing


@pytest.mark.parametrize(
    ("there", "what"),
    [
        ([], "distributed-ucxx is not installed"),
        (["ucxx"], "distributed-ucxx is not installed"),
        (["distributed_ucxx"], "ucxx is not installed"),
    ],
)
def test_missing_packages(site, there, what):
    site(*there)
    found = ucx_config.installed_ucx({})
    assert found.problem == f"{what}: {installing(cuda_extra())}"
    assert found.missing


# Together


def test_look_and_json(site, cards, nvml, tmp_path):
    site("distributed_ucxx", "ucxx", "libucx")
    nvml(gpus(3, [(0, 1)]))
    write(tmp_path, {**port("mlx5_0", "4: ACTIVE")})
    write(tmp_path, {"proc/driver/nvidia/gpus/0000/information": "Device Minor: \t 9\n"})
    found = fabric.look(cards, {"UCX_TLS": "all"})
    assert found.nvlink == (("GPU-0", "GPU-1"),)
    assert found.hidden_gpus == 1
    assert (found.ucx.ucx, found.ucx.tls) == ("1.21.0", "all")
    assert len(found.interfaces) == 5
    assert [one.name for one in found.infiniband] == ["mlx5_0:1"]
    assert Fabric.from_json(json.loads(json.dumps(dataclasses.asdict(found)))) == found
    assert fabric.look(cards, {}, gpus=False).gpus == ()


def test_looking_loads_neither_ucx_nor_dask():
    program = (
        "import sys; from hpcdask.comm import fabric; fabric.look(); "
        "names = {name.partition('.')[0] for name in sys.modules}; "
        "print(names & {'dask', 'distributed', 'ucxx', 'libucx', 'distributed_ucxx', 'cuda'}, "
        "'libuc' in open('/proc/self/maps').read())"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=300, check=True
    )
    assert done.stdout == "set() False\n"
