"""What is decided about exchanges between workers, without any."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from hpcdask.comm.cuda_ipc import Mappings
from hpcdask.comm.ucx_config import environment
from hpcdask.comm.warmup import FAR_PEERS, LinkTest, choose_peers, evaluate
from launching import needs


def link(to: str = "a", source: str = "b", **values) -> LinkTest:
    found = {"transport": "ucx", "rate": 1e11, "cuda_ipc": True}
    return LinkTest(to, source, **{**found, **values})


# What workers found, in words


@pytest.mark.parametrize(
    ("links", "line", "warnings"),
    [
        (
            [link(), link("b", "a", rate=2e11), link("a", "c")],
            "ucx between 2 pairs of workers, CUDA IPC is active (100 GB/s or more)",
            [],
        ),
        # a rate is no evidence: under load it is low over NVLink, too
        ([link(rate=1e8)], "1 pair of workers, CUDA IPC is active (0.1 GB/s or more)", []),
        ([link(rate=1e12, cuda_ipc=None)], "1 pair of workers (1e+03 GB/s or more)", []),
        # host memory, and other nodes
        ([link(rate=1e8, cuda_ipc=None)], "1 pair of workers (0.1 GB/s or more)", []),
        ([link(same_host=False, rate=5e9, cuda_ipc=None)], "workers (5 GB/s or mo", []),
        (
            [link(), link("d", "c", cuda_ipc=False), link("c", "d", cuda_ipc=False)],
            "2 pairs of workers (100 GB/s or more)",
            ["slow: between workers c and d, on one node, CUDA IPC (NVLink) is not in use. See"],
        ),
        ([link(transport="tcp")], "no data over ucx", ["from worker b to a goes over tcp"]),
        (
            [link(problem="TimeoutError: x", transport="", rate=0.0), link()],
            "ucx between 1 pair of workers, CUDA IPC is active",
            ["no data came from b to a: TimeoutError: x"],
        ),
        ([], "no data over ucx", []),
    ],
)
def test_what_links_say(links, line, warnings):
    found, told = evaluate(links)
    assert line in found
    assert all(text in warning for text, warning in zip(warnings, told, strict=True))


def test_a_ucx_whose_mappings_cannot_be_released_is_one_line():
    """Regression: with another UCX than 1.21 nothing was released, and nobody was told."""
    links = [link(unknown_ucx=Mappings((1, 20, 1)).unknown) for _ in range(8)]
    _, (line,) = evaluate(links)
    assert line.startswith("UCX 1.20.1 is not known to hpcdask: when a worker dies, GPU memory")
    for version in ((1, 21, 0), (1, 22, 0)):  # is released, or need not be
        known = [link(unknown_ucx=Mappings(version).unknown)]
        assert evaluate(known)[1] == []


# Whom a new worker gets warm with


def test_all_on_its_node_and_the_last_few_elsewhere():
    near = [f"tls://10.0.0.1:{port}" for port in range(1, 9)]
    far = [f"tls://10.0.0.{host}:1" for host in range(2, 40)]
    chosen = choose_peers(near[3], [*near[:4], *far, *near[4:]])
    assert sorted(chosen[:7]) == sorted(set(near) - {near[3]})
    assert chosen[7:] == far[-FAR_PEERS:]


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


async def meet(theirs: bytes, mine: bytes) -> tuple[list[Any], list[bytes], list[bytes]]:
    """Return what a listener and a connector end with, and what each has sent."""
    from hpcdask.comm.ucx import prove

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


@needs("ucxx")
async def test_both_know_the_secret():
    (listener, connector), told, heard = await meet(b"s" * 32, b"s" * 32)
    assert listener == connector[::-1]  # each sends by the tag by which the other receives
    sent = told + heard
    assert [len(part) for part in sent] == [32] * 4
    assert len({*sent, *(await meet(b"s" * 32, b"s" * 32))[1]}) == 6  # every challenge is new
    assert not any(b"s" * 8 in part for part in sent)
    assert not any(tag.to_bytes(8, "big") in part for part in sent for tag in listener)


@needs("ucxx")
async def test_a_listener_proves_nothing_to_one_that_does_not_know_the_secret():
    ends, told, _ = await meet(b"s" * 32, b"x" * 32)
    assert isinstance(ends[0], PermissionError)
    assert isinstance(ends[1], asyncio.CancelledError)  # it waited on
    assert len(told) == 1


@needs("ucxx")
async def test_a_connector_refuses_a_listener_that_sends_its_answer_back():
    from hpcdask.comm.ucx import prove

    own = asyncio.Queue()
    own.put_nowait(b"c" * 32)
    with pytest.raises(PermissionError):
        await prove(Channel(own, own), b"s" * 32, listens=False)
