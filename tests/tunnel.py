"""Connections that are passed on from one socket to another, like those of ssh -L."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable


def forward(listener: socket.socket, connect: Callable[[], socket.socket]) -> None:
    """Pass on what a listening socket accepts, in threads, until it is shut down."""

    def pump(source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                sink.sendall(data)
            sink.shutdown(socket.SHUT_WR)

    def serve() -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = listener.accept()
                far = connect()
                for ends in ((near, far), (far, near)):
                    threading.Thread(target=pump, args=ends, daemon=True).start()

    threading.Thread(target=serve, daemon=True).start()
