"""Which transport and interface workers get, in recorded environments."""

from __future__ import annotations

import dataclasses
import itertools

import pytest

from hpcdask.comm.fabric import Fabric, Interface, Port
from hpcdask.comm.topology import NodeLinks
from hpcdask.comm.transport import check_interface, choose, choose_alone, choose_interface
from hpcdask.comm.ucx_config import ucx_environment
from hpcdask.comm.ucx_install import PREFER_SYSTEM, UcxInstall
from hpcdask.errors import MissingExtra, UsageError
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
IB0 = Interface("ib0", "10.1.0.1", "infiniband", 400_000)
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
    return [NodeLinks(host, tuple(map(gpu, own)), fabric(own)) for own in split]


def nodes(count=2, **options):
    return [seat for number in range(count) for seat in seats(f"n{number}", 4, **options)]


def cpu(count=2, **options):
    return [dataclasses.replace(seat, gpus=()) for seat in seats(count=count, **options)]


def mig(host="a", *ports):
    fabric = Fabric((ETH,), ports, (), 0, SYSTEM if ports else PYPI)
    return [NodeLinks(host, (gpu(f"MIG-{host}{number}"),), fabric) for number in range(3)]


def shared_gpu():
    return seats(count=1) * 2


def tls(value, ucx=PYPI):
    """A UCX and the user's UCX_TLS."""
    return dataclasses.replace(ucx, tls=value)


def is_in(choice, protocol, reach, reason):
    assert (choice.protocol, choice.reach) == (protocol, reach)
    assert reason in choice.reason
    assert not any("\n" in line for line in (choice.reason, *choice.warnings))


AUTO = WorkerSpec()
UCX = WorkerSpec(protocol="ucx")
NVLINK = WorkerSpec(enable_nvlink=True)
INSIDE = "NVLink inside nodes, tcp between them: "


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
        (AUTO, shared_gpu(), "tcp", "one GPU only on a"),
        (AUTO, cpu(), "tcp", "workers compute on the CPU"),
        (AUTO, [*seats(), *cpu(1, host="b")], "tcp", "not every worker has a GPU: none on b"),
        (AUTO, mig(), "tcp", "MIG slices"),
        (AUTO, [*mig("a"), *mig("b")], "tcp", "no usable InfiniBand on a, b; MIG slices"),
        (AUTO, [*mig("a", IB), *mig("b", IB)], "ucx", "InfiniBand joins the 2 nodes"),
        (AUTO, seats(hidden=7), "tcp", "--gpu-bind=none"),
        # A job that has a part of the node, whose workers see each other's GPUs
        (AUTO, seats(count=4, ranks=1, hidden=4), "ucx", "NVLink joins the 4 GPUs of a"),
        (AUTO, seats(ucx=MISSING), "tcp", 'on a, distributed-ucxx is not installed: pip install "'),
        (AUTO, seats(ucx=MISSING, links="none"), "tcp", "NVLink does not join"),
        (AUTO, seats(ucx=BROKEN), "tcp", "ucxx needs 1.19.0"),
        (AUTO, seats(ucx=NO_CUDA), "tcp", "has no transport for CUDA"),
        (WorkerSpec(rmm_async=True), seats(), "tcp", "--rmm-async"),
        # The switch and UCX_TLS
        (WorkerSpec(enable_nvlink=False), seats(), "tcp", "--disable-nvlink leaves out NVLink"),
        (NVLINK, seats(), "ucx", "NVLink joins the 8"),
        (NVLINK, seats(links="unknown"), "ucx", "NVLink joins"),
        (AUTO, seats(ucx=tls("tcp")), "tcp", "UCX_TLS=tcp on a leaves out NVLink"),
        (AUTO, seats(ucx=tls("tcp,cuda_copy")), "tcp", "UCX_TLS=tcp,"),
        (AUTO, seats(ucx=tls("^cuda_ipc")), "tcp", "UCX_TLS=^cuda_ipc"),
        (AUTO, seats(ucx=tls("^cuda_copy")), "tcp", "UCX_TLS=^cuda_copy on a leaves out cuda_copy"),
        (AUTO, nodes(ports=[IB], ucx=tls("rc,tcp", SYSTEM)), "tcp", "UCX_TLS=rc,tcp on n0 leaves"),
        (AUTO, seats(ucx=tls("^ib")), "ucx", "NVLink"),
        (AUTO, seats(ucx=tls("all")), "ucx", "NVLink"),
        (AUTO, seats(ucx=tls("tcp,cuda")), "ucx", "NVLink"),
        (AUTO, seats(ucx=tls("sm,cuda")), "tcp", "UCX_TLS=sm,cuda on a leaves UCX nothing to"),
        (AUTO, nodes(ports=[IB], ucx=tls("rc,cuda", SYSTEM)), "ucx", "InfiniBand joins the 2 nod"),
        (
            AUTO,
            nodes(ports=[IB], ucx=tls("^rc,dc,ud", SYSTEM), links="none"),
            "tcp",
            "UCX_TLS=^rc,",
        ),
        # Several nodes, joined by InfiniBand
        (AUTO, nodes(ports=[IB], ucx=SYSTEM), "ucx", "joins the 2 nodes, NVLink the GPUs inside"),
        (AUTO, nodes(ports=[DOWN, IB], ucx=SYSTEM, links="none"), "ucx", "joins the 2 nodes"),
        (AUTO, nodes(net=HSN, ports=[IB], ucx=SYSTEM), "ucx", "InfiniBand"),
        (AUTO, nodes(ports=[IB], ucx=SYSTEM, hidden=3), "ucx", "InfiniBand joins the 2 nodes"),
        # Several nodes with neither
        (AUTO, nodes(ports=[IB], links="none"), "tcp", "n0, n1 cannot use the InfiniBand there"),
        (AUTO, nodes(ports=[IB], ucx=NO_CUDA), "tcp", "no transport for CUDA"),
        (AUTO, nodes(links="none"), "tcp", "no usable InfiniBand on n0, n1; NVLink does"),
        (AUTO, nodes(5, links="none"), "tcp", "InfiniBand on n0, n1, n2, n3, n4; "),
        (AUTO, nodes(hidden=3), "tcp", "InfiniBand on n0, n1; workers on n0, n1 are confined to"),
        (AUTO, [*seats("a", 1), *seats("b", 1)], "tcp", "no node has two GPUs"),
        (AUTO, [*nodes(), *seats("b", links="none")], "tcp", "NVLink does not join the GPUs of b"),
        (
            AUTO,
            nodes(net=[ETH, *HSN], hidden=3),
            "tcp",
            "which tcp can use (with --interface hsn0)",
        ),
        (
            WorkerSpec(interface="auto"),
            nodes(net=HSN, hidden=3),
            "tcp",
            "which tcp can use (hsn0);",
        ),
        (AUTO, nodes(ucx=MISSING), "tcp", "on n0, n1, distributed-ucxx is not installed"),
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
        (UCX, nodes(), "ucx", "--protocol ucx"),
    ],
)
def test_choice(spec, found, protocol, reason):
    is_in(choose(spec, found), protocol, "all", reason)


@pytest.mark.parametrize(
    ("spec", "found", "reason"),
    [
        (AUTO, nodes(), "no usable InfiniBand on n0, n1"),
        (AUTO, nodes(links="bridges"), "no usable InfiniBand on n0, n1"),
        (AUTO, nodes(ports=[DOWN], ucx=SYSTEM), "no usable InfiniBand on n0, n1"),
        (AUTO, nodes(ports=[SHUT], ucx=SYSTEM), "no usable InfiniBand on n0, n1"),
        (AUTO, nodes(ports=[ROCE], ucx=SYSTEM), "no usable InfiniBand on n0, n1"),
        (AUTO, nodes(ports=[IB]), "the UCX on n0, n1 cannot use the InfiniBand there"),
        (AUTO, nodes(net=HSN), "UCX has no transport for Slingshot, which tcp can use (w"),
        (
            AUTO,
            [*nodes(1, ports=[IB], ucx=SYSTEM), *seats("b", ucx=SYSTEM)],
            "no usable InfiniBand on b",
        ),
        # A node where nothing needs to be joined
        (AUTO, [*nodes(), *seats("b", 1)], "no usable InfiniBand on n0, n1, b"),
        (AUTO, nodes(ports=[IB], ucx=tls("cuda,tcp", SYSTEM)), "UCX_TLS=cuda,tcp on n0 leaves out"),
    ],
)
def test_ucx_inside_nodes_only(spec, found, reason):
    is_in(choose(spec, found), "ucx", "node", INSIDE + reason)


@pytest.mark.parametrize(
    ("spec", "found", "expected"),
    [
        (AUTO, seats(), []),
        (AUTO, nodes(ports=[IB], ucx=SYSTEM), []),
        (AUTO, nodes(), []),
        (AUTO, seats(ports=[IB]), []),  # InfiniBand is of no use on a single node
        (AUTO, nodes(ports=[IB]), [f"{PREFER_SYSTEM}=true"]),
        (AUTO, nodes(ports=[IB], links="none"), [f"{PREFER_SYSTEM}=true"]),
        (UCX, nodes(ports=[IB]), [f"{PREFER_SYSTEM}=true"]),
        (AUTO, nodes(ports=[IB], ucx=MISSING), []),
        (AUTO, nodes(ports=[SHUT], ucx=SYSTEM), ["/dev/infiniband"]),
        (AUTO, nodes(ports=[IB, SHUT], ucx=SYSTEM), []),
        (AUTO, nodes(ports=[ROCE], ucx=SYSTEM), ["--protocol ucx uses them, if the network suits"]),
        (UCX, nodes(ports=[ROCE], ucx=SYSTEM), []),
        (AUTO, [*mig("a", IB), *mig("b", IB)], ["MIG slices cannot share memory"]),
        (AUTO, seats(links="bridges"), ["over PCIe"]),
        (UCX, seats(links="none"), ["NVLink does not join"]),
        (UCX, seats(count=1), []),
        (UCX, seats(hidden=7), ["--gpu-bind=none"]),
        (AUTO, nodes(ports=[IB], ucx=SYSTEM, hidden=3), ["--gpu-bind=none"]),
        (UCX, mig(), ["MIG"]),
        (UCX, cpu(), ["workers compute on the CPU; without NVLink or InfiniBand ucx is slower"]),
        (UCX, [*seats(), *cpu(1, host="b")], ["not every worker has a GPU: none on b; without"]),
        (UCX, nodes(), ["no usable InfiniBand on n0, n1"]),
        (
            UCX,
            seats(ucx=tls("tcp,cuda_copy")),
            ["UCX_TLS=tcp,cuda_copy on a leaves out NVLink: expect less"],
        ),
        (UCX, cpu(ucx=tls("tcp")), ["workers compute on the CPU; without"]),
        (
            WorkerSpec(enable_nvlink=False),
            nodes(ports=[IB], ucx=tls("all", SYSTEM)),
            ["UCX_TLS is set on n0, n1 and counts more than --disable-nvlink"],
        ),
        (WorkerSpec(protocol="tcp"), seats(), ["auto would take ucx: NVLink joins the 8 GPUs of"]),
        (WorkerSpec(protocol="tcp"), nodes(), [f"auto would take ucx: {INSIDE}no usable"]),
        (WorkerSpec(protocol="tcp"), seats(ucx=MISSING), []),
        (WorkerSpec(protocol="tcp"), seats(count=1), []),
        (WorkerSpec(protocol="tcp", rmm_async=True), seats(), []),
        (NVLINK, seats(ucx=MISSING), ["--enable-nvlink has no effect"]),
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


def job(own=1, **options):
    """The seat of a job with the first GPUs of a node that has 8, or that hides the others."""
    options = {"hidden": 0, **options}
    count = own if options["hidden"] else 8
    (seat,) = seats("n0", count, ranks=1, **options)
    return dataclasses.replace(seat, gpus=seat.gpus[:own])


@pytest.mark.parametrize(
    ("spec", "seat", "protocol", "reach", "reason", "warning"),
    [
        (AUTO, job(), "ucx", "node", INSIDE + "no usable InfiniBand on n0", ""),
        (AUTO, job(8), "ucx", "node", INSIDE, ""),
        (AUTO, job(links="bridges"), "ucx", "node", INSIDE, ""),
        (AUTO, job(ports=[IB], ucx=SYSTEM), "ucx", "all", "InfiniBand joins this node to oth", ""),
        (AUTO, job(ports=[IB]), "ucx", "node", "cannot use the InfiniBand", f"{PREFER_SYSTEM}=t"),
        (AUTO, job(ports=[SHUT]), "ucx", "node", "no usable InfiniBand", "/dev/infiniband"),
        (AUTO, job(net=HSN), "ucx", "node", "Slingshot, which tcp can use", ""),
        (AUTO, job(ucx=MISSING), "tcp", "all", "on n0, distributed-ucxx is not installed", ""),
        (AUTO, job(links="none"), "tcp", "all", "NVLink does not join the GPUs of n0", ""),
        (AUTO, job(links="unknown"), "tcp", "all", "NVML does not tell", ""),
        (AUTO, seats("n0", 1)[0], "tcp", "all", "one GPU only on n0", ""),
        (AUTO, cpu(1)[0], "tcp", "all", "workers compute on the CPU", ""),
        (AUTO, mig()[0], "tcp", "all", "MIG slices", ""),
        (WorkerSpec(rmm_async=True), job(), "tcp", "all", "--rmm-async", ""),
        (WorkerSpec(enable_nvlink=False), job(), "tcp", "all", "--disable-nvlink", ""),
        (
            AUTO,
            job(2, hidden=6),
            "tcp",
            "all",
            "6 GPUs of n0 are kept from this job by a cgroup or a container, so CUDA IPC",
            "",
        ),
        (AUTO, job(2, hidden=1), "tcp", "all", "1 GPU of n0 is kept", ""),
        (AUTO, job(1, hidden=7), "tcp", "all", "there: let jobs have whole nodes", ""),
        (AUTO, job(hidden=7, ports=[IB], ucx=SYSTEM), "ucx", "all", "InfiniBand", "let jobs have"),
        (UCX, job(hidden=7, ports=[IB], ucx=SYSTEM), "ucx", "all", "--protocol ucx", "let jobs ha"),
        (UCX, job(), "ucx", "all", "--protocol ucx", "no usable InfiniBand on n0: between nodes"),
        (UCX, cpu(1)[0], "ucx", "all", "--protocol ucx", "workers compute on the CPU; without"),
        (WorkerSpec(protocol="tcp"), job(), "tcp", "all", "--protocol tcp", "auto would take ucx"),
        (WorkerSpec(protocol="tcp"), cpu(1)[0], "tcp", "all", "--protocol tcp", ""),
    ],
)
def test_choice_of_a_job_that_does_not_know_the_others(
    spec, seat, protocol, reach, reason, warning
):
    choice = choose_alone(spec, seat)
    is_in(choice, protocol, reach, reason)
    assert len(choice.warnings) == bool(warning)
    assert not warning or warning in choice.warnings[0]


@pytest.mark.parametrize(
    ("options", "ucx", "kind"),
    [
        ({"protocol": "ucx"}, MISSING, MissingExtra),
        ({"protocol": "ucx"}, BROKEN, UsageError),
        ({"protocol": "tcp", "enable_nvlink": True}, PYPI, UsageError),
    ],
)
def test_a_job_is_refused_the_same(options, ucx, kind):
    with pytest.raises(kind):
        choose_alone(WorkerSpec(**options), job(ucx=ucx))


@pytest.mark.parametrize(
    ("options", "found", "text"),
    [
        ({}, seats(ucx=BROKEN), "on a, the UCX in /opt/ucx is 1.15"),
        ({}, seats(ucx=NO_CUDA), "has no transport for CUDA"),
        ({"rmm_async": True}, seats(), "cannot be shared between processes"),
        ({}, seats(ucx=tls("sm,self,cuda")), "UCX_TLS=sm,self,cuda on a leaves UCX nothing to"),
        ({}, seats(ucx=tls("tcp")), "UCX_TLS=tcp on a leaves out cuda_copy"),
        (
            {},
            nodes(ports=[IB], ucx=tls("rc,tcp", SYSTEM)),
            "UCX_TLS=rc,tcp on n0 leaves out cuda_c",
        ),
        (
            {},
            [*seats("a", 2), *cpu(1, host="b", ucx=tls("tcp")), *seats("c", ucx=tls("tcp"))],
            "UCX_TLS=tcp on c leaves out cuda_copy",
        ),
        ({}, seats(ucx=tls("^cuda_copy")), "leaves out cuda_copy"),
        ({}, seats(ucx=tls("^cuda")), "leaves out cuda_copy"),
        ({}, seats(ucx=tls("tcp,cuda_ipc")), "leaves out cuda_copy"),
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
    assert f'pip install "hpcdask[{cuda_extra()}]"' in str(error.value)


def test_the_asynchronous_allocator_does_not_matter_on_the_cpu():
    assert choose(WorkerSpec(protocol="ucx", rmm_async=True), cpu()).protocol == "ucx"


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, {}),
        ({"enable_nvlink": True}, {}),
        ({"enable_nvlink": False}, {"UCX_TLS": "^cuda_ipc"}),
        ({"port_range": "20000-20999"}, {"UCX_TCP_PORT_RANGE": "20000-20999"}),
    ],
)
def test_ucx_environment(options, expected):
    spec = WorkerSpec(**options)
    assert ucx_environment(spec, {}) == expected
    assert ucx_environment(spec, dict.fromkeys(expected, "the user's")) == {}


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
