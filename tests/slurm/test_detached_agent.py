"""Detached clusters on a SLURM whose nodes may not submit (AllocNodes): an agent does so."""

from __future__ import annotations

import shutil
import signal
import socket
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

import hpcdask
from hpcdask.jobs import detached
from hpcdask.jobs.detached import ControlRecord
from launching import leftovers, wait_for
from slurm_login import Login, login
from slurm_site import SlurmSite

pytestmark = [pytest.mark.slurm, pytest.mark.slow]

AGENT = "hpcdask.clusters.detached.agent"


class LoginOnlySite(SlurmSite):
    """The controller takes jobs from the login node only, by the host that munge tells.

    The nodes have a munge of their own, which tells another address.
    """

    def _write_slurm_conf(self) -> None:
        super()._write_slurm_conf()
        login, *_ = socket.gethostbyaddr("127.0.0.1")
        conf = self.folder / "slurm.conf"
        text = conf.read_text().replace("State=UP", f"State=UP AllocNodes={login}")
        conf.write_text(text)
        nodes = text.replace(f"{self.folder}/munge/", f"{self.folder}/munge-nodes/")
        (self.folder / "slurm.conf.nodes").write_text(nodes)

    def _start_munge(self) -> None:
        super()._start_munge()
        folder = self.folder / "munge-nodes"
        folder.mkdir()
        shutil.copy(self.folder / "munge/key", folder / "key")
        daemon = self._start(
            "munged",
            "--foreground",
            "--force",
            "--origin=127.0.0.2",
            f"--key-file={folder}/key",
            f"--socket={folder}/socket",
            f"--pid-file={folder}/pid",
            f"--log-file={self.folder}/log/munged-nodes.log",
            f"--seed-file={folder}/seed",
            "--num-threads=2",
        )
        self._wait(daemon, (folder / "socket").is_socket, "the nodes' munge's socket")

    def _start(self, program, *arguments):
        conf = self.env["SLURM_CONF"]
        if program == "slurmd":
            arguments = tuple(f"{conf}.nodes" if word == conf else word for word in arguments)
        return super()._start(program, *arguments)


@pytest.fixture
def user(slurm_programs: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Login]:
    with LoginOnlySite() as site:
        monkeypatch.setenv("SLURM_CONF", site.env["SLURM_CONF"])
        with login(site, tmp_path, monkeypatch) as user:
            yield user
            site.mend()


def agents(user: Login) -> list[psutil.Process]:
    return [one for one in leftovers(user.marker) if AGENT in one.cmdline()]


def test_an_agent_submits_is_killed_and_comes_back(user: Login, capfd: pytest.CaptureFixture[str]):
    with user.detached(n_workers=1) as cluster:
        (agent,) = wait_for(lambda: agents(user), 30, "the agent")
        assert agent.ppid() != psutil.Process().pid
        with cluster.get_client() as client:
            client.wait_for_workers(1, timeout=180)
            cluster.scale(2)
            client.wait_for_workers(2, timeout=180)
            assert client.submit(sum, [1, 2]).result(timeout=60) == 3

            agent.send_signal(signal.SIGKILL)
            said = f"submissions are not possible: the agent on {socket.gethostname()} is gone"
            wait_for(lambda: said in repr(cluster.jobs()), 60, "it to be seen")
            assert "run hpcdask attach mine there" in repr(cluster)
            assert said in cluster._repr_html_()
            wait_for(lambda: said in capfd.readouterr().err, 30, "it to be told")
            assert said in " ".join(user.hpcdask("list").split())
            cluster.scale(3)  # waits for an agent
            assert client.submit(sum, [2, 3]).result(timeout=60) == 5
            assert len(user.queued()) == 3

            assert "mine runs" in user.hpcdask("attach", "mine")
            client.wait_for_workers(3, timeout=180)
            wait_for(lambda: not cluster.jobs().problem, 60, "it to be seen that it is back")
            assert len(agents(user)) == 1
        folder = detached.find("mine")
        assert (folder.path / "agent.log").stat().st_mode & 0o077 == 0
        assert ControlRecord.read(folder).agent.startswith("tls://")
        user.hpcdask("down", "mine")
        wait_for(lambda: not agents(user), 30, "the agent to end")
    assert not user.queued()


@pytest.mark.long
def test_it_ends_what_a_killed_cluster_leaves(user: Login):
    with user.detached(n_workers=1) as cluster:
        cluster.wait_for_workers(1, timeout=180)
        hpcdask.attach("mine").close()
        assert len(agents(user)) == 1
    folder = detached.find("mine")
    user.lose(detached.scheduler_job(folder))
    user.site.run("scontrol", "update", "nodename=node[1-4]", "state=down", "reason=test")
    wait_for(lambda: not agents(user), 90, "the agent to end")
    record = ControlRecord.read(folder)
    assert record.state == detached.ENDED
    assert "its scheduler's job" in record.why
    wait_for(lambda: not user.queued(), 30, "the jobs to be gone")
