"""Credentials let the cluster's own parts in and nobody else, and nobody else reads them."""

from __future__ import annotations

import datetime
import os
import ssl
import stat
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.serialization import load_pem_private_key
from distributed import Security
from distributed.comm import connect
from distributed.core import Server

from hpcdask.errors import SchedulerFileError
from hpcdask.security import private
from hpcdask.security.credentials import (
    Credentials,
    client_only,
    create_credentials,
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


async def contact(
    server_has: Credentials, client_has: Any, client: str = "client", server: str = "scheduler"
) -> None:
    """Have a client call a distributed server over TLS, with credentials or an SSL context."""
    called = Server({"ping": lambda: "pong"})
    await called.listen("tls://127.0.0.1:0", **to_security(server_has).get_listen_args(server))
    if isinstance(client_has, ssl.SSLContext):
        arguments = {"ssl_context": client_has, "require_encryption": True}
    else:
        far = Security(require_encryption=True, **client_has)  # as from another host
        arguments = far.get_connection_args(client)
    try:
        comm = await connect(called.address, timeout=3, **arguments)
        await comm.write({"op": "ping", "reply": True})
        assert await comm.read() == "pong"
        await comm.close()
    finally:
        await called.close()


@pytest.mark.parametrize("server", ["scheduler", "worker"])
@pytest.mark.parametrize("client", ROLES)
async def test_parts_of_one_cluster_talk(credentials, client, server):
    await contact(credentials, credentials, client, server)


async def test_a_client_needs_its_own_part_only(credentials):
    part = client_only(credentials)
    assert set(part) == {"tls_ca_file", "tls_client_cert", "tls_client_key"}
    await contact(credentials, part)


def without_key(ours: Credentials, others: Credentials) -> ssl.SSLContext:
    context = ssl.create_default_context(cadata=ours["tls_ca_file"])
    context.check_hostname = False
    context.verify_flags &= ~ssl.VERIFY_X509_STRICT
    return context


def stolen(ours: Credentials, others: Credentials) -> Credentials:
    """The right authority with another's key."""
    return {**client_only(others), "tls_ca_file": ours["tls_ca_file"]}


@pytest.mark.parametrize(
    ("client_has", "role"),
    [
        *((lambda ours, others: others, role) for role in ROLES),
        (stolen, "client"),
        (without_key, "client"),
    ],
    ids=[*(f"another's {role}" for role in ROLES), "stolen", "without key"],
)
async def test_who_has_other_keys_is_refused(credentials, others, client_has, role):
    with pytest.raises(OSError, match=r"(?i)certificate|closed|timed out|handshake|alert|ssl"):
        await contact(credentials, client_has(credentials, others), role)


async def test_a_server_with_other_keys_or_a_client_s_is_not_believed(credentials, others):
    own = client_only(credentials).items()
    as_scheduler = {name.replace("client", "scheduler"): text for name, text in own}
    for server_has in (others, as_scheduler):
        with pytest.raises(OSError, match=r"(?i)certificate|closed|timed out|ssl|tls"):
            await contact(server_has, credentials)


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


# --- where they lie -------------------------------------------------------------------------------


def mode(path: Path) -> int:
    return stat.S_IMODE(path.lstat().st_mode)


@pytest.mark.parametrize("umask", [0o000, 0o022, 0o077])
def test_a_key_file_is_for_its_user_alone_and_is_loaded(credentials, tmp_path, umask):
    file = tmp_path / "keys"
    before = os.umask(umask)
    try:
        save_credentials(credentials, str(file))
    finally:
        os.umask(before)
    assert os.listdir(tmp_path) == ["keys"]
    assert mode(file) == 0o600
    assert load_credentials(str(file)) == credentials


@pytest.mark.parametrize("text", ["", "[1]", "{}", '{"tls_ca_file": "x"}'])
def test_a_file_without_keys(tmp_path, text):
    private.write_private(str(tmp_path / "keys"), text)
    with pytest.raises(SchedulerFileError, match="holds no keys"):
        load_credentials(str(tmp_path / "keys"))


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
