"""Computes something, then ends in the way that its first argument names."""

import os
import signal
import subprocess
import sys
import time

from common import show, stamp
from distributed import Client


def fail() -> None:
    raise ValueError("the user's own error")


client = Client()
assert client.submit(sum, [1, 2]).result() == 3
folders = client.run(lambda dask_worker: dask_worker.local_directory)
show("ready", sorted(folders.values()))
how = sys.argv[1]
if how == "task-runs":
    sleeping = client.submit(time.sleep, 600)
    while not any(client.processing().values()):
        time.sleep(0.01)
if how == "os-exit":
    subprocess.Popen(["sleep", "600"])
if how == "shutdown":
    client.shutdown()
stamp()
if how == "exit-3":
    sys.exit(3)
elif how == "shutdown":
    sys.exit("that is why")
elif how == "exception":
    fail()
elif how == "os-exit":
    os._exit(7)
elif how == "SIGKILL":
    os.kill(os.getpid(), signal.SIGKILL)
