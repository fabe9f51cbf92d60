"""What is decided about exchanges between workers, without any."""

from __future__ import annotations

import asyncio
import hmac
import logging
from dataclasses import asdict
from types import SimpleNamespace

import dask
import numpy as np
import pytest
from distributed.comm import CommClosedError
from distributed.protocol import to_serialize

from hpcdask import logs
from hpcdask.comm import peers
from hpcdask.comm.ucx_hooks import environment
from hpcdask.comm.warmup import FAR_PEERS, LinkTest, choose_peers, evaluate, transport_of
from launching import needs


def link(to: str = "a", source: str = "b", **values) -> LinkTest:
    found = {"transport": "ucx", "first_s": 0.1, "rate": 1e11, "cuda_ipc": True}
    return LinkTest(to, source, **{**found, **values})


# What workers found, in words


def test_links_between_gpus_that_share_memory_say_that_cuda_ipc_is_active():
    found = evaluate([link(), link("b", "a", rate=2e11), link("a", "c")], on_device=True)
    expected = "ucx between 2 pairs of workers, CUDA IPC is active (100 GB/s or more)"
    assert found.line == expected
    assert found.warnings == ()


def test_host_memory_has_no_cuda_ipc():
    found = evaluate([link(rate=1e8, cuda_ipc=None)], on_device=False)
    assert found.line == "ucx between 1 pair of workers (0.1 GB/s or more)"
    assert found.warnings == ()


def test_a_pair_without_cuda_ipc_on_one_node_is_named():
    found = evaluate(
        [link(), link("d", "c", cuda_ipc=False), link("c", "d", cuda_ipc=False)], on_device=True
    )
    assert "CUDA IPC is active" not in found.line
    (warning,) = found.warnings
    assert "between workers c and d" in warning
    for words in ("CUDA IPC (NVLink) is not in use", "UCX_TLS", "confined", "PCIe"):
        assert words in warning


def test_of_many_pairs_some_are_named():
    """A setting that is the same on all nodes concerns each pair."""
    found = evaluate(
        [link(f"a{number}", f"b{number}", cuda_ipc=False) for number in range(3500)], on_device=True
    )
    assert len(found.warnings) == 6
    assert found.warnings[-1] == "the same for 3495 more links"


def test_a_rate_is_no_evidence_of_cuda_ipc():
    """Under load it is low over NVLink, too."""
    found = evaluate([link(rate=1e8)], on_device=True)
    expected = "ucx between 1 pair of workers, CUDA IPC is active (0.1 GB/s or more)"
    assert (found.line, found.warnings) == (expected, ())
    for rate in (1e8, 1e12):
        unknown = evaluate([link(rate=rate, cuda_ipc=None)], on_device=True)
        assert "CUDA IPC" not in unknown.line
        assert unknown.warnings == ()


def test_between_nodes_less_is_expected_and_cuda_ipc_is_not_claimed():
    found = evaluate([link(same_host=False, rate=5e9, cuda_ipc=None)], on_device=True)
    assert found.line == "ucx between 1 pair of workers (5 GB/s or more)"
    assert found.warnings == ()


def test_data_over_tcp_is_a_warning():
    found = evaluate([link(transport="tcp")], on_device=True)
    assert found.line == "no data over ucx"
    assert found.warnings == ("data from worker b to a goes over tcp, not ucx",)


def test_a_problem_is_told_and_counts_as_nothing_else():
    found = evaluate(
        [link(problem="TimeoutError: x", transport="", rate=0.0), link()], on_device=True
    )
    assert found.warnings == ("no data came from worker b to a: TimeoutError: x",)
    assert found.line.startswith("ucx between 1 pair of workers, CUDA IPC is active")


def test_nothing_found_is_said():
    assert evaluate([], on_device=True).line == "no data over ucx"


def test_the_transport_of_those_that_are_there():
    def told(*events) -> str:
        told = tuple((0.0, {"name": name, "links": links}) for name, links in events)
        workers = {name: SimpleNamespace(name=name) for name in ("a", "b")}
        scheduler = SimpleNamespace(workers=workers, get_events=lambda _: told)
        return transport_of(scheduler, on_device=True)

    assert transport_of(None, on_device=True) == told() == told(("a", [])) == ""
    assert told(("a", []), ("gone", [])) == ""
    assert told(("a", []), ("b", [])) == "tcp between workers"
    links = [asdict(link("a", "b", rate=2e11)), asdict(link("gone", "b", rate=1e9))]
    expected = "ucx between 1 pair of workers, CUDA IPC is active (200 GB/s or more)"
    assert told(("a", links), ("b", [])) == expected


# Whom a new worker gets warm with


def test_all_on_its_node_and_the_last_few_elsewhere():
    near = [f"tls://10.0.0.1:{port}" for port in range(1, 9)]
    far = [f"tls://10.0.0.{host}:1" for host in range(2, 40)]
    chosen = choose_peers(near[3], [*near[:4], *far, *near[4:]])
    assert sorted(chosen[:7]) == sorted(set(near) - {near[3]})
    assert chosen[7:] == far[-FAR_PEERS:]


def test_not_all_begin_with_the_same_one():
    near = [f"tcp://10.0.0.1:{port}" for port in range(1, 30)]
    assert len({choose_peers(me, near)[0] for me in near}) > 5


def test_the_first_worker_has_nobody():
    assert choose_peers("tcp://10.0.0.1:1", ["tcp://10.0.0.1:1"]) == []
    assert choose_peers("tcp://10.0.0.1:1", []) == []


def test_addresses_of_ipv6():
    here, there = "tcp://[::1]:1", "tcp://[::2]:1"
    assert choose_peers(here, [here, there, "tcp://[::1]:2"]) == ["tcp://[::1]:2", there]


# The environment


def test_the_user_s_settings_of_ucx_win():
    wanted = environment({})
    assert wanted["UCX_WARN_UNUSED_ENV_VARS"] == "n"
    mine = dict.fromkeys(wanted, "mine")
    given = environment({**mine, "UCX_TLS": "tcp"})
    assert "UCX_TLS" not in given
    assert {name for name, value in given.items() if value != "mine"} == {"UCXPY_PROGRESS_MODE"}


def test_ucx_is_driven_by_the_event_loop_whatever_the_user_set():
    given = environment({"UCXPY_PROGRESS_MODE": "thread"})
    assert given["UCXPY_PROGRESS_MODE"] == "blocking"


# Messages


def limit_of(worker_class=peers.PeerWorker) -> float:
    worker = SimpleNamespace(state=SimpleNamespace(transfer_message_bytes_limit=50e6))
    worker_class._ask_for_more(worker)
    return worker.state.transfer_message_bytes_limit


def test_device_memory_travels_in_large_messages_unless_the_user_said_otherwise():
    assert limit_of() == peers.MESSAGE_NBYTES
    with dask.config.set({"distributed.worker.transfer.message-bytes-limit": "60MB"}):
        assert limit_of() == 50e6


class OnDevice:
    __cuda_array_interface__ = None


@needs("ucxx")
@pytest.mark.parametrize(
    ("msg", "expected"),
    [
        ({"status": "OK", "data": {"x": to_serialize(OnDevice())}}, True),
        ({"status": "OK", "data": {"x": to_serialize(1), "y": to_serialize(OnDevice())}}, True),
        (to_serialize(OnDevice()), True),
        ({"status": "OK", "data": {"x": to_serialize(np.ones(3))}}, False),
        ({"op": "get_data", "keys": ["x"]}, False),
        (["x"], False),
    ],
)
def test_messages_of_device_memory_are_known_before_they_are_serialized(msg, expected):
    from hpcdask.comm import ucx

    assert ucx._of_device(msg) is expected


@needs("ucxx")
@pytest.mark.parametrize("nbytes", [0, 1, 1006, 1007, 1008, 5000])
def test_the_first_block_has_one_size_and_loses_nothing(nbytes: int):
    from hpcdask.comm import ucx

    header = bytes(range(256)) * 20
    first, rest = ucx._first_block(0, header[:nbytes], 3)
    assert len(first) == ucx.BLOCK_NBYTES
    flag, size, count = ucx._PREFIX.unpack_from(first)
    assert (flag, size, count) == (0, nbytes, 3)
    assert (first[ucx._PREFIX.size :] + rest)[:nbytes] == header[:nbytes]
    assert bool(rest) == (nbytes > ucx.BLOCK_NBYTES - ucx._PREFIX.size)


# The proof


class Wire:
    """One end of a pair of queues, in the place of an `Endpoint`."""

    def __init__(self, out: asyncio.Queue[bytes], into: asyncio.Queue[bytes]) -> None:
        self.out, self.into = out, into
        self.sent: list[bytes] = []

    def send(self, buffer: bytes):
        self.sent.append(bytes(buffer))
        self.out.put_nowait(bytes(buffer))
        return asyncio.sleep(0)

    async def receive(self, buffer: bytearray) -> None:
        buffer[:] = await self.into.get()

    async def wait(self, *requests) -> None:
        for request in requests:
            await request


def meet(theirs: bytes, mine: bytes) -> tuple[list[object], Wire, Wire]:
    from hpcdask.comm.ucx_auth import authenticate

    async def both():
        one, other = asyncio.Queue(), asyncio.Queue()
        listener, connector = Wire(one, other), Wire(other, one)

        ends = [
            asyncio.create_task(authenticate(listener, theirs, listens=True)),
            asyncio.create_task(authenticate(connector, mine, listens=False)),
        ]
        await asyncio.wait(ends, timeout=60, return_when=asyncio.FIRST_EXCEPTION)
        for _ in range(10):  # what was sent before the refusal arrives
            await asyncio.sleep(0)
        for end in ends:
            end.cancel()
        return await asyncio.gather(*ends, return_exceptions=True), listener, connector

    return asyncio.run(both())


@needs("ucxx")
def test_both_know_the_secret():
    ends, listener, connector = meet(b"s" * 32, b"s" * 32)
    assert ends == [None, None]
    assert [len(part) for part in listener.sent + connector.sent] == [32] * 4
    assert len({*listener.sent, *connector.sent}) == 4
    assert not any(b"s" * 8 in part for part in listener.sent + connector.sent)


@needs("ucxx")
def test_a_listener_proves_nothing_to_one_that_does_not_know_the_secret():
    ends, listener, _ = meet(b"s" * 32, b"x" * 32)
    assert isinstance(ends[0], PermissionError)
    assert isinstance(ends[1], asyncio.CancelledError)  # it waited on
    assert len(listener.sent) == 1


@needs("ucxx")
def test_a_connector_refuses_a_listener_that_sends_its_answer_back():
    from hpcdask.comm.ucx_auth import authenticate

    class Mirror(Wire):
        def send(self, buffer: bytes):
            self.into.put_nowait(bytes(buffer))
            return super().send(buffer)

    async def dial():
        await authenticate(Mirror(asyncio.Queue(), asyncio.Queue()), b"s" * 32, listens=False)

    with pytest.raises(PermissionError):
        asyncio.run(dial())


@needs("ucxx")
def test_every_challenge_is_new():
    _, one, _ = meet(b"s" * 32, b"s" * 32)
    _, two, _ = meet(b"s" * 32, b"s" * 32)
    assert not {*one.sent} & {*two.sent}
    assert hmac.digest(b"s" * 32, b"listens" + one.sent[0], "sha256") not in one.sent


@pytest.mark.parametrize(
    ("error", "told"),
    [
        ("[SSL: UNEXPECTED_EOF_WHILE_READING] EOF occurred in violation of protocol", False),
        ("[SSL: CERTIFICATE_VERIFY_FAILED] certificate verify failed", True),
    ],
)
def test_a_peer_that_ended_in_the_handshake_is_not_complained_about(error, told):
    text = "Listener on %r: TLS handshake failed with remote %r: %s"
    arguments = ("tls://10.0.0.1:1", "tls://10.0.0.2:2", error)
    record = logging.LogRecord(
        "distributed.comm.tcp", logging.WARNING, "", 0, text, arguments, None
    )
    assert logs._not_of_the_departed(record) == told


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (CommClosedError("in <TLS>: Stream is closed"), False),  # its stream's end tells it
        (OSError("Timed out trying to connect to tls://10.0.0.1:1 after 30 s"), True),
    ],
)
def test_a_heartbeat_that_the_end_of_the_scheduler_cut_off_is_not_complained_about(error, told):
    text = "Failed to communicate with scheduler during heartbeat."
    what = (type(error), error, None)
    record = logging.LogRecord("distributed.worker", logging.ERROR, "", 0, text, (), what)
    assert logs._not_of_the_departed(record) == told


@pytest.mark.parametrize(
    "text",
    [
        "Worker stream died during communication: tls://192.0.2.2:1",
        "failed during get data with tls://192.0.2.1:1 -> tls://192.0.2.2:1",
    ],
)
def test_a_peer_that_died_is_one_line(text):
    for error, traceback in (
        (CommClosedError("in <TLS>: Stream is closed"), False),
        (OSError("Timed out trying to connect to tls://192.0.2.2:1 after 10 s"), False),
        (OSError(), True),
    ):
        known = (type(error), error, None)
        record = logging.LogRecord("distributed.worker", logging.ERROR, "", 0, text, (), known)
        assert logs._not_of_the_departed(record)
        assert bool(record.exc_info) == traceback
        assert ("after 10 s" in record.getMessage()) == ("after 10 s" in str(error))
