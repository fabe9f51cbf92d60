"""Which transport and interface workers get, in recorded environments."""

from __future__ import annotations

import dataclasses
import itertools

import pytest

from hpcdask.comm.fabric import Fabric, Interface, Port
from hpcdask.comm.transport import NodeLinks, choose, choose_interface
from hpcdask.comm.ucx_config import PREFER_SYSTEM, UcxInstall
from hpcdask.errors import MissingExtra, UsageError, installing
from hpcdask.gpu.devices import Gpu
from hpcdask.gpu.driver import cuda_extra
from hpcdask.spec.specs import WorkerSpec

PYPI = UcxInstall("0.52.0", "1.21.0", "package", ("cma", "cuda"))
SYSTEM = UcxInstall("0.52.0", "1.20.0", "system", ("cma", "cuda", "ib", "ib_mlx5", "rdmacm"))
NO_CUDA = UcxInstall("0.52.0", "1.20.0", "system", ("cma", "ib"))
MISSING = UcxInstall(problem='distributed-ucxx is not installed: pip install "hpcdask[cuda13]"')
BROKEN = UcxInstall("0.52.0", problem="the UCX in /opt/ucx is 1.15, and ucxx needs 1.19.0 or newer")
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
    }[links]

    def fabric(own):
        shown = tuple(own if hidden else uuids)
        seen = tuple(pair for pair in pairs if set(pair) <= set(shown))
        return Fabric((*net,), (*ports,), seen, hidden, ucx, shown)

    split = [[uuid] for uuid in uuids] if ranks is None else [uuids]
    return [NodeLinks(host, tuple(map(gpu, own)), fabric(own)) for own in split]


def nodes(count=2, **options):
    return [seat for number in range(count) for seat in seats(f"n{number}", 4, **options)]


def cpu(count=2, **options):
    return [dataclasses.replace(seat, gpus=()) for seat in seats(count=count, **options)]


def mig(host="a", *ports):
    fabric = Fabric((ETH,), ports, (), 0, SYSTEM if ports else PYPI)
    return [NodeLinks(host, (gpu(f"MIG-{host}{number}"),), fabric) for number in range(3)]


def job(own=1, **options):
    """The seat of a job with the first GPUs of a node that has 8, or that hides the others."""
    options = {"hidden": 0, **options}
    count = own if options["hidden"] else 8
    (seat,) = seats("n0", count, ranks=1, **options)
    return dataclasses.replace(seat, gpus=seat.gpus[:own])


def tls(value, ucx=PYPI):
    """A UCX and the user's UCX_TLS."""
    return dataclasses.replace(ucx, tls=value)


AUTO = WorkerSpec()
TCP = WorkerSpec(protocol="tcp")
UCX = WorkerSpec(protocol="ucx")
NVLINK = WorkerSpec(enable_nvlink=True)
INSIDE = "NVLink inside nodes, tcp between them: "
SLOWER = "without NVLink or InfiniBand ucx is slower"
WHOLE = "let jobs have whole nodes"
RC = tls("rc,tcp", SYSTEM)


@pytest.mark.parametrize(
    ("spec", "found", "expected", "reason", "warnings"),
    [
        # One node
        (AUTO, seats(), "ucx", "NVLink joins the 8 GPUs of a", []),
        (AUTO, seats(ranks=1), "ucx", "NVLink joins the 8 GPUs of a", []),
        (AUTO, seats(ports=[IB]), "ucx", "NVLink joins the 8 GPUs of a", []),
        (AUTO, seats(links="bridges"), "ucx", "NVLink joins the 8 GPUs of a", []),
        (AUTO, seats(links="none"), "tcp", "NVLink does not join the GPUs of a", []),
        (AUTO, seats(count=1), "tcp", "a single GPU", []),
        (AUTO, seats(count=1) * 2, "tcp", "one GPU only on a", []),
        (AUTO, cpu(), "tcp", "workers compute on the CPU", []),
        (AUTO, [*seats(), *cpu(1, host="b")], "tcp", "not every worker has a GPU: none on b", []),
        (AUTO, mig(), "tcp", "MIG slices", []),
        (AUTO, seats(hidden=7), "tcp", "workers on a are confined", ["--gpu-bind=none"]),
        # A job that has a part of the node, whose workers see each other's GPUs
        (AUTO, seats(count=4, ranks=1, hidden=4), "ucx", "NVLink joins the 4 GPUs of a", []),
        # Without UCX
        (AUTO, seats(ucx=MISSING), "tcp", "on a, distributed-ucxx is not installed: pip inst", []),
        (AUTO, seats(ucx=MISSING, links="none"), "tcp", "NVLink does not join", []),
        (AUTO, seats(ucx=BROKEN), "tcp", "ucxx needs 1.19.0", []),
        (AUTO, seats(ucx=NO_CUDA), "tcp", "has no transport for CUDA", []),
        (WorkerSpec(rmm_async=True), seats(), "tcp", "--rmm-async", []),
        # The switch and UCX_TLS
        (WorkerSpec(enable_nvlink=False), seats(), "tcp", "--disable-nvlink leaves out NVL", []),
        (NVLINK, seats(links="none"), "ucx", "NVLink joins", []),
        (AUTO, seats(ucx=tls("tcp")), "tcp", "UCX_TLS=tcp on a leaves out NVLink", []),
        (AUTO, seats(ucx=tls("^cuda_ipc")), "tcp", "UCX_TLS=^cuda_ipc", []),
        (AUTO, seats(ucx=tls("^cuda_copy")), "tcp", "UCX_TLS=^cuda_copy on a leaves out cuda", []),
        (AUTO, nodes(ports=[IB], ucx=RC), "tcp", "UCX_TLS=rc,tcp on n0 leaves out cuda_copy", []),
        (AUTO, seats(ucx=tls("^ib")), "ucx", "NVLink", []),
        (AUTO, seats(ucx=tls("all")), "ucx", "NVLink", []),
        (AUTO, seats(ucx=tls("tcp,cuda")), "ucx", "NVLink", []),
        # Several nodes, joined by InfiniBand
        (AUTO, nodes(ports=[IB], ucx=SYSTEM), "ucx", "the 2 nodes, NVLink the GPUs inside", []),
        (AUTO, nodes(ports=[DOWN, IB], ucx=SYSTEM, links="none"), "ucx", "joins the 2 nodes", []),
        (AUTO, nodes(net=HSN, ports=[IB, SHUT], ucx=SYSTEM), "ucx", "InfiniBand", []),
        (AUTO, nodes(ports=[IB], ucx=tls("rc,cuda", SYSTEM)), "ucx", "joins the 2 nodes", []),
        (AUTO, nodes(ports=[IB], ucx=SYSTEM, hidden=3), "ucx", "joins the 2 no", [WHOLE]),
        (AUTO, [*mig("a", IB), *mig("b", IB)], "ucx", "InfiniBand joins the 2 nodes", []),
        # Several nodes, with NVLink only
        (AUTO, nodes(), "node", INSIDE + "no usable InfiniBand on n0, n1", []),
        (AUTO, nodes(ports=[DOWN], ucx=SYSTEM), "node", "no usable InfiniBand on n0, n1", []),
        (AUTO, nodes(ports=[SHUT], ucx=SYSTEM), "node", "no usable InfiniBand", []),
        (AUTO, nodes(ports=[ROCE], ucx=SYSTEM), "node", "no usable InfiniBand", []),
        (AUTO, nodes(ports=[IB]), "node", "UCX on n0, n1 cannot use", [f"{PREFER_SYSTEM}=true"]),
        (AUTO, nodes(net=HSN), "node", "tcp can use Slingshot (--interface hsn0)", []),
        (AUTO, [*nodes(1, ports=[IB], ucx=SYSTEM), *seats("b", ucx=SYSTEM)], "node", "on b", []),
        (
            AUTO,
            nodes(ports=[IB], ucx=tls("cuda,tcp", SYSTEM)),
            "node",
            "UCX_TLS=cuda,tcp on n0",
            [],
        ),
        # Several nodes with neither
        (AUTO, nodes(ports=[IB], links="none"), "tcp", "cannot use the Inf", [PREFER_SYSTEM]),
        (AUTO, nodes(links="none"), "tcp", "no usable InfiniBand on n0, n1; NVLink does", []),
        (AUTO, nodes(hidden=3), "tcp", "on n0, n1; workers on n0, n1 are confined to", [WHOLE]),
        (AUTO, [*seats("a", 1), *seats("b", 1)], "tcp", "one GPU only on a, b", []),
        (AUTO, [*nodes(), *seats("b", links="none")], "tcp", "not join the GPUs of b", []),
        (AUTO, nodes(ports=[IB], ucx=MISSING), "tcp", "on n0, n1, distributed-ucxx is not in", []),
        # By name
        (TCP, cpu(), "tcp", "--protocol tcp", []),
        (TCP, seats(), "tcp", "--protocol tcp", ["auto would take ucx: NVLink joins the 8 GPUs"]),
        (TCP, seats(ucx=MISSING), "tcp", "--protocol tcp", []),
        (UCX, seats(), "ucx", "--protocol ucx", []),
        (UCX, seats(links="none"), "ucx", "--protocol ucx", ["does not join the GPUs of a: with"]),
        (UCX, seats(hidden=7), "ucx", "--protocol ucx", ["--gpu-bind=none", SLOWER]),
        (UCX, cpu(), "ucx", "--protocol ucx", [SLOWER]),
        (UCX, nodes(), "ucx", "--protocol ucx", ["no usable InfiniBand on n0, n1"]),
        (UCX, nodes(ports=[ROCE], ucx=SYSTEM), "ucx", "--protocol ucx", []),
        (WorkerSpec(protocol="ucx", rmm_async=True), cpu(), "ucx", "--protocol ucx", [SLOWER]),
        # A job that does not know the others
        (AUTO, job(), "node", INSIDE + "no usable InfiniBand on n0", []),
        (AUTO, job(8, links="bridges"), "node", INSIDE, []),
        (AUTO, job(ports=[IB], ucx=SYSTEM), "ucx", "InfiniBand joins this node to others", []),
        (AUTO, job(ports=[IB]), "node", "cannot use the InfiniBand", [f"{PREFER_SYSTEM}=true"]),
        (AUTO, job(ucx=MISSING), "tcp", "on n0, distributed-ucxx is not installed", []),
        (AUTO, job(links="none"), "tcp", "NVLink does not join the GPUs of n0", []),
        (AUTO, seats("n0", 1)[0], "tcp", "one GPU only on n0", []),
        (AUTO, cpu(1)[0], "tcp", "workers compute on the CPU", []),
        (AUTO, job(2, hidden=6), "tcp", "workers on n0 are confined to their GPUs by", [WHOLE]),
        (AUTO, job(hidden=7, ports=[IB], ucx=SYSTEM), "ucx", "InfiniBand", [WHOLE]),
        (UCX, job(), "ucx", "--protocol ucx", ["no usable InfiniBand on n0"]),
    ],
)
def test_choice(spec, found, expected, reason, warnings):
    """`expected` is tcp, ucx for all workers, or ucx inside of a node."""
    alone = not isinstance(found, list)
    choice = choose(spec, [found] if alone else found, alone=alone)
    protocol, reach = ("ucx", "node") if expected == "node" else (expected, "all")
    assert (choice.protocol, choice.reach) == (protocol, reach)
    assert reason in choice.reason
    assert len(choice.warnings) == len(warnings), choice.warnings
    assert all(text in line for text, line in zip(warnings, choice.warnings, strict=True))
    assert not any("\n" in line for line in (choice.reason, *choice.warnings))


@pytest.mark.parametrize(
    ("options", "found", "text"),
    [
        ({}, seats(ucx=BROKEN), "on a, the UCX in /opt/ucx is 1.15"),
        ({}, job(ucx=BROKEN), "on n0, the UCX in /opt/ucx is 1.15"),
        ({}, seats(ucx=NO_CUDA), "has no transport for CUDA"),
        ({"rmm_async": True}, seats(), "cannot be shared between processes"),
        ({}, [*seats("a"), *seats("c", ucx=tls("tcp"))], "UCX_TLS=tcp on c leaves out cuda_copy"),
        ({}, seats(ucx=tls("^cuda")), "leaves out cuda_copy"),
        ({"protocol": "tcp", "enable_nvlink": True}, seats(), "--enable-nvlink is for ucx"),
    ],
)
def test_what_cannot_work_is_refused(options, found, text):
    spec = WorkerSpec(**{"protocol": "ucx", **options})
    seats = found if isinstance(found, list) else [found]
    with pytest.raises(UsageError) as error:
        choose(spec, seats, alone=seats is not found)
    assert text in str(error.value)


def test_a_node_without_the_package_is_named():
    found = [*seats("a", 2), *seats("b", 2, ucx=MISSING)]
    with pytest.raises(MissingExtra) as error:
        choose(UCX, found)
    assert "--protocol ucx on b needs distributed_ucxx" in str(error.value)
    assert installing(cuda_extra()) in str(error.value)


# Interfaces


def net(host, *interfaces):
    kinds = {"i": "infiniband", "h": "slingshot", "e": "ethernet", "t": "other"}
    found = tuple(Interface(name, "10.0.0.1", kinds[name[0]], speed) for name, speed in interfaces)
    return NodeLinks(host, (), Fabric(found))


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        ([[("eth0", 1), ("hsn0", 2), ("ib0", 1)]] * 2, ["ib0"] * 2),
        ([[("eth0", 1000), ("hsn0", 2)]] * 2, ["hsn0"] * 2),
        ([[("eth0", 1000), ("eth1", 25000)]] * 2, ["eth1"] * 2),
        ([[("eth1", 1000), ("eth0", 1000)]] * 2, ["eth0"] * 2),  # a tie: the first by name
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
