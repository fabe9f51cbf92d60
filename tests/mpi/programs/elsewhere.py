"""A program of its own that knows a cluster by its scheduler file only."""

import json
import sys
import urllib.request

from distributed import Scheduler
from distributed.diagnostics.plugin import SchedulerPlugin

import hpcdask


class LateWorker(SchedulerPlugin):
    """A worker that says something when it has been told to end, as happens on busy machines."""

    async def start(self, scheduler: Scheduler) -> None:
        """Keep to whom."""
        self._scheduler = scheduler

    async def before_close(self) -> None:
        """Say it."""
        answer = self._scheduler.heartbeat_worker(address="tls://127.0.0.1:1", metrics={})
        assert answer["status"] == "missing"


def has_bokeh() -> bool:
    return "bokeh" in sys.modules


if __name__ == "__main__":
    file, what = sys.argv[1:]
    client = hpcdask.connect(file)
    found = {"sum": client.submit(sum, [1, 2]).result()}
    if what == "shutdown":
        client.register_plugin(LateWorker())
        client.shutdown()
    else:
        found["bokeh before"] = client.run_on_scheduler(has_bokeh)
        with urllib.request.urlopen(what, timeout=180) as page:
            found["dashboard"] = page.status
        found["bokeh after"] = client.run_on_scheduler(has_bokeh)
        found["bokeh in workers"] = any(client.run(has_bokeh).values())
        client.close()
    print(json.dumps(found))
