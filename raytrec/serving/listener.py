"""HTTP server of a replica, which listens in a thread and shares its port with other replicas."""

from __future__ import annotations

import ctypes
import socket
import struct
from contextlib import suppress
from threading import Thread
from time import sleep
from typing import Any

from raytrec.common.errors import RunError

# When closing: seconds in which clients may send requests, and answers may finish.
CLOSE_GRACE_S, DRAIN_TIMEOUT_S = 1, 30
LISTEN_BACKLOG = 2048  # maximum number of connections waiting to be accepted
SO_ATTACH_FILTER, BPF_RET = 26, 6  # linux/asm-generic/socket.h, linux/bpf_common.h


class Listener:
    """HTTP server that runs an ASGI application in a thread with an event loop until `close` is called.

    Several processes of one user can listen on one port: the kernel distributes connections (SO_REUSEPORT).
    Clients connect directly to the process that scores, because Serve's proxy takes several times longer
    than scoring.

    Args:
        app: ASGI application.
        host: Address to listen on.
        port: Port to listen on; 0: any free port.

    Attributes:
        port: Port of the socket.

    Raises:
        RunError: The server cannot listen on the address.
    """

    def __init__(self, app: Any, host: str, port: int):
        import uvicorn

        from raytrec.compat.uvicorn_ import CLIENT_TIMEOUT_S, BoundedProtocol, abort_slow

        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._socket = socket.socket(family, socket.SOCK_STREAM)
        # REUSEADDR: closed connections, which the kernel remembers for a minute, do not block the port.
        for option in (socket.SO_REUSEPORT, socket.SO_REUSEADDR):
            self._socket.setsockopt(socket.SOL_SOCKET, option, 1)
        try:
            self._socket.bind((host, port))
        except OSError as error:
            self._socket.close()
            raise RunError(
                f"the service cannot listen: {error.strerror}",
                where=f"{host}:{port}",
                expected="an address of this machine and a free port",
            ) from None
        self._socket.listen(LISTEN_BACKLOG)  # connections are queued from now on
        self.port = self._socket.getsockname()[1]
        config = uvicorn.Config(
            app,
            http=BoundedProtocol,
            log_config=None,
            access_log=False,
            lifespan="off",
            ws="none",
            server_header=False,
            timeout_keep_alive=CLIENT_TIMEOUT_S,
            timeout_graceful_shutdown=DRAIN_TIMEOUT_S,
            callback_notify=lambda: abort_slow(self._server),
            timeout_notify=0,
        )
        self._server = uvicorn.Server(config)
        self._thread = Thread(target=self._server.run, args=([self._socket],), name="http", daemon=True)
        self._thread.start()

    @property
    def alive(self) -> bool:
        """Return True if the thread is running and thus listens on the socket."""
        return self._thread.is_alive()

    def close(self) -> None:
        """Stop accepting connections, and return when all requests that have arrived are answered.

        Clients with open connections have CLOSE_GRACE_S to send a request, whose answer closes the
        connection.
        """
        refuse_connections(self._socket)
        closing, state = (b"connection", b"close"), self._server.server_state
        for headers in (self._server.config.encoded_headers, state.default_headers):
            headers.append(closing)
        sleep(CLOSE_GRACE_S)
        self._server.should_exit = True
        self._thread.join(DRAIN_TIMEOUT_S + 5)


def refuse_connections(listening: socket.socket) -> None:
    """Drop the packets of new connections, so that waiting connections can be accepted first.

    Closing a socket resets connections that wait to be accepted. Dropped packets are resent after 1 s.
    """
    drop = ctypes.create_string_buffer(struct.pack("HBBI", BPF_RET, 0, 0, 0))
    program = struct.pack("HP", 1, ctypes.addressof(drop))
    with suppress(OSError):  # some containers do not support filters
        listening.setsockopt(socket.SOL_SOCKET, SO_ATTACH_FILTER, program)
