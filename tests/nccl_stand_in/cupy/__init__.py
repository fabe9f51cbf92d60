"""A stand-in for CuPy and NCCL, without GPUs: what `hpcdask.gpu.nccl` calls, on NumPy arrays.

Its ranks find each other by files in `STAND_IN`. `STAND_IN_FAULTS` says what a rank does where, as
``{"1": ["join", "hang"]}``: it hangs, dies, raises or sums wrongly.
"""

from types import SimpleNamespace

import numpy as np

float32 = np.float32


class ndarray(np.ndarray):
    @property
    def data(self):
        return SimpleNamespace(ptr=self.ctypes.data)


def full(*args, **keywords):
    return np.full(*args, **keywords).view(ndarray)


def zeros_like(array):
    return np.zeros_like(array)
