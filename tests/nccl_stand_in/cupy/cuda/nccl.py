import ctypes
import json
import os
import signal
import threading
import time
import uuid
from pathlib import Path

import numpy as np

available = not os.environ.get("STAND_IN_MISSING")
NCCL_FLOAT32 = NCCL_SUM = 0
FOLDER = Path(os.environ["STAND_IN"])
FAULTS = json.loads(os.environ.get("STAND_IN_FAULTS", "{}"))


def get_version():
    return int(os.environ.get("STAND_IN_VERSION", "22809"))


def get_unique_id():
    fault("id")
    return uuid.uuid4().hex.encode() * 4


def fault(where):
    """What happens here on this GPU."""
    place, what = FAULTS.get(os.environ.get("CUDA_VISIBLE_DEVICES"), (None, None))
    if place != where:
        return False
    if what == "hang":
        threading.Event().wait()
    if what == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    if what == "raise":
        print("n1:1:1 [0] misc/socket.cc:1 NCCL WARN Connection refused", flush=True)
        raise RuntimeError("NCCL_ERROR_SYSTEM_ERROR")
    return True


class NcclCommunicator:
    def __init__(self, size, unique_id, rank):
        self._size, self._rank, self._id = size, rank, unique_id.hex()[:64]
        fault("join")
        self._meet("join")

    def _meet(self, where):
        (FOLDER / f"{self._id}-{where}-{self._rank}").touch()
        while len(list(FOLDER.glob(f"{self._id}-{where}-*"))) < self._size:
            time.sleep(0.01)

    def size(self):
        return self._size

    def rank_id(self):
        return self._rank

    def allReduce(self, source, result, count, *rest):
        wrong = fault("sum")
        self._meet("sum")
        mine, sums = (
            np.ctypeslib.as_array(ctypes.cast(place, ctypes.POINTER(ctypes.c_float)), (count,))
            for place in (source, result)
        )
        assert (mine == self._rank + 1).all()
        sums[:] = self._size * (self._size + 1) / 2 + wrong

    def destroy(self):
        pass
