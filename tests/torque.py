"""PBS's commands over SLURM, which SLURM's package slurm-wlm-torque brings, in a private folder."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from launching import unavailable

BESIDE = Path(sys.prefix).parent / ".queues"
TORQUE = Path(os.environ.get("HPCDASK_QUEUES", BESIDE)) / "torque/usr"


def with_torque(env: Mapping[str, str]) -> dict[str, str]:
    """The environment of a SLURM's user, with qsub, qstat and qdel for it."""
    if not (TORQUE / "bin/qsub").exists():
        unavailable(f"PBS's commands are not in {TORQUE}: run tests/tools/install-queues.sh")
    modules = [module.parent for module in (TORQUE / "lib").rglob("Slurm.pm")]  # of this Perl
    libraries = [f"{TORQUE}/lib/x86_64-linux-gnu", env.get("LD_LIBRARY_PATH", "")]
    found = {
        **env,
        "PATH": os.pathsep.join([f"{TORQUE}/bin", env["PATH"]]),
        "PERL5LIB": os.pathsep.join(map(str, [*modules, TORQUE / "share/perl5"])),
        "LD_LIBRARY_PATH": os.pathsep.join(filter(None, libraries)),
    }
    # qstat calls it for each job that runs, and SLURM 24.11 (Debian 13) has it no more
    whole = "use Slurm; exit !Slurm->can('job_cpus_allocated_on_node_id')"
    if subprocess.run(["perl", "-e", whole], env=found, timeout=180, check=False).returncode:
        pytest.skip("qstat of this SLURM does not work with its own library")
    return found
