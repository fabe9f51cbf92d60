"""Waits to be ended. Its first argument says what it does about signals."""

import os
import signal
import sys
import time

from common import show
from distributed import Client


def leave(number: int, frame: object) -> None:
    show("signal", number)
    time.sleep(1)
    os._exit(9)


def leave_by_usr1(number: int, frame: object) -> None:
    # Computes once more: the workers must not mind the signal
    sys.exit(client.submit(sum, [1, 3]).result())


how = sys.argv[1] if len(sys.argv) > 1 else ""
client = Client()
if how == "handler":
    signal.signal(signal.SIGTERM, leave)
elif how == "ignore":
    signal.signal(signal.SIGTERM, lambda number, frame: show("ignored", number))
elif how == "usr1":
    signal.signal(signal.SIGUSR1, leave_by_usr1)
show("ready", {"scheduler": client.run_on_scheduler(os.getpid)})
try:
    time.sleep(600)
except KeyboardInterrupt:
    if how != "catch":
        raise
    try:
        for _ in range(100):  # is there a second one?
            client.submit(sum, [1, 2], pure=False).result()
    except KeyboardInterrupt:
        sys.exit(6)
    sys.exit(5)
