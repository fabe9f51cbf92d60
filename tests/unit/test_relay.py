"""Commands of the queue that a detached cluster's node may not run: who runs them, and how."""

from __future__ import annotations

import asyncio
import pickle
from pathlib import Path

import pytest
from distributed import Security
from distributed.core import rpc

from hpcdask.clusters.detached import agent, relay
from hpcdask.clusters.detached.relay import Relay
from hpcdask.errors import QueueError, Refused, UsageError
from hpcdask.queues.slurm import SlurmQueue
from hpcdask.security.credentials import create_credentials, to_security
from launching import until

SUBMIT = ("sbatch", "script.sh")
DENIED = "sbatch: error: Batch job submission failed: Access/permission denied"


def put(folder: Path, name: str, text: str) -> None:
    folder.joinpath(name).write_text(f"#!/bin/sh\n{text}\n")
    folder.joinpath(name).chmod(0o700)


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of the only commands that there are."""
    monkeypatch.setenv("PATH", str(tmp_path))
    return tmp_path


async def obey(control: rpc, me: tuple[str, int], done: bytes = b"") -> bytes:
    """Run one command as an agent does; return the outcome."""
    answer = await control.exchange(agent=me, done=done)
    return await agent._obey("slurm", answer["order"])


def make(security: Security, events: list[str]) -> Relay:
    return Relay(
        "mine",
        lambda: ("127.0.0.1", security),
        lambda: events.append("needed"),
        lambda: events.append("arrived"),
    )


@pytest.mark.parametrize("command", ["exit 1", None])
def test_an_agent_runs_what_the_node_may_not(
    node: Path, monkeypatch: pytest.MonkeyPatch, command: str | None
):
    """Denied, or missing; one agent only, which is seen to go."""

    async def play() -> None:
        security, events, queue = to_security(create_credentials()), [], SlurmQueue()
        control = make(security, events)
        if command:
            put(node, "sbatch", f"echo '{DENIED}' >&2; {command}")
        running = asyncio.ensure_future(control.run(queue, SUBMIT, None, None))
        await until(lambda: control.address, 30, "it to listen")
        assert control.lacks_agent
        assert not control.problem  # it may be on its way
        with pytest.raises(OSError, match=r"\w"):
            async with rpc(control.address.replace("tls", "tcp"), timeout=5) as stranger:
                await stranger.exchange(agent=("x", 1), done=b"")
        async with rpc(
            control.address, connection_args=security.get_connection_args("client")
        ) as line:
            put(node, "sbatch", "echo 7")
            done = await obey(line, ("here", 1))
            assert "end" in await line.exchange(agent=("there", 2), done=b"")
            monkeypatch.setattr(relay, "CALL_S", 0.01)
            assert await line.exchange(agent=("here", 1), done=done) == {}
            assert (await running).stdout == "7\n"
            assert events == ["needed", "arrived"]
            monkeypatch.setattr(relay, "GONE_S", 0.0)
            text = "the agent on here is gone; run hpcdask attach mine there"
            with pytest.raises(Refused, match=text) as error:
                await control.run(queue, SUBMIT, None, None)
            assert error.value.for_now
            await line.exchange(agent=("there", 2), done=b"")
            assert events == ["needed", "arrived", "arrived"]
        await control.close()

    asyncio.run(play())


def test_the_agent_runs_commands_of_the_queue_only(node: Path):
    put(node, "rm", "exit 0")
    order = pickle.dumps((1.0, ("rm", "-r", "x"), None, None, 5.0))
    number, outcome = pickle.loads(asyncio.run(agent._obey("slurm", order)))
    assert number == 1.0
    assert isinstance(outcome, QueueError)
    assert "commands of SLURM only, not rm" in str(outcome)


def test_not_without_tls_and_not_for_ever(node: Path, monkeypatch: pytest.MonkeyPatch):
    async def play() -> None:
        with pytest.raises(UsageError, match=r"may not run sbatch .*only with TLS"):
            await make(Security(), []).run(SlurmQueue(), SUBMIT, None, None)
        monkeypatch.setattr(relay, "START_S", 0.0)
        control = make(to_security(create_credentials()), [])
        with pytest.raises(Refused, match="run hpcdask attach mine on a host that may"):
            await control.run(SlurmQueue(), SUBMIT, None, None)
        await control.close()

    asyncio.run(play())
