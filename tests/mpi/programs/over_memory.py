"""Has a task take more memory than its worker may."""

import os
import sys
import time

from common import show, stamp
from distributed import Client, KilledWorker


def take() -> int:
    blocks = []
    for _ in range(100):
        blocks.append(b"x" * 2**24)  # written, so that it counts
        time.sleep(0.01)
    return sum(map(len, blocks))


client = Client()
before = client.run(os.getpid)
try:
    client.submit(take).result()
except KilledWorker:
    client.wait_for_workers(len(before), timeout=180)
    after = client.run(os.getpid)
    show("result", {"new": len(set(after.values()) - set(before.values())), "all": len(after)})
    stamp()
    sys.exit(6)
stamp()
