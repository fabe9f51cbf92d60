"""TLS connections of one thread, on a real network: what happens to one is not told of another."""

from __future__ import annotations

import contextlib
import pickle
import socket
import ssl
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from distributed import Security

from hpcdask.security.credentials import create_credentials, to_security
from hpcdask.security.nearby import NearbySecurity
from hpcdask.upstream import tls
from launching import wait_for


@pytest.fixture(scope="module")
def access() -> Security:
    return to_security(create_credentials())


@pytest.fixture
def connect(access: Security) -> Iterator[Callable[[], tuple[ssl.SSLSocket, ssl.SSLSocket]]]:
    """Makes both ends of a TLS connection; reading finds nothing instead of waiting."""
    server = access.get_listen_args("scheduler")["ssl_context"]
    client = access.get_connection_args("client")["ssl_context"]
    with contextlib.ExitStack() as stack, ThreadPoolExecutor(1) as other:
        listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))

        def connect() -> tuple[ssl.SSLSocket, ssl.SSLSocket]:
            accepted = other.submit(lambda: server.wrap_socket(listener.accept()[0], True))
            plain = socket.create_connection(listener.getsockname(), timeout=60)
            ends = client.wrap_socket(plain), accepted.result(10)
            for end in ends:
                stack.enter_context(end)
                end.setblocking(False)
            return ends

        yield connect


def finds_nothing(connection: ssl.SSLSocket) -> bool:
    """Whether it is told that nothing has come, which is not an error."""
    try:
        connection.recv(100)
    except ssl.SSLWantReadError:
        return True
    return False


@pytest.mark.parametrize("act", ["send", "recv"])
def test_a_peer_that_is_gone_ends_no_other_connection(connect: Any, act: str):
    """On Debian 13 (Python 3.13.5, OpenSSL 3.5), the other one had a broken pipe."""
    healthy, _ = connect()
    assert finds_nothing(healthy)
    gone, here = connect()
    gone.close()  # with the server's session tickets unread, which resets the connection

    def ended() -> bool:
        try:
            return not here.recv(100) if act == "recv" else not here.send(b"reply")
        except ssl.SSLWantReadError:
            return False
        except OSError:
            return True
        finally:
            assert finds_nothing(healthy)

    wait_for(ended, 5, "the end of the connection to be seen")
    assert finds_nothing(healthy)


def test_credentials_of_one_s_own_are_kept_and_travel():
    own = Security.temporary(tls_ciphers="ECDHE+AESGCM")
    made = pickle.loads(pickle.dumps(NearbySecurity.of(own)))
    assert all(getattr(made, name) == getattr(own, name) for name in Security.__slots__)
    for arguments in (made.get_listen_args("worker"), made.get_connection_args("client")):
        assert issubclass(arguments["ssl_context"].sslsocket_class, tls.Socket)
