"""Dask's dashboard of a run, in a real browser while Dask tasks run."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

import browser
from launching import openmpi_launcher
from running import Site

pytestmark = [pytest.mark.mpi, pytest.mark.slow, pytest.mark.long]
#: With HPCDASK_PICTURES set, the test takes it anew.
PICTURE = Path(__file__).parents[2] / "docs" / "pictures" / "dashboard.png"
#: The bars of the task stream.
DRAWN = """
[...(window.Bokeh?.documents[0]?._all_models?.values() ?? [])].some(
  one => (one.data?.worker_thread?.length ?? 0) > 500
)
"""


def test_the_task_stream_is_drawn_while_dask_tasks_run(tmp_path: Path) -> None:
    with Site(openmpi_launcher()) as site:
        run = site.start("looked_at.py", n=4)
        link = run.line("dashboard ", timeout=120)
        taken = browser.watch(tmp_path, link, DRAWN, (1280, 760))
        (site.folder / "seen").touch()
        ended = run.end(120)
        assert ended.code == 0, str(ended)
        assert len(taken) > 30_000  # an empty page has 13 kB
        if os.environ.get("HPCDASK_PICTURES"):
            PICTURE.write_bytes(taken)
        site.check_nothing_left(ended.at)
