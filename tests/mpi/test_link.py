"""The line between the ranks, over a network that comes and goes."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from chaos.hosts import Hosts, missing
from launching import unavailable, wait_for

LEADER = """
import asyncio, sys
from hpcdask.runner.link import Listener

async def main():
    over = asyncio.Event()
    async def arrived(report, channel):
        print("arrived", flush=True)
        while (message := await channel.receive()) is not None:
            print(message["text"], flush=True)
        print("gone", flush=True)
        over.set()
    print(await Listener(arrived).listen(sys.argv[1]), flush=True)
    await over.wait()

asyncio.run(main())
"""
RANK = """
import asyncio, sys
from hpcdask.runner.link import RendezvousInfo, dial

async def main():
    address, port = sys.argv[1:]
    channel = await dial(RendezvousInfo(address, int(port), "n1", {}), address)
    channel.send(rank=1)
    await asyncio.to_thread(sys.stdin.readline)
    channel.send(text="still there")
    await channel.receive()

asyncio.run(main())
"""


@pytest.mark.slow
def test_a_network_that_is_lost_for_twelve_seconds_ends_no_line(tmp_path: Path):
    """Regression: ten seconds ended the run."""
    if os.geteuid():
        pytest.skip("network namespaces: only root may make them")
    if why := missing():
        unavailable(why)
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}

    def start(host: str, program: str, *words: str) -> subprocess.Popen:
        command = ["ip", "netns", "exec", host, sys.executable, "-c", program, *words]
        process = stack.enter_context(subprocess.Popen(command, **pipes))
        stack.callback(process.kill)  # should the test fail, nobody waits for it
        return process

    def wait_until(moment: float) -> None:
        wait_for(lambda: time.monotonic() > moment, 60)

    with Hosts(tmp_path) as hosts, contextlib.ExitStack() as stack:
        (here, there), (address, _) = hosts.names, hosts.addresses
        leader = start(here, LEADER, address)
        rank = start(there, RANK, address, leader.stdout.readline().strip())
        assert leader.stdout.readline() == "arrived\n"
        start_of_silence = time.monotonic()
        wait_until(start_of_silence + 3)
        hosts.join(up=False)
        wait_until(start_of_silence + 15)
        hosts.join(up=True)
        wait_until(start_of_silence + 18)
        rank.stdin.write("\n")
        rank.stdin.flush()
        assert leader.stdout.readline() == "still there\n"
        rank.kill()
        assert leader.stdout.readline() == "gone\n"
