"""How the answers of queueing systems are read, and what they are asked.

The answers were written after the manuals and the systems' sources, which each section names; no
system was running. Grid Engine and OAR are tested with real commands elsewhere.
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
from hpcdask.queues.htcondor import HtcondorQueue
from hpcdask.queues.job_state import QueueState, QueueStatus
from hpcdask.queues.lsf import LsfQueue
from hpcdask.queues.moab import MoabQueue
from hpcdask.queues.oar import OarQueue
from hpcdask.queues.pbs import PbsQueue
from hpcdask.queues.sge import SgeQueue

T = TypeVar("T")
Answer = str | tuple[int, str, str]
End = tuple[QueueState, str, int | None]
PENDING, REQUEUED, RUNNING = QueueState.PENDING, QueueState.REQUEUED, QueueState.RUNNING
COMPLETED, FAILED, TIMEOUT = QueueState.COMPLETED, QueueState.FAILED, QueueState.TIMEOUT
CANCELLED, PREEMPTED, UNKNOWN = QueueState.CANCELLED, QueueState.PREEMPTED, QueueState.UNKNOWN
#: A local time of the samples.
START = 1795212000.0
AGAIN = "the queue started it a second time"


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


def facts(seen: QueueStatus) -> End:
    return seen.state, seen.reason, seen.exit_code


def ask(queue: Queue, answers: Mapping[str, Answer], *ids: str) -> dict[str, QueueStatus]:
    """What a query tells of these jobs."""
    Site(queue, answers)
    return do(queue.query(ids))


# All systems

PRO = {"qstat --version": "pbs_version = 23.06.06\n"}
#: What each says where nobody answers: the command that shows jobs, and the one that cancels.
SILENT: dict[type[Queue], tuple[str, str, str]] = {
    PbsQueue: ("qstat -f", "qdel", "cannot connect to server head (errno=111)"),
    SgeQueue: ("qstat", "qdel", "unable to contact qmaster"),
    LsfQueue: ("bjobs", "bkill", "LSF is down"),
    OarQueue: ("oarstat", "oardel", "DB connection error"),
    HtcondorQueue: ("condor_q", "condor_rm", "Can't find address of local schedd"),
    MoabQueue: ("showq", "canceljob", "cannot connect to server"),
}


@pytest.mark.parametrize("kind", SILENT)
def test_a_system_that_does_not_answer(kind: type[Queue]):
    show, cancel, said = SILENT[kind]
    queue = kind()
    Site(queue, {**PRO, show: (1, "", f"{said}\n"), cancel: (1, "", f"{said}\n")})
    for work in (queue.query(["9"]), queue.cancel(["9"])):
        with pytest.raises(QueueError, match=re.escape(said)):
            do(work)


GONE: dict[type[Queue], Mapping[str, Answer]] = {
    PbsQueue: {
        **PRO,
        "qstat": (153, "", "qstat: Unknown Job Id 9\n"),
        "qdel": (153, "", "qdel: Unknown Job Id 9\n"),
    },
    SgeQueue: {"qstat": "<job_info/>", "qdel": (1, 'denied: job "9" does not exist\n', "")},
    LsfQueue: {
        "bjobs": (255, "", "No job found\n"),
        "bkill": (255, "", "Job <9>: Job has already finished\n"),
    },
    OarQueue: {"oarstat": "{}", "oardel": (1, "", "Job 9 is already terminated\n")},
    HtcondorQueue: {
        "condor_q": "",
        "condor_rm": (1, "", "Couldn't find/remove all jobs matching constraint\n"),
    },
    MoabQueue: {"showq": "<Data/>", "canceljob": (1, "", "ERROR:  invalid job specified (9)\n")},
}


@pytest.mark.parametrize("kind", GONE)
def test_a_job_that_is_not_known_is_missing_and_may_be_cancelled(kind: type[Queue]):
    queue = kind()
    assert ask(queue, GONE[kind], "9") == {}
    do(queue.cancel(["9"]))


#: The command that submits; what it says of limits that pass, and of what does not.
REFUSALS: dict[type[Queue], tuple[str, list[str], list[str]]] = {
    PbsQueue: (
        "qsub",
        [
            "qsub: would exceed queue gpu's per-user limit",
            "qsub: Array job exceeds server or queue size limit",
            "qsub: submit error (Maximum number of jobs already in queue for user)",
        ],
        [
            "qsub: Unknown queue",
            "qsub: Invalid account",
            "qsub: Job exceeds queue and/or server resource limits",
        ],
    ),
    LsfQueue: (
        "bsub",
        [
            "User <ann>: Pending job threshold reached. Job not submitted",
            "Job array index too large. Job not submitted",
            "User <ann>: User's job limit reached. Job not submitted",
        ],
        [
            "RUNLIMIT: Cannot exceed queue's hard limit(s). Job not submitted",
            "Bad CPU limit specification. Job not submitted",
            "gpuu: No such queue. Job not submitted",
        ],
    ),
    OarQueue: (
        "oarsub",
        ["[ADMISSION RULE] Too many jobs for user ann"],
        ["[ERROR] Unknown queue nix", "[ADMISSION RULE] walltime exceeds the maximum"],
    ),
    HtcondorQueue: (
        "condor_submit",
        ["ERROR: Number of submitted jobs would exceed MAX_JOBS_PER_OWNER"],
        ["ERROR: on Line 3 of submit file: Parse error"],
    ),
    MoabQueue: (
        "msub",
        ["qsub: Maximum number of jobs already in queue", "ERROR: cannot connect to server"],
        ["qsub: Job exceeds queue resource limits MSG=max walltime", "ERROR: invalid class"],
    ),
}


@pytest.mark.parametrize("kind", REFUSALS)
def test_limits_pass_and_other_refusals_do_not(script: str, kind: type[Queue]):
    command, limits, others = REFUSALS[kind]
    for said in (*limits, *others):
        queue = kind()
        Site(queue, {**PRO, command: (1, "", f"{said}\n")})
        with pytest.raises(Refused) as caught:
            do(queue.submit(script, 1))
        start = f"{command} refused the job: {said}. Script kept at {script}. "
        assert str(caught.value) == start + queue.advice
        assert caught.value.for_now is (said in limits)


# PBS Professional: qstat(1B), "Job Attributes"; PBS Professional User's Guide, "Job Exit Status"

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
    assert seen["12.server"] == QueueStatus(
        "12.server", RUNNING, "", None, 0, START, START + 7200, "n1+n2"
    )
    assert facts(seen["13[0].server"]) == (COMPLETED, "", 0)
    waiting = "Not Running: Insufficient amount of resource: ngpus"
    assert facts(seen["13[1].server"]) == (PENDING, waiting, None)
    assert set(seen) == {"12.server", "13[0].server", "13[1].server"}
    assert do(queue.tagged()) == {"12.server": TAG, "13[1].server": TAG}


LATE = "resources_used.walltime = 01:00:02\n    Resource_List.walltime = 01:00:00"
PRO_ENDS: dict[str, End] = {
    "job_state = F\n    Exit_status = 0": (COMPLETED, "", 0),
    "job_state = F\n    Exit_status = 3": (FAILED, "", 3),
    "job_state = F\n    Exit_status = 265": (FAILED, "ended by SIGKILL", 137),
    "job_state = F\n    Exit_status = 271\n    substate = 91": (CANCELLED, "", 143),
    "job_state = F\n    substate = 91\n    comment = by ann": (CANCELLED, "by ann", None),
    "job_state = F\n    Exit_status = -29": (TIMEOUT, "", -29),
    "job_state = F\n    Exit_status = -1": (FAILED, "PBS could not start it", -1),
    "job_state = F\n    Exit_status = 75": (PREEMPTED, AGAIN, 75),
    "job_state = H": (PENDING, "held", None),
    "job_state = Q\n    run_count = 1": (REQUEUED, "", None),
    "job_state = S": (RUNNING, "suspended", None),
    "job_state = E": (RUNNING, "", None),
    f"job_state = F\n    Exit_status = 271\n    {LATE}": (TIMEOUT, "", 143),
}


@pytest.mark.parametrize("text", PRO_ENDS)
def test_states_of_pbs(text: str):
    answers = {**PRO, "qstat -f": f"Job Id: 1.server\n    {text}\n\n"}
    assert facts(ask(PbsQueue(), answers, "1.server")["1.server"]) == PRO_ENDS[text]


def test_pbs_submits_one_array(script: str):
    queue = PbsQueue()
    site = Site(queue, {**PRO, "qsub": "13[].server\n", "qstat -B": "    max_array_size = 500\n"})
    assert do(queue.submit(script, 2)) == ["13[0].server", "13[1].server"]
    assert site.ran[-1] == f"qsub -J 0-1 {script}"
    assert do(queue.limit()) == 500
    site.answers = {"qsub": "14.server\n"}
    assert do(queue.submit(script, 1)) == ["14.server"]
    assert site.ran[-1] == f"qsub {script}"


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
    site = Site(
        queue,
        {
            "qstat --version": (0, "", "Version: 6.1.3\nCommit: abc\n"),
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
    assert facts(seen[ids[0]]) == (CANCELLED, "", 143)
    assert (seen[ids[1]].state, seen[ids[1]].nodes) == (RUNNING, "n1")
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
    **dict.fromkeys(("r", "t", "dr", "Rr"), (RUNNING, "")),
    "qw": (PENDING, ""),
    "hqw": (PENDING, "held"),
    "Rq": (REQUEUED, ""),
    "S": (RUNNING, "suspended"),
    "Eqw": (PENDING, "error state Eqw, why: qacct -j 4"),
    "?": (UNKNOWN, "?"),
}


@pytest.mark.parametrize("letters", SGE_STATES)
def test_states_of_grid_engine(letters: str):
    queue = SgeQueue()
    hard = "<hard_request name='h_rt' resource_contribution='0.0'>1800</hard_request>"
    site = Site(queue, {"qstat": sge_job(letters, hard), "qdel": ""})
    state, reason = SGE_STATES[letters]
    stuck = letters == "Eqw"
    job = QueueStatus("4.2", state, reason, None, 0, START, START + 1800, "n1", stuck)
    assert do(queue.query(["4.2", "4.3"])) == {"4.2": job}
    assert site.ran == ["qstat -u ann -xml -r -g d"], "a query changes nothing"
    assert (queue.lasting(reason) == "End it: qdel JOB") is stuck


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

SGE_ENDS: dict[tuple[str, int, int], End] = {
    ("0", 0, 9): (COMPLETED, "", 0),
    ("0", 2, 9): (FAILED, "", 2),
    ("100 : assumedly after job", 137, 9): (FAILED, "ended by SIGKILL", 137),
    ("100 : assumedly after job", 137, 1801): (TIMEOUT, "", 137),
    ("37  : qmaster enforced h_rt, h_cpu, or h_vmem limit", 137, 9): (TIMEOUT, "", 137),
    ("26  : opening input/output file", 0, 0): (FAILED, "opening input/output file", 0),
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
    text = sge_job("qw").replace("<tasks>2<", "<tasks>1,3-7:2<")
    seen = ask(SgeQueue(), {"qstat": text}, *(f"4.{task}" for task in range(1, 9)))
    assert list(seen) == ["4.1", "4.3", "4.5", "4.7"]


# LSF 10.1: bjobs(1) -o and -json, bsub(1), bkill(1), lsb.params(5) MAX_JOB_ARRAY_SIZE


def lsf_records(*records: Mapping[str, str]) -> str:
    return json.dumps({"COMMAND": "bjobs", "JOBS": len(records), "RECORDS": list(records)})


def lsf_record(stat: str, **more: str) -> dict[str, str]:
    record = {"JOBID": "31", "JOBINDEX": "2", "STAT": stat, "EXIT_CODE": "", "EXIT_REASON": ""}
    empty = {"PEND_REASON": "", "START_TIME": "", "EXEC_HOST": ""}
    return {**record, **empty, **{name.upper(): value for name, value in more.items()}}


def lsf_exit(code: str, reason: str) -> dict[str, str]:
    return lsf_record("EXIT", exit_code=code, exit_reason=reason)


LATE_LSF, OWNER, MEMORY = "TERM_RUNLIMIT: job killed", "TERM_OWNER: by owner", "TERM_MEMLIMIT: x"
LSF_STATES: list[tuple[dict[str, str], End]] = [
    (lsf_record("PEND", pend_reason="No GPU hosts;"), (PENDING, "No GPU hosts", None)),
    (lsf_record("PSUSP"), (PENDING, "", None)),
    (lsf_record("SSUSP"), (RUNNING, "suspended", None)),
    (lsf_record("DONE"), (COMPLETED, "", 0)),
    (lsf_record("EXIT", exit_code="3"), (FAILED, "", 3)),
    (lsf_record("EXIT", exit_code="75"), (PREEMPTED, AGAIN, 75)),
    (lsf_exit("140", LATE_LSF), (TIMEOUT, LATE_LSF, 140)),
    (lsf_exit("130", OWNER), (CANCELLED, OWNER, 130)),
    (lsf_exit("137", MEMORY), (FAILED, MEMORY, 137)),
    (lsf_record("UNKWN"), (UNKNOWN, "UNKWN", None)),
]


@pytest.mark.parametrize(("record", "expected"), LSF_STATES)
def test_states_of_lsf(record: dict[str, str], expected: End):
    queue = LsfQueue()
    lost = {"JOBID": "32", "ERROR": "Job <32> is not found"}
    site = Site(queue, {"bjobs": lsf_records(record, lost)})
    seen = do(queue.query(["31[2]", "31[3]", "32"]))
    assert site.ran[0].endswith(" -a 31 32")
    assert set(seen) == {"31[2]"}
    assert facts(seen["31[2]"]) == expected


def test_times_and_hosts_of_lsf():
    """A time without a year is the last such."""
    record = lsf_record("RUN", start_time="Nov 20 22:00 2026", exec_host="8*n1:2*n2")
    job = ask(LsfQueue(), {"bjobs": lsf_records(record)}, "31[2]")["31[2]"]
    assert (job.state, job.started, job.nodes) == (RUNNING, START, "n1+n2")
    at = time.localtime(time.time() - 3600)
    record = lsf_record("RUN", start_time=time.strftime("%b %d %H:%M", at))
    job = ask(LsfQueue(), {"bjobs": lsf_records(record)}, "31[2]")["31[2]"]
    assert 3500 < time.time() - (job.started or 0) < 3700


def test_lsf_submits_one_array(script: str):
    Path(script).write_text("#!/usr/bin/env bash\n#BSUB -J dask-worker\ntrue\n")
    queue = LsfQueue()
    said = "Job <31> is submitted to queue <gpu>.\n"
    site = Site(queue, {"bsub": said, "bparams": "    MAX_JOB_ARRAY_SIZE = 400\n"})
    assert do(queue.submit(script, 2)) == ["31[1]", "31[2]"]
    assert do(queue.submit(script, 1)) == ["31"]
    assert site.ran == ["bsub -J 'dask-worker[1-2]'", "bsub"]
    assert site.inputs[0] == Path(script).read_text()
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


# OAR 2.5: oarstat(1) -f -J and Stat.pm, oarsub(1), oardel(1)


def oar_job(state: str, event: str = "", **more: Any) -> str:
    job = {"Job_Id": 41, "state": state, "startTime": 1795212000, "walltime": 7200}
    events = [{"type": event, "job_id": 41, "description": ""}] if event else []
    hosts = ["n1", "n1", "n2"]
    return json.dumps({"41": {**job, "events": events, "assigned_network_address": hosts, **more}})


OAR_STATES: list[tuple[str, End]] = [
    (oar_job("Waiting", message="R=8,W=2:0:0"), (PENDING, "R=8,W=2:0:0", None)),
    (oar_job("Hold"), (PENDING, "Hold", None)),
    (oar_job("Launching"), (RUNNING, "", None)),
    (oar_job("Running"), (RUNNING, "", None)),
    (oar_job("Finishing", exit_code=0), (RUNNING, "", None)),
    (oar_job("Suspended"), (RUNNING, "suspended", None)),
    (oar_job("Terminated", exit_code=0), (COMPLETED, "", 0)),
    (oar_job("Terminated", exit_code=768), (FAILED, "", 3)),
    (oar_job("Terminated", exit_code=9), (FAILED, "ended by SIGKILL", 137)),
    (oar_job("Error", message="no node", exit_code=None), (FAILED, "no node", None)),
    (oar_job("Error", "WALLTIME"), (TIMEOUT, "", None)),
    (oar_job("Error", "FRAG_JOB_REQUEST"), (CANCELLED, "", None)),
    (oar_job("Error", "BESTEFFORT_KILL"), (PREEMPTED, "", None)),
    (oar_job("Odd"), (UNKNOWN, "Odd", None)),
]


@pytest.mark.parametrize(("text", "expected"), OAR_STATES)
def test_states_of_oar(text: str, expected: End):
    queue = OarQueue()
    site = Site(queue, {"oarstat": text})
    seen = do(queue.query(["41", "42"]))
    assert site.ran == ["oarstat -f -J -j 41 -j 42"]
    assert set(seen) == {"41"}
    assert facts(seen["41"]) == expected
    if expected[0] is RUNNING:
        times = (START, START + 7200, "n1+n2")
        assert (seen["41"].started, seen["41"].ends, seen["41"].nodes) == times


def test_oar_submits_one_array_with_the_scripts_options(tmp_path: Path):
    path = tmp_path / "it's; mine.sh"
    path.write_text(
        "#!/usr/bin/env bash\n#OAR -n 'my job'\n#OAR -l /nodes=1/gpu=1,walltime=1:00:00\n"
        "# HPCDASK_TAG=hpcdask:ab12cd34\ntrue\n"
    )
    queue = OarQueue()
    said = "[ADMISSION RULE] ok\nOAR_JOB_ID=41\nOAR_JOB_ID=42\nOAR_ARRAY_ID=41\n"
    site = Site(queue, {"oarsub": said})
    assert do(queue.submit(str(path), 2)) == ["41", "42"]
    *words, command = shlex.split(site.ran[0])
    assert words[:3] == ["oarsub", "-n", "my job"]
    assert words[3:] == ["-l", "/nodes=1/gpu=1,walltime=1:00:00", "--array", "2"]
    tag, bash = "HPCDASK_TAG=hpcdask:ab12cd34", ["/usr/bin/env", "bash"]
    assert shlex.split(command) == ["env", tag, *bash, str(path)]
    with pytest.raises(QueueError, match="instead of 3 job ids"):
        do(queue.submit(str(path), 3))


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


def test_oars_own_copy_of_a_job_is_told_of():
    """Regression: a query cancelled it, also one of `hpcdask list --jobs`."""
    told = "[NodeChangeState] Resubmiting job 41 => 57) (due to event PING_CHECKER_NODE_SUSPECTED"
    events = [{"type": "RESUBMIT_JOB_AUTOMATICALLY", "job_id": 41, "description": told}]
    queue = OarQueue()
    site = Site(queue, {"oarstat": oar_job("Error", events=events)})
    seen = do(queue.query(["41"]))["41"]
    assert (seen.state, seen.copies) == (FAILED, ("57",))
    assert site.ran == ["oarstat -f -J -j 41"]


# HTCondor 24: condor_q(1) and condor_history(1) -json, job ClassAd attributes, hold reason codes


def ad(status: int, **more: Any) -> dict[str, Any]:
    return {"ClusterId": 51, "ProcId": 3, "Owner": "ann", "JobStatus": status, **more}


BY_POLICY = {"RemoveReason": "The job attribute PeriodicRemove expression evaluated to TRUE"}
CONDOR_STATES: list[tuple[dict[str, Any], End]] = [
    (ad(1), (PENDING, "", None)),
    (ad(1, NumJobStarts=1), (REQUEUED, "", None)),
    (ad(2, JobCurrentStartDate=1795212000), (RUNNING, "", None)),
    (ad(5, HoldReason="via condor_hold"), (PENDING, "via condor_hold", None)),
    (ad(3, RemoveReason="via condor_rm"), (CANCELLED, "via condor_rm", None)),
    (ad(3, LastHoldReason="no shell", **BY_POLICY), (FAILED, "no shell", None)),
    (ad(4, ExitBySignal=False, ExitCode=0), (COMPLETED, "", 0)),
    (ad(4, ExitBySignal=False, ExitCode=3), (FAILED, "", 3)),
    (ad(4, ExitBySignal=True, ExitSignal=9), (FAILED, "ended by SIGKILL", 137)),
    (ad(0), (UNKNOWN, "status 0", None)),
]


@pytest.mark.parametrize(("job", "expected"), CONDOR_STATES)
def test_states_of_htcondor(job: dict[str, Any], expected: End):
    queue = HtcondorQueue()
    text = json.dumps([{**job, "LastRemoteHost": "slot1_1@n1.site"}])
    site = Site(queue, {"condor_q": text, "condor_history": text})
    for seen in (do(queue.query(["51.3", "51.4"])), do(queue.departed(["51.3", "51.4"]))):
        assert set(seen) == {"51.3"}
        assert facts(seen["51.3"]) == expected
        assert seen["51.3"].nodes == "n1.site"
    assert site.ran == ["condor_q 51 -json", "condor_history 51.3 51.4 -limit 2 -json"]


def test_htcondor_submits_one_cluster(tmp_path: Path):
    path = tmp_path / "it's $1.sh"
    path.write_text("#!/usr/bin/env bash\n#CONDOR request_gpus = 1\ntrue\n")
    queue = HtcondorQueue()
    site = Site(queue, {"condor_submit": "51.0 - 51.1\n"})
    assert do(queue.submit(str(path), 2)) == ["51.0", "51.1"]
    assert site.ran == ["condor_submit -terse"]
    executable = str(path).replace("$", "$(DOLLAR)")
    assert site.inputs == [f"request_gpus = 1\nexecutable = {executable}\nqueue 2\n"]
    assert path.stat().st_mode & 0o777 == 0o700


def test_tags_of_htcondor():
    queue = HtcondorQueue()
    jobs = [
        ad(2, HpcdaskTag=TAG),
        {**ad(2, HpcdaskTag="hpcdask:ffffffff"), "ProcId": 4, "Owner": "bob"},
        {**ad(3, HpcdaskTag=TAG), "ProcId": 5},
    ]
    Site(queue, {"condor_q": json.dumps(jobs)})
    assert do(queue.tagged()) == {"51.3": TAG}


# Moab 9: showq (--xml, -c), msub, canceljob


def moab_job(state: str, **attributes: str) -> str:
    job = {"JobID": "Moab.61", "User": "ann", "State": state, **attributes}
    text = " ".join(f'{name}="{value}"' for name, value in job.items())
    return f'<Data><Object>queue</Object><queue option="active"><job {text}></job></queue></Data>'


MOAB_STATES: list[tuple[str, End]] = [
    (moab_job("Running"), (RUNNING, "", None)),
    (moab_job("Idle"), (PENDING, "", None)),
    (moab_job("BatchHold"), (PENDING, "held", None)),
    (moab_job("Completed", CompletionCode="0"), (COMPLETED, "", 0)),
    (moab_job("Completed", CompletionCode="3"), (FAILED, "", 3)),
    (moab_job("Removed", CompletionCode="CNCLD(271)"), (CANCELLED, "", 143)),
    (moab_job("Odd"), (UNKNOWN, "Odd", None)),
]


@pytest.mark.parametrize(("text", "expected"), MOAB_STATES)
def test_states_of_moab(text: str, expected: End):
    queue = MoabQueue()
    site = Site(queue, {"showq": text})
    for seen in (do(queue.query(["Moab.61", "62"])), do(queue.departed(["Moab.61", "62"]))):
        assert set(seen) == {"Moab.61"}
        assert facts(seen["Moab.61"]) == expected
    assert site.ran == ["showq --xml", "showq -c --xml"]


def test_moab_submits_and_finds_one_job(script: str):
    queue = MoabQueue()
    times = {"StartTime": "1795212000", "ReqAWDuration": "3600", "MasterHost": "n1"}
    shown = moab_job("Running", JobName="dask.worker.hpcdask_ab12cd34", **times)
    site = Site(queue, {"msub": "\nMoab.61\n", "showq": shown})
    assert do(queue.limit()) == 1
    assert do(queue.submit(script, 1)) == ["Moab.61"]
    assert site.ran == [f"msub -E {script}"]
    job = QueueStatus("Moab.61", RUNNING, "", None, 0, START, START + 3600, "n1")
    assert do(queue.query(["Moab.61"])) == {"Moab.61": job}
    assert do(queue.tagged()) == {"Moab.61": TAG}
    site.answers = {"showq": moab_job("Running", JobName="dask-worker")}
    assert do(queue.tagged()) == {}
