"""`hpcdask doctor` for real: alone, under both MPIs, on two nodes that are one machine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from clock import stretched
from launching import clean_environment
from listeners import free_range, text
from running import Site, under

pytestmark = pytest.mark.mpi

DOCTOR = [sys.executable, "-m", "hpcdask", "doctor"]

#: A rank that does not take part, beside one that does.
ONE_STAYS_AWAY = (
    'if [ "${OMPI_COMM_WORLD_RANK:-$PMI_RANK}" = 1 ]; then exec sleep 600; fi; exec "$@"'
)


def of_topic(made: dict[str, Any], topic: str) -> list[dict[str, Any]]:
    findings = [one for node in made["nodes"] for one in node["findings"]]
    return [one for one in [*findings, *made["between_nodes"]] if one["topic"] == topic]


def parse(text: str) -> dict[str, Any]:
    assert text.count('"verdict"') == 1, text
    return json.loads(text)


def test_alone_as_text_and_as_json():
    environ = clean_environment()
    text, as_json = (
        subprocess.run(
            [*DOCTOR, *options],
            env=environ,
            capture_output=True,
            text=True,
            timeout=600,
            stdin=subprocess.DEVNULL,
            check=False,
        )
        for options in ([], ["--json"])
    )
    made = parse(as_json.stdout)
    assert as_json.returncode == text.returncode == made["exit_code"]
    assert text.stdout.splitlines()[-1] == made["verdict"]
    assert (text.stderr, as_json.stderr) == ("", "")
    assert "\x1b" not in text.stdout
    (node,) = made["nodes"]
    assert node["ranks"] == [0]
    (python,) = of_topic(made, "Python")
    assert sys.executable in python["value"]
    assert not of_topic(made, "ranks")


@pytest.mark.long
def test_for_the_cpu_nothing_is_said_of_gpus(tmp_path: Path):
    """In a job, no GPU is a warning otherwise."""
    nothing = str(tmp_path / "bin")  # such as an srun without a SLURM
    job = {"PBS_JOBID": "7.head", "PATH": nothing}
    made = parse(ranks_of_two_nodes(tmp_path, "--json", "--device", "cpu", **job)[0][1])
    findings = [one for node in made["nodes"] for one in node["findings"]]
    groups = {one["group"] for one in findings}
    assert not groups & {"GPUs", "stack"}, groups
    assert {"network", "process"} <= groups
    bad = {one["group"] for one in findings if one["status"] in ("warning", "error")}
    assert bad <= {"node", "process"}  # which are this machine's
    (transport,) = of_topic(made, "protocol")
    assert "tcp: workers compute on the CPU" in transport["value"]


@under("openmpi", "mpich")
def test_under_mpirun_there_is_one_report(site: Site):
    done = site.popen(*DOCTOR, "--json", n=2, env={"UCX_TLS": "tcp"}).end(60)
    made = parse(done.out)
    assert done.code == made["exit_code"], done.err
    assert made["ranks"] == 2
    (node,) = made["nodes"]
    assert node["ranks"] == [0, 1]
    (ranks,) = of_topic(made, "ranks")
    assert ranks["value"].startswith("2: 2 on ")
    (mpi4py,) = of_topic(made, "mpi4py")
    assert (mpi4py["status"], site.launcher.name in mpi4py["value"]) == ("ok", True)
    assert "hpcdask: error" not in done.err
    assert len(of_topic(made, "/dev/shm")) == 1
    site.check_nothing_left()


@under("mpich")
def test_a_rank_that_does_not_arrive_is_named(site: Site):
    options = ("--json", "--timeout", str(stretched(1)))
    done = site.popen("sh", "-c", ONE_STAYS_AWAY, "sh", *DOCTOR, *options, n=2).end(60, code=2)
    (ranks,) = of_topic(parse(done.out), "ranks")
    assert ranks["status"] == "error"
    assert "rank 1 of 2 did not arrive" in ranks["value"]


def ranks_of_two_nodes(folder: Path, *options: str, **second: str) -> list[tuple[int, str, str]]:
    """Both ranks of a launch whose nodes are this machine; exit code, output, errors of each.

    The second has more variables.
    """
    running = []
    for index in range(2):
        rank = {
            "index": index,
            "size": 2,
            "local_index": 0,
            "local_size": 1,
            "host": f"node{index + 1}",
            "launcher": "given",
            "launch_id": str(folder),
        }
        environ = {**clean_environment(), "HOME": str(folder), "HPCDASK_RANK": json.dumps(rank)}
        running.append(
            subprocess.Popen(
                [*DOCTOR, *options],
                env={**environ, **(second if index else {})},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        )
    ended = [process.communicate(timeout=180) for process in running]
    assert not os.listdir(folder)  # nothing is left where the ranks met
    return [(one.returncode, *texts) for one, texts in zip(running, ended, strict=True)]


def test_two_nodes_are_compared(tmp_path: Path):
    first, second = ranks_of_two_nodes(tmp_path, "--json", UCX_MAX_RNDV_RAILS="1")
    made = parse(first[1])
    assert second == (first[0], "", "")
    assert first[0] == made["exit_code"] == 1
    assert [node["host"] for node in made["nodes"]] == ["node1", "node2"]
    (difference,) = of_topic(made, "settings")
    assert difference["status"] == "warning"
    assert difference["value"] == "none on node1; UCX_MAX_RNDV_RAILS=1 on node2"
    (port,) = of_topic(made, "scheduler's port")
    assert (port["status"], "on node1 reached from 1 other node" in port["value"]) == ("ok", True)
    (clocks,) = of_topic(made, "clocks")
    assert clocks["status"] == "ok"


@pytest.mark.long
def test_two_nodes_meet_in_a_range_of_ports(tmp_path: Path):
    ports = text(free_range(40))
    first, second = ranks_of_two_nodes(tmp_path, "--json", "--port-range", ports)
    made = parse(first[1])
    assert second == (first[0], "", "")
    free = of_topic(made, "port range")
    assert [one["status"] for one in free] == ["ok", "ok"]
    assert f"{ports}: " in free[0]["value"]
    (port,) = of_topic(made, "scheduler's port")
    least, most = map(int, ports.split("-"))
    assert least <= int(port["value"].partition(" on ")[0].rpartition(":")[2]) <= most
