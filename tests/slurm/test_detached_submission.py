"""Detached clusters on a SLURM whose nodes may not submit (AllocNodes)."""

from __future__ import annotations

import shutil
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from hpcdask.errors import ClusterError, Refused
from slurm_login import Login, login
from slurm_site import SlurmSite

pytestmark = [pytest.mark.slurm, pytest.mark.slow]


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


def test_the_error_names_the_scheduler_on_the_login_node(user: Login):
    advice = r"Access/permission denied.*scheduler_job=None"
    with pytest.raises(ClusterError, match=advice):
        user.detached(n_workers=1)
    with user.detached() as cluster:
        with pytest.raises(Refused, match=advice):
            cluster.scale(1)
        cluster.shutdown()
    with user.detached(scheduler_job=None, n_workers=1) as cluster:
        with cluster.get_client() as client:
            assert client.submit(sum, [1, 2]).result(timeout=180) == 3
        cluster.shutdown()
    assert not user.queued()
