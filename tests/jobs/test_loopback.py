"""A machine without a network, whose own name is 127.0.1.1, as Debian's /etc/hosts has it."""

from __future__ import annotations

import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from launching import clean_environment, unavailable

ISOLATED = ["unshare", "--net", "--mount", "--map-root-user"]
HOSTS = 'ip link set lo up; mount --bind "$HOSTS" /etc/hosts; exec "$@"'
#: Two ranks of Open MPI, of which each is told to be alone on its node.
RANKS = """
export OMPI_COMM_WORLD_SIZE=2 OMPI_COMM_WORLD_LOCAL_SIZE=1 OMPI_COMM_WORLD_LOCAL_RANK=0
export PMIX_NAMESPACE=$$
OMPI_COMM_WORLD_RANK=1 "$@" & OMPI_COMM_WORLD_RANK=0 "$@"; wait
"""
CLUSTER = """
import os, hpcdask
if __name__ == "__main__":
    keywords = {"cores": 1, "memory": "1GiB", "shared_temp_directory": os.environ["HOME"], **MORE}
    hpcdask.SLURMCUDACluster(**keywords).END()
"""
DETACHED = CLUSTER.replace("MORE", "{'name': 'mine', 'detached': True, 'scheduler_job': None}")
DOORS = {
    "run": (["sh", "-c", RANKS, "ranks"], "--interface", "print('done')", "-m", "hpcdask.run"),
    "jobs": ([], "scheduler_options=", CLUSTER.replace("MORE", "{}").replace("END", "close")),
    "detached": ([], "scheduler_options=", DETACHED.replace("END", "shutdown")),
}


@pytest.mark.parametrize("door", DOORS)
def test_an_address_that_other_nodes_cannot_reach_is_told(tmp_path: Path, door: str) -> None:
    if not shutil.which("ip") or subprocess.run([*ISOLATED, "true"]).returncode:
        unavailable("no network namespaces")
    (tmp_path / "hosts").write_text(f"127.0.0.1 localhost\n127.0.1.1 {socket.gethostname()}\n")
    starter, remedy, text, *options = DOORS[door]
    (program := tmp_path / "program.py").write_text(text)
    environ = {**clean_environment(), "HOME": str(tmp_path), "HOSTS": str(tmp_path / "hosts")}
    done = subprocess.run(
        [*ISOLATED, "sh", "-c", HOSTS, "sh", *starter, sys.executable, *options, program],
        env=environ,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    warnings = [line for line in done.stderr.splitlines() if "warning: the scheduler" in line]
    assert len(warnings) == 1, done.stderr
    assert "listens at 127.0.1.1, which other nodes cannot reach" in warnings[0]
    assert remedy in warnings[0]
