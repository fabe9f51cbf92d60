"""How the answers of queueing systems are read, and what they are asked.

The answers were written after the manuals and the systems' sources, which each section names; no
system was running. PBS over SLURM, Grid Engine and OAR are tested with real commands elsewhere.
"""

import asyncio
import json
import re
import shlex
import subprocess
import time
from collections.abc import Coroutine, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import pytest

from doors import TAG
from hpcdask.errors import QueueError, Refused
from hpcdask.queues import helpers
from hpcdask.queues.base import Queue
from hpcdask.queues.flux import FluxQueue
from hpcdask.queues.htcondor import HtcondorQueue
from hpcdask.queues.job_state import QueueState, QueueStatus
from hpcdask.queues.lsf import LsfQueue
from hpcdask.queues.moab import MoabQueue
from hpcdask.queues.oar import OarQueue
from hpcdask.queues.pbs import PbsQueue
from hpcdask.queues.sge import SgeQueue

T = TypeVar("T")
Answer = str | tuple[int, str, str]


def do(work: Coroutine[Any, Any, T]) -> T:
    return asyncio.run(work)


class Site:
    """Answers for the commands of a door, by the start of the command; what was run is in `ran`.

    An answer is the output of a command that succeeds, or exit code, output and error output.
    """

    def __init__(self, queue: Queue, answers: Mapping[str, Answer]) -> None:
        self.answers = answers
        self.ran: list[str] = []
        self.inputs: list[str | None] = []
        queue.run = self.run  # type: ignore[method-assign]

    async def run(
        self, *command: str, input: str | None = None, env: Mapping[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        line = shlex.join(command)
        self.ran.append(line)
        self.inputs.append(input)
        found = [start for start in self.answers if line.startswith(start)]
        assert found, f"nothing answers {line}"
        answer = self.answers[max(found, key=len)]
        code, out, err = (0, answer, "") if isinstance(answer, str) else answer
        return subprocess.CompletedProcess(list(command), code, out, err)


@pytest.fixture(autouse=True)
def ann() -> Iterator[None]:
    """The samples' user, and the time zone of their times."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(helpers, "user", lambda: "ann")
        patch.setenv("TZ", "UTC")
        time.tzset()
        yield
    time.tzset()


@pytest.fixture
def script(tmp_path: Path) -> str:
    path = tmp_path / "script.sh"
    path.write_text("#!/usr/bin/env bash\n")
    return str(path)


def facts(seen: QueueStatus) -> tuple[QueueState, str, int | None]:
    return seen.state, seen.reason, seen.exit_code


# PBS Professional: qstat(1B), "Job Attributes"; PBS Professional User's Guide, "Job Exit Status"

PRO = {"qstat --version": "pbs_version = 23.06.06\n"}

PRO_JOBS = """\
Job Id: 12.server
    Job_Name = dask-worker
    Job_Owner = ann@login1
    resources_used.walltime = 00:10:00
    job_state = R
    queue = gpu
    exec_host = n1/0*8+n1/1*8+n2/0
    Resource_List.walltime = 02:00:00
    stime = Fri Nov 20 22:00:00 2026
    substate = 42
    Variable_List = PBS_O_HOME=/home/ann,PBS_O_SHELL=/bin/bash,
\tHPCDASK_TAG=hpcdask:ab12cd34,PBS_O_QUEUE=gpu
    run_count = 1

Job Id: 13[].server
    Job_Name = dask-worker
    Job_Owner = ann@login1
    job_state = B
    Variable_List = HPCDASK_TAG=hpcdask:ab12cd34

Job Id: 13[0].server
    Job_Name = dask-worker
    Job_Owner = ann@login1
    job_state = X
    Exit_status = 0
    substate = 92
    Variable_List = HPCDASK_TAG=hpcdask:ab12cd34

Job Id: 13[1].server
    Job_Name = dask-worker
    Job_Owner = ann@login1
    job_state = Q
    comment = Not Running: Insufficient amount of resource: ngpus
    Variable_List = HPCDASK_TAG=hpcdask:ab12cd34

Job Id: 14.server
    Job_Owner = bob@login1
    job_state = R
    Variable_List = HPCDASK_TAG=hpcdask:ffffffff

"""


def test_pbs_shows_a_running_job_and_an_array():
    queue = PbsQueue()
    site = Site(queue, {**PRO, "qstat -f": PRO_JOBS})
    seen = do(queue.query(["12.server", "13[0].server", "13[1].server", "99.server"]))
    assert site.ran[1] == "qstat -f -x -t -w 12.server '13[].server' 99.server"
    start = 1795212000.0
    assert seen["12.server"] == QueueStatus(
        "12.server", QueueState.RUNNING, "", None, 0, start, start + 7200, "n1+n2"
    )
    assert facts(seen["13[0].server"]) == (QueueState.COMPLETED, "", 0)
    waiting = "Not Running: Insufficient amount of resource: ngpus"
    assert facts(seen["13[1].server"]) == (QueueState.PENDING, waiting, None)
    assert set(seen) == {"12.server", "13[0].server", "13[1].server"}


PRO_ENDS = {
    "job_state = F\n    Exit_status = 0": (QueueState.COMPLETED, "", 0),
    "job_state = F\n    Exit_status = 3": (QueueState.FAILED, "", 3),
    "job_state = F\n    Exit_status = 265": (QueueState.FAILED, "ended by SIGKILL", 137),
    "job_state = F\n    Exit_status = 271\n    substate = 91": (QueueState.CANCELLED, "", 143),
    "job_state = F\n    substate = 91\n    comment = by ann": (
        QueueState.CANCELLED,
        "by ann",
        None,
    ),
    "job_state = F\n    Exit_status = -29": (QueueState.TIMEOUT, "", -29),
    "job_state = F\n    Exit_status = -1": (QueueState.FAILED, "PBS could not start it", -1),
    "job_state = F\n    Exit_status = 75": (
        QueueState.PREEMPTED,
        "the queue started it a second time",
        75,
    ),
    "job_state = H": (QueueState.PENDING, "held", None),
    "job_state = Q\n    run_count = 1": (QueueState.REQUEUED, "", None),
    "job_state = S": (QueueState.RUNNING, "suspended", None),
    "job_state = E": (QueueState.RUNNING, "", None),
    (
        "job_state = F\n    Exit_status = 271\n    resources_used.walltime = 01:00:02\n"
        "    Resource_List.walltime = 01:00:00"
    ): (QueueState.TIMEOUT, "", 143),
}


@pytest.mark.parametrize("text", PRO_ENDS)
def test_states_of_pbs(text: str):
    queue = PbsQueue()
    Site(queue, {**PRO, "qstat -f": f"Job Id: 1.server\n    {text}\n\n"})
    assert facts(do(queue.query(["1.server"]))["1.server"]) == PRO_ENDS[text]


def test_pbs_does_not_know_a_job():
    queue = PbsQueue()
    unknown = (153, "", "qstat: Unknown Job Id 9.server\n")
    Site(queue, {**PRO, "qstat -f": unknown, "qdel": (153, "", "qdel: Unknown Job Id 9.server\n")})
    assert do(queue.query(["9.server"])) == {}
    do(queue.cancel(["9.server"]))


def test_pbs_does_not_answer():
    queue = PbsQueue()
    down = (255, "", "Connection refused\nqstat: cannot connect to server head (errno=111)\n")
    Site(queue, {**PRO, "qstat -f": down, "qdel": down})
    with pytest.raises(QueueError, match="cannot connect to server"):
        do(queue.query(["9.server"]))
    with pytest.raises(QueueError, match="cannot connect to server"):
        do(queue.cancel(["9.server"]))


def test_pbs_submits_one_array(script: str):
    queue = PbsQueue()
    site = Site(queue, {**PRO, "qsub": "13[].server\n", "qstat -B": "    max_array_size = 500\n"})
    assert do(queue.submit(script, 2)) == ["13[0].server", "13[1].server"]
    assert site.ran[-1] == f"qsub -J 0-1 {script}"
    assert do(queue.limit()) == 500
    site.answers = {"qsub": "14.server\n"}
    assert do(queue.submit(script, 1)) == ["14.server"]
    assert site.ran[-1] == f"qsub {script}"


def test_tags_of_pbs():
    queue = PbsQueue()
    Site(queue, {**PRO, "qstat -f -t -w": PRO_JOBS})
    assert do(queue.tagged()) == {"12.server": TAG, "13[1].server": TAG}


PBS_REFUSALS = {
    "qsub: would exceed queue gpu's per-user limit": True,
    "qsub: Array job exceeds server or queue size limit": True,
    "qsub: submit error (Maximum number of jobs already in queue for user)": True,
    "qsub: Unknown queue": False,
    "qsub: Invalid account": False,
    "qsub: Job exceeds queue and/or server resource limits": False,
}


@pytest.mark.parametrize("text", PBS_REFUSALS)
def test_refusals_of_pbs(script: str, text: str):
    queue = PbsQueue()
    Site(queue, {**PRO, "qsub": (188, "", f"{text}\n")})
    with pytest.raises(Refused) as caught:
        do(queue.submit(script, 2))
    assert str(caught.value) == (
        f"qsub refused the job: {text}. Script kept at {script}. "
        f"Queues: qstat -Q, their limits: qstat -Q -f"
    )
    assert caught.value.for_now is PBS_REFUSALS[text]


# Torque 6: qstat(1), qsub(1) -t; exit codes as in PBS

TORQUE_JOBS = """\
Job Id: 21[0].head.site
    Job_Name = dask-worker-0
    Job_Owner = ann@login1.site
    resources_used.walltime = 00:00:10
    job_state = C
    exit_status = 271
    Resource_List.walltime = 01:00:00
    start_time = Fri Nov 20 22:00:00 2026
    Variable_List = PBS_O_QUEUE=gpu,HPCDASK_TAG=hpcdask:ab12cd34

Job Id: 21[1].head.site
    Job_Name = dask-worker-1
    Job_Owner = ann@login1.site
    job_state = R
    exec_host = n1/0-7
    Variable_List = PBS_O_QUEUE=gpu,HPCDASK_TAG=hpcdask:ab12cd34

"""


def test_torque(script: str):
    queue = PbsQueue()
    version = (0, "", "Version: 6.1.3\nCommit: abc\n")
    site = Site(
        queue,
        {
            "qstat --version": version,
            "qsub": "21[].head.site\n",
            "qstat -f": TORQUE_JOBS,
            "qstat -B": "    max_job_array_size = 300\n",
        },
    )
    ids = do(queue.submit(script, 2))
    assert ids == ["21[0].head.site", "21[1].head.site"]
    assert site.ran[-1] == f"qsub -t 0-1 {script}"
    seen = do(queue.query(ids))
    assert site.ran[-1] == "qstat -f -t -1 '21[].head.site'"
    assert facts(seen[ids[0]]) == (QueueState.CANCELLED, "", 143)
    assert (seen[ids[1]].state, seen[ids[1]].nodes) == (QueueState.RUNNING, "n1")
    assert do(queue.tagged()) == {ids[1]: TAG}
    assert do(queue.limit()) == 300


# Grid Engine: qstat(1) and its schema, sge_accounting(5), sge_status(5)


def sge_job(letters: str, more: str = "") -> str:
    return (
        f"<job_info><queue_info><job_list state='running'><JB_job_number>4</JB_job_number>"
        f"<state>{letters}</state><JAT_start_time>2026-11-20T22:00:00</JAT_start_time>"
        f"<queue_name>gpu.q@n1</queue_name><tasks>2</tasks>{more}</job_list></queue_info>"
        f"</job_info>"
    )


SGE_STATES = {
    "r": (QueueState.RUNNING, ""),
    "t": (QueueState.RUNNING, ""),
    "dr": (QueueState.RUNNING, ""),
    "Rr": (QueueState.RUNNING, ""),
    "qw": (QueueState.PENDING, ""),
    "hqw": (QueueState.PENDING, "held"),
    "Rq": (QueueState.REQUEUED, ""),
    "S": (QueueState.RUNNING, "suspended"),
    "Eqw": (QueueState.FAILED, "error state Eqw, why: qacct -j 4"),
    "?": (QueueState.UNKNOWN, "?"),
}


@pytest.mark.parametrize("letters", SGE_STATES)
def test_states_of_grid_engine(letters: str):
    queue = SgeQueue()
    hard = "<hard_request name='h_rt' resource_contribution='0.0'>1800</hard_request>"
    site = Site(queue, {"qstat": sge_job(letters, hard), "qdel": ""})
    seen = do(queue.query(["4.2", "4.3"]))
    assert set(seen) == {"4.2"}
    start = 1795212000.0
    state, reason = SGE_STATES[letters]
    assert seen["4.2"] == QueueStatus("4.2", state, reason, None, 0, start, start + 1800, "n1")
    assert site.ran[0] == "qstat -u ann -xml -r -g d"
    assert site.ran[1:] == (["qdel 4.2"] if state is QueueState.FAILED else [])


ACCOUNTS = """\
==============================================================
qname        gpu.q
hostname     n1
jobnumber    4
taskid       {task}
start_time   Fri Nov 20 22:00:00 2026
failed       {failed}
exit_status  {code}
ru_wallclock {seconds}s
category     -l gpu=1,h_rt=1800
"""

SGE_ENDS = {
    ("0", 0, 9): (QueueState.COMPLETED, "", 0),
    ("0", 2, 9): (QueueState.FAILED, "", 2),
    ("100 : assumedly after job", 137, 9): (QueueState.FAILED, "ended by SIGKILL", 137),
    ("100 : assumedly after job", 137, 1801): (QueueState.TIMEOUT, "", 137),
    ("37  : qmaster enforced h_rt, h_cpu, or h_vmem limit", 137, 9): (QueueState.TIMEOUT, "", 137),
    ("26  : opening input/output file", 0, 0): (QueueState.FAILED, "opening input/output file", 0),
}


@pytest.mark.parametrize(("failed", "code", "seconds"), SGE_ENDS)
def test_accounts_of_grid_engine(failed: str, code: int, seconds: int):
    queue = SgeQueue()
    records = [
        ACCOUNTS.format(task=task, failed=failed, code=code, seconds=seconds) for task in (1, 2)
    ]
    site = Site(queue, {"qacct": "".join(records)})
    seen = do(queue.departed(["4.1", "4.2", "4.3"]))
    assert site.ran == ["qacct -j 4"]
    assert set(seen) == {"4.1", "4.2"}
    assert facts(seen["4.2"]) == SGE_ENDS[failed, code, seconds]


def test_pending_elements_of_grid_engine_may_come_as_ranges():
    queue = SgeQueue()
    Site(queue, {"qstat": sge_job("qw").replace("<tasks>2<", "<tasks>1,3-7:2<")})
    seen = do(queue.query([f"4.{task}" for task in range(1, 9)]))
    assert list(seen) == ["4.1", "4.3", "4.5", "4.7"]


def test_broken_xml_of_grid_engine():
    queue = SgeQueue()
    Site(queue, {"qstat": "<job_info>"})
    with pytest.raises(QueueError, match="XML"):
        do(queue.query(["4"]))


# LSF 10.1: bjobs(1) -o and -json, bsub(1), bkill(1), lsb.params(5) MAX_JOB_ARRAY_SIZE


def lsf_records(*records: Mapping[str, str]) -> str:
    return json.dumps({"COMMAND": "bjobs", "JOBS": len(records), "RECORDS": list(records)})


def lsf_record(stat: str, **more: str) -> dict[str, str]:
    record = {"JOBID": "31", "JOBINDEX": "2", "STAT": stat, "EXIT_CODE": "", "EXIT_REASON": ""}
    empty = {"PEND_REASON": "", "START_TIME": "", "EXEC_HOST": ""}
    return {**record, **empty, **{name.upper(): value for name, value in more.items()}}


LSF_STATES = [
    (lsf_record("RUN", start_time="Nov 20 22:00 2026"), (QueueState.RUNNING, "", None)),
    (lsf_record("PEND", pend_reason="No GPU hosts;"), (QueueState.PENDING, "No GPU hosts", None)),
    (lsf_record("PSUSP"), (QueueState.PENDING, "", None)),
    (lsf_record("SSUSP"), (QueueState.RUNNING, "suspended", None)),
    (lsf_record("DONE"), (QueueState.COMPLETED, "", 0)),
    (lsf_record("EXIT", exit_code="3"), (QueueState.FAILED, "", 3)),
    (
        lsf_record("EXIT", exit_code="75"),
        (QueueState.PREEMPTED, "the queue started it a second time", 75),
    ),
    (
        lsf_record("EXIT", exit_code="140", exit_reason="TERM_RUNLIMIT: job killed after limit"),
        (QueueState.TIMEOUT, "TERM_RUNLIMIT: job killed after limit", 140),
    ),
    (
        lsf_record("EXIT", exit_code="130", exit_reason="TERM_OWNER: job killed by owner"),
        (QueueState.CANCELLED, "TERM_OWNER: job killed by owner", 130),
    ),
    (
        lsf_record("EXIT", exit_code="137", exit_reason="TERM_MEMLIMIT: job killed"),
        (QueueState.FAILED, "TERM_MEMLIMIT: job killed", 137),
    ),
    (lsf_record("UNKWN"), (QueueState.UNKNOWN, "UNKWN", None)),
]


@pytest.mark.parametrize(("record", "expected"), LSF_STATES)
def test_states_of_lsf(record: dict[str, str], expected: tuple[QueueState, str, int | None]):
    queue = LsfQueue()
    site = Site(
        queue, {"bjobs": lsf_records(record, {"JOBID": "32", "ERROR": "Job <32> is not found"})}
    )
    seen = do(queue.query(["31[2]", "31[3]", "32"]))
    assert site.ran[0].endswith(" -a 31 32")
    assert set(seen) == {"31[2]"}
    assert facts(seen["31[2]"]) == expected


def test_times_and_hosts_of_lsf():
    queue = LsfQueue()
    record = lsf_record("RUN", start_time="Nov 20 22:00 2026", exec_host="8*n1:2*n2")
    Site(queue, {"bjobs": lsf_records(record)})
    seen = do(queue.query(["31[2]"]))["31[2]"]
    assert (seen.started, seen.nodes) == (1795212000.0, "n1+n2")


def test_a_time_of_lsf_without_a_year_is_the_last_such():
    queue = LsfQueue()
    at = time.localtime(time.time() - 3600)
    record = lsf_record("RUN", start_time=time.strftime("%b %d %H:%M", at))
    Site(queue, {"bjobs": lsf_records(record)})
    started = do(queue.query(["31[2]"]))["31[2]"].started
    assert started is not None
    assert 3500 < time.time() - started < 3700


def test_lsf_knows_no_job():
    queue = LsfQueue()
    gone = (255, "", "Job <31>: Job has already finished\n")
    Site(queue, {"bjobs": (255, "", "No job found\n"), "bkill": gone})
    assert do(queue.query(["31"])) == {}
    assert do(queue.tagged()) == {}
    do(queue.cancel(["31"]))


def test_lsf_does_not_answer():
    queue = LsfQueue()
    down = (255, "", "LSF is down. Please wait ...\n")
    Site(queue, {"bjobs": down, "bkill": down})
    with pytest.raises(QueueError, match="LSF is down"):
        do(queue.query(["31"]))
    with pytest.raises(QueueError, match="LSF is down"):
        do(queue.cancel(["31"]))


def test_lsf_submits_one_array(script: str):
    Path(script).write_text("#!/usr/bin/env bash\n#BSUB -J dask-worker\ntrue\n")
    queue = LsfQueue()
    said = "Job <31> is submitted to queue <gpu>.\n"
    site = Site(queue, {"bsub": said, "bparams": "    MAX_JOB_ARRAY_SIZE = 400\n"})
    assert do(queue.submit(script, 2)) == ["31[1]", "31[2]"]
    assert site.ran == ["bsub -J 'dask-worker[1-2]'"]
    assert site.inputs == [Path(script).read_text()]
    assert do(queue.submit(script, 1)) == ["31"]
    assert site.ran[1] == "bsub"
    assert do(queue.limit()) == 400


def test_tags_of_lsf():
    queue = LsfQueue()
    records = [
        {"JOBID": "31", "JOBINDEX": "1", "JOB_DESCRIPTION": TAG},
        {"JOBID": "33", "JOBINDEX": "0", "JOB_DESCRIPTION": TAG},
        {"JOBID": "34", "JOBINDEX": "0", "JOB_DESCRIPTION": "something else"},
    ]
    Site(queue, {"bjobs": lsf_records(*records)})
    assert do(queue.tagged()) == {"31[1]": TAG, "33": TAG}


LSF_REFUSALS = {
    "User <ann>: Pending job threshold reached. Job not submitted": True,
    "Job array index too large. Job not submitted": True,
    "User <ann>: User's job limit reached. Job not submitted": True,
    "RUNLIMIT: Cannot exceed queue's hard limit(s). Job not submitted": False,
    "MEMLIMIT: Cannot exceed queue's hard limit(s). Job not submitted": False,
    "Bad CPU limit specification. Job not submitted": False,
    "gpuu: No such queue. Job not submitted": False,
    "Bad resource requirement syntax. Job not submitted": False,
}


@pytest.mark.parametrize("text", LSF_REFUSALS)
def test_refusals_of_lsf(script: str, text: str):
    queue = LsfQueue()
    Site(queue, {"bsub": (255, "", f"{text}.\n")})
    with pytest.raises(Refused) as caught:
        do(queue.submit(script, 1))
    assert caught.value.for_now is LSF_REFUSALS[text]
    assert "bqueues" in str(caught.value)


# OAR 2.5: oarstat(1) -f -J and Stat.pm, oarsub(1), oardel(1)


def oar_job(state: str, **more: Any) -> str:
    job = {"Job_Id": 41, "state": state, "startTime": 1795212000, "walltime": 7200, "events": []}
    return json.dumps({"41": {**job, "assigned_network_address": ["n1", "n1", "n2"], **more}})


def event(name: str) -> dict[str, Any]:
    return {"events": [{"type": name, "job_id": 41, "description": ""}]}


OAR_STATES = [
    (oar_job("Waiting", message="R=8,W=2:0:0"), (QueueState.PENDING, "R=8,W=2:0:0", None)),
    (oar_job("Hold"), (QueueState.PENDING, "Hold", None)),
    (oar_job("Launching"), (QueueState.RUNNING, "", None)),
    (oar_job("Running"), (QueueState.RUNNING, "", None)),
    (oar_job("Finishing", exit_code=0), (QueueState.RUNNING, "", None)),
    (oar_job("Suspended"), (QueueState.RUNNING, "suspended", None)),
    (oar_job("Terminated", exit_code=0), (QueueState.COMPLETED, "", 0)),
    (oar_job("Terminated", exit_code=768), (QueueState.FAILED, "", 3)),
    (oar_job("Terminated", exit_code=9), (QueueState.FAILED, "ended by SIGKILL", 137)),
    (oar_job("Error", message="no node", exit_code=None), (QueueState.FAILED, "no node", None)),
    (oar_job("Error", **event("WALLTIME")), (QueueState.TIMEOUT, "", None)),
    (oar_job("Error", **event("FRAG_JOB_REQUEST")), (QueueState.CANCELLED, "", None)),
    (oar_job("Error", **event("BESTEFFORT_KILL")), (QueueState.PREEMPTED, "", None)),
    (oar_job("Odd"), (QueueState.UNKNOWN, "Odd", None)),
]


@pytest.mark.parametrize(("text", "expected"), OAR_STATES)
def test_states_of_oar(text: str, expected: tuple[QueueState, str, int | None]):
    queue = OarQueue()
    site = Site(queue, {"oarstat": text})
    seen = do(queue.query(["41", "42"]))
    assert site.ran == ["oarstat -f -J -j 41 -j 42"]
    assert set(seen) == {"41"}
    assert facts(seen["41"]) == expected


def test_times_and_nodes_of_oar():
    queue = OarQueue()
    Site(queue, {"oarstat": oar_job("Running")})
    seen = do(queue.query(["41"]))["41"]
    assert (seen.started, seen.ends, seen.nodes) == (1795212000.0, 1795219200.0, "n1+n2")


def test_oar_submits_one_array_with_the_scripts_options(tmp_path: Path):
    path = tmp_path / "it's; mine.sh"
    path.write_text(
        "#!/usr/bin/env bash\n#OAR -n 'my job'\n#OAR -l /nodes=1/gpu=1,walltime=1:00:00\n"
        "# HPCDASK_TAG=hpcdask:ab12cd34\ntrue\n"
    )
    queue = OarQueue()
    site = Site(
        queue, {"oarsub": "[ADMISSION RULE] ok\nOAR_JOB_ID=41\nOAR_JOB_ID=42\nOAR_ARRAY_ID=41\n"}
    )
    assert do(queue.submit(str(path), 2)) == ["41", "42"]
    words = shlex.split(site.ran[0])
    assert words[:7] == [
        "oarsub",
        "-n",
        "my job",
        "-l",
        "/nodes=1/gpu=1,walltime=1:00:00",
        "--array",
        "2",
    ]
    assert shlex.split(words[7]) == [
        "env",
        "HPCDASK_TAG=hpcdask:ab12cd34",
        "/usr/bin/env",
        "bash",
        str(path),
    ]


def test_oar_gives_fewer_jobs_than_asked(script: str):
    queue = OarQueue()
    Site(queue, {"oarsub": "OAR_JOB_ID=41\n"})
    with pytest.raises(QueueError, match="instead of 2 job ids"):
        do(queue.submit(script, 2))


def test_refusals_of_oar(script: str):
    queue = OarQueue()
    said = "[ADMISSION RULE] Too many jobs for user ann\n"
    site = Site(queue, {"oarsub": (6, said, "")})
    with pytest.raises(Refused, match="Too many jobs") as caught:
        do(queue.submit(script, 2))
    assert caught.value.for_now
    for said in ("[ERROR] Unknown queue nix", "[ADMISSION RULE] walltime exceeds the maximum"):
        site.answers = {"oarsub": (5, "", f"{said}\n")}
        with pytest.raises(Refused, match=re.escape(said)) as caught:
            do(queue.submit(script, 2))
        assert not caught.value.for_now


def test_tags_of_oar():
    queue = OarQueue()
    jobs = {
        "41": {"command": "env HPCDASK_TAG=hpcdask:ab12cd34 /usr/bin/env bash /home/ann/s.sh"},
        "42": {"command": "sleep 10"},
        "43": {"command": None},
    }
    site = Site(queue, {"oarstat": json.dumps(jobs)})
    assert do(queue.tagged()) == {"41": TAG}
    assert site.ran == ["oarstat -f -J -u ann"]


def test_oars_own_copy_of_a_job_is_cancelled():
    told = "[NodeChangeState] Resubmiting job 41 => 57) (due to event PING_CHECKER_NODE_SUSPECTED"
    events = [{"type": "RESUBMIT_JOB_AUTOMATICALLY", "job_id": 41, "description": told}]
    queue = OarQueue()
    site = Site(queue, {"oarstat": oar_job("Error", events=events), "oardel": ""})
    assert do(queue.query(["41"]))["41"].state is QueueState.FAILED
    assert site.ran == ["oarstat -f -J -j 41", "oardel 57"]


def test_oar_does_not_answer():
    queue = OarQueue()
    Site(
        queue,
        {"oarstat": (1, "", "DB connection error, exiting.\n"), "oardel": (1, "", "DB error\n")},
    )
    with pytest.raises(QueueError, match="DB connection error"):
        do(queue.query(["41"]))
    with pytest.raises(QueueError, match="DB error"):
        do(queue.cancel(["41"]))


# Flux 0.88: flux-jobs(1) --json and info.py, flux-batch(1), flux-cancel(1), raise.c


def flux_job(state: str, **more: Any) -> dict[str, Any]:
    job = {"id": 1479472349184, "jobid": "\u0192gPwYj9Ty", "name": f"mine:{TAG}", "urgency": 16}
    return {**job, "state": state, "annotations": {}, "exception": {}, **more}


RAN = {"t_run": 1795212000.5, "expiration": 1795219200.5, "nodelist": "n[1-2]"}
ENDED = {**RAN, "state": "INACTIVE"}
FLUX_STATES = [
    (flux_job("DEPEND"), (QueueState.PENDING, "", None)),
    (flux_job("PRIORITY"), (QueueState.PENDING, "", None)),
    (flux_job("SCHED", urgency=0), (QueueState.PENDING, "held (urgency 0)", None)),
    (
        flux_job("SCHED", annotations={"sched": {"reason_pending": "insufficient resources"}}),
        (QueueState.PENDING, "insufficient resources", None),
    ),
    (flux_job("RUN", **RAN), (QueueState.RUNNING, "", None)),
    (flux_job("CLEANUP", **RAN), (QueueState.RUNNING, "", None)),
    (
        flux_job("INACTIVE", result="COMPLETED", returncode=0, waitstatus=0),
        (QueueState.COMPLETED, "", 0),
    ),
    (
        flux_job("INACTIVE", result="FAILED", returncode=3, waitstatus=768),
        (QueueState.FAILED, "", 3),
    ),
    (
        flux_job("INACTIVE", result="FAILED", returncode=-9, waitstatus=9),
        (QueueState.FAILED, "ended by SIGKILL", 137),
    ),
    (
        flux_job(
            "INACTIVE",
            result="FAILED",
            returncode=1,
            exception={"occurred": True, "type": "alloc", "note": "unsatisfiable request"},
        ),
        (QueueState.FAILED, "unsatisfiable request", 1),
    ),
    (
        flux_job(
            "INACTIVE", result="CANCELED", returncode=-128, exception={"type": "cancel", "note": ""}
        ),
        (QueueState.CANCELLED, "cancel", None),
    ),
    (
        flux_job(
            "INACTIVE",
            result="TIMEOUT",
            returncode=142,
            waitstatus=36352,
            exception={"type": "timeout", "note": "resource allocation expired"},
        ),
        (QueueState.TIMEOUT, "resource allocation expired", 142),
    ),
    (flux_job("ODD"), (QueueState.UNKNOWN, "ODD", None)),
]


@pytest.mark.parametrize(("job", "expected"), FLUX_STATES)
def test_states_of_flux(job: dict[str, Any], expected: tuple[QueueState, str, int | None]):
    queue = FluxQueue()
    for found in (job, {"jobs": [job]}):  # alone if one was asked for
        site = Site(queue, {"flux jobs": json.dumps(found)})
        seen = do(queue.query(["1479472349184", "7"]))
        assert site.ran == ["flux jobs --json 1479472349184 7"]
        assert set(seen) == {"1479472349184"}
        assert facts(seen["1479472349184"]) == expected


def test_times_and_nodes_of_flux():
    queue = FluxQueue()
    Site(queue, {"flux jobs": json.dumps(flux_job("RUN", **RAN))})
    seen = do(queue.query(["1479472349184"]))["1479472349184"]
    assert (seen.started, seen.ends, seen.nodes) == (1795212000.5, 1795219200.5, "n[1-2]")


@pytest.mark.parametrize("said", ["fgPwYj9Ty\n", "\u0192gPwYj9Ty\n"])
def test_ids_of_flux_are_numbers(script: str, said: str):
    queue = FluxQueue()
    site = Site(queue, {"flux batch": said})
    (job,) = do(queue.submit(script, 1))
    assert site.ran == [f"flux batch {shlex.quote(script)}"]
    number, text = int(job), ""
    digits = "123456789ABCDEFGHJKLMNPQRSTUVWXYZabcdefghijkmnopqrstuvwxyz"
    while number:
        number, digit = divmod(number, 58)
        text = digits[digit] + text
    assert text == "gPwYj9Ty"


def test_what_flux_refuses(script: str):
    queue = FluxQueue()
    site = Site(queue, {"flux batch": (1, "", "flux-batch: ERROR: 'nix' is not a valid queue\n")})
    with pytest.raises(Refused, match="not a valid queue") as caught:
        do(queue.submit(script, 1))
    assert not caught.value.for_now
    site.answers = {
        "flux batch": (1, "", "flux-batch: ERROR: job submission to gpu is disabled: service\n")
    }
    with pytest.raises(Refused) as caught:
        do(queue.submit(script, 1))
    assert caught.value.for_now


def test_tags_of_flux():
    queue = FluxQueue()
    jobs = [flux_job("RUN"), {**flux_job("RUN", name="another"), "id": 7}]
    site = Site(queue, {"flux jobs": json.dumps({"jobs": jobs})})
    assert do(queue.tagged()) == {"1479472349184": TAG}
    assert site.ran == ["flux jobs --json --count=0"]


def test_flux_does_not_know_or_does_not_answer():
    queue = FluxQueue()
    site = Site(
        queue,
        {
            "flux jobs": (1, "", "JobID 7 unknown\n"),
            "flux cancel": (1, "", "flux-cancel: ERROR: 7: job is inactive\n"),
        },
    )
    assert do(queue.query(["7"])) == {}
    do(queue.cancel(["7"]))
    lost = "ERROR: Unable to connect to Flux: broker socket /run/flux/local was not found"
    site.answers = {"flux": (1, "", f"flux-jobs: {lost}\n")}
    with pytest.raises(QueueError, match="Unable to connect"):
        do(queue.query(["7"]))
    with pytest.raises(QueueError, match="Unable to connect"):
        do(queue.cancel(["7"]))


# HTCondor 24: condor_q(1) and condor_history(1) -json, job ClassAd attributes, hold reason codes


def ad(status: int, **more: Any) -> dict[str, Any]:
    return {"ClusterId": 51, "ProcId": 3, "Owner": "ann", "JobStatus": status, **more}


CONDOR_STATES = [
    (ad(1), (QueueState.PENDING, "", None)),
    (ad(1, NumJobStarts=1), (QueueState.REQUEUED, "", None)),
    (ad(2, JobCurrentStartDate=1795212000), (QueueState.RUNNING, "", None)),
    (ad(7), (QueueState.RUNNING, "suspended", None)),
    (
        ad(5, HoldReasonCode=1, HoldReason="via condor_hold"),
        (QueueState.PENDING, "via condor_hold", None),
    ),
    (ad(5, HoldReasonCode=6, HoldReason="no shell"), (QueueState.FAILED, "no shell", None)),
    (ad(5, HoldReasonCode=46, HoldReason="too long"), (QueueState.TIMEOUT, "too long", None)),
    (ad(3, RemoveReason="via condor_rm"), (QueueState.CANCELLED, "via condor_rm", None)),
    (ad(4, ExitBySignal=False, ExitCode=0), (QueueState.COMPLETED, "", 0)),
    (ad(4, ExitBySignal=False, ExitCode=3), (QueueState.FAILED, "", 3)),
    (ad(4, ExitBySignal=True, ExitSignal=9), (QueueState.FAILED, "ended by SIGKILL", 137)),
    (ad(0), (QueueState.UNKNOWN, "status 0", None)),
]


@pytest.mark.parametrize(("job", "expected"), CONDOR_STATES)
def test_states_of_htcondor(job: dict[str, Any], expected: tuple[QueueState, str, int | None]):
    queue = HtcondorQueue()
    site = Site(queue, {"condor_q": json.dumps([job]), "condor_rm": ""})
    seen = do(queue.query(["51.3", "51.4"]))
    assert set(seen) == {"51.3"}
    assert facts(seen["51.3"]) == expected
    assert site.ran[0].startswith("condor_q 51 -json -attributes ClusterId,ProcId,")
    held_back = job["JobStatus"] == 5 and job["HoldReasonCode"] != 1
    assert site.ran[1:] == (["condor_rm 51.3"] if held_back else [])


def test_history_of_htcondor():
    queue = HtcondorQueue()
    job = ad(4, ExitBySignal=False, ExitCode=0, LastRemoteHost="slot1_1@n1.site")
    site = Site(queue, {"condor_history": json.dumps([job])})
    seen = do(queue.departed(["51.3", "51.4"]))
    assert site.ran[0].startswith("condor_history 51.3 51.4 -limit 2 -json")
    assert (seen["51.3"].state, seen["51.3"].nodes) == (QueueState.COMPLETED, "n1.site")
    assert set(seen) == {"51.3"}


def test_an_empty_queue_of_htcondor_answers_nothing():
    queue = HtcondorQueue()
    Site(queue, {"condor_q": ""})
    assert do(queue.query(["51.3"])) == {}


def test_htcondor_submits_one_cluster(tmp_path: Path):
    path = tmp_path / "it's $1.sh"
    path.write_text("#!/usr/bin/env bash\n#CONDOR request_gpus = 1\ntrue\n")
    queue = HtcondorQueue()
    site = Site(queue, {"condor_submit": "51.0 - 51.1\n", "condor_config_val": "300\n"})
    assert do(queue.submit(str(path), 2)) == ["51.0", "51.1"]
    assert site.ran == ["condor_submit -terse"]
    executable = str(path).replace("$", "$(DOLLAR)")
    assert site.inputs == [f"request_gpus = 1\nexecutable = {executable}\nqueue 2\n"]
    assert path.stat().st_mode & 0o777 == 0o700
    assert do(queue.limit()) == 300
    site.answers = {"condor_submit": "52.0 - 52.0\n"}
    assert do(queue.submit(str(path), 1)) == ["52.0"]


def test_refusals_of_htcondor(script: str):
    queue = HtcondorQueue()
    said = "ERROR: Number of submitted jobs would exceed MAX_JOBS_PER_OWNER\n"
    site = Site(queue, {"condor_submit": (1, "", said)})
    with pytest.raises(Refused, match="MAX_JOBS_PER_OWNER") as caught:
        do(queue.submit(script, 2))
    assert caught.value.for_now
    site.answers = {"condor_submit": (1, "", "ERROR: on Line 3 of submit file: Parse error\n")}
    with pytest.raises(Refused, match="Parse error") as caught:
        do(queue.submit(script, 2))
    assert not caught.value.for_now


def test_tags_of_htcondor():
    queue = HtcondorQueue()
    jobs = [
        ad(2, HpcdaskTag=TAG),
        {**ad(2, HpcdaskTag="hpcdask:ffffffff"), "ProcId": 4, "Owner": "bob"},
        {**ad(3, HpcdaskTag=TAG), "ProcId": 5},
    ]
    Site(queue, {"condor_q": json.dumps(jobs)})
    assert do(queue.tagged()) == {"51.3": TAG}


def test_htcondor_does_not_answer():
    queue = HtcondorQueue()
    Site(queue, {"condor_q": (1, "", "Error: Can't find address of local schedd\n")})
    with pytest.raises(QueueError, match="local schedd"):
        do(queue.query(["51.3"]))


def test_a_job_that_is_gone_from_htcondor_does_not_matter():
    queue = HtcondorQueue()
    gone = "Couldn't find/remove all jobs matching constraint\n"
    Site(queue, {"condor_rm": (1, "", gone)})
    do(queue.cancel(["51.3"]))


# Moab 9: showq (--xml, -c), msub, canceljob


def moab_job(**attributes: str) -> str:
    job = {"JobID": "61", "DRMJID": "61.head", "User": "ann", **attributes}
    text = " ".join(f'{name}="{value}"' for name, value in job.items())
    return f'<Data><Object>queue</Object><queue option="active"><job {text}></job></queue></Data>'


MOAB_STATES = [
    (moab_job(State="Running"), (QueueState.RUNNING, "", None)),
    (moab_job(State="Idle"), (QueueState.PENDING, "", None)),
    (moab_job(State="BatchHold"), (QueueState.PENDING, "BatchHold", None)),
    (moab_job(State="Completed", CompletionCode="0"), (QueueState.COMPLETED, "", 0)),
    (moab_job(State="Completed", CompletionCode="3"), (QueueState.FAILED, "", 3)),
    (moab_job(State="Removed", CompletionCode="CNCLD(271)"), (QueueState.CANCELLED, "", 143)),
    (
        moab_job(
            State="Completed",
            CompletionCode="271",
            StartTime="1795212000",
            ReqAWDuration="3600",
            CompletionTime="1795215601",
        ),
        (QueueState.TIMEOUT, "", 143),
    ),
    (moab_job(State="Odd"), (QueueState.UNKNOWN, "Odd", None)),
]


@pytest.mark.parametrize(("text", "expected"), MOAB_STATES)
def test_states_of_moab(text: str, expected: tuple[QueueState, str, int | None]):
    queue = MoabQueue()
    site = Site(queue, {"showq --xml": text, "showq -c --xml": text})
    assert facts(do(queue.query(["61", "62"]))["61"]) == expected
    assert facts(do(queue.departed(["61", "62"]))["61"]) == expected
    assert site.ran == ["showq --xml", "showq -c --xml"]


def test_times_of_moab():
    queue = MoabQueue()
    times = {"StartTime": "1795212000", "ReqAWDuration": "3600", "MasterHost": "n1"}
    Site(queue, {"showq": moab_job(State="Running", **times)})
    seen = do(queue.query(["61"]))["61"]
    assert (seen.started, seen.ends, seen.nodes) == (1795212000.0, 1795215600.0, "n1")


def test_moab_finds_a_job_by_the_id_of_torque():
    queue = MoabQueue()
    Site(queue, {"showq": moab_job(State="Running", JobID="Moab.7")})
    assert set(do(queue.query(["61"]))) == {"61"}
    assert set(do(queue.query(["Moab.7", "Moab.8"]))) == {"Moab.7"}


def test_moab_submits_one_job(script: str):
    queue = MoabQueue()
    site = Site(queue, {"msub": "\nMoab.61\n"})
    assert do(queue.limit()) == 1
    assert do(queue.submit(script, 1)) == ["Moab.61"]
    assert site.ran == [f"msub -E {script}"]


def test_tags_of_moab():
    queue = MoabQueue()
    Site(queue, {"showq": moab_job(State="Running", JobName="dask-worker.hpcdask_ab12cd34")})
    assert do(queue.tagged()) == {"61": TAG}
    Site(queue, {"showq": moab_job(State="Running", JobName="dask-worker")})
    assert do(queue.tagged()) == {}


MOAB_REFUSALS = {
    "qsub: Maximum number of jobs already in queue": True,
    "ERROR: cannot connect to server": True,
    "qsub: Job exceeds queue resource limits MSG=cannot satisfy queue max walltime": False,
    "ERROR: invalid class specified": False,
}


@pytest.mark.parametrize("text", MOAB_REFUSALS)
def test_refusals_of_moab(script: str, text: str):
    queue = MoabQueue()
    Site(queue, {"msub": (1, "", f"{text}\n")})
    with pytest.raises(Refused) as caught:
        do(queue.submit(script, 1))
    assert caught.value.for_now is MOAB_REFUSALS[text]


def test_moab_does_not_answer():
    queue = MoabQueue()
    down = (1, "", "ERROR: cannot connect to server\n")
    Site(queue, {"showq": down, "msub": down, "canceljob": down})
    with pytest.raises(QueueError, match="cannot connect"):
        do(queue.query(["61"]))
    with pytest.raises(QueueError, match="cannot connect"):
        do(queue.cancel(["61"]))
