"""Credentials of one cluster, by an authority that is made for it and forgotten at once."""

from __future__ import annotations

import contextlib
import datetime
import errno
import json
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from hpcdask.errors import SchedulerFileError, UsageError
from hpcdask.upstream.configuration import files

from . import private

if TYPE_CHECKING:
    from distributed import Security

#: Credentials end with the longest job that a site is likely to allow.
VALIDITY = datetime.timedelta(days=90)
ROLES = ("scheduler", "worker", "client")
#: distributed's names of credentials, and those that a client needs.
FIELDS = ("tls_ca_file", *(f"tls_{role}_{kind}" for role in ROLES for kind in ("cert", "key")))
CLIENT = ("tls_ca_file", "tls_client_cert", "tls_client_key")
Credentials = dict[str, str]


def create_credentials() -> Credentials:
    """Make keys and certificates (ECDSA P-256) for a new cluster: keywords of Security, in PEM."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
    from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

    now, pem, plain = datetime.datetime.now(datetime.UTC), Encoding.PEM, NoEncryption()
    authority, issuer = ec.generate_private_key(ec.SECP256R1()), f"hpcdask {os.urandom(8).hex()}"

    def certify(subject: str, key: Any, *usages: x509.ObjectIdentifier) -> str:
        builder = (
            x509.CertificateBuilder()
            .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, subject)]))
            .issuer_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, issuer)]))
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            # clocks of nodes differ a little
            .not_valid_before(now - datetime.timedelta(hours=1))
            .not_valid_after(now + VALIDITY)
            .add_extension(x509.BasicConstraints(ca=not usages, path_length=None), critical=True)
        )
        if usages:
            builder = builder.add_extension(x509.ExtendedKeyUsage(usages), critical=False)
        certificate = builder.sign(authority, hashes.SHA256())
        return certificate.public_bytes(pem).decode()

    made = {"tls_ca_file": certify(issuer, authority)}
    for role in ROLES:
        key = ec.generate_private_key(ec.SECP256R1())
        usages = [ExtendedKeyUsageOID.CLIENT_AUTH]
        if role != "client":  # whose key does for no scheduler
            usages.append(ExtendedKeyUsageOID.SERVER_AUTH)
        made[f"tls_{role}_cert"] = certify(f"hpcdask {role}", key, *usages)
        made[f"tls_{role}_key"] = key.private_bytes(pem, PrivateFormat.PKCS8, plain).decode()
    return made


def client_only(credentials: Credentials) -> Credentials:
    """Return the part of the credentials that a client needs."""
    return {name: credentials[name] for name in CLIENT if name in credentials}


def save_credentials(credentials: Credentials, path: str) -> None:
    """Write credentials to a 0600 file."""
    private.write_private(path, json.dumps(credentials))


def load_credentials(path: str) -> Credentials:
    """Return the credentials in a key file, or raise SchedulerFileError."""
    problem = "holds no keys of a cluster"
    try:
        found: Credentials = json.loads(private.read(path))
        if os.stat(path).st_mode & 0o077:
            raise private.NotPrivate(errno.EPERM, "is open to others", path)
        if set(CLIENT) <= set(found):
            return found
    except private.NotPrivate as error:
        problem = f"{error.strerror}; it must be yours with mode 0600"
    except OSError:
        problem = "is gone: the cluster has ended, or this node does not share the file"
    except (ValueError, TypeError, RecursionError):  # it is no JSON, or no mapping
        pass
    raise SchedulerFileError(f"the key file {path} {problem}")


def check_configuration() -> None:
    """Raise UsageError if other users may write Dask's configuration, which can run code."""
    import dask.config

    for path in (*dask.config.paths, *files()):
        with contextlib.suppress(OSError):  # it is not there
            if private.others_may_write(os.stat(path)):
                raise UsageError(
                    f"others may write {path}, Dask's configuration, and so run code as you. See "
                    f"what it says, then: chmod go-w {path}"
                )


def to_security(credentials: Mapping[str, str] | None) -> Security:
    """Return distributed's Security from credentials in memory or paths of PEM files."""
    from .nearby import NearbySecurity

    if not credentials:
        return NearbySecurity()
    return NearbySecurity(require_encryption=True, **credentials)
