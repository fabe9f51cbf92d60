"""How the answers of queueing systems are read, and what they are asked.

The answers were written after the manuals and the systems' sources, which each table names; no
system was running. Grid Engine and OAR are tested with real commands elsewhere.
"""

import asyncio
import json
import re
import shlex
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from doors import TAG
from hpcdask.errors import QueueError, Refused
from hpcdask.queues import helpers
from hpcdask.queues.base import Queue
from hpcdask.queues.htcondor import HtcondorQueue
from hpcdask.queues.job_state import JobState, QueueStatus
from hpcdask.queues.lsf import LsfQueue
from hpcdask.queues.moab import MoabQueue
from hpcdask.queues.oar import OarQueue
from hpcdask.queues.pbs import PbsQueue
from hpcdask.queues.sge import SgeQueue

Answer = str | tuple[int, str, str]
PENDING, REQUEUED, RUNNING = JobState.PENDING, JobState.REQUEUED, JobState.RUNNING
COMPLETED, FAILED, TIMEOUT = JobState.COMPLETED, JobState.FAILED, JobState.TIMEOUT
CANCELLED, PREEMPTED, UNKNOWN = JobState.CANCELLED, JobState.PREEMPTED, JobState.UNKNOWN
#: A local time of the samples.
START = 1795212000.0
AGAIN = "the queue started it a second time"


do = asyncio.run


class Site:
    """Answers for the commands of a queue, by the start of the command; what was run is in `ran`.

    An answer is the output of a command that succeeds, or exit code, output and error output.
    """

    def __init__(self, queue: Queue, answers: Mapping[str, Answer]) -> None:
        version = (0, "", "Version: 6.1.3\n") if isinstance(queue, Torque) else "pbs_version = 23\n"
        self.answers: dict[str, Answer] = {"qstat --version": version, **answers}
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


# What is said on failures


#: The commands that show, cancel and submit jobs; what is said where nobody answers, and of job 9,
#: which is not there, by the first two; then of limits that pass, and of other refusals.
FAILURES: dict[type[Queue], tuple[tuple[str, ...], str, Answer, str, list[str], list[str]]] = {
    PbsQueue: (
        ("qstat -f", "qdel", "qsub"),
        "cannot connect to server head (errno=111)",
        (153, "", "qstat: Unknown Job Id 9\n"),
        "qdel: Unknown Job Id 9",
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
    SgeQueue: (
        ("qstat", "qdel", "qsub"),
        "unable to contact qmaster",
        "<job_info/>",
        'denied: job "9" does not exist',
        ["unable to contact qmaster", "job rejected: only 5 jobs are allowed per user"],
        ['Unable to run job: unknown queue "nix"'],
    ),
    LsfQueue: (
        ("bjobs", "bkill", "bsub"),
        "LSF is down",
        (255, "", "No job found\n"),
        "Job <9>: Job has already finished",
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
        ("oarstat", "oardel", "oarsub"),
        "DB connection error",
        "{}",
        "Deleting the job = 9 ...ERROR.\nCannot frag 9 ; This job was already killed.",
        ["[ADMISSION RULE] Too many jobs for user ann"],
        ["[ERROR] Unknown queue nix", "[ADMISSION RULE] walltime exceeds the maximum"],
    ),
    HtcondorQueue: (
        ("condor_q", "condor_rm", "condor_submit"),
        "Can't find address of local schedd",
        "",
        "Couldn't find/remove all jobs matching constraint",
        ["ERROR: Number of submitted jobs would exceed MAX_JOBS_PER_OWNER"],
        ["ERROR: on Line 3 of submit file: Parse error"],
    ),
    MoabQueue: (
        ("showq", "canceljob", "msub"),
        "cannot connect to server",
        "<Data/>",
        "ERROR:  invalid job specified (9)",
        ["qsub: Maximum number of jobs already in queue", "ERROR: cannot connect to server"],
        ["qsub: Job exceeds queue resource limits MSG=max walltime", "ERROR: invalid class"],
    ),
}


@pytest.mark.parametrize("kind", FAILURES)
def test_failures(tmp_path: Path, kind: type[Queue]):
    """A silent system is an error, a job that is gone is none. Limits pass, others do not."""
    (show, cancel, submit), silent, unknown, gone, passes, others = FAILURES[kind]
    queue, script = kind(), tmp_path / "script.sh"
    script.write_text("#!/usr/bin/env bash\n")
    Site(queue, dict.fromkeys((show, cancel), (1, "", f"{silent}\n")))
    for work in (queue.query(["9"]), queue.cancel(["9"])):
        with pytest.raises(QueueError, match=re.escape(silent)):
            do(work)
    Site(queue, {show: unknown, cancel: (1, f"{gone}\n", "")})
    assert do(queue.query(["9"])) == {}
    do(queue.cancel(["9"]))
    for said in (*passes, *others):
        Site(queue, {submit: (1, "", f"{said}\n")})
        with pytest.raises(Refused) as caught:
            do(queue.submit(str(script), 1))
        start = f"{submit} refused the job: {said}. Script kept at {script}. "
        assert str(caught.value) == start + queue.advice
        assert caught.value.for_now is (said in passes)


def test_what_oar_says_of_several_jobs_is_read_line_by_line():
    """Regression: one job that was gone hid that another could not be cancelled."""
    queue, said = OarQueue(), "Cannot frag 8 ; You are not the right user"
    out = "Deleting the job = 8 ...ERROR.\nDeleting the job = 9 ...ERROR.\n"
    Site(queue, {"oardel": (6, out, f"{said}.\nCannot frag 9 ; This job was already killed.\n")})
    with pytest.raises(QueueError, match=re.escape(said)):
        do(queue.cancel(["8", "9"]))


# What is said of jobs: the command's answer about one, and the job


def pbs(*lines: str) -> str:
    """PBS Professional: qstat(1B), "Job Attributes"; User's Guide, "Job Exit Status"."""
    return "\n    ".join(["Job Id: 1.server", *lines, "\n"])


def sge(letters: str, tasks: str = "2") -> str:
    """Grid Engine: qstat(1) and its schema."""
    return (
        f"<job_info><queue_info><job_list state='running'><JB_job_number>4</JB_job_number>"
        f"<state>{letters}</state><JAT_start_time>2026-11-20T22:00:00</JAT_start_time>"
        f"<queue_name>gpu.q@n1</queue_name><tasks>{tasks}</tasks>"
        f"<hard_request name='h_rt' resource_contribution='0.0'>7200</hard_request>"
        f"</job_list></queue_info></job_info>"
    )


def lsf(stat: str, **more: str) -> str:
    """LSF 10.1: bjobs(1) -o and -json."""
    record = {"JOBID": "31", "JOBINDEX": "2", "STAT": stat, "EXIT_CODE": "", "EXEC_HOST": ""}
    record |= {name.upper(): value for name, value in more.items()}
    return json.dumps({"RECORDS": [record, {"JOBID": "32", "ERROR": "Job <32> is not found"}]})


def oar(state: str, event: str = "", told: str = "", **more: Any) -> str:
    """OAR 2.5: oarstat(1) -f -J and Stat.pm."""
    job = {"state": state, "startTime": 1795212000, "walltime": 7200}
    events = [{"type": event, "job_id": 41, "description": told}] if event else []
    hosts = ["n1", "n1", "n2"]
    return json.dumps({"41": {**job, "events": events, "assigned_network_address": hosts, **more}})


def condor(status: int, **more: Any) -> str:
    """HTCondor 24: condor_q(1) and condor_history(1) -json, job ClassAd attributes."""
    job = {"ClusterId": 51, "ProcId": 3, "JobStatus": status, "LastRemoteHost": "slot1_1@n1"}
    return json.dumps([{**job, **more}])


def moab(state: str, **attributes: str) -> str:
    """Moab 9: showq (--xml, -c)."""
    job = {"JobID": "Moab.61", "User": "ann", "State": state, "MasterHost": "n1", **attributes}
    text = " ".join(f'{name}="{value}"' for name, value in job.items())
    return f'<Data><Object>queue</Object><queue option="active"><job {text}></job></queue></Data>'


#: The commands that show jobs, with these ids, of which the first is there.
SHOW: dict[Callable[..., str], tuple[type[Queue], list[str], list[str]]] = {
    pbs: (PbsQueue, ["qstat -f -x -t -w 1.server 2.server"], ["1.server", "2.server"]),
    sge: (SgeQueue, ["qstat -u ann -xml -r -g d"], ["4.2", "4.3"]),
    lsf: (LsfQueue, ["bjobs -json -o "], ["31[2]", "31[3]", "32"]),
    oar: (OarQueue, ["oarstat -f -J -j 41 -j 42"], ["41", "42"]),
    condor: (
        HtcondorQueue,
        ["condor_q 51 -json", "condor_history 51.3 51.4 -limit 2 -json"],
        ["51.3", "51.4"],
    ),
    moab: (MoabQueue, ["showq --xml", "showq -c --xml"], ["Moab.61", "62"]),
}
PBS_RUN = ("job_state = R", "exec_host = n1/0*8+n1/1*8+n2/0", "run_count = 1")
PBS_RUN += ("Resource_List.walltime = 02:00:00", "stime = Fri Nov 20 22:00:00 2026")
CONDOR_RUN = {"JobCurrentStartDate": START, "AllowedJobDuration": 7200}
MOAB_RUN = {"StartTime": "1795212000", "ReqAWDuration": "7200"}
RUNS, ENDS = (RUNNING, "", None, START), START + 7200
F, LATE = "job_state = F", ("resources_used.walltime = 01:00:02", "Resource_List.walltime = 1:0:0")
RUNLIMIT, OWNER, MEMORY = "TERM_RUNLIMIT: killed", "TERM_OWNER: by owner", "TERM_MEMLIMIT: x"
BY_POLICY = {"RemoveReason": "The job attribute PeriodicRemove expression evaluated to TRUE"}
#: State, reason, exit code, start, end and nodes of the job.
STATES: dict[Callable[..., str], list[tuple[str, tuple[Any, ...]]]] = {
    pbs: [
        (pbs(*PBS_RUN), (*RUNS, ENDS, "n1+n2")),
        (pbs(F, "Exit_status = 0"), (COMPLETED, "", 0)),
        (pbs("job_state = X", "Exit_status = 0", "substate = 92"), (COMPLETED, "", 0)),
        (pbs(F, "Exit_status = 3"), (FAILED, "", 3)),
        (pbs(F, "Exit_status = 265"), (FAILED, "ended by SIGKILL", 137)),
        (pbs(F, "Exit_status = 271", "substate = 91"), (CANCELLED, "", 143)),
        (pbs(F, "substate = 91", "comment = by ann"), (CANCELLED, "by ann", None)),
        (pbs(F, "Exit_status = -29"), (TIMEOUT, "", -29)),
        (pbs(F, "Exit_status = 271", *LATE), (TIMEOUT, "", 143)),
        (pbs(F, "Exit_status = -1"), (FAILED, "PBS could not start it", -1)),
        (pbs(F, "Exit_status = 75"), (PREEMPTED, AGAIN, 75)),
        (pbs("job_state = H"), (PENDING, "held", None)),
        (pbs("job_state = Q", "comment = no ngpus"), (PENDING, "no ngpus", None)),
        (pbs("job_state = Q", "run_count = 1"), (REQUEUED, "", None)),
        (pbs("job_state = S"), (RUNNING, "suspended", None)),
        (pbs("job_state = E"), (RUNNING, "", None)),
    ],
    sge: [
        *((sge(letters), (*RUNS, ENDS, "n1")) for letters in ("r", "t", "dr", "Rr")),
        (sge("qw"), (PENDING, "", None)),
        (sge("hqw"), (PENDING, "held", None)),
        (sge("Rq"), (REQUEUED, "", None)),
        (sge("S"), (RUNNING, "suspended", None)),
        (sge("Eqw"), (PENDING, "error state Eqw: qacct -j 4, then qdel", None)),
        (sge("?"), (UNKNOWN, "?", None)),
    ],
    lsf: [
        (
            lsf("RUN", start_time="Nov 20 22:00 2026", exec_host="8*n1:2*n2"),
            (*RUNS, None, "n1+n2"),
        ),
        (lsf("PEND", pend_reason="No GPU hosts;"), (PENDING, "No GPU hosts", None)),
        (lsf("PSUSP"), (PENDING, "", None)),
        (lsf("SSUSP"), (RUNNING, "suspended", None)),
        (lsf("DONE"), (COMPLETED, "", 0)),
        (lsf("EXIT", exit_code="3"), (FAILED, "", 3)),
        (lsf("EXIT", exit_code="75"), (PREEMPTED, AGAIN, 75)),
        (lsf("EXIT", exit_code="140", exit_reason=RUNLIMIT), (TIMEOUT, RUNLIMIT, 140)),
        (lsf("EXIT", exit_code="130", exit_reason=OWNER), (CANCELLED, OWNER, 130)),
        (lsf("EXIT", exit_code="137", exit_reason=MEMORY), (FAILED, MEMORY, 137)),
        (lsf("UNKWN"), (UNKNOWN, "UNKWN", None)),
    ],
    oar: [
        (oar("Waiting", message="R=8,W=2:0:0"), (PENDING, "R=8,W=2:0:0", None)),
        (oar("Hold"), (PENDING, "Hold", None)),
        *((oar(word), (*RUNS, ENDS, "n1+n2")) for word in ("Launching", "Running")),
        (oar("Finishing", exit_code=0), (RUNNING, "", None)),
        (oar("Suspended"), (RUNNING, "suspended", None)),
        (oar("Terminated", exit_code=0), (COMPLETED, "", 0)),
        (oar("Terminated", exit_code=768), (FAILED, "", 3)),
        (oar("Terminated", exit_code=9), (FAILED, "ended by SIGKILL", 137)),
        (oar("Error", message="no node", exit_code=None), (FAILED, "no node", None)),
        (oar("Error", "WALLTIME"), (TIMEOUT, "", None)),
        (oar("Error", "FRAG_JOB_REQUEST"), (CANCELLED, "", None)),
        (oar("Error", "BESTEFFORT_KILL"), (PREEMPTED, "", None)),
        (oar("Odd"), (UNKNOWN, "Odd", None)),
    ],
    condor: [
        (condor(2, **CONDOR_RUN), (*RUNS, ENDS, "n1")),
        (condor(1), (PENDING, "", None)),
        (condor(1, NumJobStarts=1), (REQUEUED, "", None)),
        (condor(5, HoldReason="via condor_hold"), (PENDING, "via condor_hold", None)),
        (condor(3, RemoveReason="via condor_rm"), (CANCELLED, "via condor_rm", None)),
        (condor(3, LastHoldReason="no shell", **BY_POLICY), (FAILED, "no shell", None)),
        (condor(4, ExitBySignal=False, ExitCode=0), (COMPLETED, "", 0)),
        (condor(4, ExitBySignal=False, ExitCode=3), (FAILED, "", 3)),
        (condor(4, ExitBySignal=True, ExitSignal=9), (FAILED, "ended by SIGKILL", 137)),
        (condor(0), (UNKNOWN, "status 0", None)),
    ],
    moab: [
        (moab("Running", **MOAB_RUN), (*RUNS, ENDS, "n1")),
        (moab("Idle"), (PENDING, "", None)),
        (moab("BatchHold"), (PENDING, "held", None)),
        (moab("Completed", CompletionCode="0"), (COMPLETED, "", 0)),
        (moab("Completed", CompletionCode="3"), (FAILED, "", 3)),
        (moab("Removed", CompletionCode="CNCLD(271)"), (CANCELLED, "", 143)),
        (moab("Odd"), (UNKNOWN, "Odd", None)),
    ],
}


@pytest.mark.parametrize(
    ("show", "answer", "expected"),
    [(show, *row) for show, rows in STATES.items() for row in rows],
)
def test_states(show: Callable[..., str], answer: str, expected: tuple[Any, ...]):
    kind, commands, ids = SHOW[show]
    queue = kind()
    site = Site(queue, {command.split()[0]: answer for command in commands})
    for command, ask in zip(commands, (queue.query, queue.departed), strict=False):
        seen = do(ask(ids))
        assert site.ran[-1].startswith(command)
        assert set(seen) == {ids[0]}
        job = seen[ids[0]]
        found = (job.state, job.reason, job.exit_code, job.started, job.ends, job.nodes)
        assert found[: len(expected)] == expected
        assert job.stuck is job.reason.startswith("error state")
        assert queue.lasting(job.reason) or not job.stuck


def test_a_time_of_lsf_without_a_year_is_the_last_such():
    at, queue = time.localtime(time.time() - 3600), LsfQueue()
    Site(queue, {"bjobs": lsf("RUN", start_time=time.strftime("%b %d %H:%M", at))})
    assert 3500 < time.time() - (do(queue.query(["31[2]"]))["31[2]"].started or 0) < 3700


def test_pending_elements_of_grid_engine_may_come_as_ranges():
    queue = SgeQueue()
    Site(queue, {"qstat": sge("qw", "1,3-7:2")})
    seen = do(queue.query([f"4.{task}" for task in range(1, 9)]))
    assert list(seen) == ["4.1", "4.3", "4.5", "4.7"]


def test_oars_own_copy_of_a_job_is_told_of():
    """Regression: a query cancelled it, also one of `hpcdask list --jobs`."""
    told = "[NodeChangeState] Resubmiting job 41 => 57) (due to event PING_CHECKER_NODE_SUSPECTED"
    queue = OarQueue()
    site = Site(queue, {"oarstat": oar("Error", "RESUBMIT_JOB_AUTOMATICALLY", told)})
    seen = do(queue.query(["41"]))["41"]
    assert (seen.state, seen.copies) == (FAILED, ("57",))
    assert site.ran == ["oarstat -f -J -j 41"]


def account(task: int, failed: str, code: int, seconds: int) -> str:
    """Grid Engine: sge_accounting(5), sge_status(5)."""
    return (
        f"{'=' * 62}\nhostname     n1\njobnumber    4\ntaskid       {task}\n"
        f"start_time   Fri Nov 20 22:00:00 2026\nfailed       {failed}\nexit_status  {code}\n"
        f"ru_wallclock {seconds}s\ncategory     -l gpu=1,h_rt=1800\n"
    )


@pytest.mark.parametrize(
    ("failed", "code", "seconds", "state", "reason"),
    [
        ("0", 0, 9, COMPLETED, ""),
        ("0", 2, 9, FAILED, ""),
        ("100 : assumedly after job", 137, 9, FAILED, "ended by SIGKILL"),
        ("100 : assumedly after job", 137, 1801, TIMEOUT, ""),
        ("37  : qmaster enforced h_rt, h_cpu, or h_vmem limit", 137, 9, TIMEOUT, ""),
        ("26  : opening input/output file", 0, 0, FAILED, "opening input/output file"),
    ],
)
def test_accounts_of_grid_engine(
    failed: str, code: int, seconds: int, state: JobState, reason: str
):
    queue = SgeQueue()
    site = Site(queue, {"qacct": "".join(account(n, failed, code, seconds) for n in (1, 2))})
    seen = do(queue.departed(["4.1", "4.2", "4.3"]))
    assert site.ran == ["qacct -j 4"]
    assert set(seen) == {"4.1", "4.2"}
    assert seen["4.2"] == QueueStatus("4.2", state, reason, code, 0, START, None, "n1")


# Submission, limits, tags


SCRIPT = f"""\
#!/usr/bin/env bash
#BSUB -J dask-worker
#OAR -n 'my job'
#OAR -l /nodes=1/gpu=1,walltime=1:00:00
#CONDOR request_gpus = 1
# HPCDASK_TAG={TAG}
true
"""
OARSUB = "oarsub -n 'my job' -l /nodes=1/gpu=1,walltime=1:00:00"
OAR_RUN = f"env HPCDASK_TAG={TAG} /usr/bin/env bash QUOTED"
INPUTS = {LsfQueue: SCRIPT}
INPUTS[HtcondorQueue] = "request_gpus = 1\nexecutable = PROGRAM\nqueue 2\n"


class Torque(PbsQueue):
    """Torque 6, as its version tells."""


@pytest.mark.parametrize(
    ("kind", "answer", "ids", "command"),
    [
        (PbsQueue, "13[].server", ["13[0].server", "13[1].server"], "qsub -J 0-1 SCRIPT"),
        (PbsQueue, "14.server", ["14.server"], "qsub SCRIPT"),
        (Torque, "21[].head", ["21[0].head", "21[1].head"], "qsub -t 0-1 SCRIPT"),
        (SgeQueue, "4.1-2:1", ["4.1", "4.2"], "qsub -terse -t 1-2 SCRIPT"),
        (SgeQueue, "5", ["5"], "qsub -terse SCRIPT"),
        (LsfQueue, "Job <31> is submitted", ["31[1]", "31[2]"], "bsub -J 'dask-worker[1-2]'"),
        (LsfQueue, "Job <32> is submitted", ["32"], "bsub"),
        (OarQueue, "[RULE] ok\nOAR_JOB_ID=41", ["41"], f"{OARSUB} {shlex.quote(OAR_RUN)}"),
        (
            OarQueue,
            "OAR_JOB_ID=41\nOAR_JOB_ID=42\nOAR_ARRAY_ID=41",
            ["41", "42"],
            f"{OARSUB} --array 2 {shlex.quote(OAR_RUN)}",
        ),
        (HtcondorQueue, "51.0 - 51.1", ["51.0", "51.1"], "condor_submit -terse"),
        (MoabQueue, "\nMoab.61", ["Moab.61"], "msub -E SCRIPT"),
    ],
)
def test_submission(tmp_path: Path, kind: type[Queue], answer: str, ids: list[str], command: str):
    path, queue, words = tmp_path / "it's; $1.sh", kind(), shlex.split(command)
    path.write_text(SCRIPT)
    names = {"SCRIPT": str(path), "QUOTED": shlex.quote(str(path))}
    names["PROGRAM"] = str(path).replace("$", "$(DOLLAR)")

    def named(text: str) -> str:
        return re.sub("|".join(names), lambda found: names[found[0]], text)

    site = Site(queue, {words[0]: f"{answer}\n"})
    assert do(queue.submit(str(path), len(ids))) == ids
    assert shlex.split(site.ran[-1]) == [named(word) for word in words]
    assert site.inputs[-1] == (named(INPUTS[kind]) if kind in INPUTS else None)
    assert kind is not HtcondorQueue or path.stat().st_mode & 0o777 == 0o700
    Site(queue, {words[0]: "Welcome to it"})
    with pytest.raises(QueueError, match="answered 'Welcome to it' instead of"):
        do(queue.submit(str(path), len(ids)))


@pytest.mark.parametrize(
    ("kind", "command", "answer", "limit"),
    [
        (PbsQueue, "qstat -B -f", "    max_array_size = 500\n", 500),
        (Torque, "qstat -B -f", "    max_job_array_size = 300\n", 300),
        (SgeQueue, "qconf -sconf", "max_aj_tasks 600\n", 600),
        (SgeQueue, "qconf -sconf", "max_aj_tasks 0\n", 75_000),
        (LsfQueue, "bparams -a", "    MAX_JOB_ARRAY_SIZE = 400\n", 400),
        (LsfQueue, "bparams -a", "", 1000),
        (OarQueue, "none", "", 1000),
        (MoabQueue, "none", "", 1),
    ],
)
def test_limit(kind: type[Queue], command: str, answer: str, limit: int):
    queue = kind()
    Site(queue, {command: answer})
    assert do(queue.limit()) == limit


def pbs_jobs(*jobs: str) -> str:
    """Return the answer on jobs of these ids, owners and states, all with a tag."""
    return "".join(
        f"Job Id: {job}\n    Job_Owner = {owner}@login1\n    job_state = {state}\n"
        f"    Variable_List = PBS_O_HOME=/home/ann,\n\tHPCDASK_TAG={TAG},PBS_O_QUEUE=gpu\n\n"
        for job, owner, state in map(str.split, jobs)
    )


PRO_JOBS = ("12.head ann R", "13[].head ann B", "13[0].head ann X", "13[1].head ann Q", "14 bob R")
SGE_TAGS = (
    "<djob_info><element><JB_job_number>4</JB_job_number><JB_context><context_list>"
    f"<VA_variable>HPCDASK_TAG</VA_variable><VA_value>{TAG}</VA_value>"
    "</context_list></JB_context></element></djob_info>"
)
OAR_JOBS = {"41": {"command": OAR_RUN}, "42": {"command": "true"}, "43": {"command": None}}
CONDOR_JOBS = [
    {"ClusterId": 51, "ProcId": number, "Owner": owner, "JobStatus": status, "HpcdaskTag": TAG}
    for number, owner, status in ((3, "ann", 2), (4, "bob", 2), (5, "ann", 3))
]


@pytest.mark.parametrize(
    ("kind", "answers", "jobs"),
    [
        (PbsQueue, {"qstat -f -t -w": pbs_jobs(*PRO_JOBS)}, ["12.head", "13[1].head"]),
        (Torque, {"qstat -f -t -1": pbs_jobs("21[0].a ann C", "21[1].a ann R")}, ["21[1].a"]),
        (SgeQueue, {"qstat -u": sge("r"), "qstat -j 4": SGE_TAGS}, ["4.2"]),
        (LsfQueue, {"bjobs": lsf("RUN", job_description=TAG)}, ["31[2]"]),
        (LsfQueue, {"bjobs": lsf("RUN", jobindex="0", job_description=TAG)}, ["31"]),
        (LsfQueue, {"bjobs": lsf("RUN", job_description="something else")}, []),
        (OarQueue, {"oarstat -f -J -u ann": json.dumps(OAR_JOBS)}, ["41"]),
        (HtcondorQueue, {"condor_q": json.dumps(CONDOR_JOBS)}, ["51.3"]),
        (MoabQueue, {"showq": moab("Running", JobName="a.hpcdask_ab12cd34")}, ["Moab.61"]),
        (MoabQueue, {"showq": moab("Running", JobName="dask-worker")}, []),
    ],
)
def test_tags(kind: type[Queue], answers: dict[str, Answer], jobs: list[str]):
    queue = kind()
    Site(queue, answers)
    assert do(queue.tagged()) == dict.fromkeys(jobs, TAG)
