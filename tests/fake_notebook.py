"""A stand-in for a notebook with a cluster: local jobs, keys, and a watchdog, but no Dask."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
import uuid
from pathlib import Path
from types import SimpleNamespace

import psutil

from hpcdask.jobs.folder import ClusterFolder
from hpcdask.jobs.watchdog import dismiss, start_watchdog
from hpcdask.queues.base import Request
from hpcdask.queues.local import LocalQueue
from hpcdask.security.credentials import save_credentials
from launching import end, leftovers, wait_for


class Notebook:
    """A process with a cluster of so many jobs; `options` are those of `main`."""

    def __init__(self, base: Path, *options: str, name: str = "nb", jobs: int = 3) -> None:
        self.marker = f"HPCDASK_TEST={uuid.uuid4().hex}"
        key, value = self.marker.split("=")
        name = f"{name}-{value[:8]}"
        self.process = subprocess.Popen(
            [sys.executable, __file__, base, name, str(jobs), *options],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, key: value},
            start_new_session=True,
        )
        pid = int(self.process.stdout.readline())
        self.watchdog = psutil.Process(pid) if pid else None
        self.folder = ClusterFolder.open(base / name)

    def jobs(self) -> list[psutil.Process]:
        return leftovers(self.folder.tag)

    def tell(self, word: str) -> None:
        """Say ``dismiss`` (the watchdog), or ``exit`` without a word to it."""
        self.process.communicate(word, timeout=180)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def close(self) -> None:
        wait_for(lambda: not end(leftovers(self.marker)) and not leftovers(self.marker))
        self.process.communicate()


def pretend(folder: ClusterFolder, **facts: object) -> None:
    """Have a cluster's folder tell other facts, such as of an end long ago."""
    path = folder.path / "cluster.json"
    known = json.loads(path.read_text())
    owner = dict(zip(("host", "space", "pid", "start"), known["owner"].split(), strict=True))
    known["owner"] = " ".join(str(facts.pop(name, value)) for name, value in owner.items())
    path.write_text(json.dumps(known | facts))


def main(base: str, name: str, count: str, *options: str) -> None:
    """Make the cluster, print the watchdog's process id, and obey a word."""
    folder = ClusterFolder.create(name, "local", base)
    save_credentials({"tls_ca_file": "not a key"}, str(folder.keys))
    queue = LocalQueue()
    request = Request(name="x", tag=folder.tag, folder=str(folder.path / "logs"), gpus=0)
    job = SimpleNamespace(shebang="", job_header="", _job_script_prologue=[])
    job.job_extra_directives = job.job_directives_skip = ()
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
    if sys.stdin.readline().strip() == "dismiss" and watchdog:
        dismiss(watchdog)


if __name__ == "__main__":
    main(*sys.argv[1:])
