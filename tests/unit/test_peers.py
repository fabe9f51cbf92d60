"""What is decided about exchanges between workers, without any."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import asdict
from types import SimpleNamespace
from typing import Any

import pytest
from distributed.comm import CommClosedError

from hpcdask import logs
from hpcdask.comm.cuda_ipc import Mappings
from hpcdask.comm.ucx_config import environment
from hpcdask.comm.warmup import FAR_PEERS, LinkTest, choose_peers, evaluate, transport_of
from launching import needs


def link(to: str = "a", source: str = "b", **values) -> LinkTest:
    found = {"transport": "ucx", "rate": 1e11, "cuda_ipc": True}
    return LinkTest(to, source, **{**found, **values})


# What workers found, in words


@pytest.mark.parametrize(
    ("links", "on_device", "line", "warnings"),
    [
        (
            [link(), link("b", "a", rate=2e11), link("a", "c")],
            True,
            "ucx between 2 pairs of workers, CUDA IPC is active (100 GB/s or more)",
            [],
        ),
        # a rate is no evidence: under load it is low over NVLink, too
        ([link(rate=1e8)], True, "1 pair of workers, CUDA IPC is active (0.1 GB/s or more)", []),
        ([link(rate=1e12, cuda_ipc=None)], True, "1 pair of workers (1e+03 GB/s or more)", []),
        # host memory, and other nodes
        ([link(rate=1e8, cuda_ipc=None)], False, "1 pair of workers (0.1 GB/s or more)", []),
        ([link(same_host=False, rate=5e9, cuda_ipc=None)], True, "workers (5 GB/s or mo", []),
        (
            [link(), link("d", "c", cuda_ipc=False), link("c", "d", cuda_ipc=False)],
            True,
            "2 pairs of workers (100 GB/s or more)",
            ["slow: between workers c and d, on one node, CUDA IPC (NVLink) is not in use. See"],
        ),
        ([link(transport="tcp")], True, "no data over ucx", ["from worker b to a goes over tcp"]),
        (
            [link(problem="TimeoutError: x", transport="", rate=0.0), link()],
            True,
            "ucx between 1 pair of workers, CUDA IPC is active",
            ["no data came from worker b to a: TimeoutError: x"],
        ),
        ([], True, "no data over ucx", []),
    ],
)
def test_what_links_say(links, on_device, line, warnings):
    found = evaluate(links, on_device=on_device)
    assert line in found.line
    assert len(found.warnings) == len(warnings)
    assert all(text in told for text, told in zip(warnings, found.warnings, strict=True))


def test_of_many_pairs_some_are_named():
    """A setting that is the same on all nodes concerns each pair."""
    found = evaluate(
        [link(f"a{number}", f"b{number}", cuda_ipc=False) for number in range(3500)], on_device=True
    )
    assert len(found.warnings) == 6
    assert found.warnings[-1] == "the same for 3495 more links"


def test_a_ucx_whose_mappings_cannot_be_released_is_one_line():
    """Regression: with another UCX than 1.21 nothing was released, and nobody was told."""
    links = [link(unknown_ucx=Mappings((1, 20, 1)).unknown) for _ in range(8)]
    (line,) = evaluate(links, on_device=True).warnings
    assert line.startswith("UCX 1.20.1 is not known to hpcdask: when a worker dies, GPU memory")
    for version in ((1, 21, 0), (1, 22, 0)):  # is released, or need not be
        known = [link(unknown_ucx=Mappings(version).unknown)]
        assert evaluate(known, on_device=True).warnings == ()


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


# The proof


class Channel:
    """One end of a pair of queues, in the place of an endpoint."""

    def __init__(self, out: asyncio.Queue[bytes], into: asyncio.Queue[bytes]) -> None:
        self.out, self.into = out, into
        self.sent: list[bytes] = []

    async def send(self, message: bytes) -> None:
        self.sent.append(message)
        self.out.put_nowait(message)

    async def receive(self, count: int) -> bytes:
        return await self.into.get()


def meet(theirs: bytes, mine: bytes) -> tuple[list[Any], list[bytes], list[bytes]]:
    """What a listener and a connector end with, and what each has sent."""
    from hpcdask.comm.ucx import prove

    async def both():
        one, other = asyncio.Queue(), asyncio.Queue()
        listener, connector = Channel(one, other), Channel(other, one)
        ends = [
            asyncio.create_task(prove(listener, theirs, listens=True)),
            asyncio.create_task(prove(connector, mine, listens=False)),
        ]
        await asyncio.wait(ends, timeout=60, return_when=asyncio.FIRST_EXCEPTION)
        for _ in range(10):  # what was sent before the refusal arrives
            await asyncio.sleep(0)
        for end in ends:
            end.cancel()
        return await asyncio.gather(*ends, return_exceptions=True), listener.sent, connector.sent

    return asyncio.run(both())


@needs("ucxx")
def test_both_know_the_secret():
    (listener, connector), told, heard = meet(b"s" * 32, b"s" * 32)
    assert listener == connector[::-1]  # each sends by the tag by which the other receives
    sent = told + heard
    assert [len(part) for part in sent] == [32] * 4
    assert len({*sent, *meet(b"s" * 32, b"s" * 32)[1]}) == 6  # every challenge is new
    assert not any(b"s" * 8 in part for part in sent)
    assert not any(tag.to_bytes(8, "big") in part for part in sent for tag in listener)


@needs("ucxx")
def test_a_listener_proves_nothing_to_one_that_does_not_know_the_secret():
    ends, told, _ = meet(b"s" * 32, b"x" * 32)
    assert isinstance(ends[0], PermissionError)
    assert isinstance(ends[1], asyncio.CancelledError)  # it waited on
    assert len(told) == 1


@needs("ucxx")
def test_a_connector_refuses_a_listener_that_sends_its_answer_back():
    from hpcdask.comm.ucx import prove

    class Mirror(Channel):
        async def send(self, message: bytes) -> None:
            self.into.put_nowait(message)

    async def dial():
        mirror = Mirror(asyncio.Queue(), asyncio.Queue())
        mirror.into.put_nowait(b"c" * 32)
        await prove(mirror, b"s" * 32, listens=False)

    with pytest.raises(PermissionError):
        asyncio.run(dial())


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
