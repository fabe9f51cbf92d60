"""Which transport and interface workers get, in recorded environments."""

from __future__ import annotations

import dataclasses
import itertools
import json

import pytest

from hpcdask.devices import Gpu
from hpcdask.errors import MissingExtra, UsageError
from hpcdask.fabric import PREFER_SYSTEM, Fabric, Interface, Port, Ucx
from hpcdask.spec import WorkerSpec
from hpcdask.transport import (
    Choice,
    Seat,
    check_interface,
    choose,
    choose_interface,
    ucx_environment,
)

PYPI = Ucx("0.52.0", "1.21.0", "package", ("cma", "cuda"))
SYSTEM = Ucx("0.52.0", "1.20.0", "system", ("cma", "cuda", "ib", "ib_mlx5", "rdmacm"))
NO_CUDA = Ucx("0.52.0", "1.20.0", "system", ("cma", "ib"))
MISSING = Ucx(problem='distributed-ucxx is not installed: pip install "hpcdask[cuda13]"')
BROKEN = Ucx("0.52.0", problem="the UCX in /opt/ucx is 1.15, and ucxx needs 1.19.0 or newer")
ETH = Interface("eno1", "10.0.0.1", "ethernet", 25_000)
HSN = (Interface("hsn0", "10.2.0.1", "slingshot", 200_000),)
IB = Port("mlx5_0:1", "InfiniBand", "ACTIVE", 400_000, True)
ROCE = dataclasses.replace(IB, link_layer="Ethernet")
DOWN = dataclasses.replace(IB, state="DOWN")
SHUT = dataclasses.replace(IB, accessible=False)


def gpu(uuid):
    return Gpu(uuid, "NVIDIA H200", 140 << 30)


def seats(host="a", count=8, ranks=None, *, links="all", ucx=PYPI, hidden=0, ports=(), net=(ETH,)):
    """A node with `count` GPUs, shared by ranks that have one worker each, or by one with all."""
    uuids = [f"GPU-{host}{number}" for number in range(count)]
    pairs = {
        "all": tuple(itertools.combinations(uuids, 2)),
        "bridges": tuple(zip(uuids[::2], uuids[1::2], strict=False)),
        "none": (),
        "unknown": (),
    }[links]
    unknown = tuple(itertools.combinations(uuids, 2)) if links == "unknown" else ()

    def fabric(own):
        shown = tuple(own if hidden else uuids)
        seen = tuple(pair for pair in pairs if set(pair) <= set(shown))
        return Fabric((*net,), (*ports,), seen, hidden, ucx, shown, unknown)

    split = [[uuid] for uuid in uuids] if ranks is None else [uuids]
    return [Seat(host, tuple(map(gpu, own)), fabric(own)) for own in split]


def nodes(count=2, **options):
    return [seat for number in range(count) for seat in seats(f"n{number}", 4, **options)]


def cpu(count=2, **options):
    return [dataclasses.replace(seat, gpus=()) for seat in seats(count=count, **options)]


def mig(host="a"):
    fabric = Fabric((ETH,), (), (), 0, PYPI)
    return [Seat(host, (gpu(f"MIG-{host}{number}"),), fabric) for number in range(3)]


def shared_gpu():
    return seats(count=1) * 2


AUTO = WorkerSpec()
UCX = WorkerSpec(protocol="ucx")


@pytest.mark.parametrize(
    ("spec", "found", "protocol", "reason"),
    [
        # One node
        (AUTO, seats(), "ucx", "NVLink joins the 8 GPUs of a"),
        (AUTO, seats(ranks=1), "ucx", "NVLink joins the 8 GPUs of a"),
        (AUTO, seats(links="bridges"), "ucx", "NVLink joins most of the 8 GPUs of a"),
        (AUTO, seats(links="none"), "tcp", "NVLink does not join the GPUs of a"),
        (AUTO, seats(links="unknown"), "tcp", "NVML does not tell whether NVLink joins"),
        (AUTO, seats(count=1), "tcp", "a single worker"),
        (AUTO, shared_gpu(), "tcp", "share one GPU"),
        (AUTO, cpu(), "tcp", "workers compute on the CPU"),
        (AUTO, [*seats(), *cpu(1, host="b")], "tcp", "not every worker has a GPU: none on b"),
        (AUTO, mig(), "tcp", "MIG slices"),
        (AUTO, seats(hidden=7), "tcp", "--gpu-bind=none"),
        # A job that has a part of the node, whose workers see each other's GPUs
        (AUTO, seats(count=4, ranks=1, hidden=4), "ucx", "NVLink joins the 4 GPUs of a"),
        (AUTO, seats(ucx=MISSING), "tcp", 'on a, distributed-ucxx is not installed: pip install "'),
        (AUTO, seats(ucx=BROKEN), "tcp", "ucxx needs 1.19.0"),
        (AUTO, seats(ucx=NO_CUDA), "tcp", "has no transport for CUDA"),
        (WorkerSpec(rmm_async=True), seats(), "tcp", "--rmm-async"),
        (WorkerSpec(enable_nvlink=False), seats(), "tcp", "--disable-nvlink"),
        (AUTO, seats(ucx=dataclasses.replace(PYPI, tls="tcp")), "tcp", "UCX_TLS=tcp on a leaves"),
        (AUTO, seats(ucx=dataclasses.replace(PYPI, tls="tcp,cuda_copy")), "tcp", "UCX_TLS=tcp,"),
        (AUTO, seats(ucx=dataclasses.replace(PYPI, tls="^cuda_ipc")), "tcp", "UCX_TLS=^cuda_ipc"),
        (AUTO, seats(ucx=dataclasses.replace(PYPI, tls="^ib")), "ucx", "NVLink"),
        (AUTO, seats(ucx=dataclasses.replace(PYPI, tls="all")), "ucx", "NVLink"),
        (AUTO, seats(ucx=dataclasses.replace(PYPI, tls="tcp,cuda")), "ucx", "NVLink"),
        # Several nodes
        (AUTO, nodes(ports=[IB], ucx=SYSTEM), "ucx", "InfiniBand joins the 2 nodes, NVLink their"),
        (AUTO, nodes(ports=[DOWN, IB], ucx=SYSTEM, links="none"), "ucx", "joins the 2 nodes"),
        (AUTO, nodes(ports=[IB]), "tcp", "but the UCX on n0, n1 cannot use it"),
        (AUTO, nodes(ports=[IB], ucx=NO_CUDA), "tcp", "no transport for CUDA"),
        (AUTO, nodes(ports=[DOWN], ucx=SYSTEM), "tcp", "no usable InfiniBand on n0, n1"),
        (AUTO, nodes(ports=[SHUT], ucx=SYSTEM), "tcp", "no usable InfiniBand on n0, n1"),
        (AUTO, nodes(ports=[ROCE], ucx=SYSTEM), "tcp", "no usable InfiniBand on n0, n1"),
        (WorkerSpec(enable_infiniband=True), nodes(ports=[ROCE], ucx=SYSTEM), "ucx", "InfiniBand"),
        (
            WorkerSpec(enable_infiniband=False),
            nodes(ports=[IB], ucx=SYSTEM),
            "tcp",
            "--disable-inf",
        ),
        (AUTO, nodes(ucx=SYSTEM), "tcp", "NVLink inside the nodes needs --protocol ucx"),
        (AUTO, nodes(5, ucx=SYSTEM), "tcp", "InfiniBand on n0, n1, n2 and 2 more, and"),
        (AUTO, nodes(net=[ETH, *HSN]), "tcp", "tcp over hsn0 (use it with --interface hsn0)"),
        (WorkerSpec(interface="auto"), nodes(net=HSN), "tcp", "tcp over hsn0;"),
        (AUTO, nodes(net=HSN, ports=[IB], ucx=SYSTEM), "ucx", "InfiniBand"),
        (AUTO, nodes(ports=[IB], ucx=SYSTEM, hidden=3), "ucx", "InfiniBand joins the 2 nodes"),
        (AUTO, [*nodes(1, ports=[IB], ucx=SYSTEM), *seats("b", ucx=SYSTEM)], "tcp", "on b, and"),
        (
            AUTO,
            [*nodes(1, ports=[IB], ucx=SYSTEM), *seats("b", ports=[IB], ucx=MISSING)],
            "tcp",
            "on b, distributed-ucxx is not installed",
        ),
        # Explicit
        (WorkerSpec(protocol="tcp"), cpu(), "tcp", "--protocol tcp"),
        (UCX, seats(links="none"), "ucx", "--protocol ucx"),
        (UCX, cpu(), "ucx", "--protocol ucx"),
    ],
)
def test_choice(spec, found, protocol, reason):
    choice = choose(spec, found)
    assert choice.protocol == protocol
    assert reason in choice.reason
    assert not any("\n" in line for line in (choice.reason, *choice.warnings))


@pytest.mark.parametrize(
    ("spec", "found", "expected"),
    [
        (AUTO, seats(), []),
        (AUTO, nodes(ports=[IB], ucx=SYSTEM), []),
        (AUTO, seats(ports=[IB]), []),  # InfiniBand is of no use on a single node
        (AUTO, nodes(ports=[IB]), [f"{PREFER_SYSTEM}=true"]),
        (UCX, nodes(ports=[IB]), [f"{PREFER_SYSTEM}=true"]),
        (AUTO, nodes(ports=[SHUT], ucx=SYSTEM), ["/dev/infiniband"]),
        (AUTO, nodes(ports=[ROCE], ucx=SYSTEM), ["--enable-infiniband"]),
        (AUTO, seats(links="bridges"), ["over PCIe"]),
        (UCX, seats(links="none"), ["NVLink does not join"]),
        (UCX, seats(hidden=7), ["--gpu-bind=none"]),
        (AUTO, nodes(ports=[IB], ucx=SYSTEM, hidden=3), ["--gpu-bind=none"]),
        (UCX, mig(), ["MIG"]),
        (UCX, cpu(), ["0.13 against 2.8 GB/s"]),
        (UCX, nodes(), ["no usable InfiniBand on n0, n1"]),
        (UCX, seats(ucx=dataclasses.replace(PYPI, tls="tcp")), ["UCX_TLS=tcp on a leaves out NVL"]),
        (WorkerSpec(protocol="tcp"), seats(), ["NVLink joins the 8 GPUs of a: --protocol ucx or"]),
        (WorkerSpec(protocol="tcp"), seats(ucx=MISSING), []),
        (WorkerSpec(protocol="tcp"), seats(count=1), []),
        (WorkerSpec(protocol="tcp", rmm_async=True), seats(), []),
        (WorkerSpec(enable_nvlink=True), seats(links="none"), ["--enable-nvlink has no effect"]),
        (
            AUTO,
            [
                *nodes(1, ports=[IB], ucx=SYSTEM),
                *seats("b", ports=[IB], ucx=dataclasses.replace(SYSTEM, ucx="1.19.0")),
            ],
            ["UCX differs between nodes: 1.20.0 (system) on n0; 1.19.0 (system) on b"],
        ),
        (
            UCX,
            [*seats("b"), *seats("c", ucx=dataclasses.replace(PYPI, distributed_ucxx="0.51.0"))],
            ["distributed-ucxx differs between nodes: 0.52.0 on b; 0.51.0 on c", "InfiniBand"],
        ),
    ],
)
def test_warnings(spec, found, expected):
    warnings = choose(spec, found).warnings
    assert len(warnings) == len(expected)
    assert all(text in line for text, line in zip(expected, warnings, strict=True))


@pytest.mark.parametrize(
    ("options", "found", "text"),
    [
        ({}, seats(ucx=BROKEN), "on a, the UCX in /opt/ucx is 1.15"),
        ({}, seats(ucx=NO_CUDA), "has no transport for CUDA"),
        ({"rmm_async": True}, seats(), "cannot be shared between processes"),
        ({"enable_infiniband": True}, nodes(ports=[IB]), f"{PREFER_SYSTEM}=true"),
        ({"enable_infiniband": True}, nodes(ucx=SYSTEM), "no usable port on n0, n1"),
        ({"enable_rdmacm": True}, seats(), "cannot connect by RDMA"),
        ({"enable_tcp_over_ucx": False}, seats(), "nothing to open connections with"),
        ({"enable_rdmacm": True, "enable_infiniband": False}, seats(), "leave one out"),
        ({"protocol": "tcp", "enable_nvlink": True}, seats(), "--enable-nvlink is for ucx"),
    ],
)
def test_what_cannot_work_is_refused(options, found, text):
    with pytest.raises(UsageError) as error:
        choose(WorkerSpec(**{"protocol": "ucx", **options}), found)
    assert text in str(error.value)


def test_a_node_without_the_package_is_named():
    found = [*seats("a", 2), *seats("b", 2, ucx=MISSING)]
    with pytest.raises(MissingExtra) as error:
        choose(UCX, found)
    assert "--protocol ucx on b needs distributed_ucxx" in str(error.value)
    assert 'pip install "hpcdask[cuda13]"' in str(error.value)


def test_the_asynchronous_allocator_does_not_matter_on_the_cpu():
    assert choose(WorkerSpec(protocol="ucx", rmm_async=True), cpu()).protocol == "ucx"


def test_seats_and_choices_travel_as_json():
    for seat in seats(links="bridges", ports=[IB], hidden=7, ucx=SYSTEM):
        assert Seat.from_json(json.loads(json.dumps(dataclasses.asdict(seat)))) == seat
    assert json.dumps(dataclasses.asdict(Choice("tcp", "why", ("beware",))))


TLS, PRIORITY = "UCX_TLS", "UCX_SOCKADDR_TLS_PRIORITY"


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, {}),
        ({"enable_nvlink": True}, {TLS: "self,sm,cuda_copy,cuda_ipc,tcp"}),
        ({"enable_infiniband": True}, {TLS: "self,sm,cuda_copy,ib,tcp"}),
        ({"enable_infiniband": True, "device": "cpu"}, {TLS: "self,sm,ib,tcp"}),
        (
            {"enable_nvlink": True, "enable_infiniband": True, "enable_rdmacm": True},
            {TLS: "self,sm,cuda_copy,cuda_ipc,ib,tcp", PRIORITY: "rdmacm"},
        ),
        (
            {"enable_infiniband": True, "enable_tcp_over_ucx": False},
            {TLS: "self,sm,cuda_copy,ib"},
        ),
        ({"enable_tcp_over_ucx": True}, {}),
        ({"enable_nvlink": False}, {TLS: "^cuda_ipc"}),
        ({"enable_infiniband": False}, {TLS: "^ib", PRIORITY: "tcp"}),
        # distributed-ucxx makes a CUDA context unless the text has "^cuda"
        (
            {"enable_infiniband": False, "enable_nvlink": False},
            {TLS: "^cuda_ipc,ib", PRIORITY: "tcp"},
        ),
        ({"enable_tcp_over_ucx": False}, {TLS: "^tcp"}),
        ({"enable_rdmacm": False}, {PRIORITY: "tcp"}),
        ({"enable_rdmacm": True}, {PRIORITY: "rdmacm"}),
    ],
)
def test_ucx_environment(options, expected):
    spec = WorkerSpec(**options)
    assert ucx_environment(spec, {}) == expected
    own = {TLS: "tcp", "UCX_LOG_LEVEL": "debug"}
    assert ucx_environment(spec, own) == {k: v for k, v in expected.items() if k != TLS}


@pytest.mark.parametrize(
    "options",
    [
        {"enable_rdmacm": True, "enable_infiniband": False},
        {"enable_tcp_over_ucx": False, "enable_infiniband": False},
        {"enable_tcp_over_ucx": False, "enable_nvlink": True},
    ],
)
def test_switches_that_contradict_each_other(options):
    with pytest.raises(UsageError, match="leave"):
        ucx_environment(WorkerSpec(**options), {})


def net(host, *interfaces):
    kinds = {"i": "infiniband", "h": "slingshot", "e": "ethernet", "t": "other"}
    found = tuple(Interface(name, "10.0.0.1", kinds[name[0]], speed) for name, speed in interfaces)
    return Seat(host, (), Fabric(found))


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        ([[("eth0", 1), ("hsn0", 2), ("ib0", 1)]] * 2, ["ib0"] * 2),
        ([[("eth0", 1000), ("hsn0", 2)]] * 2, ["hsn0"] * 2),
        ([[("eth0", 1000), ("eth1", 25000)]] * 2, ["eth1"] * 2),
        ([[("eth1", 1000), ("eth0", 1000)]] * 2, ["eth0"] * 2),  # a tie: the first by name
        # The slowest node counts
        ([[("eth0", 10), ("eth1", 100)], [("eth0", 10), ("eth1", 1)]], ["eth0"] * 2),
        ([[("ib0", 1), ("eth0", 1)], [("eth0", 1)]], ["eth0"] * 2),
        ([[("ib0", 1), ("ib1", 9)], [("ib0", 1)]], ["ib0"] * 2),
        ([[("eno1", 1), ("eno2", 9)], [("ens5", 1)]], ["eno2", "ens5"]),  # one each of a kind
        ([[("eth0", 0)]], ["eth0"]),
    ],
)
def test_interface_auto(found, expected):
    seats = [net(f"n{number}", *interfaces) for number, interfaces in enumerate(found)]
    chosen = choose_interface(WorkerSpec(interface="auto"), seats)
    assert chosen == {f"n{number}": name for number, name in enumerate(expected)}


def test_no_interface_in_common():
    found = [net("a", ("ib0", 1)), net("b", ("eth0", 1), ("tun0", 0)), net("c")]
    with pytest.raises(UsageError) as error:
        choose_interface(WorkerSpec(interface="auto"), found)
    assert "a: ib0 (infiniband); b: eth0 (ethernet), tun0 (other); c: none" in str(error.value)


def test_interface_by_name_or_not_at_all():
    assert choose_interface(WorkerSpec(interface="lo"), [net("a"), net("b")]) == {
        "a": "lo",
        "b": "lo",
    }
    assert choose_interface(WorkerSpec(), [net("a", ("eth0", 1))]) == {}


def test_check_interface():
    have = [Interface("lo", "127.0.0.1", "other", 0), ETH]
    check_interface("lo", have, "a")
    with pytest.raises(UsageError) as error:
        check_interface("ib7", have, "a")
    assert str(error.value) == (
        "--interface: a has no interface ib7 with an IPv4 address. It has: eno1, lo"
    )
