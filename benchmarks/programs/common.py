"""What the programs of this folder share: their options, the clock and the lines they print."""

from __future__ import annotations

import argparse
import functools
import importlib.util
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import dask
import psutil
from distributed import Client, wait


class Options(argparse.Namespace):
    """Options of a program, and what follows from them."""

    def pick(self, *, gpu: Any, cpu: Any) -> Any:
        """Return the size for what the cluster computes on, or for what `--sizes` says."""
        sizes = self.sizes or {"cuda": "gpu", "cpu": "cpu"}[self.device]
        return gpu if sizes == "gpu" else cpu

    @property
    def xp(self) -> Any:
        """CuPy or NumPy."""
        return importlib.import_module("cupy" if self.device == "cuda" else "numpy")

    @functools.cached_property
    def random(self) -> Any:
        """Random numbers as dask arrays, by CuPy or NumPy."""
        import dask.array as da

        return da.random.RandomState(RandomState=self.xp.random.RandomState)

    def persist(self, *collections: Any) -> Any:
        """Persist one or several collections, and wait for them."""
        found = dask.persist(*collections)
        self.finish(*found)
        return found if len(found) > 1 else found[0]

    def finish(self, *collections: Any) -> None:
        """Wait for collections, and for what their Dask tasks left running on the GPUs."""

        def synchronize() -> None:  # inside, so that workers get it by value
            import cupy

            cupy.cuda.Device().synchronize()

        wait(collections)
        if self.device == "cuda":
            self.client.run(synchronize)

    def measure(
        self,
        run: Callable[..., Any],
        check: Callable[[Any], bool],
        prepare: Callable[[], Any] | None = None,
        nbytes: int | None = None,
    ) -> None:
        """Time `run` several times, with what `prepare` makes, and print a line for each.

        After `--seconds` no further one starts, but for the second. `nbytes` is the size of the
        data.
        """
        start = time.perf_counter()
        for number in range(self.runs):
            given = (prepare(),) if prepare else ()
            began = time.perf_counter()
            result = run(*given)
            seconds = time.perf_counter() - began
            report(seconds, check(result), run=number, nbytes=nbytes)
            given = result = None
            if number and time.perf_counter() - start > self.seconds:
                break


def start(**defaults: int | str | None) -> Options:
    """Connect to the cluster; `defaults` are the program's own options."""
    parser = argparse.ArgumentParser(description=sys.modules["__main__"].__doc__)
    parser.add_argument("--device", choices=["cuda", "cpu"], help="the default is what there is")
    parser.add_argument("--sizes", choices=["gpu", "cpu"], help="the default is as the device")
    parser.add_argument("--workers", type=int, default=1, help="wait for so many")
    parser.add_argument("--runs", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=40, help="start no third run after these")
    for name, value in defaults.items():
        parser.add_argument(f"--{name}", default=value, type=int if isinstance(value, int) else str)
    options = parser.parse_args(namespace=Options())
    options.device = options.device or ("cuda" if has_gpu() else "cpu")
    options.client = Client()
    options.client.wait_for_workers(options.workers)
    return options


def has_gpu() -> bool:
    """Return whether CuPy is there, and a GPU for it."""
    if importlib.util.find_spec("cupy") is None:
        return False
    import cupy

    return bool(cupy.cuda.is_available())


def need(*packages: str) -> None:
    """End the program with a line where a package is missing."""
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    if missing:
        print(json.dumps({"skipped": f"{', '.join(missing)} not installed"}), flush=True)
        sys.exit()


def since_launch() -> float:
    """Return the seconds since the launch of the command, by the environment if it is there."""
    launched = os.environ.get("LAUNCHED") or psutil.Process().create_time()
    return time.time() - float(launched)


def report(seconds: float, correct: bool, *, run: int = 0, nbytes: int | None = None) -> None:
    """Print the line of one run."""
    line = {"program": Path(sys.argv[0]).name, "run": run, "seconds": seconds}
    line |= {"correct": bool(correct)} | ({"GB": nbytes / 1e9} if nbytes else {})
    print(json.dumps(line), flush=True)
