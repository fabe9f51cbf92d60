"""What the measuring commands accept, report and refuse."""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import signal
import subprocess
import sys
import time
import types
from pathlib import Path
from types import SimpleNamespace

import dask
import pytest
from distributed import Client, KilledWorker, LocalCluster
from distributed.client import FutureCancelledError
from distributed.comm import CommClosedError
from threadpoolctl import threadpool_limits

from hpcdask.bench import cluster as bench_cluster
from hpcdask.bench import command, exchange, execution, limits, startup, summary, zarr
from hpcdask.bench import workload as bench_workload
from hpcdask.bench.array import run_array
from hpcdask.bench.options import OutputFile
from hpcdask.bench.records import Case, rate
from hpcdask.bench.workload import Timed, record
from hpcdask.bootstrap.environment import interpreter
from hpcdask.errors import ClusterError, UsageError
from hpcdask.workloads import WorkloadError
from hpcdask.workloads import array as array_workload

GPU = {
    "host": "n1",
    "gpu": True,
    "cuda": True,
    "why": "",
    "name": "H200",
    "memory": 1,
    "cupy": "14",
}
BROKEN = {"host": "n2", "gpu": True, "cuda": False, "why": 'CuPy is missing: pip install "x"'}
BARE = {"host": "n3", "gpu": False, "cuda": False, "why": "no device"}


@pytest.fixture(scope="module")
def client():
    # the process is that of all tests before, and would have paused
    memory = dict.fromkeys(("target", "spill", "pause"), False)
    with (
        dask.config.set({f"distributed.worker.memory.{name}": memory[name] for name in memory}),
        threadpool_limits(1),  # as in a worker; the threads of two would wait for one another
        LocalCluster(
            n_workers=2,
            threads_per_worker=1,
            processes=False,
            dashboard_address=":0",
            memory_limit="1GiB",
        ) as local,
        Client(local) as client,
        dask.config.set({"scheduler-address": local.scheduler_address}),
    ):
        yield client


RATES = {"memory": 1e10, "random": 1e8, "matrix_float64": 1e10, "matrix_float32": 2e10, "link": 1e9}


@pytest.fixture(autouse=True)
def _rates(monkeypatch):
    """What takes three seconds to measure; test_limits does."""
    monkeypatch.setattr(limits, "measure", lambda cluster: RATES)


# --- choosing the device --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("found", "wanted", "chosen"),
    [
        ([GPU, GPU], "auto", "cuda"),
        ([GPU, GPU], "cuda", "cuda"),
        ([GPU, BROKEN], "cpu", "cpu"),
        ([BARE, BARE], "auto", "cpu"),
    ],
)
def test_device(found, wanted, chosen):
    assert bench_cluster.choose_device({f"w{i}": f for i, f in enumerate(found)}, wanted) == chosen


@pytest.mark.parametrize(
    ("found", "wanted", "message"),
    [
        ([GPU, BARE], "auto", r"1 of 2 workers have no CUDA device: w1 on n3"),
        ([BARE, BARE], "cuda", r"2 of 2 workers have no CUDA device: w0 on n3.*, w1 on n3"),
        ([GPU, BROKEN], "auto", r"w1 on n2 sees a GPU but cannot use it: CuPy is missing: pip"),
        ([BROKEN, BROKEN], "auto", "sees a GPU"),
    ],
)
def test_device_errors(found, wanted, message):
    with pytest.raises(UsageError, match=message):
        bench_cluster.choose_device({f"w{i}": f for i, f in enumerate(found)}, wanted)


def test_a_worker_whose_gpu_has_no_cupy_is_an_error(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(UsageError, match=r'pip install "hpcdask\[cuda13\]"'):
        bench_cluster.choose_device({"w0": bench_cluster.probe()}, "auto")


def test_a_worker_that_hides_its_gpus_has_none(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert not bench_cluster.probe()["gpu"]


# --- measuring ------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["tuned", "stock"])
@pytest.mark.parametrize(
    ("workload", "size", "options", "shape"),
    [
        ("array", "8MB", [], [1000, 1000]),
        ("svd", "5MB", ["--k", "4"], [52_000, 96]),
    ],
)
def test_command_reports_one_json_line(
    client, tmp_path, capsys, workload, form, size, options, shape
):
    file = tmp_path / "lines.json"
    argv = [
        *("--size", size, "--form", form, "--device", "cpu", "--repeats", "2", *options),
        *("--json", str(file)),
    ]
    file.write_text('{"before": 1}\n')
    assert command.main([workload, *argv]) == 0
    out, err = capsys.readouterr()
    line = json.loads(out)
    assert [json.loads(line) for line in file.read_text().splitlines()] == [{"before": 1}, line]
    assert (line["workload"], line["form"], line["shape"]) == (workload, form, shape)
    assert len(line["seconds"]) == 2
    assert line["seconds_min"] <= line["seconds_median"] <= line["seconds_max"]
    assert line["devices"] == {"cpu": 2}
    assert line["workers"] == 2
    assert line["dask_tasks"] > 1
    assert line["bytes"] == shape[0] * shape[1] * {"float64": 8, "uint8": 1}[line["dtype"]]
    assert all(check["ok"] for check in line["checks"])
    assert {"python", "dask", "distributed", "numpy", "cupy"} <= set(line["versions"])
    assert "on 2 x cpu (NumPy" in err
    assert "B/s" in err
    assert "0.0 GB/s" not in err
    assert "Traceback" not in err


def test_a_terminal_gets_a_table_and_the_file_json(client, tmp_path, capsys, monkeypatch):
    """It got up to 20 kB of JSON for each result."""
    monkeypatch.setattr(summary, "is_terminal", lambda: True)
    file = tmp_path / "lines.json"
    argv = ["--size", "8MB", "--form", "both", "--device", "cpu", "--json", str(file)]
    assert command.main(["array", *argv]) == 0
    heads, *rows = capsys.readouterr().out.strip().splitlines()
    assert heads.split("  ")[0] == "workload"
    assert [row.split("  ")[0] for row in rows] == ["array, tuned", "array, stock"]
    assert all("8.0 MB" in row and "% of" in row for row in rows)
    assert [json.loads(line)["form"] for line in file.read_text().splitlines()] == [
        "tuned",
        "stock",
    ]


def test_a_table_names_what_is_wrong(client, capsys, monkeypatch):
    monkeypatch.setattr(summary, "is_terminal", lambda: True)
    monkeypatch.setattr(array_workload, "LOC", 9.0)
    monkeypatch.setattr(command, "run_array", lambda cluster, *_, **__: _wrong(cluster))
    assert command.main(["array", "--size", "8MB", "--device", "cpu"]) == 1
    assert "check failed" in capsys.readouterr().out


def test_no_result_is_no_table(capsys):
    summary.show([{"workload": limits.LIMITS, "rates": RATES}])
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("terminal", [True, False])
def test_a_rank_of_open_mpi_has_the_terminal_of_mpirun(monkeypatch, terminal):
    """Open MPI gives each rank a terminal of its own."""
    reading, writing = os.openpty() if terminal else os.pipe()
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=writing) as mpirun:
        process = SimpleNamespace(pid=mpirun.pid, name=lambda: "prterun")
        monkeypatch.setattr("psutil.Process", lambda: SimpleNamespace(parents=lambda: [process]))
        monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
        assert summary.is_terminal() == terminal
        monkeypatch.setattr(sys.stdout, "isatty", lambda: False)
        assert not summary.is_terminal()
        mpirun.stdin.close()
    os.close(reading)
    os.close(writing)


@pytest.mark.parametrize(
    ("gigabytes", "text"),
    [(2283.0, "2.3 TB/s"), (0.2, "200.0 MB/s"), (0.0123, "12.3 MB/s"), (4e-6, "4.0 kB/s")],
)
def test_a_rate_is_never_told_as_zero(gigabytes, text):
    """Small arrays had 0.0 GB/s."""
    assert rate(gigabytes) == text


def test_chunk_size_bounds_the_chunks(client, capsys):
    assert command.main(["array", "--size", "8MB", "--device", "cpu", "--chunk-size", "100kB"]) == 0
    chunks = json.loads(capsys.readouterr().out)["chunks"]
    assert chunks == {"count": 84, "largest": [12, 1000]}


def test_a_wrong_result_is_exit_code_1(client, capsys, monkeypatch):
    monkeypatch.setattr(array_workload, "LOC", 9.0)
    monkeypatch.setattr(command, "run_array", lambda cluster, *_, **__: _wrong(cluster))
    assert command.main(["array", "--size", "8MB", "--device", "cpu"]) == 1
    assert "check failed: mean is 11.0, expected 10.0 within" in capsys.readouterr().err


def _wrong(cluster):
    checks = array_workload.check_sum(11.0 * 250_000, 250_000, (1000, 1000))
    case = Case("array", "tuned", (1000, 1000), "float64", 1, (1000, 1000))
    return record(case, cluster, Timed([1.0], None, 1), {}, checks)


@pytest.mark.parametrize(
    ("options", "nbytes"), [([], 2 * 10**6), (["--operation", "mean"], 2 * 10**5)]
)
def test_the_array_s_size_suits_the_cluster(client, capsys, monkeypatch, options, nbytes):
    """It was 2 TB, also without a GPU."""
    monkeypatch.setitem(command.SIZES["cpu"], "array", 10**6)
    monkeypatch.setitem(command.SIZES["cpu"], "operation", 10**5)
    assert command.main(["array", "--device", "cpu", "--repeats", "1", *options]) == 0
    assert json.loads(capsys.readouterr().out)["bytes"] == pytest.approx(nbytes, rel=0.01)


@pytest.mark.parametrize("form", ["tuned", "stock"])
def test_bars_tell_the_warm_up(client, monkeypatch, form):
    titles = []

    @contextlib.contextmanager
    def progress(_client, title, _n_tasks):
        titles.append(title)
        yield

    monkeypatch.setattr(bench_workload, "progress", progress)
    run_array(bench_cluster.inspect(client, "cpu"), 8_000_000, repeats=2, form=form)
    assert titles == ["warm-up", "run 1 of 2", "run 2 of 2"]


def test_progress_follows_the_scheduler(client, monkeypatch):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    monkeypatch.setattr(bench_workload, "PROGRESS_INTERVAL_S", 0.01)
    cluster = bench_cluster.inspect(client, "cpu")
    assert run_array(cluster, 8_000_000, repeats=1)["checks"][0]["ok"]


# --- refusing -------------------------------------------------------------------------------------


@pytest.fixture
def no_cluster(monkeypatch):
    """Nothing may be started."""

    def start(*_):
        raise AssertionError("a cluster was asked for")

    monkeypatch.setattr(execution, "connect", start)
    monkeypatch.setattr(os, "execv", start)


@pytest.mark.parametrize(
    ("workload", "argv", "message"),
    [
        ("array", ["--size", "2XX"], "'2XX' is not a size: a number of bytes with a unit"),
        ("array", ["--size", "-5GB"], "is not a size"),
        ("array", ["--size="], "'--size': '' is not a size"),
        ("array", ["--size", "GB"], "'GB' is not a size"),
        ("array", ["--size", "1MB", "--chunk-size="], "'--chunk-size': '' is not a size"),
        ("exchange", ["--transpose-size", " "], "'--transpose-size': ' ' is not a size"),
        ("array", ["--size", "31"], "too small: the least is 32 B"),
        ("array", ["--size", "1MB", "--chunk-size", "0"], "'--chunk-size': '0' is not a size"),
        ("array", ["--size", "1MB", "--scheduler-file", "/none.json"], "/none.json does not exist"),
        ("array", ["--size", "1MB", "--repeats", "0"], "--repeats"),
        ("array", ["--form", "best"], "--form"),
        ("array", ["--frob"], "--frob"),
        ("svd", ["--size", "100"], "too small"),
        ("svd", ["--size", "5MB", "--k", "101"], "k=101 is out of range"),
        ("svd", ["--size", "5MB", "--k", "0"], "k=0 is out of range"),
        ("svd", ["--size", "5MB", "--k", "101", "--form", "stock"], "k=101 is out of range"),
        ("svd", ["--size", "90GB"], "does not fit 2 x cpu"),
        ("svd", ["--size", "90GB"], "or --packed, up to 2576MB; or --stream, any size"),
        ("svd", ["--size", "90GB", "--packed"], "2576MB is the most; or --stream, any size"),
        ("svd", ["--size", "90GB", "--exact"], "--size 644MB is the most"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(client, capsys, workload, argv, message):
    assert command.main([workload, *argv, "--device", "cpu"]) == 2
    out, err = capsys.readouterr()
    assert not out
    last = err.splitlines()[-1]
    assert last.startswith("hpcdask: error: ")
    assert message in last
    assert len(err.splitlines()) == 1


def test_an_error_of_a_worker_is_one_line(client, capsys, monkeypatch):
    def refuse(*_, **__):
        raise WorkloadError("a CUDA worker needs CuPy")

    monkeypatch.setattr(command, "run_array", refuse)
    assert command.main(["array", "--size", "8MB", "--device", "cpu"]) == 2
    assert capsys.readouterr().err == "hpcdask: error: a CUDA worker needs CuPy\n"


@pytest.mark.parametrize(("argv", "runner"), [([], []), (["--device", "cpu"], ["--device", "cpu"])])
def test_without_a_cluster_it_becomes_the_program_of_a_runner(argv, runner, monkeypatch):
    started = []
    monkeypatch.setattr(os, "execv", lambda *command: started.append(command) or sys.exit(7))
    monkeypatch.delitem(dask.config.config, "scheduler-address", raising=False)
    monkeypatch.delenv(startup.AHEAD, raising=False)
    assert command.main(["array", "--size", "1MB", *argv]) == 7
    assert 0 < float(os.environ[startup.AHEAD]) <= startup.age()
    again = ["array", "--size", "1MB", *argv]
    whole = [*interpreter(), "-m", "hpcdask.run", *runner, "-m", "hpcdask.bench", *again]
    assert started == [(sys.executable, whole)]


def test_startup_of_a_cluster_of_its_own(tmp_path):
    """Alone: a cluster around it; one JSON line, nothing else on stdout."""
    root = Path(command.__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-m", "hpcdask.bench", "startup", "--device", "cpu"],
        env={**os.environ, "PYTHONPATH": str(root)},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    line = json.loads(done.stdout)
    assert list(line["devices"]) == ["cpu"]
    names = [part["name"] for part in line["phases"]]
    assert names == [startup.PHASES[event] for event in PHASES_WITHOUT_GPU]
    assert all(part["seconds"] > 0 for part in line["phases"])
    until_ready = sum(part["seconds"] for part in line["phases"][:-2])
    assert 0 < until_ready <= line["seconds_max"] * 1.01
    assert "until the last of" in done.stderr
    assert " 0.00 s" not in done.stderr


PHASES_WITHOUT_GPU = [
    *("distributed imported", "worker forked", "registered", "transport started", "warm"),
]


def test_when_a_process_began():
    before = time.time()
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        after = time.time()
        tick = 1 / os.sysconf("SC_CLK_TCK")
        assert before - tick <= startup._began(process.pid) <= after + tick
        process.communicate(b"\n")
    assert startup._began(process.pid) == math.inf


@pytest.mark.parametrize(("ahead", "launcher"), [(None, 30.0), (28.0, 2.0), (31.0, None)])
def test_imports_of_the_bench_are_not_the_launcher_s(monkeypatch, ahead, launcher):
    """Before it becomes the runner it takes seconds, which workers wait for otherwise."""
    monkeypatch.setenv(startup.STARTED, "1000.0")
    monkeypatch.delenv(startup.AHEAD, raising=False)
    if ahead is not None:
        monkeypatch.setenv(startup.AHEAD, str(ahead))
    above = [SimpleNamespace(pid=1, name=lambda: "mpirun")]
    monkeypatch.setattr("psutil.Process", lambda: SimpleNamespace(parents=lambda: above))
    monkeypatch.setattr(startup, "_began", lambda pid: 970.0)
    monkeypatch.setattr(startup, "marks", [(1.0, "registered")])
    found = startup._marks()
    if launcher is None:
        assert found == [(1.0, "registered")]
    else:
        assert found == [(launcher, startup.LAUNCHER_DONE), (launcher + 1.0, "registered")]


def test_phases_of_a_worker_that_was_started_again():
    life = [(1.0, "GPUs found"), (2.0, "distributed imported"), (9.0, "worker forked")]
    marks = [*life, (9.5, "registered"), (9.75, "warm")]
    found = startup.phases(marks)
    assert found == {
        "interpreter, imports": 2.0,
        "ranks meet, scheduler, nanny": 7.0,
        "registration": 0.5,
        "first transfers": 0.25,
    }


def test_phases_of_a_worker_whose_context_was_made_before_the_ranks_met():
    early = [(1.0, "distributed imported"), (1.5, "CUDA context made")]
    found = startup.phases([*early, (2.25, "worker forked"), (2.25, "packages imported")])
    assert found == {
        "interpreter, imports": 1.0,
        "CUDA context": 0.5,
        "ranks meet, scheduler, nanny": 0.75,
        "imports of CUDA packages": 0.0,
    }


def test_startup_of_workers_that_others_started(client, capsys):
    assert command.main(["startup", "--device", "cpu"]) == 2
    assert "start-up is measured of workers that hpcdask started" in capsys.readouterr().err


@pytest.mark.parametrize("operation", array_workload.NAMES)
def test_operations(client, capsys, operation):
    argv = ["array", "--size", "2MB", "--device", "cpu", "--operation", operation, "--repeats", "1"]
    assert command.main(argv) == 0
    line = json.loads(capsys.readouterr().out)
    assert line["label"] == f"array {operation}, stock"
    assert line["limit"]["fraction"] > 0
    assert line["rates"] == RATES


@pytest.mark.parametrize(
    ("operation", "where", "most"),
    [("matmul", "every worker", "268MB"), ("stencil", "the workers", "1073MB")],
)
def test_an_operation_that_keeps_its_array_needs_room(client, capsys, operation, where, most):
    argv = ["array", "--size", "90GB", "--device", "cpu", "--operation", operation]
    assert command.main(argv) == 2
    said = capsys.readouterr().err
    assert f"keeps its array of 90.0 GB on {where}; 2 x cpu" in said
    assert f"--size {most} is the most. sum, mean, std" in said


@pytest.mark.parametrize(
    ("options", "label", "nbytes"),
    [
        (["--exact", "--size", "320kB"], "svd exact, stock", 320_000),
        (["--packed", "--size", "5MB", "--k", "4"], "svd 2 bits, tuned", 4_992_000),
        (["--stream", "--size", "5MB", "--k", "4"], "svd streamed, tuned", 4_992_000),
    ],
)
def test_kinds_of_svd(client, capsys, options, label, nbytes):
    assert command.main(["svd", *options, "--device", "cpu", "--repeats", "1"]) == 0
    line = json.loads(capsys.readouterr().out)
    assert (line["label"], line["bytes"]) == (label, nbytes)
    assert line["limit"]["by"] in ("memory", "matrix_float64", "matrix_float32")


def test_a_store_that_was_not_written_to_its_end_is_no_store(client, tmp_path, monkeypatch):
    """The next call took it for the user's own, and measured zeros."""
    path = tmp_path / "g.zarr"
    write = zarr.made_genotypes.write_genotypes

    def break_off(*args, **kwargs):
        write(*args, **kwargs)  # makes it, and writes nothing
        raise KeyboardInterrupt

    argv = ["zarr", "--size", "4MB", "--path", str(path), "--device", "cpu", "--repeats", "1"]
    with monkeypatch.context() as context:
        context.setattr(zarr.made_genotypes, "write_genotypes", break_off)
        assert command.main(argv) == 130
    assert not list(tmp_path.iterdir())
    assert command.main(argv) == 0
    assert [found.name for found in tmp_path.iterdir()] == ["g.zarr"]


def test_a_worker_that_is_out_of_memory_is_one_line(client, capsys, monkeypatch):
    def killed(*_: object, **__: object) -> None:
        raise KilledWorker("key", SimpleNamespace(address="tcp://n1:1"), 3)

    monkeypatch.setattr(command, "run_array", killed)
    assert command.main(["array", "--size", "1MB", "--device", "cpu"]) == 1
    said = capsys.readouterr().err
    assert said.count("\n") <= 2, said
    assert "hpcdask: error: KilledWorker: " in said


def test_input_that_contradicts_itself(tmp_path, capsys):
    same = str(tmp_path / "x.html")
    argv = ["array", "--size", "1MB", "--json", same, "--report", same]
    assert command.main(argv) == 2
    assert "--json and --report are both" in capsys.readouterr().err
    (tmp_path / "a.json").touch()
    argv = ["--compare", *[str(tmp_path / "a.json")] * 2, "array", "--size", "1MB"]
    assert command.main(argv) == 2
    assert "--compare reads two files; to measure array, leave it out" in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--report", "--size"])
def test_options_stand_behind_the_workload(capsys, option):
    assert command.main([option, "x.html", "all"]) == 2
    said = capsys.readouterr().err
    where = "all" if option == "--report" else "array"
    assert f"and stands behind one: hpcdask bench {where} {option} …" in said
    assert command.main(["--frob"]) == 2
    assert "--frob" in capsys.readouterr().err


def test_no_more_chunks_than_dask_can_take(client, capsys):
    assert command.main(["array", "--size", "1e12GB", "--device", "cpu"]) == 2
    assert "are about what Dask can take" in capsys.readouterr().err


@pytest.mark.parametrize("visible", ["", "-1", "NoDevFiles"])
def test_a_worker_that_is_to_see_no_gpu_has_none(monkeypatch, visible):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert bench_cluster.probe()["gpu"] is False


def test_zarr_from_a_temporary_store(client, capsys, monkeypatch):
    counted = []
    count = zarr.workload.count_variants
    monkeypatch.setattr(
        zarr.workload, "count_variants", lambda x, **how: counted.append(x) or count(x, **how)
    )
    assert command.main(["zarr", "--size", "4MB", "--device", "cpu", "--repeats", "1"]) == 0
    out, err = capsys.readouterr()
    line = json.loads(out)
    assert [part["name"] for part in line["phases"]] == ["load alone", "compute alone"]
    assert len(line["checks"]) == 3
    assert all(check["ok"] for check in line["checks"])
    # from memory all is computed that the whole way computes: twice, after that was built thrice
    assert len(counted) == 3 + 2
    folder = re.search(r"genotypes to (\S+)/genotypes.zarr", err)[1]
    assert not Path(folder).exists()


def test_zarr_that_was_made_is_read_again(client, capsys, tmp_path):
    argv = ["zarr", "--size", "1MB", "--device", "cpu", "--repeats", "1"]
    argv += ["--path", str(tmp_path / "x.zarr")]
    assert command.main(argv) == 0
    assert command.main(argv) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert lines[0]["result"]["singular_values"] == lines[1]["result"]["singular_values"]
    assert [len(line["checks"]) for line in lines] == [3, 1]


def test_zarr_that_is_none(client, capsys, tmp_path):
    assert command.main(["zarr", "--path", str(tmp_path), "--device", "cpu"]) == 2
    assert str(tmp_path) in capsys.readouterr().err


@pytest.mark.parametrize("form", ["stock", "both"])
@pytest.mark.parametrize("option", ["--packed", "--stream"])
def test_what_the_stock_form_has_not_is_refused_at_once(no_cluster, capsys, option, form):
    assert command.main(["svd", option, "--form", form, "--device", "cpu"]) == 2
    assert f"{option} is for the tuned form" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["svd", "--exact", "--packed"], "--exact takes no --packed:"),
        (["svd", "--exact", "--form", "stock", "--k", "10"], "--exact takes no --k, --form:"),
        (["array", "--operation", "fft", "--chunk-size", "1MB"], "fft takes no --chunk-size:"),
        (["array", "--operation", "fft", "--form", "tuned"], "fft takes no --form:"),
    ],
)
def test_what_plain_dask_array_has_not_is_refused_at_once(no_cluster, capsys, options, said):
    assert command.main([*options, "--device", "cpu"]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "message"), [("report.pdf", "has to end in .html"), ("no/r.html", "cannot be written")]
)
def test_report_that_cannot_be_written_is_refused_at_once(capsys, name, message):
    assert command.main(["array", "--size", "8MB", "--report", name]) == 2
    assert message in capsys.readouterr().err


def test_json_that_cannot_be_written_is_refused_at_once(no_cluster, capsys, tmp_path):
    for name in (tmp_path / "no" / "x.json", tmp_path):
        assert command.main(["array", "--size", "8MB", "--json", str(name)]) == 2
        assert f"'--json': '{name}' cannot be written" in capsys.readouterr().err


def test_json_may_go_to_what_is_no_file(tmp_path):
    assert OutputFile().convert(os.devnull, None, None) == Path(os.devnull)
    assert OutputFile().convert(str(tmp_path / "new"), None, None) == tmp_path / "new"


@pytest.mark.parametrize(
    ("error", "code"), [(ClusterError("a worker is gone"), 1), (WorkloadError("no GPU"), 2)]
)
def test_report_of_what_was_measured_before_a_failure(
    client, capsys, monkeypatch, tmp_path, error, code
):
    def measure(*args, form, **how):
        if form == "stock":
            raise error
        return run_array(*args, form=form, **how)

    monkeypatch.setattr(command, "run_array", measure)
    page = tmp_path / "report.html"
    argv = ["array", "--size", "8MB", "--device", "cpu", "--repeats", "1", "--form", "both"]
    assert command.main([*argv, "--report", str(page)]) == code
    assert "array, tuned" in page.read_text()
    assert capsys.readouterr().err.splitlines()[-1] == f"hpcdask: error: {error}"


def test_report_of_what_was_measured_before_sigterm(monkeypatch, tmp_path):
    written = []
    monkeypatch.setattr(
        execution, "_write_report", lambda lines, path: written.append((lines, path))
    )
    before = signal.getsignal(signal.SIGTERM)
    page = tmp_path / "report.html"

    def measure():
        with execution._reported(page) as lines:
            lines.append({"workload": "array"})
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(600)

    with pytest.raises(SystemExit) as ended:
        measure()
    assert ended.value.code == 128 + signal.SIGTERM
    assert written == [([{"workload": "array"}], page)]
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_report_that_fails_too_leaves_the_exit_code(client, capsys, monkeypatch, tmp_path):
    page = tmp_path / "report.html"

    def measure(cluster, *, form, **_):
        if form == "stock":
            page.mkdir()
            raise ClusterError("a worker is gone")
        return _wrong(cluster)

    monkeypatch.setattr(command, "run_array", measure)
    argv = ["array", "--size", "8MB", "--device", "cpu", "--form", "both", "--report", str(page)]
    assert command.main(argv) == 1
    err = capsys.readouterr().err
    assert f"warning: {page} cannot be written" in err
    assert err.endswith("error: a worker is gone\n")


def test_a_wrong_result_counts_although_only_the_run_after_has_it(capsys, tmp_path):
    times = {"seconds_min": 1.0, "seconds_median": 1.1, "seconds_max": 1.2}
    right, wrong = ({**times, "workload": name, "checks": []} for name in ("array", "svd"))
    wrong["checks"] = [{"name": "values", "ok": False}]
    before, after = tmp_path / "before.json", tmp_path / "after.json"
    before.write_text(json.dumps(right))
    after.write_text(f"{json.dumps(right)}\n{json.dumps(wrong)}\n")
    assert command.main(["--compare", str(before), str(after)]) == 1
    assert re.search(r"^svd .* wrong$", capsys.readouterr().out, re.MULTILINE)
    assert command.main(["--compare", str(after), str(before)]) == 0
    assert "only before" in capsys.readouterr().out


def test_all_workloads_with_a_report(client, capsys, monkeypatch, tmp_path):
    small = {"array": 500_000, "operation": 50_000, "svd": 5_000_000, "exact": 80_000}
    small["zarr"] = 400_000
    monkeypatch.setitem(exchange.PAIR_NBYTES, "cpu", 80_000)
    monkeypatch.setitem(exchange.SQUARE_NBYTES, "cpu", 800_000)

    monkeypatch.setitem(command.SIZES, "cpu", small)
    monkeypatch.setattr(command, "NAMES", ("fft",))
    page = tmp_path / "report.html"
    argv = ["all", "--device", "cpu", "--repeats", "1", "--report", str(page)]
    assert command.main(argv) == 0
    out, err = capsys.readouterr()
    labels = [json.loads(line).get("label") for line in out.splitlines()]
    assert {"array, tuned", "array, stock", "array fft, stock", "svd exact, stock"} <= {*labels}
    assert "left out: 2 workers do not know when they were launched" in err
    assert "svd 2 bits, tuned" in page.read_text()


def test_help_lists_the_workloads(capsys):
    assert command.main([]) == 0
    out = capsys.readouterr().out
    assert all(name in out for name in ("array", "svd", "exchange", "startup", "--compare"))


@pytest.mark.parametrize(
    ("cases", "message"),
    [("svdd", "--cases has no svdd: startup, tasks, array, svd,"), ("crowd", "crowd need GPUs")],
)
def test_cases_beside_the_peers_that_there_are_not(cases, message):
    """They printed nothing."""
    script = Path(command.__file__).parents[2] / "benchmarks" / "peers.py"
    argv = [sys.executable, str(script), "--cases", cases]
    done = subprocess.run(
        argv, env={**os.environ, "PATH": ""}, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 2, done.stderr
    assert message in done.stderr


@pytest.mark.parametrize(
    "error",
    [
        FutureCancelledError("x", "scheduler-connection-lost"),
        CommClosedError("in <TLS>: stream is closed"),
        TimeoutError("no connection"),
    ],
)
def test_a_cluster_that_is_lost_is_no_bad_input(monkeypatch, error):
    def measure(cluster: object) -> dict:
        raise error

    for name in ("connect", "inspect", "watched"):
        monkeypatch.setattr(execution, name, lambda *_, **__: contextlib.nullcontext())
    files = {"json_file": None, "report_file": None}
    with pytest.raises(ClusterError, match=r"lost its cluster .*see the log of its scheduler"):
        execution.execute([measure], scheduler_file="cluster.json", device="cpu", **files)


def test_it_is_known_which_workers_exchange_over_ucx():
    peers = types.SimpleNamespace(peer_transports={"tls://m:5": "tcp", "tls://n:5": "ucx"})
    workers = [types.SimpleNamespace(), peers]
    client = types.SimpleNamespace(run=lambda ask: {str(one): ask(one) for one in workers})
    assert bench_cluster._over_ucx(client) == {"ucx"}
    workers.remove(peers)
    assert bench_cluster._over_ucx(client) == set()


@pytest.mark.parametrize(
    ("states", "said"),
    [
        ([], "has had no worker for 0.2 s"),
        (["paused", "paused"], r"all workers \(2\) have been paused for 0.3 s"),
    ],
)
def test_a_cluster_that_computes_nothing_does_not_hang(client, monkeypatch, states, said):
    never = client.submit(lambda: 1, resources={"none of them has it": 1}, pure=False)
    monkeypatch.setattr(bench_cluster, "LOOK_S", 0.05)
    monkeypatch.setattr(bench_cluster, "WORKER_TIMEOUT_S", 0.2)
    monkeypatch.setattr(bench_cluster, "PAUSED_TIMEOUT_S", 0.3)
    assert client.run_on_scheduler(bench_cluster._states) == ["running", "running"]
    monkeypatch.setattr(client, "run_on_scheduler", lambda _: states)
    with pytest.raises(ClusterError, match=said):
        bench_cluster.wait_with_workers(client, [never])
