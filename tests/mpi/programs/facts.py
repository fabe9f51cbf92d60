"""Shows what a program can see of the way it was started."""

import gc
import inspect
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import warnings

import numpy  # noqa: F401
import threadpoolctl


def handler(signal_name: str) -> str:
    return str(signal.getsignal(getattr(signal, signal_name)))


def open_files() -> dict[str, str]:
    kinds = {}
    for fd in os.listdir("/proc/self/fd"):
        try:
            kinds[fd] = os.readlink(f"/proc/self/fd/{fd}")
        except OSError:
            continue  # the listing's own
    # besides that of its stacks, in memory, which `hpcdask stacks` reads
    own = "/memfd:hpcdask-stacks"
    return {fd: kind for fd, kind in kinds.items() if int(fd) > 2 and not kind.startswith(own)}


main = sys.modules["__main__"]
facts = {
    "argv": sys.argv,
    "path": sys.path,
    "name": __name__,
    "file": __file__,
    "package": __package__,
    "spec": __spec__ and __spec__.name,
    "doc": __doc__,
    "is main": main.__dict__ is globals(),
    "source": inspect.getsource(handler).splitlines()[0],
    "threads": threading.active_count(),
    "main thread": threading.current_thread() is threading.main_thread(),
    "start method": multiprocessing.get_start_method(),
    "process": multiprocessing.current_process().name,
    "signals": {s: handler(s) for s in ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1", "SIGPIPE")},
    "in child": subprocess.run(
        ["sh", "-c", "grep ^SigIgn /proc/self/status"], capture_output=True, text=True, check=True
    ).stdout,
    "limits of threads": {k: v for k, v in os.environ.items() if k.endswith("_NUM_THREADS")},
    "BLAS threads": [pool["num_threads"] for pool in threadpoolctl.threadpool_info()],
    "cores": sorted(os.sched_getaffinity(0)),
    "folder": os.getcwd(),
    "open files": open_files(),
    "excepthook": sys.excepthook is sys.__excepthook__,
    "warnings": [(f[0], str(f[1]), f[2].__name__) for f in warnings.filters],
    "collector": gc.isenabled(),
    "umask": os.umask(0o22),
    "encoding": [sys.stdout.encoding, sys.stdout.errors, sys.stderr.errors],
    "buffered": [sys.stdout.line_buffering, sys.stderr.line_buffering],
    "stdin": sys.stdin.read() if os.environ.get("READ_STDIN") == "1" else "",
}
print("facts", json.dumps(facts))
