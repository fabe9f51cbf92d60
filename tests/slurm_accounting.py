"""Accounting of a SLURM site for tests: its own MariaDB behind a socket, and slurmdbd."""

from __future__ import annotations

import os
import pwd
import shutil
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path

PROGRAMS = ("mariadb-install-db", "mariadbd", "slurmdbd", "sacct", "sacctmgr")
#: Started as a program with its arguments; returns it.
Start = Callable[..., subprocess.Popen[bytes]]
#: Waits for a program's condition, with what is waited for.
Wait = Callable[[subprocess.Popen[bytes], Callable[[], bool], str], None]


def settings(folder: Path, port: int) -> dict[str, object]:
    """Return what slurm.conf says about accounting."""
    return {
        "AccountingStorageType": "accounting_storage/slurmdbd",
        "AccountingStorageHost": "localhost",
        "AccountingStoragePort": port,
        "AccountingStoragePass": f"{folder}/munge/socket",
        "AccountingStorageEnforce": "associations,limits,qos",
        "AccountingStorageTRES": "gres/gpu",
    }


def environment(folder: Path) -> dict[str, str]:
    """Return what slurmdbd needs in its environment to find the database's socket."""
    return {"MYSQL_UNIX_PORT": str(folder / "db" / "socket")}


def start_database(folder: Path, start: Start, wait: Wait, env: Mapping[str, str]) -> None:
    """Start MariaDB. Who may enter the site's folder is its root; no port is open."""
    (folder / "db").mkdir()
    as_root = ["--user=root"] if os.geteuid() == 0 else []
    place = [f"--datadir={folder}/db/data", "--innodb-log-file-size=8M", *as_root]
    made = subprocess.run(
        [
            shutil.which("mariadb-install-db", path=env["PATH"]) or "mariadb-install-db",
            "--no-defaults",
            *place,
            "--auth-root-authentication-method=normal",
            "--skip-test-db",
        ],
        env=env,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    if made.returncode:
        raise RuntimeError(f"mariadb-install-db failed: {made.stdout[-2000:]}{made.stderr[-2000:]}")
    daemon = start(
        "mariadbd",
        "--no-defaults",
        *place,
        "--skip-networking",
        f"--socket={folder}/db/socket",
        f"--pid-file={folder}/db/pid",
        f"--log-error={folder}/log/mariadbd.log",
        "--innodb-buffer-pool-size=64M",
        "--innodb-lock-wait-timeout=900",
        "--innodb-flush-log-at-trx-commit=0",
    )
    wait(daemon, (folder / "db" / "socket").is_socket, "MariaDB's socket")


def write_slurmdbd_conf(folder: Path, port: int) -> None:
    """Write slurmdbd.conf beside slurm.conf, where slurmdbd finds it."""
    path = folder / "slurmdbd.conf"
    path.touch(mode=0o600)  # slurmdbd insists
    path.write_text(
        "\n".join(
            [
                "DbdHost=localhost",
                f"DbdPort={port}",
                f"SlurmUser={pwd.getpwuid(os.geteuid()).pw_name}",
                "AuthType=auth/munge",
                f"AuthInfo=socket={folder}/munge/socket",
                "StorageType=accounting_storage/mysql",
                "StorageHost=localhost",
                "StorageUser=root",
                "StorageLoc=slurm",
                f"LogFile={folder}/log/slurmdbd.log",
                f"PidFile={folder}/slurmdbd.pid",
                "CommitDelay=0\n",
            ]
        )
    )
