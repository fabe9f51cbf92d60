"""Credentials of one cluster: who may talk to it, and where the keys lie.

A certificate authority is made for each cluster and forgotten at once, so that nobody can
issue more. Scheduler, workers and clients have keys of their own.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from hpcdask.errors import SchedulerFileError, UsageError

from . import private

if TYPE_CHECKING:
    from distributed import Security

#: Credentials end with the longest job that a site is likely to allow.
VALIDITY = datetime.timedelta(days=90)
#: File names in a key folder -> fields of distributed's Security.
FILES = {
    "ca.pem": "tls_ca_file",
    **{
        f"{role}.{kind}.pem": f"tls_{role}_{kind}"
        for role in ("scheduler", "worker", "client")
        for kind in ("cert", "key")
    },
}

#: Ends of the names of files that Dask reads as configuration, in any case.
CONFIGURATION = (".json", ".yaml", ".yml")

Credentials = dict[str, str]


def create_credentials() -> Credentials:
    """Make keys and certificates (ECDSA P-256) for a new cluster, in memory.

    They are keyword arguments of `distributed.Security`, in PEM.
    """
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

    now = datetime.datetime.now(datetime.UTC)

    def build(subject: str, issuer: str, public: Any, signer: Any, role: str | None) -> str:
        authority = role is None
        builder = (
            x509.CertificateBuilder()
            .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, subject)]))
            .issuer_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, issuer)]))
            .public_key(public)
            .serial_number(x509.random_serial_number())
            # clocks of nodes differ a little
            .not_valid_before(now - datetime.timedelta(hours=1))
            .not_valid_after(now + VALIDITY)
            .add_extension(x509.BasicConstraints(ca=authority, path_length=None), critical=True)
        )
        if not authority:  # a client's key does for no scheduler
            usages = [ExtendedKeyUsageOID.CLIENT_AUTH]
            usages += [ExtendedKeyUsageOID.SERVER_AUTH] * (role != "client")
            builder = builder.add_extension(x509.ExtendedKeyUsage(usages), critical=False)
        certificate = builder.sign(signer, hashes.SHA256())
        return certificate.public_bytes(serialization.Encoding.PEM).decode()

    authority = ec.generate_private_key(ec.SECP256R1())
    name = f"hpcdask {os.urandom(8).hex()}"
    made = {"tls_ca_file": build(name, name, authority.public_key(), authority, None)}
    for role in ("scheduler", "worker", "client"):
        key = ec.generate_private_key(ec.SECP256R1())
        made[f"tls_{role}_cert"] = build(f"hpcdask {role}", name, key.public_key(), authority, role)
        made[f"tls_{role}_key"] = key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        ).decode()
    return made


def client_only(credentials: Credentials) -> Credentials:
    """The part of the credentials that a client needs."""
    return {
        name: credentials[name]
        for name in ("tls_ca_file", "tls_client_cert", "tls_client_key")
        if name in credentials
    }


def to_security(credentials: Mapping[str, str] | None) -> Security:
    """distributed's Security from credentials in memory or paths of PEM files."""
    from .tls import ClusterSecurity

    if not credentials:
        return ClusterSecurity()
    return ClusterSecurity(require_encryption=True, **credentials)


def save_credentials(credentials: Credentials, folder: str) -> None:
    """Write each credential to a 0600 file in a new 0700 folder."""
    if is_key_folder(folder):
        private.remove(folder)  # of a cluster that could not clean up
    os.mkdir(folder, 0o700)
    for name, field in FILES.items():
        if field in credentials:
            private.write_private(os.path.join(folder, name), credentials[field])


def is_key_folder(folder: str) -> bool:
    """Return whether this is a folder of ours that holds nothing but keys."""
    try:
        private.check_folder(folder)
        return all(re.fullmatch(private.KEYS, name) for name in os.listdir(folder))
    except OSError:
        return False


def load_credentials(folder: str) -> Credentials:
    """The credentials in a key folder, as keyword arguments of Security.

    Raises SchedulerFileError if the folder is gone, or others can read or write it.
    """
    found: Credentials = {}
    try:
        closed = not private.check_folder(folder).st_mode & 0o077
        for name, field in FILES.items():
            with contextlib.suppress(FileNotFoundError):
                found[field] = private.read(os.path.join(folder, name))
    except private.NotPrivate:
        closed = False
    except (OSError, UnicodeDecodeError):
        raise SchedulerFileError(
            f"the key folder {folder} is gone: the cluster has ended, "
            f"or this node does not share the folder"
        ) from None
    if not closed:
        raise SchedulerFileError(
            f"the key folder {folder} belongs to, or is open to, somebody else; "
            f"it must be yours with mode 0700"
        )
    if len(client_only(found)) < 3:
        raise SchedulerFileError(
            f"the key folder {folder} is incomplete: the cluster has ended, or is still starting"
        )
    return found


def check_configuration() -> None:
    """Refuse Dask's configuration where other users may write it: it can run code.

    Raises UsageError, which names the file or folder.
    """
    import dask.config

    for path in dask.config.paths:
        files = [path]
        with contextlib.suppress(OSError):  # it is a file, or not there
            names = (name for name in os.listdir(path) if name.lower().endswith(CONFIGURATION))
            files += [os.path.join(path, name) for name in names]
        for found in files:
            with contextlib.suppress(OSError):
                if private.others_may_write(os.stat(found)):
                    raise UsageError(
                        f"others may write {found}, Dask's configuration, and so run code as you. "
                        f"See what it says, then: chmod go-w {found}"
                    )
