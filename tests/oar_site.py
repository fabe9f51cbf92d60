"""A real OAR on this host, for tests: its own database, port and folders.

The server's programs and jobs are processes of the user who runs the tests, and the one node is
this host. So two programs have stand-ins: ``oardodo``, by which OAR becomes another user, and the
``ssh`` to nodes, both of which run the command here. GPUs are a property of the resources.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

import slurm_accounting
from hpcdask.queues.helpers import user
from launching import clean_environment, wait_for
from queue_site import QueueSite, free_ports

PRIVATE = Path(os.environ.get("HPCDASK_QUEUES", Path(sys.prefix).parent / ".queues")) / "oar"
PROGRAMS = PRIVATE / "usr/lib/oar"
COMMANDS = ("oarsub", "oarstat", "oardel", "oarhold", "oarresume", "oarnodes", "oarnodesetting")
NODE = "localhost"

CONFIGURATION = {
    "DB_TYPE": "mysql",
    "DB_HOSTNAME": "localhost",
    "DB_PORT": "3306",
    "DB_BASE_NAME": "oar",
    "DB_BASE_LOGIN": "oar",
    "DB_BASE_PASSWD": "oar",
    "SERVER_HOSTNAME": "127.0.0.1",
    "LOG_LEVEL": "3",
    "SCHEDULER_JOB_SECURITY_TIME": "1",
    "SCHEDULER_MIN_TIME_BETWEEN_2_CALLS": "0",
}
#: What cpusets and their clean-up, and pings of nodes, begin with.
LEFT_OUT = ("JOB_RESOURCE_MANAGER_", "CPUSET_PATH", "PINGCHECKER_")
#: What a site cannot set: how often the server looks for jobs whose time is over, in seconds, and
#: where its own library is.
CHANGES = {
    "Almighty": {
        "my $read_commands_timeout = 10;": "my $read_commands_timeout = 1;",
        "my $villainstimeout = 10;": "my $villainstimeout = 3;",
    },
    "bipbip": {'"/usr/share/perl5/OAR/Tools.pm"': f'"{PRIVATE}/usr/share/perl5/OAR/Tools.pm"'},
}
COMMAND = """\
#!/bin/sh
# As OAR's own small program of this name does it, but for becoming the user oar
export OARDO_USER={user} OARDO_UID={uid} OARDIR={root}/oar OARCONFFILE={root}/oar.conf
export PERL5LIB={perl} MYSQL_UNIX_PORT={socket}
export PATH={root}/stand-ins:$PATH
exec "$OARDIR/${{0##*/}}" "$@"
"""
STAND_INS = {
    "stand-ins/oardodo": '#!/bin/sh\n[ "$1" = chown ] || exec "$@"\n',
    "stand-ins/ssh": '#!/bin/sh\nwhile [ "$1" != localhost ]; do shift; done; shift; eval "$@"\n',
    # It names the nodes that do not answer
    "stand-ins/ping": '#!/bin/sh\n[ ! -e "${0%/*}/unreachable" ] || echo "$1" >&2\n',
}


def is_missing() -> bool:
    """Whether OAR's programs are not there."""
    return not (PROGRAMS / "Almighty").exists()


class OarSite(QueueSite):
    """An OAR as a context manager.

    Parameters
    ----------
    cores, gpus
        Of its one node; each GPU has as many of the cores.
    """

    name = "oar"

    def __init__(self, cores: int = 8, gpus: int = 4) -> None:
        super().__init__()
        self.cores = cores
        self.gpus = gpus

    def _open(self) -> None:
        env = clean_environment()
        self.marker = f"HPCDASK_OAR_SITE={self.folder}"
        self.env = {
            **env,
            "PATH": f"{self.folder}/bin{os.pathsep}{env['PATH']}:/usr/sbin:/sbin",
            "HPCDASK_OAR_SITE": str(self.folder),
            **slurm_accounting.environment(self.folder),
        }
        self._write_programs()
        self._start_database()
        server = self._start("Almighty")
        self._wait(server, lambda: not self.run("oarstat", check=False).returncode, "the server")

    @property
    def unreachable(self) -> Path:
        """While there is such a file, no node answers."""
        return self.folder / "stand-ins/unreachable"

    def sql(self, statements: str, database: Sequence[str] = ("oar",)) -> str:
        """Run statements in OAR's database, as its administrator."""
        socket = f"--socket={self.folder}/db/socket"
        command = ("mariadb", "--no-defaults", socket, "--user=root", "--batch", *database)
        return self.run(*command, input=statements).stdout

    def cancel_all(self, timeout: float = 30) -> None:
        """Delete all jobs, and wait until none is there."""
        active = "SELECT job_id FROM jobs WHERE state NOT IN ('Terminated', 'Error');"

        if jobs := self.sql(active).split()[1:]:
            self.run("oardel", *jobs, check=False)

        def all_over() -> bool:
            return not self.sql(active)

        wait_for(all_over, timeout, "OAR's jobs to end", interval=0.5)

    # Start and end

    def _write_programs(self) -> None:
        for name in ("bin", "stand-ins", "runtime"):
            (self.folder / name).mkdir()
        shutil.copytree(PROGRAMS, self.folder / "oar")
        for name, changes in CHANGES.items():
            path = self.folder / "oar" / name
            text = path.read_text()
            for old, new in changes.items():
                assert old in text, (name, old)
                text = text.replace(old, new)
            path.write_text(text)
        (port,) = free_ports(1)
        settings = {
            **CONFIGURATION,
            "SERVER_PORT": str(port),
            "LOG_FILE": f"{self.folder}/log/oar.log",
            "OAR_RUNTIME_DIRECTORY": f"{self.folder}/runtime",
            "OPENSSH_CMD": f"{self.folder}/stand-ins/ssh",
            "PINGCHECKER_GENERIC_COMMAND": f"{self.folder}/stand-ins/ping",
        }
        given = (PRIVATE / "usr/share/oar/oar-common/oar.conf").read_text().splitlines()
        lines = [line for line in given if not line.startswith((*settings, *LEFT_OUT, "#"))]
        lines += [f'{name}="{value}"' for name, value in settings.items()]
        (self.folder / "oar.conf").write_text("\n".join(filter(None, lines)) + "\n")
        perl = [PRIVATE / "usr/share/perl5", *(PRIVATE / "usr/lib").glob("*/perl5/*")]
        text = COMMAND.format(
            user=shlex.quote(user()),
            uid=os.geteuid(),
            root=self.folder,
            perl=":".join(map(str, perl)),
            socket=self.env["MYSQL_UNIX_PORT"],
        )
        scripts = {f"bin/{name}": text for name in (*COMMANDS, "Almighty", "oarproperty")}
        for name, text in {**scripts, **STAND_INS}.items():
            path = self.folder / name
            path.write_text(text)
            path.chmod(0o700)

    def _start_database(self) -> None:
        slurm_accounting.start_database(self.folder, self._start, self._wait, self.env)
        # OAR leaves out values that have no default
        self.sql(
            "SET GLOBAL sql_mode = ''; CREATE DATABASE oar; "
            "GRANT ALL ON oar.* TO oar@localhost IDENTIFIED BY 'oar';",
            database=(),
        )
        names = ("mysql_structure", "default_data", "mysql_default_admission_rules")
        *tables, rules = ((PROGRAMS / f"database/{name}.sql").read_text() for name in names)
        # A word that MariaDB keeps for itself; only oarwalltime needs the column
        tables[0] = tables[0].replace("\nforce ENUM", "\n`force` ENUM")
        # All but the one that root submits no jobs, and one whose quotes MariaDB does not take
        rules = re.findall(
            r"^INSERT [^(]+\([^(]+\((?!2,|8,).+?^'\);$", rules, re.MULTILINE | re.DOTALL
        )
        # OAR itself has no gpu; which cores belong to which is for the site to say
        columns = [f"ALTER TABLE resources ADD COLUMN {name} INT;" for name in ("core", "gpu")]
        share = self.cores // self.gpus
        rows = [
            "INSERT INTO resources (network_address, state, core, gpu, host, cpuset) VALUES "
            f"('{NODE}', 'Alive', {core}, {core // share}, '{NODE}', {core});"
            for core in range(self.cores)
        ]
        columns.append("ALTER TABLE resources ADD COLUMN host VARCHAR(255);")
        self.sql("\n".join([*tables, *columns, *rows, *rules]))
