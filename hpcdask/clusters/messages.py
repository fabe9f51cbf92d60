"""Messages for the user on jobs, on a silent queue, and on why nothing more is submitted."""

from __future__ import annotations

from hpcdask.errors import HpcdaskError, JobsFailed, NotHere, QueueError
from hpcdask.jobs.detached import scheduler_job
from hpcdask.jobs.folder import ClusterFolder
from hpcdask.queues.base import Queue

from .job import Job
from .reconcile import Failure

#: Why a cluster ends that nobody closed.
SHUT_DOWN = (
    "the scheduler was shut down, such as by Client.shutdown, so its jobs are cancelled and this "
    "cluster is closed: make a new one"
)

#: What to do where a detached cluster's scheduler runs on a node that may not submit.
FROM_LOGIN_NODE = (
    "The node of the cluster's scheduler may not submit jobs: make the cluster on a login node, "
    "with scheduler_job=None, which keeps its scheduler there"
)


def no_submission(error: HpcdaskError, queue: Queue, folder: ClusterFolder) -> str:
    """Return the error's text, with advice if the scheduler's node may not submit."""
    text = str(error)
    denied = isinstance(error, NotHere) or queue.denied.search(text)
    if denied and scheduler_job(folder) is not None:
        return f"{text.rstrip('. ')}. {FROM_LOGIN_NODE}"
    return text


def job_ended(job: Job, folder: ClusterFolder) -> str:
    """Return a text on a job that nobody had ended."""
    code = "" if job.exit_code is None else f", exit code {job.exit_code}"
    reason = f" ({job.reason})" if job.reason else ""
    return f"job {job.id} has ended: {job.state}{reason}{code}{_log(job, folder)}"


def job_stuck(job: Job, folder: ClusterFolder) -> str:
    """Return a text on a job that the queue would keep for ever."""
    return (
        f"job {job.id} is given up, as one that failed: the queue could not start it, and holds it "
        f"({job.reason}){_log(job, folder)}"
    )


def _log(job: Job, folder: ClusterFolder) -> str:
    logs = folder.logs_of([job.id])[job.id]
    return f". Log: {logs[-1]}" if logs else ""


def stopped(error: HpcdaskError) -> str:
    """Return a text that nothing more is submitted, and why."""
    again = "Nothing more is submitted until scale() or adapt() asks again"
    text = str(error)  # its end may be that of a log, in lines of its own
    return f"error: {text}\n{again}" if "\n" in text else f"error: {text}. {again}"


def jobs_failed(failure: Failure, start_timeout_s: float, folder: ClusterFolder) -> JobsFailed:
    """Return the error where too many jobs died, or did not start, with the end of the last log."""
    job = failure.job
    late = job.overdue and not job.arrived and not job.stuck
    what = f"{failure.count} jobs died within an hour"
    if failure.kind == "start":
        did = "brought no workers" if late else "ended before their workers connected"
        what = f"{failure.count} jobs in a row {did}"
    if late:
        which = f"{job.size - len(job.workers)} of its workers" if job.workers else "its workers"
        how = f"{which} did not connect within {start_timeout_s:g} s (start_timeout)"
    else:
        code = "unknown" if job.exit_code is None else job.exit_code
        how = ", ".join(filter(None, [str(job.state), job.reason, f"exit code {code}"]))
    tail = "\n".join(folder.tails([job.id], 10)[job.id])
    return JobsFailed(
        f"{what}. The last was job {job.id}: {how}. Script and log are in {folder.path}"
        + (f", its log ends:\n{tail}" if tail else f", {NO_LOG}")
    )


#: Of a job that wrote nothing.
NO_LOG = (
    "its log is empty: it may have ended before Python started. Check job_script_prologue and "
    "python"
)


def words(error: BaseException) -> str:
    """Return the error of a query; an answer that makes no sense may be any exception."""
    return str(error) if isinstance(error, QueueError) else f"{type(error).__name__}: {error}"
