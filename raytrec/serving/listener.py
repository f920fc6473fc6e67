"""HTTP in a thread of this process."""

from __future__ import annotations

import ctypes
import socket
import struct
import time
from contextlib import suppress
from threading import Thread
from typing import Any

from raytrec.common.errors import RunError

LINGER_S, DRAIN_S = 1, 30  # at the end: seconds that clients may send requests, and that answers may take
BACKLOG = 2048  # connections that wait to be accepted
SO_ATTACH_FILTER, BPF_RET = 26, 6  # linux/asm-generic/socket.h, linux/bpf_common.h


class Listener:
    """HTTP server of an ASGI application, in a thread with an event loop, until `close`.

    Processes of one user can listen on one port: the kernel deals connections to them (SO_REUSEPORT), and no
    proxy is between a client and the process that scores. (Serve's costs several times what scoring does.)

    Args:
        app: ASGI application.
        host: address to listen on.
        port: port to listen on; 0: any free port.

    Attributes:
        port: port of the socket.

    Raises:
        RunError: The address cannot be listened on.
    """

    def __init__(self, app: Any, host: str, port: int):
        import uvicorn

        from raytrec.compat.uvicorn_ import CLIENT_S, BoundedProtocol, abort_slow

        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._socket = socket.socket(family, socket.SOCK_STREAM)
        # REUSEADDR: closed connections, which the kernel remembers for a minute, do not hold the port.
        for option in (socket.SO_REUSEPORT, socket.SO_REUSEADDR):
            self._socket.setsockopt(socket.SOL_SOCKET, option, 1)
        try:
            self._socket.bind((host, port))
        except OSError as error:
            self._socket.close()
            raise RunError(
                f"the service cannot listen: {error.strerror}",
                where=f"{host}:{port}",
                expected="an address of this machine, and a port that is free",
            ) from None
        self._socket.listen(BACKLOG)  # connections wait from now on
        self.port = self._socket.getsockname()[1]
        config = uvicorn.Config(
            app,
            http=BoundedProtocol,
            log_config=None,
            access_log=False,
            lifespan="off",
            ws="none",
            server_header=False,
            timeout_keep_alive=CLIENT_S,
            timeout_graceful_shutdown=DRAIN_S,
            callback_notify=lambda: abort_slow(self._server),
            timeout_notify=0,
        )
        self._server = uvicorn.Server(config)
        self._thread = Thread(target=self._server.run, args=([self._socket],), name="http", daemon=True)
        self._thread.start()

    @property
    def alive(self) -> bool:
        """True if the thread runs, so that the socket is listened on."""
        return self._thread.is_alive()

    def close(self) -> None:
        """Accept no further connections, and return when all requests that have arrived are answered.

        Clients with kept connections have LINGER_S to send a request, whose answer closes the connection.
        """
        refuse_connections(self._socket)
        closing, state = (b"connection", b"close"), self._server.server_state
        for headers in (self._server.config.encoded_headers, state.default_headers):
            headers.append(closing)
        time.sleep(LINGER_S)
        self._server.should_exit = True
        self._thread.join(DRAIN_S + 5)


def refuse_connections(listening: socket.socket) -> None:
    """Drop the packets of new connections, so that those already waiting can be accepted before it is closed.

    Closing a socket resets connections that wait to be accepted. Dropped packets are sent again after 1 s.
    """
    drop = ctypes.create_string_buffer(struct.pack("HBBI", BPF_RET, 0, 0, 0))
    program = struct.pack("HP", 1, ctypes.addressof(drop))
    with suppress(OSError):  # some kernels of containers have no filters
        listening.setsockopt(socket.SOL_SOCKET, SO_ATTACH_FILTER, program)
