"""Private parts of dask-jobqueue, as in 0.9, whose Job classes are used without its clusters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .parts import require

SEEN = "dask-jobqueue 0.9"


def prologue(job: Any) -> Sequence[str]:
    """The lines that the user wants before the command; no attribute that is public has them."""
    require(SEEN, job, "_job_script_prologue")
    return job._job_script_prologue or ()
