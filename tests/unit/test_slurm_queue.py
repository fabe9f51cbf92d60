"""SLURM's door without a SLURM: the script, and what its commands print."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
from datetime import timedelta
from types import SimpleNamespace

import pytest

from hpcdask.errors import NoAnswer, QueueError, Refused, UsageError
from hpcdask.queues import slurm_errors, slurm_output
from hpcdask.queues.base import Request
from hpcdask.queues.job_state import QueueState, QueueStatus
from hpcdask.queues.script import double_quoted, one_line
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


def job(*extra: str, header: tuple[str, ...] = (), prologue: tuple[str, ...] = ()):
    """Return what a door uses of dask-jobqueue's Job."""
    usual = ("-J placeholder", "-p gpu", "-n 1", "--cpus-per-task=8", "--mem=60G", "-t 02:00:00")
    lines = [f"#SBATCH {option}" for option in (*(header or usual), *extra)]
    return SimpleNamespace(
        shebang="#!/usr/bin/env bash",
        job_header="\n".join(lines),
        job_extra_directives=list(extra),
        _job_script_prologue=list(prologue),
    )


USUAL = job()


def request_of(**changes) -> Request:
    return Request(**{"name": "train", "tag": "hpcdask:ab12", "folder": "/home/me/logs", **changes})


def directives(request: Request, queue: SlurmQueue | None = None, job=USUAL) -> list[str]:
    script = (queue or SlurmQueue()).script(job, request, [], "true")
    return [line for line in script.splitlines() if line.startswith("#SBATCH")]


def test_script():
    script = SlurmQueue().script(
        job("--constraint=h200", prologue=("module load cuda",)),
        request_of(gpu_type="h200", gpus=2),
        ["umask 077", "exec >>log 2>&1"],
        "exec python -m hpcdask.worker",
    )
    assert (
        script
        == """\
#!/usr/bin/env bash
#SBATCH --job-name="train"
#SBATCH -p gpu
#SBATCH -n 1
#SBATCH --cpus-per-task=8
#SBATCH --mem=60G
#SBATCH -t 02:00:00
#SBATCH --constraint=h200
#SBATCH --gres=gpu:h200:2
#SBATCH --comment="hpcdask:ab12"
#SBATCH --output="/home/me/logs/queue-%A_%a.log"

umask 077
exec >>log 2>&1
module load cuda
exec python -m hpcdask.worker
"""
    )


@pytest.mark.parametrize(
    ("option", "changes", "line"),
    [
        ("gres", {"gpus": 1}, "--gres=gpu:1"),
        ("gres", {"gpus": 8, "nodes": 2, "gpu_type": "a100"}, "--gres=gpu:a100:4"),
        ("gpus-per-node", {"gpus": 8, "nodes": 2}, "--gpus-per-node=4"),
        ("gpus-per-node", {"gpus": 2, "gpu_type": "a100"}, "--gpus-per-node=a100:2"),
        ("gpus", {"gpus": 7, "nodes": 2}, "--gpus=7"),
        ("gpus", {"gpus": 2, "gpu_type": "a 100"}, '--gpus="a 100:2"'),
    ],
)
def test_gpu_request(option, changes, line):
    lines = directives(request_of(**changes), SlurmQueue(gpu_request=option))
    assert f"#SBATCH {line}" in lines


def test_bad_gpu_requests():
    with pytest.raises(UsageError, match="'tres' is not one of gres, gpus-per-node, gpus"):
        SlurmQueue(gpu_request="tres")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="3 GPUs cannot be shared evenly by 2 nodes"):
        directives(request_of(gpus=3, nodes=2))


def test_several_nodes():
    assert not [line for line in directives(request_of(gpus=0)) if "gpu:" in line]
    lines = directives(request_of(gpus=4, nodes=2))
    assert "#SBATCH --nodes=2 --ntasks-per-node=1" in lines
    assert "#SBATCH -n 1" not in lines
    assert "#SBATCH --gres=gpu:2" in lines


def test_quoting():
    header = ("-J placeholder", "-A it's me", "-p a;b", "--mem=1 G", "--cpus-per-task=8")
    lines = directives(
        request_of(name='a "b" \\c #d', folder="/me/50% of 'it'/#1"), job=job(header=header)
    )
    assert lines == [
        '#SBATCH --job-name="a \\"b\\" \\\\c #d"',
        '#SBATCH -A "it\'s me"',
        '#SBATCH -p "a;b"',
        '#SBATCH --mem="1 G"',
        "#SBATCH --cpus-per-task=8",
        "#SBATCH --gres=gpu:1",
        '#SBATCH --comment="hpcdask:ab12"',
        "#SBATCH --output=\"/me/50%% of 'it'/#1/queue-%A_%a.log\"",
    ]


@pytest.mark.parametrize(
    "bad",
    [
        {"name": "two\nlines"},
        {"folder": "/me/two\nlines"},
        {"folder": "/me/back\\slash"},
        {"gpu_type": "a100\n#SBATCH -N 99"},
    ],
)
def test_what_no_line_can_say_is_refused(bad):
    with pytest.raises(UsageError, match=r"line end|backslash"):
        directives(request_of(**bad))


@pytest.mark.parametrize(
    "directive",
    [
        "--clusters=other",
        "--cluster=other",
        "-M other",
        "-Mother",
        "--exclusive -M other # why",
        "-M 'other",
    ],
)
def test_directives_that_name_another_cluster_are_refused(directive):
    with pytest.raises(UsageError, match=r"squeue and scancel would not .* set SLURM_CLUSTERS in"):
        directives(request_of(), job=job(directive))


@pytest.mark.parametrize(
    "directive",
    [
        *("--cluster-constraint=x", "--comment='a -M b'", "--exclusive # -M b", "--mail-user=M"),
        "-A two words # why",
    ],
)
def test_other_directives_are_not_refused(directive):
    assert f"#SBATCH {directive}" in directives(request_of(name="-M x"), job=job(directive))


def test_double_quoted():
    assert double_quoted('a"\\$', "x") == '"a\\"\\\\$"'
    assert double_quoted("a$", "x", escaped="$") == '"a\\$"'
    with pytest.raises(UsageError, match=r"name 'a\\tb' has a control character"):
        one_line("a\tb", "name")


@pytest.mark.parametrize(
    ("text", "minutes"),
    [
        ("90", 90),
        ("90:30", 90.5),
        ("36:00:00", 36 * 60),
        ("1-12", 36 * 60),
        ("1-12:30", 36 * 60 + 30),
        (" 1-12:30:30 ", 36 * 60 + 30.5),
    ],
)
def test_walltime(text, minutes):
    assert SlurmQueue.parse_walltime(text) == timedelta(minutes=minutes)
    for unlimited in ("UNLIMITED", "infinite"):
        assert SlurmQueue.parse_walltime(unlimited) == timedelta.max


@pytest.mark.parametrize("text", ["", "2h", "1:2:3:4", "-5", "1-", "0", "00:00", "1.5", "1-1-1"])
def test_bad_walltime(text):
    with pytest.raises(UsageError, match=r"is not one of MINUTES, .* DAYS-HOURS:MINUTES:SECONDS"):
        SlurmQueue.parse_walltime(text)


def row(state: str, restarts=0, status="0", start="1000", end="5000", nodes="n1", reason="None"):
    return f"7_1;{state};{restarts};{status};{start};{end};{nodes};{reason};"


RAN = {"started": 1000.0, "nodes": "n1"}
WAITS = {"start": "N/A", "end": "N/A", "nodes": ""}


@pytest.mark.parametrize(
    ("line", "state", "facts"),
    [
        (row("PENDING", **WAITS, reason="Resources"), "pending", {"reason": "Resources"}),
        (
            row("PENDING", 2, start="9000", reason="ReqNodeNotAvail; May be reserved"),
            "requeued",
            {"reason": "ReqNodeNotAvail; May be reserved", "restarts": 2, "nodes": "n1"},
        ),
        (
            row("REQUEUE_HOLD", 1),
            "requeued",
            {"reason": "REQUEUE_HOLD", "restarts": 1, "nodes": "n1"},
        ),
        (
            row("RESV_DEL_HOLD", **WAITS, reason="Reservation r1 is gone"),
            "pending",
            {"reason": "RESV_DEL_HOLD: Reservation r1 is gone"},
        ),
        # its nodes boot
        (row("CONFIGURING"), "pending", {"reason": "CONFIGURING", "nodes": "n1"}),
        (
            row("POWER_UP_NODE", 1, reason="x"),
            "requeued",
            {"reason": "POWER_UP_NODE: x", "restarts": 1, "nodes": "n1"},
        ),
        # its end is still to come: it will run again
        (
            row("COMPLETING", 1),
            "requeued",
            {"reason": "COMPLETING", "restarts": 1, "nodes": "n1"},
        ),
        (row("CANCELLED", start="1500", nodes=""), "cancelled", {"started": 1500.0}),
        (row("RUNNING", 1, end="NONE"), "running", {"restarts": 1, **RAN}),
        (row("RUNNING"), "running", {"ends": 5000.0, **RAN}),
        (row("SUSPENDED"), "running", {"reason": "SUSPENDED", "ends": 5000.0, **RAN}),
        (row("COMPLETING", end="1999"), "running", {"reason": "COMPLETING", **RAN}),
        # the controller's clock is ahead
        (row("COMPLETING", end="2025"), "running", {"reason": "COMPLETING", **RAN}),
        (row("COMPLETED"), "completed", {"exit_code": 0, **RAN}),
        (row("FAILED", status="768", reason="X"), "failed", {"reason": "X", "exit_code": 3, **RAN}),
        (row("FAILED", status="9", reason="X"), "failed", {"reason": "X", "exit_code": 137, **RAN}),
        (row("FAILED", status="3:0"), "failed", {"exit_code": 3, **RAN}),  # of newer versions
        (row("TIMEOUT", reason="X"), "timeout", {"reason": "TIMEOUT: X", **RAN}),
        (row("NODE_FAIL", status="1", reason="X"), "failed", {"reason": "NODE_FAIL: X", **RAN}),
        (row("OUT_OF_MEMORY", status="0:125"), "failed", {"reason": "OUT_OF_MEMORY", **RAN}),
        (row("PREEMPTED", status="15"), "preempted", {"exit_code": 143, **RAN}),
        (row("DEADLINE"), "timeout", {"reason": "DEADLINE", **RAN}),
        (row("BOOT_FAIL"), "failed", {"reason": "BOOT_FAIL", **RAN}),
    ],
)
def test_squeue(line, state, facts):
    job = QueueStatus("7_1", QueueState(state), **facts)
    assert slurm_output.parse_squeue(line + "\n", NOW) == {"7_1": job}


def test_squeue_of_several():
    text = "CLUSTER: site\n" + row("RUNNING") + "\n8;COMPLETED;0;0;1;2;n1;None;\n9+0;RUNNING;0;\n"
    assert set(slurm_output.parse_squeue(text, NOW)) == {"7_1", "8"}


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
def test_elements_of_an_array(shown, ids):
    assert slurm_output.expand(shown) == ids


@pytest.mark.parametrize("shown", ["7_[0,2,4", "7_[0-9,...]", "7_[1-]"])
def test_elements_that_are_not_shown_whole(shown):
    with pytest.raises(QueueError, match="squeue shortened '7_"):
        slurm_output.expand(shown)


def test_waiting_elements_are_one_line():
    line = "7_[0-2%1];PENDING;0;0;N/A;N/A;;Resources;\n"
    seen = slurm_output.parse_squeue(line, NOW)
    assert seen == {
        f"7_{n}": QueueStatus(f"7_{n}", QueueState.PENDING, "Resources") for n in range(3)
    }


def test_a_state_nobody_knows_is_as_if_the_job_were_not_shown(monkeypatch):
    answer(monkeypatch, squeue=row("FROZEN"), scontrol="")
    queue = SlurmQueue()
    assert asyncio.run(queue.query(["7_1"])) == {}
    assert asyncio.run(queue.departed(["7_1", "8_1"])) == {}


def test_elements_that_left_their_array():
    ids = ["7_1", "7_2", "8_1", "9"]
    over = QueueStatus("7_2", QueueState.CANCELLED, "before it started")
    assert slurm_output.left(ids, {"7_1", "9_1"}) == {"7_2": over}
    assert slurm_output.left(["7_2"], {"7"}) == {
        "7_2": over
    }  # the rest of an array, cancelled as one


def test_squeue_answers_something_else():
    assert slurm_output.parse_squeue("", NOW) == {}
    with pytest.raises(QueueError, match="squeue answered 'Welcome!', which is not"):
        slurm_output.parse_squeue("Welcome!\n", NOW)


def test_sacct():
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
    seen = slurm_output.parse_sacct(text)
    assert seen == {
        "5": QueueStatus("5", QueueState.COMPLETED, "", 0, started=1000.0, nodes="n1"),
        "6_0": QueueStatus("6_0", QueueState.FAILED, "", 3, started=1000.0, nodes="n1"),
        "6_1": QueueStatus("6_1", QueueState.FAILED, "", 137, started=1000.0, nodes="n[1-2]"),
        "6_2": QueueStatus("6_2", QueueState.CANCELLED, "by user 0"),
        "6_3": QueueStatus(
            "6_3", QueueState.CANCELLED, "by user 4294967290", 143, started=1000.0, nodes="n1"
        ),
        "6_4": QueueStatus("6_4", QueueState.TIMEOUT, "TIMEOUT", started=1000.0, nodes="n1"),
        "7_8": QueueStatus("7_8", QueueState.CANCELLED, "by user 0"),
        "7_9": QueueStatus("7_9", QueueState.CANCELLED, "by user 0"),
        "6_5": QueueStatus("6_5", QueueState.FAILED, "OUT_OF_MEMORY", started=1000.0, nodes="n1"),
    }


def refusal(*lines: str) -> QueueError:
    stderr = "".join(f"sbatch: error: {line}\n" for line in lines)
    done = subprocess.CompletedProcess(["sbatch"], 1, "", stderr)
    return slurm_errors.refused(done, "/me/script.sh")


POLICY = (
    "Batch job submission failed: Job violates accounting/QOS policy "
    "(job submit limit, user's size and/or time limits)"
)


@pytest.mark.parametrize(
    ("lines", "for_now"),
    [
        (["QOSMaxSubmitJobPerUserLimit", POLICY], True),
        (["AssocMaxSubmitJobLimit", POLICY], True),
        ([POLICY], True),
        (["QOSMaxWallDurationPerJobLimit", POLICY], False),
        (["AssocMaxWallDurationPerJobLimit", POLICY], False),
        (["Slurm temporarily unable to accept job, sleeping and retrying"], True),
        (["Batch job submission failed: Resource temporarily unavailable"], True),
        (["Unable to contact slurm controller (connect failure)"], True),
        (["Batch job submission failed: Invalid job array specification"], True),
        (["Batch job submission failed: Invalid partition name specified"], False),
    ],
)
def test_limits_pass_and_other_refusals_do_not(lines, for_now):
    error = refusal(*lines)
    assert isinstance(error, Refused)
    assert error.for_now is for_now


MUNGE = (
    "If munged is up, restart with --num-threads=10",
    'Munge encode failed: Failed to access "/run/munge/munge.socket.2": No such file or directory',
    "slurm_send_node_msg: auth_g_create: REQUEST_SUBMIT_BATCH_JOB has authentication error",
    "Batch job submission failed: Protocol authentication error",
)
DOWN = "Batch job submission failed: Required partition not available (inactive or drain)"


@pytest.mark.parametrize(
    "lines", [MUNGE, *((line,) for line in (*MUNGE, DOWN)), ("Unable to contact slurm controller",)]
)
def test_what_is_away_for_all_jobs_passes_and_is_not_tried_with_fewer(lines):
    """After a short failure of munge, or a maintenance, nothing more was submitted."""
    error = refusal(*lines)
    assert isinstance(error, Refused)
    assert error.for_now
    assert not error.fewer


def test_a_partition_that_is_down_is_told_with_how_to_list_others():
    assert str(refusal(DOWN)).endswith("Script kept at /me/script.sh. Partitions: sinfo -s")


@pytest.mark.parametrize(
    ("line", "advice"),
    [
        ("Invalid account or account/partition combination specified", "Accounts: sacctmgr show"),
        ("Invalid qos specification", "Limits: sacctmgr show qos"),
        ("Requested node configuration is not available", 'sinfo -o "%P %G'),
        ("Invalid generic resource (gres) specification", 'sinfo -o "%P %G'),
        ("Requested time limit is invalid (missing or exceeds some limit)", 'sinfo -o "%P %l"'),
        ("Invalid feature specification", 'sinfo -o "%P %f"'),
        ("Requested reservation is invalid", "scontrol show reservation"),
    ],
)
def test_a_refusal_tells_what_lists_the_valid_ones(line, advice):
    text = str(refusal(f"Batch job submission failed: {line}"))
    assert text.startswith(f"sbatch refused the job: {line}. Script kept at /me/script.sh. ")
    assert advice in text.partition("script.sh. ")[2]
    assert "\n" not in text


@pytest.mark.parametrize(
    "lines",
    [
        ["Batch job submission failed: Socket timed out on send/recv operation"],
        ["Munge decode failed: Invalid credential", MUNGE[-1]],
    ],
)
def test_a_lost_answer_is_no_refusal(lines):
    error = refusal(*lines)
    assert isinstance(error, NoAnswer)
    assert "See with squeue whether the job is there" in str(error)


@pytest.mark.parametrize(
    ("said", "kind"),
    [
        ("scontrol: error: Unable to contact slurm controller", NoAnswer),
        ("slurm_load_ctl_conf error: Socket timed out on send/recv operation", NoAnswer),
        (f"scontrol: error: {MUNGE[1]}", NoAnswer),
        ("scontrol: unrecognized option", QueueError),
    ],
)
def test_a_controller_that_is_away_for_a_moment(said, kind):
    """scontrol is asked before sbatch; a cluster tries that again, too."""
    error = slurm_errors.failed(subprocess.CompletedProcess(["scontrol"], 1, "", said))
    assert type(error) is kind


def test_the_cluster_is_the_same_for_all_commands(monkeypatch):
    monkeypatch.setenv("SBATCH_CLUSTERS", "a")
    monkeypatch.setenv("SLURM_CLUSTERS", "b")
    done = SlurmQueue()._run(["env"], None, None)
    assert "SBATCH_CLUSTERS" not in done.stdout
    assert "SLURM_CLUSTERS=b\n" in done.stdout


def test_a_command_that_nobody_waits_for_is_killed(tmp_path):
    """A cluster that closed while squeue hung said that its thread could not be joined."""
    queue, note = SlurmQueue(timeout_s=600), tmp_path / "pid"

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


@pytest.mark.parametrize(("clusters", "option"), [("", []), ("b", ["--clusters=b"])])
def test_accounting_is_asked_about_the_same_cluster(monkeypatch, clusters, option):
    calls = answer(
        monkeypatch, sacct="", scontrol="AccountingStorageType = accounting_storage/slurmdbd\n"
    )
    monkeypatch.setenv("SLURM_CLUSTERS", clusters)
    assert asyncio.run(SlurmQueue().departed(["7_1"])) == {}
    assert [word for word in calls[-1] if word.startswith("--clusters")] == option


def test_ids_of_one_array_are_cancelled_together(monkeypatch):
    calls = answer(monkeypatch, scancel="")
    ids = [*(f"{job}" for job in range(1, 1002)), *(f"2000_{n}" for n in range(3)), "2001_7"]
    asyncio.run(SlurmQueue().cancel(ids))
    assert [len(call) for call in calls] == [1001, 4]
    assert calls[1] == ("scancel", "1001", "2000_[0,1,2]", "2001_[7]")
    asyncio.run(SlurmQueue().cancel([]))
    assert len(calls) == 2


@pytest.mark.parametrize(
    "said",
    [
        "scancel: error: Kill job error on job id 5: Invalid job id specified\n",
        "Kill job error on job id 5: Job/step already completing or completed\n",
    ],
)
def test_cancelling_a_job_that_is_over(monkeypatch, said):
    answer(monkeypatch, scancel=(1, said))
    asyncio.run(SlurmQueue().cancel(["5"]))


@pytest.mark.parametrize("said", ["Invalid job id specified\nAccess/permission denied\n", ""])
def test_a_scancel_that_fails(monkeypatch, said):
    answer(monkeypatch, scancel=(1, said))
    with pytest.raises(QueueError, match="scancel failed: "):
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
