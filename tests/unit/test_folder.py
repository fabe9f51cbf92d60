"""What a cluster keeps on disk."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from hpcdask.errors import UsageError
from hpcdask.jobs import folder, owner
from hpcdask.jobs.detached import ControlRecord, named
from hpcdask.jobs.discovery import choose
from hpcdask.jobs.folder import ClusterFolder, base_path, list_clusters, prune
from hpcdask.jobs.owner import Owner
from hpcdask.security import private
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


def test_cleanup_takes_the_start_of_a_name():
    known = [SimpleNamespace(name=name) for name in ("ab-1", "mine-1", "mine-2")]
    assert choose(known, ("a", "mine-2"), False) == [known[0], known[2]]
    for name in ("mine", "b", ""):
        with pytest.raises(UsageError, match=f"is called {name}. There are: ab-1, mine-1, mine-2"):
            choose(known, (name,), False)


def test_everything_is_private_whatever_the_umask(tmp_path):
    before = os.umask(0)
    try:
        made = ClusterFolder.create("ab-1", "slurm", tmp_path / "a/b")
        made.write_script("#!/bin/bash\n")
        made.new_submission().record(["1"])
    finally:
        os.umask(before)
    files = [made.path / "cluster.json", made.path / "submissions/001/ids"]
    scripts = [made.path / "script.sh", made.path / "submissions/001/script.sh"]
    folders = [tmp_path / "a", tmp_path / "a/b", made.path, made.path / "logs"]
    assert {mode(path) for path in files} == {0o600}
    assert {mode(path) for path in [*scripts, *folders, made.path / "submissions"]} == {0o700}


def test_the_default_base_is_in_the_home(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    made = ClusterFolder.create("ab-1", "slurm")
    assert made.path == tmp_path / ".hpcdask/ab-1"
    assert [found.name for found in list_clusters()] == ["ab-1"]


def test_the_environment_names_the_usual_base(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("HPCDASK_HOME", "~/project/hpcdask")
    made = ClusterFolder.create("ab-1", "slurm")
    assert made.path == tmp_path / "project/hpcdask/ab-1"
    assert [found.name for found in list_clusters()] == ["ab-1"]
    monkeypatch.setenv("HPCDASK_HOME", "")
    assert base_path() == tmp_path / ".hpcdask"


def test_a_folder_elsewhere_is_known_at_home(tmp_path):
    """`hpcdask jobs`, `cleanup` and clients of other processes did not know such clusters."""
    usual = base_path()
    made = ClusterFolder.create("ab-1", "slurm", tmp_path / "scratch")
    (found,) = list_clusters()
    assert (found.path, found.lives()) == (made.path, True)
    assert sorted(usual.iterdir()) == [usual / "ab-1"]
    made.ended = time.time() - 31 * 86400
    made._write()
    assert prune() == ["ab-1"]
    assert not made.path.exists()
    assert not list(usual.iterdir())


def test_a_home_that_takes_no_link_is_no_obstacle(tmp_path):
    base_path().touch()
    assert ClusterFolder.create("ab-1", "slurm", tmp_path / "scratch").path.is_dir()


def test_a_base_where_others_may_write_is_refused(tmp_path):
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o757)
    with pytest.raises(UsageError, match=r"others may write in .*/open: chmod go-w"):
        ClusterFolder.create("ab-1", "slurm", tmp_path / "open")
    assert not list((tmp_path / "open").iterdir())


def test_a_group_of_ones_own_may_write_but_no_other(tmp_path, monkeypatch):
    (tmp_path / "base").mkdir()
    (tmp_path / "base").chmod(0o770)
    monkeypatch.setattr(private, "_is_private_group", lambda group: False)
    with pytest.raises(UsageError, match="others may write"):
        ClusterFolder.create("ab-1", "slurm", tmp_path / "base")
    monkeypatch.setattr(private, "_is_private_group", lambda group: True)
    ClusterFolder.create("ab-1", "slurm", tmp_path / "base")


def test_another_users_base_is_refused(tmp_path, monkeypatch):
    (tmp_path / "base").mkdir()
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    with pytest.raises(UsageError, match=r"belongs to another user \(uid"):
        ClusterFolder.create("ab-1", "slurm", tmp_path / "base")


def test_users_share_a_folder_in_which_each_has_one(tmp_path, monkeypatch):
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o1777)
    with pytest.raises(
        UsageError, match=r"others may write in .*/shared: .*such as .*/shared/\$USER"
    ):
        ClusterFolder.create("ab-1", "slurm", shared)
    monkeypatch.setenv("USER", "alice")
    folder = ClusterFolder.create("ab-1", "slurm", f"{shared}/$USER")
    assert folder.path == shared / "alice/ab-1"
    assert stat.S_IMODE((shared / "alice").stat().st_mode) == 0o700
    assert [one.name for one in list_clusters()] == ["ab-1"]
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)  # who took the name of another
    with pytest.raises(UsageError, match=r"shared/alice belongs to another user"):
        ClusterFolder.create("ab-2", "slurm", f"{shared}/$USER")


@pytest.mark.parametrize("name", ["$NOT_SET", "${NOT_SET}"])
def test_a_base_with_a_variable_that_is_not_set(tmp_path, name):
    with pytest.raises(UsageError, match=r"NOT_SET\}? is not set here, in "):
        ClusterFolder.create("ab-1", "slurm", tmp_path / name)


def test_a_base_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match=r"file/base/ab-1 cannot be made: .*shared_temp_directory"):
        ClusterFolder.create("ab-1", "slurm", tmp_path / "file/base")


def test_a_name_is_taken_once(cluster):
    with pytest.raises(UsageError, match="cannot be made: File exists"):
        ClusterFolder.create("ab-1", "slurm", cluster.path.parent)


def test_open_knows_what_create_wrote(cluster):
    again = ClusterFolder.open(cluster.path)
    assert (again.name, again.queue, again.tag) == ("ab-1", "slurm", "hpcdask:ab-1")
    assert (again.owner, again.created, again.ended) == (Owner.this(), cluster.created, None)
    assert json.loads((cluster.path / "cluster.json").read_text())["tag"] == cluster.tag


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


def test_submissions_are_numbered_and_keep_their_script(cluster):
    first = cluster.new_submission()
    first.record(["7_1", "7_2"])
    cluster.write_script("#!/bin/bash\necho second\n")
    second = cluster.new_submission()
    second.record(["8"])
    second.record(["9"])
    assert [first.path.name, second.path.name] == ["001", "002"]
    assert "first" in first.script.read_text()
    assert "second" in second.script.read_text()
    again = ClusterFolder.open(cluster.path)
    assert again.ids() == ["7_1", "7_2", "8", "9"]
    assert abs(again.submitted()["7_2"] - time.time()) < 600
    (cluster.path / "logs/8.log").write_text("hello")
    assert (second.path / "logs/8.log").read_text() == "hello"


def test_many_submissions_stay_in_order(cluster):
    for number in range(1, 12):
        cluster.new_submission().record([str(number)])
    (cluster.path / "submissions/011").rename(cluster.path / "submissions/1000")
    cluster.new_submission().record(["12"])
    assert cluster.ids() == [str(number) for number in range(1, 13)]
    assert cluster.submissions()[-1].path.name == "1001"


def test_a_submission_that_brought_nothing_is_taken_again(cluster):
    first = cluster.new_submission()
    cluster.write_script("#!/bin/bash\necho second\n")
    second = cluster.new_submission()
    assert second.path == first.path
    assert "second" in second.script.read_text()


def test_an_unanswered_submission_is_noticed(cluster):
    assert cluster.unanswered_s() is None
    submission = cluster.new_submission()
    os.utime(submission.script, (0, time.time() - 100))
    assert cluster.unanswered_s() == pytest.approx(100, abs=30)
    submission.record(["1"])
    assert cluster.unanswered_s() is None


def test_logs_are_found_by_the_jobs_id(cluster):
    logs = cluster.path / "logs"
    for name in ("12_1", "12_10", "queue-12_1", "queue-12_10", "queue-12_1-x", "13", "queue-131"):
        (logs / f"{name}.log").write_text(name)
    (logs / "queue-7[3].server.log").touch()
    (logs / "queue-12_1.txt").touch()
    names = [path.name for path in cluster.log_of("12_1")]
    assert names == ["queue-12_1-x.log", "queue-12_1.log", "12_1.log"]
    assert [path.name for path in cluster.log_of("13")] == ["13.log"]
    assert [path.name for path in cluster.log_of("7[3]")] == ["queue-7[3].server.log"]
    assert cluster.log_of("99") == []
    assert cluster.log_path("99") == logs / "99.log"


def test_tail(cluster, monkeypatch):
    logs = cluster.path / "logs"
    (logs / "queue-5.log").write_text("from the queue\n")
    (logs / "5.log").write_bytes(b"one\nbad \xff\nthree")
    assert cluster.tail("5") == ["from the queue", "one", "bad \N{REPLACEMENT CHARACTER}", "three"]
    assert cluster.tail("5", 2) == ["bad \N{REPLACEMENT CHARACTER}", "three"]
    assert cluster.tail("5", 100) == cluster.tail("5")
    assert cluster.tail("5", 0) == []
    assert cluster.tail("6", 5) == []
    monkeypatch.setattr(owner, "TAIL_BYTES", 5)
    assert cluster.tail("5", 1) == ["three"]
    assert len(cluster.tail("5")) == 4


def test_logs_elsewhere(cluster, tmp_path):
    cluster.logs_in(tmp_path / "my logs/here")
    (cluster.path / "logs/5.log").write_text("hello")
    assert (tmp_path / "my logs/here/5.log").read_text() == "hello"
    assert mode(tmp_path / "my logs") == 0o700
    assert cluster.tail("5") == ["hello"]


def test_logs_go_to_no_folder_where_others_may_write(cluster, tmp_path):
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    with pytest.raises(UsageError, match="others may write"):
        cluster.logs_in(tmp_path / "open")
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match=r"log_directory: .* cannot be used"):
        cluster.logs_in(tmp_path / "file/logs")


def test_keys_go_when_the_cluster_ends(cluster):
    save_credentials(create_credentials(), str(cluster.keys))
    assert load_credentials(str(cluster.keys))
    cluster.remove_keys()
    cluster.remove_keys()
    assert not cluster.keys.exists()
    save_credentials(create_credentials(), str(cluster.keys))
    cluster.mark_ended()
    assert not cluster.keys.exists()
    assert ClusterFolder.open(cluster.path).ended == pytest.approx(time.time(), abs=60)


def test_a_folder_that_the_user_removed_can_end(cluster):
    folder.shutil.rmtree(cluster.path)
    cluster.mark_ended()
    assert cluster.ids() == []
    assert cluster.submitted() == {}
    assert not cluster.path.exists()


def test_whether_the_notebook_lives(cluster, tmp_path):
    assert ClusterFolder.open(cluster.path).lives() is True
    program = f"""
from hpcdask.jobs.folder import ClusterFolder
ClusterFolder.create("gone", "slurm", {str(tmp_path)!r})
"""
    subprocess.run([sys.executable, "-c", program], timeout=300, check=True)
    assert ClusterFolder.open(tmp_path / "gone").lives() is False
    cluster.mark_ended()
    assert cluster.lives() is False


@pytest.mark.parametrize("change", [{"host": "login7"}, {"space": "pid:[1]"}])
def test_a_notebook_elsewhere_cannot_be_seen(cluster, change):
    path = cluster.path / "cluster.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    assert ClusterFolder.open(cluster.path).lives() is None


def test_another_process_with_the_same_id_is_not_the_notebook(cluster):
    path = cluster.path / "cluster.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"start": "1"}))
    assert ClusterFolder.open(cluster.path).lives() is False


def test_only_what_ended_long_ago_is_pruned(tmp_path):
    for name, days in (("old", 31), ("young", 29), ("running", None)):
        made = ClusterFolder.create(name, "slurm", tmp_path)
        made.created -= 100 * 86400
        made.ended = None if days is None else time.time() - days * 86400
        made._write()
    keep = tmp_path / "my logs"
    keep.mkdir(mode=0o700)
    (keep / "1.log").touch()
    ClusterFolder.open(tmp_path / "old").logs_in(keep)
    assert prune(tmp_path) == ["old"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["my logs", "running", "young"]
    assert (keep / "1.log").exists()
