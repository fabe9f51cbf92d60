"""A real SLURM on this host, for tests: its own munge, controller, virtual nodes and ports.

The nodes are `slurmd` processes. Their GPUs are links to /dev/null, which SLURM counts, hands
out and names in CUDA_VISIBLE_DEVICES like real ones. Two sites run side by side. Waits that are
long by default, such as a requeued job's, are short. Accounting, with a database, is an option.

As a program it opens a shell in a site of two nodes: ``python tests/slurm_site.py [COMMAND ...]``.
"""

from __future__ import annotations

import contextlib
import os
import pwd
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import slurm_accounting
from launching import clean_environment, end, leftovers, name_of, wait_for
from queue_site import QueueSite, free_ports

PROGRAMS = ("munged", "slurmctld", "slurmd", "srun", "sbatch", "squeue", "scancel", "scontrol")
SBIN = os.pathsep.join(["/usr/local/sbin", "/usr/sbin", "/sbin"])  # not on every user's PATH


def missing_programs(accounting: bool = False) -> list[str]:
    """Return the programs a site needs that are not installed."""
    programs = [*PROGRAMS, *(slurm_accounting.PROGRAMS if accounting else ())]
    return [program for program in programs if not shutil.which(program, path=search_path())]


def search_path() -> str:
    return os.environ.get("PATH", os.defpath) + os.pathsep + SBIN


class SlurmSite(QueueSite):
    """A SLURM as a context manager.

    >>> with SlurmSite(nodes=2, gpus_per_node=4) as site:
    ...     site.run("srun", "-N2", "hostname").stdout

    Parameters
    ----------
    nodes, gpus_per_node, cpus_per_node, memory_per_node_mb
        What there is; CPUs and memory may exceed the host's.
    requeue_wait_s
        How long a requeued job waits before it starts again (SLURM's own default is 120 s). It is
        the life of a job's credential too, in which a job has to be launched.
    conf
        More of slurm.conf, or other values: ``conf={"KillOnBadExit": 1}``.
    accounting
        With slurmdbd: `sacct` works, and accounts, associations and limits of a QOS are enforced.
        The user who starts it may use the account ``tests``, and no other.
    """

    name = "slurm"

    def __init__(
        self,
        nodes: int = 4,
        gpus_per_node: int = 2,
        cpus_per_node: int = 8,
        memory_per_node_mb: int = 16_000,
        requeue_wait_s: int = 6,
        conf: Mapping[str, object] | None = None,
        accounting: bool = False,
    ) -> None:
        super().__init__()
        self.nodes = [f"node{n}" for n in range(1, nodes + 1)]
        self.gpus_per_node = gpus_per_node
        self.cpus_per_node = cpus_per_node
        self.memory_per_node_mb = memory_per_node_mb
        self.requeue_wait_s = requeue_wait_s
        self.conf = dict(conf or {})
        self.accounting = accounting
        self._dbd_port = 0

    def _open(self) -> None:
        self.env = {**clean_environment(), "SLURM_CONF": f"{self.folder}/slurm.conf"}
        self.marker = f"SLURM_CONF={self.folder}/slurm.conf"  # SLURM sets it for every job as well
        self._write_slurm_conf()
        self._write_gres_conf()
        self._start_munge()
        if self.accounting:
            self._start_accounting()
        self._start_slurm()

    # What tests use

    def submit(self, *arguments: str | os.PathLike[str], **kwargs) -> int:
        """Submit with `sbatch arguments...` and return the job's id."""
        return int(self.run("sbatch", "--parsable", *arguments, **kwargs).stdout)

    def state(self, job: int) -> str:
        """Return the job's state in SLURM's words, such as PENDING or COMPLETED."""
        return self.run("squeue", "-h", "-t", "all", "-j", str(job), "-o", "%T").stdout.strip()

    def wait_for_state(self, job: int, *states: str, timeout: float = 20) -> str:
        """Wait until the job is in one of these states, and return which."""

        def reached() -> str:
            return state if (state := self.state(job)) in states else ""

        return wait_for(reached, timeout, f"job {job} to be {' or '.join(states)}", interval=0.2)

    def idle_nodes(self) -> list[str]:
        """Return the sorted names of the nodes that are up and run nothing."""
        # Not `-t idle`, which lists nodes that still clean up after a job
        lines = self.run("sinfo", "-h", "-N", "-o", "%T %N").stdout.splitlines()
        # one line for each partition that a node is in
        return sorted({line.split()[1] for line in lines if line.startswith("idle ")})

    def cancel_all(self, timeout: float = 90) -> None:
        """Cancel all jobs, and wait until none is in the queue and every node is idle.

        What ignores SIGTERM takes KillWait, 15 s.
        """

        def all_over() -> bool:
            if jobs := self.run("squeue", "-h", "-t", "pending,running", "-o", "%A").stdout.split():
                self.run("scancel", *jobs, check=False)
            over = not self.run("squeue", "-h").stdout
            return over and self.idle_nodes() == sorted(self.nodes)

        wait_for(all_over, timeout, "the jobs to end and all nodes to be idle", interval=0.2)

    def daemons(self, program: str) -> list[subprocess.Popen[bytes]]:
        """Return the processes of a daemon, such as ``slurmd``, those of the nodes in order."""
        return [daemon for daemon in self._daemons if Path(daemon.args[0]).name == program]

    def restart(self, daemon: subprocess.Popen[bytes]) -> None:
        """Start a daemon again that has ended, unless that was done already."""
        if daemon in self._daemons and daemon.poll() is not None:
            self._daemons.remove(daemon)
            self._start(*daemon.args)

    def bring_back(self) -> None:
        """Start all daemons again that have ended, and take all nodes back."""
        for daemon in list(self._daemons):
            self.restart(daemon)
        self._wait(
            self._daemons[-1],
            lambda: self.run("scontrol", "ping", check=False).returncode == 0,
            "slurmctld to answer",
        )
        for node in self.nodes:
            self.run("scontrol", "update", f"nodename={node}", "state=resume", check=False)

    def mend(self) -> None:
        """As at the start: all daemons, no jobs, idle nodes."""
        self.bring_back()
        self.cancel_all(60)
        # jobs that a killed controller has forgotten, and whose ids it gives again
        end(one for one in leftovers(self.marker) if name_of(one) == "slurmstepd")

    # Start and end

    def _write_slurm_conf(self) -> None:
        for name in ("state", "spool", "munge", "cgroup", "gpu"):
            (self.folder / name).mkdir()
        folder = self.folder
        host = socket.gethostname().split(".")[0]
        user = pwd.getpwuid(os.geteuid()).pw_name
        port, self._dbd_port, *node_ports = free_ports(2 + len(self.nodes))
        settings = {
            "ClusterName": "site",
            "SlurmctldHost": f"{host}(127.0.0.1)",
            "SlurmctldPort": port,
            "SlurmUser": user,
            "SlurmdUser": user,
            "AuthType": "auth/munge",
            "CredType": "cred/munge",
            "AuthInfo": f"socket={folder}/munge/socket,cred_expire={self.requeue_wait_s}",
            "StateSaveLocation": f"{folder}/state",
            "SlurmdSpoolDir": f"{folder}/spool/%n",
            "SlurmctldPidFile": f"{folder}/slurmctld.pid",
            "SlurmdPidFile": f"{folder}/slurmd.%n.pid",
            "SlurmctldLogFile": f"{folder}/log/slurmctld.log",
            "SlurmdLogFile": f"{folder}/log/%n.log",
            "MailProg": "/bin/true",
            "ProctrackType": "proctrack/linuxproc",
            "TaskPlugin": "task/none",
            "JobAcctGatherType": "jobacct_gather/none",
            "MpiDefault": "none",
            "SelectType": "select/cons_tres",
            "SelectTypeParameters": "CR_Core_Memory",
            "DefMemPerCPU": self.memory_per_node_mb // self.cpus_per_node,
            "GresTypes": "gpu,nvme",
            "JobRequeue": 1,
            "ReturnToService": 2,
            "KillWait": 15,
            "SchedulerParameters": "batch_sched_delay=0,sched_interval=1,bf_interval=1",
            "SlurmdParameters": "config_overrides",  # more CPUs and memory than the host has
        }
        if self.accounting:
            settings |= slurm_accounting.settings(folder, self._dbd_port)
        lines = [f"{key}={value}" for key, value in {**settings, **self.conf}.items()]
        gpus = f"gpu:{self.gpus_per_node}," if self.gpus_per_node else ""
        gres = f" Gres={gpus}nvme:200"
        for name, node_port in zip(self.nodes, node_ports, strict=True):
            lines.append(
                f"NodeName={name} NodeHostname={host} NodeAddr=127.0.0.1 Port={node_port}"
                f" CPUs={self.cpus_per_node} RealMemory={self.memory_per_node_mb}{gres}"
            )
        lines.append("PartitionName=gpu Nodes=ALL Default=YES MaxTime=INFINITE State=UP")
        (folder / "slurm.conf").write_text("\n".join(lines) + "\n")
        # slurmd 22.05 wants a cgroup plugin even where none is used; v1 starts everywhere
        (folder / "cgroup.conf").write_text(
            f"CgroupPlugin=cgroup/v1\nCgroupMountpoint={folder}/cgroup\n"
        )

    def _write_gres_conf(self) -> None:
        lines = ["Name=nvme Count=200 Flags=CountOnly\n"]
        for name in self.nodes:
            for index in range(self.gpus_per_node):
                device = self.folder / "gpu" / f"{name}-{index}"
                device.symlink_to("/dev/null")  # SLURM insists on a character device
                lines.append(f"NodeName={name} Name=gpu File={device}\n")
        (self.folder / "gres.conf").write_text("".join(lines))

    def _start_munge(self) -> None:
        folder = self.folder / "munge"
        key = folder / "key"
        key.touch(mode=0o600)
        key.write_bytes(os.urandom(1024))
        # --force: munge prefers a socket folder that all users of the host can reach
        daemon = self._start(
            "munged",
            "--foreground",
            "--force",
            f"--key-file={key}",
            f"--socket={folder}/socket",
            f"--pid-file={folder}/pid",
            f"--log-file={self.folder}/log/munged.log",
            f"--seed-file={folder}/seed",
            "--num-threads=2",
        )
        self._wait(daemon, (folder / "socket").is_socket, "munge's socket")

    def _start_accounting(self) -> None:
        self.env |= slurm_accounting.environment(self.folder)
        slurm_accounting.start_database(
            self.folder, self._start, self._wait, {**self.env, "PATH": search_path()}
        )
        slurm_accounting.write_slurmdbd_conf(self.folder, self._dbd_port)
        daemon = self._start("slurmdbd", "-D")
        self._wait(
            daemon,
            lambda: self.run("sacctmgr", "-n", "show", "qos", check=False).returncode == 0,
            "slurmdbd to answer",
        )
        user = pwd.getpwuid(os.geteuid()).pw_name
        # The controller is told when it starts
        self.run("sacctmgr", "-i", "add", "cluster", "site")
        self.run("sacctmgr", "-i", "add", "account", "tests", "cluster=site")
        self.run("sacctmgr", "-i", "add", "user", user, "account=tests", "defaultaccount=tests")

    def _start_slurm(self) -> None:
        controller = self._start("slurmctld", "-D", "-f", self.env["SLURM_CONF"])
        self._wait(
            controller,
            lambda: self.run("scontrol", "ping", check=False).returncode == 0,
            "slurmctld to answer",
        )
        for name in self.nodes:
            # -f, though SLURM_CONF says the same: it shows in ps which site a daemon belongs to
            node = self._start("slurmd", "-D", "-N", name, "-f", self.env["SLURM_CONF"])
        self._wait(
            node,
            lambda: self.idle_nodes() == sorted(self.nodes),
            f"{len(self.nodes)} idle nodes",
        )

    def _path(self) -> str:
        return search_path()


def main(command: Sequence[str]) -> int:
    """Run a command, or a shell, in a site of two nodes, and return its exit code."""
    if missing := missing_programs():
        sys.exit(f"SLURM is not installed, missing: {' '.join(missing)}")
    for number in (signal.SIGTERM, signal.SIGHUP):  # the site ends as with Ctrl-C
        signal.signal(number, signal.default_int_handler)
    with SlurmSite(nodes=2) as site, contextlib.suppress(KeyboardInterrupt):
        words = command or [os.environ.get("SHELL", "/bin/sh")]
        return subprocess.run(words, env=site.env, check=False).returncode
    return 130


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
