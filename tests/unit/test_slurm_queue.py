"""SLURM's door without a SLURM: what its commands print."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
from contextlib import nullcontext

import pytest

from hpcdask.errors import NoAnswer, QueueError, Refused
from hpcdask.queues import slurm
from hpcdask.queues.job_state import JobState, QueueStatus
from hpcdask.queues.slurm import SlurmQueue
from launching import wait_for

NOW = 2_000.0


def answer(monkeypatch, **answers: str | tuple[int, str]) -> list[tuple[str, ...]]:
    """Give commands their output, or exit code and errors; return the list of what was run."""
    calls: list[tuple[str, ...]] = []

    async def run(self, *command, env=None):
        calls.append(command)
        said = answers[command[0]]
        code, out, err = (0, said, "") if isinstance(said, str) else (said[0], "", said[1])
        return subprocess.CompletedProcess(command, code, out, err)

    monkeypatch.setattr(SlurmQueue, "run", run)
    return calls


@pytest.fixture
def ask(monkeypatch):
    """What a query tells of jobs where squeue prints this."""

    def ask(text: str, *ids: str) -> dict[str, QueueStatus]:
        answer(monkeypatch, squeue=text)
        monkeypatch.setattr(slurm.time, "time", lambda: NOW)
        return asyncio.run(SlurmQueue().query(ids or ["7_1"]))

    return ask


def row(state: str, restarts=0, status="0", start="1000", end="5000", nodes="n1", reason="None"):
    return f"7_1;{state};{restarts};{status};{start};{end};{nodes};{reason};"


RAN = {"started": 1000.0, "nodes": "n1"}
WAITS = {"start": "N/A", "end": "N/A", "nodes": ""}
ON = {"nodes": "n1"}
AGAIN = {"nodes": "n1", "restarts": 1}
MAYBE = "ReqNodeNotAvail; May be reserved"


@pytest.mark.parametrize(
    ("line", "state", "reason", "facts"),
    [
        (row("PENDING", **WAITS, reason="Resources"), "pending", "Resources", {}),
        (row("PENDING", 1, start="9000", reason=MAYBE), "requeued", MAYBE, AGAIN),
        (row("REQUEUE_HOLD", 1), "requeued", "REQUEUE_HOLD", AGAIN),
        (row("RESV_DEL_HOLD", **WAITS, reason="gone"), "pending", "RESV_DEL_HOLD: gone", {}),
        # its nodes boot
        (row("CONFIGURING"), "pending", "CONFIGURING", ON),
        (row("POWER_UP_NODE", 1, reason="x"), "requeued", "POWER_UP_NODE: x", AGAIN),
        # its end is still to come: it will run again
        (row("COMPLETING", 1), "requeued", "COMPLETING", AGAIN),
        (row("CANCELLED", start="1500", nodes=""), "cancelled", "", {"started": 1500.0}),
        (row("RUNNING", 1, end="NONE"), "running", "", {"restarts": 1, **RAN}),
        (row("RUNNING"), "running", "", {"ends": 5000.0, **RAN}),
        (row("SUSPENDED"), "running", "SUSPENDED", {"ends": 5000.0, **RAN}),
        (row("COMPLETING", end="1999"), "running", "COMPLETING", RAN),
        # the controller's clock is ahead
        (row("COMPLETING", end="2025"), "running", "COMPLETING", RAN),
        (row("COMPLETED"), "completed", "", {"exit_code": 0, **RAN}),
        (row("FAILED", status="768", reason="X"), "failed", "X", {"exit_code": 3, **RAN}),
        (row("FAILED", status="9", reason="X"), "failed", "X", {"exit_code": 137, **RAN}),
        (row("FAILED", status="3:0"), "failed", "", {"exit_code": 3, **RAN}),  # of newer versions
        (row("TIMEOUT", reason="X"), "timeout", "X", RAN),
        (row("NODE_FAIL", status="1", reason="X"), "failed", "NODE_FAIL: X", RAN),
        (row("OUT_OF_MEMORY", status="0:125"), "failed", "OUT_OF_MEMORY", RAN),
        (row("PREEMPTED", status="15"), "preempted", "", {"exit_code": 143, **RAN}),
        (row("DEADLINE"), "timeout", "DEADLINE", RAN),
        (row("BOOT_FAIL"), "failed", "BOOT_FAIL", RAN),
        # Regression: a job in a state that the table does not know was lost
        (row("UPDATE_DB"), "unknown", "UPDATE_DB", ON),
    ],
)
def test_squeue(ask, line, state, reason, facts):
    assert ask(line + "\n") == {"7_1": QueueStatus("7_1", JobState(state), reason, **facts)}


@pytest.mark.parametrize(
    ("shown", "ids"),
    [
        ("7", ["7"]),
        ("7_3", ["7_3"]),
        ("7_[3]", ["7_3"]),
        ("7_[0-4:2,8,10-11%5]", ["7_0", "7_2", "7_4", "7_8", "7_10", "7_11"]),
        ("7+1", []),
    ],
)
def test_elements_of_an_array(ask, shown, ids):
    line = f"{shown};PENDING;0;0;N/A;N/A;;Resources;\n"
    seen = ask(line, "7", "7+1", *(f"7_{number}" for number in range(20)))
    assert seen == {one: QueueStatus(one, JobState.PENDING, "Resources") for one in ids}


@pytest.mark.parametrize(
    "reason", ["launch_failed_requeued_held", "launch failed requeued held", "JobHoldMaxRequeue"]
)
def test_a_job_that_slurm_could_not_start_is_stuck(ask, reason):
    assert ask(row("REQUEUE_HOLD", 1, reason=reason))["7_1"].stuck
    assert SlurmQueue.lasting(reason) is not None


@pytest.mark.parametrize("shown", ["9_1;RUNNING;0;0;1;2;n1;None;\n", "7;PENDING;0;0;1;2;;None;\n"])
def test_elements_that_left_their_array(monkeypatch, shown):
    answer(monkeypatch, squeue=row("RUNNING") + "\n" + shown, scontrol="")
    queue = SlurmQueue()
    asyncio.run(queue.query(["7_1"]))
    over = QueueStatus("7_2", JobState.CANCELLED, "before it started")
    assert asyncio.run(queue.departed(["7_1", "7_2", "8_1", "9"])) == {"7_2": over}


def test_squeue_answers_something_else(ask):
    assert ask("") == {}
    with pytest.raises(QueueError, match="squeue answered 'Welcome!', which is not"):
        ask("Welcome!\n")


def test_sacct(monkeypatch):
    text = """\
Welcome to the site!

5|0:0|1000|n1|COMPLETED
6_0|3:0|1000|n1|FAILED
6_1|0:9|1000|n[1-2]|FAILED
6_2|0:0|Unknown|None assigned|CANCELLED by 0
6_3|0:15|1000|n1|CANCELLED by 4294967290
6_4|0:0|1000|n1|TIMEOUT
6_5|0:125|1000|n1|OUT_OF_MEMORY
6_6|0:0|1000|n1|RUNNING
6_7|0:0|Unknown|None assigned|PENDING
7_[8-9]|0:0|Unknown|None assigned|CANCELLED by 0
"""
    answer(
        monkeypatch, sacct=text, scontrol="AccountingStorageType = accounting_storage/slurmdbd\n"
    )
    ids = ["5", *(f"6_{number}" for number in range(9)), "7_8", "7_9"]
    ran = {"started": 1000.0, "nodes": "n1"}
    ends = {
        "5": ("completed", "", 0, ran),
        "6_0": ("failed", "", 3, ran),
        "6_1": ("failed", "", 137, {**ran, "nodes": "n[1-2]"}),
        "6_2": ("cancelled", "by user 0", None, {}),
        "6_3": ("cancelled", "by user 4294967290", 143, ran),
        "6_4": ("timeout", "", None, ran),
        "6_5": ("failed", "OUT_OF_MEMORY", None, ran),
        "7_8": ("cancelled", "by user 0", None, {}),
        "7_9": ("cancelled", "by user 0", None, {}),
    }
    assert asyncio.run(SlurmQueue().departed(ids)) == {
        job: QueueStatus(job, JobState(state), reason, code, **facts)
        for job, (state, reason, code, facts) in ends.items()
    }


POLICY = (
    "Batch job submission failed: Job violates accounting/QOS policy "
    "(job submit limit, user's size and/or time limits)"
)
MUNGE = (
    "If munged is up, restart with --num-threads=10",
    'Munge encode failed: Failed to access "/run/munge/munge.socket.2": No such file or directory',
    "slurm_send_node_msg: auth_g_create: REQUEST_SUBMIT_BATCH_JOB has authentication error",
    "Batch job submission failed: Protocol authentication error",
)
DOWN = "Required partition not available (inactive or drain)"
TIME = "Requested time limit is invalid (missing or exceeds some limit)"


@pytest.mark.parametrize(
    ("lines", "passes", "advice"),
    [
        # limits, which fewer jobs may not reach
        (["QOSMaxSubmitJobPerUserLimit", POLICY], "fewer", "Limits: sacctmgr show qos"),
        (["AssocMaxSubmitJobLimit", POLICY], "fewer", "Limits: sacctmgr show "),
        ([POLICY], "fewer", "Limits: sacctmgr show qos"),
        (["Invalid job array specification"], "fewer", ""),
        # what is away for all jobs. Regression: nothing more was submitted afterwards
        (["Slurm temporarily unable to accept job, sleeping and retrying"], "later", ""),
        (["Resource temporarily unavailable"], "later", ""),
        (["Unable to contact slurm controller (connect failure)"], "later", ""),
        *(([line], "later", "") for line in MUNGE),
        (MUNGE, "later", ""),
        ([DOWN], "later", "Partitions: sinfo -s"),
        # what does not pass
        (["QOSMaxWallDurationPerJobLimit", POLICY], "", "Limits: sacctmgr show qos"),
        (["AssocMaxWallDurationPerJobLimit", POLICY], "", "Limits: sacctmgr show "),
        (["Invalid partition name specified"], "", "Partitions: sinfo -s"),
        (["Invalid account or account/partition combination specified"], "", "Accounts: sacctmgr"),
        (["Invalid qos specification"], "", "Limits: sacctmgr show qos"),
        (["Invalid generic resource (gres) specification"], "", 'sinfo -o "%P %G'),
        ([TIME], "", 'sinfo -o "%P %l"'),
        (["Invalid feature specification"], "", 'sinfo -o "%P %f"'),
        (["Requested reservation is invalid"], "", "scontrol show reservation"),
    ],
)
def test_refusals(monkeypatch, tmp_path, lines, passes, advice):
    """A refusal tells whether it passes, for fewer jobs or later, and what lists the valid ones."""
    error = refusal(monkeypatch, tmp_path, lines)
    assert isinstance(error, Refused)
    assert (error.for_now, error.fewer) == (bool(passes), passes == "fewer")
    told, _, shown = str(error).partition(f". Script kept at {tmp_path / 'script.sh'}")
    assert told.startswith("sbatch refused the job: ")
    assert "Batch job submission failed" not in told
    assert advice in shown
    assert bool(shown) is bool(advice)
    assert "\n" not in str(error)


def test_a_refusal_of_memory_names_the_largest_node(monkeypatch, tmp_path):
    script = tmp_path / "script.sh"
    script.write_text("#SBATCH --mem=61036M\n")
    said = "sbatch: error: Memory specification can not be satisfied"
    answer(monkeypatch, sbatch=(1, said), sinfo="8000\n16000\n")
    with pytest.raises(Refused, match=r"Asked: 61036M a node; the largest has 16000M$"):
        asyncio.run(SlurmQueue().submit(str(script), 1))


def refusal(monkeypatch, tmp_path, lines) -> QueueError:
    script = tmp_path / "script.sh"
    script.touch()
    answer(monkeypatch, sbatch=(1, "".join(f"sbatch: error: {line}\n" for line in lines)))
    with pytest.raises(QueueError) as caught:
        asyncio.run(SlurmQueue().submit(str(script), 1))
    return caught.value


@pytest.mark.parametrize(
    "lines",
    [
        ["Batch job submission failed: Socket timed out on send/recv operation"],
        ["Munge decode failed: Invalid credential", MUNGE[-1]],
    ],
)
def test_a_lost_answer_is_no_refusal(monkeypatch, tmp_path, lines):
    """Regression: one that munge could not decode was taken for a limit that passes."""
    error = refusal(monkeypatch, tmp_path, lines)
    assert isinstance(error, NoAnswer)
    assert "See with squeue whether the job is there" in str(error)


def test_the_cluster_is_the_same_for_all_commands(monkeypatch):
    monkeypatch.setenv("SBATCH_CLUSTERS", "a")
    monkeypatch.setenv("SLURM_CLUSTERS", "b")
    done = asyncio.run(SlurmQueue().run("env"))
    assert "SBATCH_CLUSTERS" not in done.stdout
    assert "SLURM_CLUSTERS=b\n" in done.stdout


def test_a_command_that_nobody_waits_for_is_killed(tmp_path):
    """A cluster that closed while squeue hung said that its thread could not be joined."""
    queue, note = SlurmQueue(), tmp_path / "pid"
    queue.timeout_s = 600

    async def give_up() -> None:
        hangs = asyncio.create_task(queue.run("sh", "-c", f"echo $$ >{note}; sleep 600; true"))
        while not (note.exists() and note.read_text()):  # noqa: ASYNC110
            await asyncio.sleep(0.02)
        hangs.cancel()
        with pytest.raises(asyncio.CancelledError):
            await hangs
        pid = int(note.read_text())
        try:  # without the kill, its thread would hold up the end of the loop
            await asyncio.to_thread(wait_for, lambda: not os.path.exists(f"/proc/{pid}"), 20)
        except AssertionError:
            os.killpg(pid, signal.SIGKILL)
            raise

    asyncio.run(give_up())


def test_ids_of_one_array_are_cancelled_together(monkeypatch):
    calls = answer(monkeypatch, scancel="")
    asyncio.run(SlurmQueue().cancel(["7", *(f"2000_{n}" for n in range(3)), "2001_7"]))
    asyncio.run(SlurmQueue().cancel([]))
    assert calls == [("scancel", "7", "2000_[0,1,2]", "2001_[7]")]


@pytest.mark.parametrize(
    ("said", "fails"),
    [
        ("scancel: error: Kill job error on job id 5: Invalid job id specified\n", False),
        ("Kill job error on job id 5: Job/step already completing or completed\n", False),
        ("Invalid job id specified\nAccess/permission denied\n", True),
        ("", True),
    ],
)
def test_a_job_that_is_over_may_be_cancelled(monkeypatch, said, fails):
    answer(monkeypatch, scancel=(1, said))
    with pytest.raises(QueueError, match="scancel failed: ") if fails else nullcontext():
        asyncio.run(SlurmQueue().cancel(["5"]))


@pytest.mark.parametrize(
    ("config", "limit"),
    [
        ("MaxArraySize            = 1001\n", 1001),
        ("MaxArraySize            = 0\n", 1),
        ("SchedulerParameters     = bf_x,max_array_tasks=50\nMaxArraySize = 1001\n", 50),
        ("", 1001),
    ],
)
def test_limit(monkeypatch, config, limit):
    calls = answer(monkeypatch, scontrol="Configuration data\n" + config)
    queue = SlurmQueue()
    assert [asyncio.run(queue.limit()) for _ in range(2)] == [limit, limit]
    assert calls == [("scontrol", "show", "config")]


@pytest.mark.parametrize("reason", ["JobHeldUser", "job requeued in held state"])
def test_who_waits_for_held_jobs_is_told_how_to_release_them(reason: str):
    """Regression: nobody was told of a job that `scontrol requeuehold` had put back."""
    assert SlurmQueue.lasting(reason) == "Release them: scontrol release JOB"
