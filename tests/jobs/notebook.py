"""A stand-in for a notebook with a cluster: local jobs, keys, and a watchdog, but no Dask.

``python notebook.py BASE NAME JOBS [--unrecorded] [--forked] [--no-watchdog]`` prints the
watchdog's process id, then obeys the line it reads: ``dismiss``, or ``exit`` without a word to it.
"""

import asyncio
import os
import sys
import time
from types import SimpleNamespace

from hpcdask.jobs.folder import ClusterFolder
from hpcdask.jobs.watchdog import dismiss, start_watchdog
from hpcdask.queues.base import Request
from hpcdask.queues.local import LocalQueue
from hpcdask.security.credentials import save_credentials

base, name, count, *options = sys.argv[1:]
folder = ClusterFolder.create(name, "local", base)
save_credentials({"tls_ca_file": "not a key"}, str(folder.keys))
queue = LocalQueue()
request = Request(name="x", tag=folder.tag, folder=str(folder.path / "logs"), gpus=0)
job = SimpleNamespace(shebang="", job_header="", _job_script_prologue=[])
folder.write_script(queue.script(job, request, [], "exec sleep 1000"))
os.set_inheritable(os.open("/dev/null", os.O_RDONLY), True)
watchdog = None if "--no-watchdog" in options else start_watchdog(folder)
ids = asyncio.run(queue.submit(str(folder.begin_submission()), int(count)))
if "--unrecorded" in options:  # long ago, so that the watchdog does not wait for more of them
    os.utime(folder.path / "submitting-", (0, 0))
else:
    folder.record(ids)
if "--forked" in options and os.fork() == 0:
    time.sleep(1000)
print(watchdog.pid if watchdog else 0, flush=True)
if sys.stdin.readline().strip() == "dismiss":
    dismiss(watchdog)
