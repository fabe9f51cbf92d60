"""What holds for detached clusters on every queue: `user` is one of a SLURM, or of another."""

from __future__ import annotations

import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from distributed import wait

import hpcdask
from hpcdask.errors import ClusterError, HpcdaskError
from hpcdask.jobs import detached
from launching import unavailable, wait_for
from login import User


def check_told(user: User, cluster: Any, why: str) -> None:
    """Those who are attached and who ask are told; the jobs end."""
    wait_for(lambda: cluster.failure is not None, 60, "the notebook to see it")
    assert why in str(cluster.failure)
    wait_for(user.gone, 60, "the jobs' end")
    with pytest.raises(ClusterError, match="has ended: "):
        cluster.scale(1)
    assert why in " ".join(user.hpcdask("list").split())


def computes_while_the_queue_is_away(
    user: User,
    folder: Path,
    capfd: pytest.CaptureFixture[str],
    leave: Callable[[], None],
    come_back: Callable[[], None],
    seconds: float = 0.0,
) -> None:
    """Until that is seen, and so many seconds more; no job is lost, and nothing runs twice."""
    with user.detached(n_workers=2) as cluster, cluster.get_client() as client:
        client.wait_for_workers(2, timeout=180)
        before = [job.id for job in cluster.jobs()]
        ran = folder / "ran"
        ran.mkdir()

        def work(number: int, folder: str) -> int:
            import time

            with open(f"{folder}/{number}", "a") as file:
                file.write("x")
            time.sleep(0.2)
            return number

        futures = client.map(work, range(100), folder=str(ran))
        leave()
        wait_for(lambda: "What the jobs do is unknown" in capfd.readouterr().err, 120, "a word")
        if seconds:
            threading.Event().wait(seconds)
        wait(futures, timeout=300)
        assert client.gather(futures) == list(range(100))
        assert client.submit(sum, [1, 2]).result(timeout=60) == 3
        come_back()
        cluster.scale(3)
        client.wait_for_workers(3, timeout=300)
        assert [job.id for job in cluster.jobs()][:2] == before
        assert len(cluster.jobs()) == 3
        assert {path.read_text() for path in ran.iterdir()} == {"x"}
        cluster.shutdown()


@contextmanager
def small_disk(folder: Path) -> Iterator[None]:
    folder.mkdir(mode=0o700)
    command = ["mount", "-t", "tmpfs", "-o", "size=4m,mode=700", "small", str(folder)]
    if subprocess.run(command, capture_output=True, check=False).returncode:
        unavailable("only root can mount a small file system")
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def fill(folder: Path) -> Path:
    path = folder / "filling"
    with path.open("wb", buffering=0) as file:
        try:
            while True:
                file.write(b"x" * 4096)
        except OSError:
            return path


def its_disk_is_full(user: User) -> None:
    """When it is made, scaled and ended."""
    with small_disk(user.folder):
        filling = fill(user.folder)
        with pytest.raises(HpcdaskError, match="No space left"):
            user.detached()
        assert not user.queued()
        filling.unlink()
        with user.detached(n_workers=1) as cluster, cluster.get_client() as client:
            client.wait_for_workers(1, timeout=180)
            fill(user.folder)
            assert client.submit(sum, [1, 2]).result(timeout=60) == 3
            with pytest.raises(HpcdaskError, match="No space left"):
                cluster.scale(2)
            filling.unlink()
            cluster.scale(2)
            client.wait_for_workers(2, timeout=180)
            fill(user.folder)
            user.hpcdask("down", "mine")
            assert user.gone()
            filling.unlink()
            with pytest.raises(ClusterError, match="hpcdask down"):
                hpcdask.attach("mine")
        assert detached.find("mine").ended
