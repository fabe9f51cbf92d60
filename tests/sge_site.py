"""A real Grid Engine on this host, for tests: its own cell, ports and spool folders.

The master and one execution host are processes of the user who runs the tests. GPUs are a number
that the host has, as on sites without a more elaborate set-up.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import sys
from pathlib import Path

import pytest

from hpcdask.queues.helpers import user
from launching import clean_environment, wait_for
from queue_site import QueueSite, free_ports

PRIVATE = Path(os.environ.get("HPCDASK_QUEUES", Path(sys.prefix).parent / ".queues")) / "sge"
PROGRAMS = PRIVATE / "usr/lib/gridengine"
SHARE = PRIVATE / "usr/share/gridengine"
LIBRARIES = [PROGRAMS, PRIVATE / "usr/lib/x86_64-linux-gnu", PRIVATE / "lib/x86_64-linux-gnu"]

BOOTSTRAP = """\
admin_user {admin}
default_domain none
ignore_fqdn true
spooling_method berkeleydb
spooling_lib libspoolb
spooling_params {root}/spool/db
binary_path {programs}
qmaster_spool_dir {root}/spool/qmaster
security_mode none
listener_threads 2
worker_threads 2
scheduler_threads 1
"""

HOST = {"hostname": "localhost", "complex_values": "slots={slots},gpu={gpus}"}
HOST_LISTS = "load_scaling user_lists xuser_lists projects xprojects usage_scaling report_variables"

QUEUE = """\
qname gpu.q
hostlist localhost
seq_no 0
load_thresholds NONE
suspend_thresholds NONE
nsuspend 1
suspend_interval 00:05:00
priority 0
min_cpu_interval 00:05:00
processors UNDEFINED
qtype BATCH
rerun FALSE
slots {slots}
tmpdir /tmp
shell /bin/sh
shell_start_mode posix_compliant
notify 00:00:60
initial_state default
"""
QUEUE_NONE = (
    "ckpt_list pe_list prolog epilog starter_method suspend_method resume_method "
    "terminate_method owner_list user_lists xuser_lists subordinate_list complex_values projects "
    "xprojects calendar"
)
QUEUE_LIMITS = "rt cpu fsize data stack core rss vmem"


def is_missing() -> bool:
    """Whether Grid Engine's programs are not there."""
    return not (PROGRAMS / "sge_qmaster").exists()


class SgeSite(QueueSite):
    """A Grid Engine as a context manager.

    Parameters
    ----------
    slots, gpus
        Of its one host.
    """

    name = "sge"

    def __init__(self, slots: int = 8, gpus: int = 4) -> None:
        super().__init__()
        self.slots = slots
        self.gpus = gpus

    def _open(self) -> None:
        env = clean_environment()
        ports = map(str, free_ports(2))
        self.env = {
            **env,
            "PATH": f"{PROGRAMS}{os.pathsep}{env['PATH']}",
            "LD_LIBRARY_PATH": os.pathsep.join(map(str, LIBRARIES)),
            "SGE_ROOT": str(self.folder),
            "SGE_CELL": "default",
            "SGE_ARCH": "lx-amd64",
            "SGE_QMASTER_PORT": next(ports),
            "SGE_EXECD_PORT": next(ports),
        }
        self.marker = f"SGE_ROOT={self.folder}"
        self._write_cell()
        master = self._start("sge_qmaster", SGE_ND="true")  # stay in the foreground
        self._wait(master, lambda: self.run("qconf", "-sh", check=False).returncode == 0, "it")
        self._configure()
        host = self._start("sge_execd", SGE_ND="true")
        self._wait(host, self._reports, "the execution host")

    def cancel_all(self, timeout: float = 20) -> None:
        """Delete all jobs, and wait until none is there."""

        def all_over() -> bool:
            self.run("qdel", "-u", user(), check=False)
            return not self.run("qstat").stdout.strip()

        wait_for(all_over, timeout, "Grid Engine's jobs to end", interval=0.3)

    # Start and end

    def _write_cell(self) -> None:
        for name in ("default/common", "spool/qmaster/job_scripts", "spool/db", "spool/execd"):
            (self.folder / name).mkdir(parents=True)
        shutil.copytree(SHARE / "util", self.folder / "util")
        common = self.folder / "default/common"
        common.joinpath("bootstrap").write_text(
            BOOTSTRAP.format(
                root=self.folder,
                programs=PROGRAMS,
                admin="none" if os.geteuid() == 0 else user(),
            )
        )
        common.joinpath("act_qmaster").write_text("localhost\n")
        own, aliases, _ = socket.gethostbyaddr("127.0.0.1")
        names = {socket.gethostname(), socket.getfqdn(), own, *aliases} - {"localhost"}
        common.joinpath("host_aliases").write_text(f"localhost {' '.join(sorted(names))}\n")
        settings = (SHARE / "default-configuration").read_text()
        for old, new in (
            ("/var/spool/gridengine/execd", f"{self.folder}/spool/execd"),
            ("min_uid                1000", "min_uid 0"),
            ("min_gid                1000", "min_gid 0"),
            ("/usr/bin/mail", "/bin/true"),
            ("accounting=true", "accounting=true accounting_flush_time=00:00:00"),
        ):
            assert old in settings, old
            settings = settings.replace(old, new)
        # A login shell would run the user's own start-up files, which may take long or wait
        settings = re.sub(r"^(login_shells +)\S+", r"\1none", settings, flags=re.MULTILINE)
        configuration = self.folder / "configuration"
        configuration.write_text(settings)
        resources = self.folder / "util/resources"
        self.run("spoolinit", "berkeleydb", "libspoolb", f"{self.folder}/spool/db", "init")
        for what, value in (
            ("configuration", configuration),
            ("complexes", resources / "centry"),
            ("usersets", resources / "usersets"),
            ("managers", user()),
        ):
            done = self.run("spooldefaults.bin", what, str(value), check=False)
            if done.returncode == -signal.SIGSEGV:  # Ubuntu 24.04's, also when it is installed
                pytest.skip("Grid Engine's spooldefaults.bin crashes on this distribution")
            assert not done.returncode, done.stdout + done.stderr

    def _configure(self) -> None:
        self.run("qconf", "-as", "localhost")
        resources = self.run("qconf", "-sc").stdout + "gpu gpu INT <= YES YES 0 0\n"
        self._give("-Mc", "resources", resources)
        host = {**HOST, **dict.fromkeys(HOST_LISTS.split(), "NONE")}
        text = "".join(f"{name} {value}\n" for name, value in host.items())
        self._give("-Ae", "host", text.format(slots=self.slots, gpus=self.gpus))
        none = "".join(f"{name} NONE\n" for name in QUEUE_NONE.split())
        limits = "".join(f"s_{n} INFINITY\nh_{n} INFINITY\n" for n in QUEUE_LIMITS.split())
        self._give("-Aq", "queue", QUEUE.format(slots=self.slots) + none + limits)
        scheduling = []
        fast = {
            "schedule_interval": "0:0:1",
            "flush_submit_sec": "1",
            "flush_finish_sec": "1",
        }
        for line in self.run("qconf", "-ssconf").stdout.splitlines():
            name, value = line.split(None, 1)
            scheduling.append(f"{name} {fast.get(name, value)}\n")
        self._give("-Msconf", "scheduling", "".join(scheduling))

    def _give(self, option: str, name: str, text: str) -> None:
        path = self.folder / name
        path.write_text(text)
        self.run("qconf", option, str(path))

    def _reports(self) -> bool:
        """Return whether the execution host tells its load."""
        rows = [line.split() for line in self.run("qhost").stdout.splitlines()]
        return any(row[0] == "localhost" and row[2] != "-" for row in rows if len(row) > 2)
