"""Kills a worker in the middle of a computation, then restarts all of them."""

import os
import signal
import time

from common import show
from distributed import Client, as_completed, wait


def square(x: int) -> int:
    time.sleep(0.05)
    return x * x


def seeds() -> set[int]:
    return set(client.run(hash, "x").values())


client = Client()
before = client.run(os.getpid)
hashes = seeds()
futures = client.map(square, range(40))
next(iter(as_completed(futures)))
victim = next(iter(before.values()))
os.kill(victim, signal.SIGKILL)
total = sum(client.gather(futures))
client.wait_for_workers(len(before), timeout=180)
after = client.run(os.getpid)
hashes |= seeds()
client.restart(timeout=180)
client.wait_for_workers(len(before), timeout=180)
restarted = client.run(os.getpid)
hashes |= seeds()
wait(client.map(square, range(4), pure=False))
show(
    "result",
    {
        "total": total,
        "workers": [len(before), len(after), len(restarted)],
        "new": len(set(after.values()) - set(before.values())),
        "same after restart": len(set(after.values()) & set(restarted.values())),
        "hashes": len(hashes),
    },
)
