"""Credentials let the cluster's own parts in and nobody else, and nobody else reads them."""

from __future__ import annotations

import asyncio
import datetime
import os
import ssl
import stat
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.serialization import load_pem_private_key
from distributed import Client, Scheduler, Worker
from distributed.comm import connect
from distributed.core import Server

from hpcdask.errors import SchedulerFileError
from hpcdask.security import private
from hpcdask.security.credentials import (
    FILES,
    Credentials,
    client_only,
    create_credentials,
    is_key_folder,
    load_credentials,
    save_credentials,
    to_security,
)

ROLES = ("scheduler", "worker", "client")


@pytest.fixture(scope="module")
def credentials() -> Credentials:
    return create_credentials()


@pytest.fixture(scope="module")
def others() -> Credentials:
    return create_credentials()


def certificate(credentials: Credentials, field: str) -> x509.Certificate:
    return x509.load_pem_x509_certificate(credentials[field].encode())


def contact(server_has, client_has, client_role: str = "client", server_role: str = "scheduler"):
    """Have a client call a distributed server over TLS, and return what it answers.

    `client_has` is credentials, or an SSL context.
    """

    async def call() -> str:
        server = Server({"ping": lambda: "pong"})
        listen = to_security(server_has).get_listen_args(server_role)
        await server.listen("tls://127.0.0.1:0", **listen)
        if isinstance(client_has, ssl.SSLContext):
            arguments = {"ssl_context": client_has, "require_encryption": True}
        else:
            arguments = to_security(client_has).get_connection_args(client_role)
        try:
            comm = await connect(server.address, timeout=3, **arguments)
            await comm.write({"op": "ping", "reply": True})
            answer = await comm.read()
            await comm.close()
            return str(answer)
        finally:
            await server.close()

    return asyncio.run(call())


@pytest.mark.parametrize("server", ["scheduler", "worker"])
@pytest.mark.parametrize("client", ROLES)
def test_parts_of_one_cluster_talk(credentials, client, server):
    assert contact(credentials, credentials, client, server) == "pong"


def test_a_client_needs_its_own_part_only(credentials):
    part = client_only(credentials)
    assert set(part) == {"tls_ca_file", "tls_client_cert", "tls_client_key"}
    assert contact(credentials, part) == "pong"


@pytest.mark.parametrize("role", ROLES)
def test_another_cluster_s_keys_are_refused(credentials, others, role):
    with pytest.raises(OSError, match=r"(?i)certificate|closed|timed out|handshake|ssl"):
        contact(credentials, others, role)


def test_a_client_that_trusts_the_right_authority_with_another_s_key_is_refused(
    credentials, others
):
    """The server asks for a certificate too, and looks who signed it."""
    stolen = {**client_only(others), "tls_ca_file": credentials["tls_ca_file"]}
    with pytest.raises(OSError, match=r"(?i)certificate|closed|alert|ssl"):
        contact(credentials, stolen)


def test_a_client_without_a_key_is_refused(credentials):
    context = ssl.create_default_context(cadata=credentials["tls_ca_file"])
    context.check_hostname = False
    context.verify_flags &= ~ssl.VERIFY_X509_STRICT
    with pytest.raises(OSError, match=r"(?i)certificate|closed|alert|ssl"):
        contact(credentials, context)


def test_a_server_with_another_cluster_s_keys_is_not_believed(credentials, others):
    with pytest.raises(OSError, match=r"(?i)certificate|closed|timed out|ssl"):
        contact(others, credentials)


def test_a_client_s_key_does_for_no_server(credentials):
    as_scheduler = {
        name.replace("client", "scheduler"): text for name, text in client_only(credentials).items()
    }
    with pytest.raises(OSError, match=r"certificate|TLS"):
        contact(as_scheduler, credentials)


def test_a_whole_cluster(credentials, tmp_path):
    """Scheduler and worker with keys in memory, the client with files."""
    folder = tmp_path / "keys"
    save_credentials(client_only(credentials), str(folder))
    own = to_security(credentials)
    files = to_security(load_credentials(str(folder)))

    async def compute() -> int:
        async with (
            Scheduler(
                protocol="tls", host="127.0.0.1", port=0, dashboard=False, security=own
            ) as scheduler,
            Worker(scheduler.address, security=own, nthreads=1, local_directory=str(tmp_path)),
            Client(scheduler.address, security=files, asynchronous=True) as client,
        ):
            return await client.submit(sum, [1, 2])

    assert asyncio.run(compute()) == 3


# --- what is in them ------------------------------------------------------------------------------


def test_validity(credentials):
    now = datetime.datetime.now(datetime.UTC)
    for field in ("tls_ca_file", *(f"tls_{role}_cert" for role in ROLES)):
        made = certificate(credentials, field)
        # clocks of nodes differ, and jobs last a month at most
        assert made.not_valid_before_utc < now - datetime.timedelta(minutes=10)
        assert now + datetime.timedelta(days=31) < made.not_valid_after_utc
        assert made.not_valid_after_utc < now + datetime.timedelta(days=366)


def test_only_the_authority_may_sign_and_its_key_is_not_kept(credentials):
    def signs(field: str) -> bool:
        constraints = certificate(credentials, field).extensions
        return constraints.get_extension_for_class(x509.BasicConstraints).value.ca

    assert signs("tls_ca_file")
    assert not any(signs(f"tls_{role}_cert") for role in ROLES)
    public = certificate(credentials, "tls_ca_file").public_key()
    for role in ROLES:
        key = load_pem_private_key(credentials[f"tls_{role}_key"].encode(), None)
        assert key.public_key() != public
        assert key.public_key() == certificate(credentials, f"tls_{role}_cert").public_key()


def test_every_cluster_and_role_has_keys_of_its_own(credentials, others):
    keys = [made[f"tls_{role}_key"] for made in (credentials, others) for role in ROLES]
    assert len(set(keys)) == 6


def test_no_credentials_mean_plain_tcp():
    assert not to_security({}).require_encryption
    assert not to_security(None).require_encryption


# --- where they lie -------------------------------------------------------------------------------


def mode(path: Path) -> int:
    return stat.S_IMODE(path.lstat().st_mode)


@pytest.mark.parametrize("umask", [0o000, 0o022, 0o077])
def test_modes(credentials, tmp_path, umask):
    folder = tmp_path / "keys"
    before = os.umask(umask)
    try:
        save_credentials(credentials, str(folder))
    finally:
        os.umask(before)
    assert mode(folder) == 0o700
    files = list(folder.iterdir())
    assert len(files) == 7
    assert all(mode(file) == 0o600 for file in files)


def test_files_are_loaded(credentials, tmp_path):
    save_credentials(credentials, str(tmp_path / "keys"))
    loaded = load_credentials(str(tmp_path / "keys"))
    assert loaded == credentials


def test_a_folder_that_is_gone(tmp_path):
    with pytest.raises(SchedulerFileError, match=r"gone.*shared?"):
        load_credentials(str(tmp_path / "keys"))


@pytest.mark.parametrize("bits", [0o750, 0o705, 0o770, 0o710, 0o777])
def test_a_folder_that_is_open_to_others(credentials, tmp_path, bits):
    folder = tmp_path / "keys"
    save_credentials(credentials, str(folder))
    folder.chmod(bits)
    with pytest.raises(SchedulerFileError, match="0700"):
        load_credentials(str(folder))


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to give a folder to another user")
def test_a_folder_of_another_user(credentials, tmp_path):
    folder = tmp_path / "keys"
    save_credentials(credentials, str(folder))
    os.chown(folder, 65534, 65534)
    with pytest.raises(SchedulerFileError, match="somebody else"):
        load_credentials(str(folder))


def test_a_folder_in_which_a_key_was_being_written_can_be_taken_over(credentials, tmp_path):
    """Its rank and janitor had died with their node, and no run took the file again."""
    folder = tmp_path / "keys"
    save_credentials(credentials, str(folder))
    (folder / "client.key.pem").rename(folder / "client.key.pem.0123456789ab")
    save_credentials(credentials, str(folder))
    assert set(os.listdir(folder)) == set(FILES)
    (folder / "mine.0123456789ab").touch()
    assert not is_key_folder(str(folder))


def test_a_private_file_replaces_what_is_there_whole_or_not_at_all(tmp_path, monkeypatch):
    file = tmp_path / "note"
    file.write_text("before")
    file.chmod(0o644)
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", lambda fd: (_ for _ in ()).throw(OSError("disk full")))
        with pytest.raises(OSError, match="disk full"):
            private.write_private(str(file), "after")
    assert file.read_text() == "before"
    assert list(tmp_path.iterdir()) == [file]
    private.write_private(str(file), "after")
    assert (file.read_text(), mode(file)) == ("after", 0o600)
