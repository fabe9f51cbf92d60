"""What a cluster keeps on disk."""

from __future__ import annotations

import grp
import os
import pwd
import subprocess
import time
from contextlib import nullcontext
from pathlib import Path

import pytest

from fake_notebook import pretend
from hpcdask.errors import UsageError
from hpcdask.jobs.detached import ControlRecord, named
from hpcdask.jobs.folder import ClusterFolder, base_path, list_clusters, prune
from hpcdask.security.credentials import create_credentials, load_credentials, save_credentials


def mode(path: Path) -> int:
    return path.lstat().st_mode & 0o777


@pytest.fixture
def cluster(tmp_path: Path) -> ClusterFolder:
    made = ClusterFolder.create("ab-1", "slurm", tmp_path / "base")
    made.write_script("#!/bin/bash\necho first\n")
    return made


def test_a_cluster_by_its_name_or_the_start_of_its_id(tmp_path):
    made = [ClusterFolder.create(name, "slurm", tmp_path) for name in ("ab-1", "mine-1", "mine-2")]
    for one in made[1:]:
        ControlRecord("mine").write(one)
    made[1].mark_ended()
    known = list_clusters(tmp_path)
    expected = {"ab-1": "ab-1", "a": "ab-1", "mine-1": "mine-1", "mine": "mine-2"}
    for name, folder_name in expected.items():
        assert named(name, known).name == folder_name
    for name in ("mi", "mine-3", "b-1"):  # two begin so, or none
        assert named(name, known) is None


def test_everything_is_private_whatever_the_umask(tmp_path):
    before = os.umask(0)
    try:
        made = ClusterFolder.create("ab-1", "slurm", tmp_path / "a/b")
        made.write_script("#!/bin/bash\n")
        made.begin_submission()
        made.record(["1"])
        made.begin_submission("gpu")
    finally:
        os.umask(before)
    files = [made.path / name for name in ("cluster.json", "jobs", "submitting-gpu")]
    folders = [tmp_path / "a", tmp_path / "a/b", made.path, made.path / "logs"]
    assert {mode(path) for path in files} == {0o600}
    assert {mode(path) for path in [made.path / "script.sh", *folders]} == {0o700}


def test_the_environment_names_the_usual_base(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("HPCDASK_HOME", "~/project/hpcdask")
    made = ClusterFolder.create("ab-1", "slurm")
    assert made.path == tmp_path / "project/hpcdask/ab-1"
    assert [found.name for found in list_clusters()] == ["ab-1"]
    monkeypatch.setenv("HPCDASK_HOME", "")
    assert base_path() == tmp_path / ".hpcdask"


def test_a_folder_elsewhere_is_known_at_home(tmp_path):
    """`hpcdask list --jobs`, `down` and clients of other processes did not know such clusters."""
    usual = base_path()
    made = ClusterFolder.create("ab-1", "slurm", tmp_path / "scratch")
    (found,) = list_clusters()
    assert (found.path, found.queue, found.tag) == (made.path, "slurm", "hpcdask:ab-1")
    assert (found.owner, found.created, found.ended) == (made.owner, made.created, None)
    assert sorted(usual.iterdir()) == [usual / "ab-1"]
    pretend(made, ended=time.time() - 31 * 86400)
    assert prune() == ["ab-1"]
    assert not made.path.exists()
    assert not list(usual.iterdir())


def test_folders_where_others_may_write_are_refused(cluster, tmp_path):
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o757)
    with pytest.raises(UsageError, match=r"others may write in .*/open: chmod go-w"):
        ClusterFolder.create("ab-1", "slurm", tmp_path / "open")
    with pytest.raises(UsageError, match="others may write"):
        cluster.logs_in(tmp_path / "open")
    assert not list((tmp_path / "open").iterdir())


def test_folders_that_cannot_be_made_are_named(cluster, tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match=r"file/base/ab-1 cannot be made: .*shared_temp_directory"):
        ClusterFolder.create("ab-1", "slurm", tmp_path / "file/base")
    with pytest.raises(UsageError, match=r"log_directory: .* cannot be used"):
        cluster.logs_in(tmp_path / "file/logs")


ME = pwd.getpwuid(os.geteuid()).pw_name


@pytest.mark.parametrize(
    ("name", "members", "private"),
    [(ME, [], True), (ME, [ME], True), (ME, [ME, "another"], False), ("project", [], False)],
)
def test_a_group_of_ones_own_may_write_but_no_other(tmp_path, monkeypatch, name, members, private):
    """Regression: a group named as the user counted as private, whoever else was in it."""
    (tmp_path / "base").mkdir()
    (tmp_path / "base").chmod(0o770)
    group = grp.struct_group((name, "x", os.getegid(), members))
    monkeypatch.setattr(grp, "getgrgid", lambda number: group)
    refused = pytest.raises(UsageError, match="others may write")
    with nullcontext() if private else refused:
        ClusterFolder.create("ab-1", "slurm", tmp_path / "base")


def test_users_share_a_folder_in_which_each_has_one(tmp_path, monkeypatch):
    (shared := tmp_path / "shared").mkdir()
    shared.chmod(0o1777)
    with pytest.raises(UsageError, match=r"write in .*/shared: .*such as .*/shared/\$USER"):
        ClusterFolder.create("ab-1", "slurm", shared)
    monkeypatch.setenv("USER", "alice")
    folder = ClusterFolder.create("ab-1", "slurm", f"{shared}/$USER")
    assert folder.path == shared / "alice/ab-1"
    assert mode(shared / "alice") == 0o700
    assert [one.name for one in list_clusters()] == ["ab-1"]
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)  # who took the name of another
    with pytest.raises(UsageError, match=r"shared/alice belongs to another user"):
        ClusterFolder.create("ab-2", "slurm", f"{shared}/$USER")


@pytest.mark.parametrize("content", ["", "{}", "[]", '{"queue": "slurm"}'])
def test_what_is_no_clusters_folder_is_skipped(cluster, content):
    other = cluster.path.parent / "other"
    other.mkdir(mode=0o700)
    (other / "cluster.json").write_text(content)
    (cluster.path.parent / "file").touch()
    (cluster.path.parent / "link").symlink_to(cluster.path)
    opened = ClusterFolder.create("cd-2", "local", cluster.path.parent)
    opened.path.chmod(0o750)
    assert [found.name for found in list_clusters(cluster.path.parent)] == ["ab-1"]
    with pytest.raises(UsageError, match="is not the folder of a cluster"):
        ClusterFolder.open(other)
    with pytest.raises(UsageError, match="is not a folder of yours"):
        ClusterFolder.open(cluster.path.parent / "link")
    with pytest.raises(UsageError, match="is open to others: chmod 700"):
        ClusterFolder.open(opened.path)


def test_a_submission_is_awaited_until_its_jobs_are_recorded(cluster):
    for group, ids in (("", ["7_1", "7_2"]), ("gpu", ["8"]), ("gpu", ["9"])):
        cluster.write_script("#!/bin/bash\n", group)
        assert not cluster.awaits_jobs(45)
        assert cluster.begin_submission(group).read_text() == "#!/bin/bash\n"
        assert cluster.awaits_jobs(45)
        cluster.record(ids, group)
    cluster.begin_submission("cpu")
    cluster.record(["10"])  # of another group
    assert cluster.awaits_jobs(45)
    os.utime(cluster.path / "submitting-cpu", (0, time.time() - 1000))
    assert not cluster.awaits_jobs(45)
    again = ClusterFolder.open(cluster.path).submitted()
    assert list(again) == ["7_1", "7_2", "8", "9", "10"]
    assert abs(again["7_2"] - time.time()) < 600


def test_logs_are_found_by_the_jobs_id(cluster):
    names = ["12_1", "12_10", "queue-12_1", "queue-12_10", "queue-12_1-x", "13", "queue-131"]
    for name in [*names, "queue-7[3].server", "13-x", "12_1.txt"]:
        (cluster.path / "logs" / f"{name}.log").touch()
    found = cluster.logs_of(["12_1", "13", "7[3]", "99"])
    assert {job_id: [path.stem for path in paths] for job_id, paths in found.items()} == {
        "12_1": ["queue-12_1-x", "queue-12_1", "12_1"],
        "13": ["13"],
        "7[3]": ["queue-7[3].server"],
        "99": [],
    }


def test_tail(cluster):
    logs = cluster.path / "logs"
    (logs / "queue-5.log").write_text("from the queue\n")
    (logs / "5.log").write_bytes(b"one\nbad \xff\nthree")
    all_lines = ["from the queue", "one", "bad \N{REPLACEMENT CHARACTER}", "three"]
    assert cluster.tails(["5", "6"]) == {"5": all_lines, "6": []}
    for lines, shown in ((2, all_lines[2:]), (100, all_lines), (0, [])):
        assert cluster.tails(["5", "6"], lines) == {"5": shown, "6": []}


def test_keys_go_when_the_cluster_ends(cluster):
    save_credentials(create_credentials(), str(cluster.keys))
    assert load_credentials(str(cluster.keys))
    cluster.mark_ended()
    cluster.remove_keys()  # once more
    assert not cluster.keys.exists()
    assert ClusterFolder.open(cluster.path).ended == pytest.approx(time.time(), abs=60)


def test_whether_the_notebook_lives(cluster):
    assert ClusterFolder.open(cluster.path).lives() is True
    with subprocess.Popen(["true"]) as gone:
        pretend(cluster, pid=gone.pid)
    assert ClusterFolder.open(cluster.path).lives() is False
    pretend(cluster, host="elsewhere")
    assert ClusterFolder.open(cluster.path).lives() is None
    cluster.mark_ended()
    assert cluster.lives() is False


def test_only_what_ended_long_ago_is_pruned(tmp_path):
    for name, days in (("old", 31), ("young", 29), ("running", None)):
        made = ClusterFolder.create(name, "slurm", tmp_path)
        pretend(made, ended=days and time.time() - days * 86400)
    keep = tmp_path / "my logs"
    keep.mkdir(mode=0o700)
    (keep / "1.log").touch()
    ClusterFolder.open(tmp_path / "old").logs_in(keep)
    assert prune(tmp_path) == ["old"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["my logs", "running", "young"]
    assert (keep / "1.log").exists()
