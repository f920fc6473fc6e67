"""HTTP server of a replica, which listens in a thread and shares its port with other replicas."""

from __future__ import annotations

import asyncio
import ctypes
import socket
import struct
from contextlib import suppress
from math import inf
from threading import Thread
from time import sleep
from typing import Any

import uvicorn

from raytrec.common.errors import RunError
from raytrec.compat import uvicorn_

DRAIN_TIMEOUT_S = 30  # timeout of pending responses when the listener closes
LISTEN_BACKLOG = 2048  # maximum number of connections waiting to be accepted
SO_ATTACH_FILTER = 26  # asm-generic/socket.h
# Instructions (linux/bpf_common.h) that drop packets whose flags, byte 13 of TCP's header, contain SYN but not ACK.
DROP_SYN = ((0x30, 0, 0, 13), (0x54, 0, 0, 0x12), (0x15, 0, 1, 0x02), (0x06, 0, 0, 0), (0x06, 0, 0, 0xFFFFFFFF))


class Listener:
    """HTTP server that runs an ASGI application in a thread with an event loop until `close` is called.

    Several processes of one user can listen on one port: the kernel distributes connections (SO_REUSEPORT).
    Clients connect directly to the process that scores, because Serve's proxy takes several times longer
    than scoring a few rows.

    Args:
        app: ASGI application.
        host: Address to listen on.
        port: Port to listen on; 0: any free port.

    Attributes:
        port: Port of the socket.
        fair_connections: Number of active connections above which responses close connections; default: no limit.
        loop: Event loop of the thread; None until the server has started.

    Raises:
        RunError: The server cannot listen on the address.
    """

    def __init__(self, app: Any, host: str, port: int):
        self.fair_connections = inf
        self.loop: asyncio.AbstractEventLoop | None = None
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._socket = socket.socket(family, socket.SOCK_STREAM)
        # REUSEADDR: closed connections, which the kernel remembers for a minute, do not block the port.
        for option in (socket.SO_REUSEPORT, socket.SO_REUSEADDR):
            self._socket.setsockopt(socket.SOL_SOCKET, option, 1)
        try:
            self._socket.bind((host, port))
        except OSError as error:
            self._socket.close()
            what, where = f"the service cannot listen: {error.strerror}", f"{host}:{port}"
            raise RunError(what, where=where, expected="an address of this machine and a free port") from None
        self._socket.listen(LISTEN_BACKLOG)  # connections are queued from now on
        self.port = self._socket.getsockname()[1]
        config = uvicorn.Config(
            app,
            http=uvicorn_.BoundedProtocol,
            log_config=None,
            access_log=False,
            lifespan="off",
            ws="none",
            server_header=False,
            timeout_keep_alive=uvicorn_.CLIENT_TIMEOUT_S,
            timeout_graceful_shutdown=DRAIN_TIMEOUT_S,
            callback_notify=self._check_connections,
            timeout_notify=0,
        )
        self._server = uvicorn_.DrainingServer(config)
        self._thread = Thread(target=self._server.run, args=([self._socket],), name="http", daemon=True)
        self._thread.start()

    @property
    def alive(self) -> bool:
        """Return True if the thread is running and thus listens on the socket."""
        return self._thread.is_alive()

    def count_active_connections(self) -> int:
        """Return the number of connections in use, or opened or used within ACTIVE_S seconds (compat/uvicorn_.py)."""
        return len(uvicorn_.list_active(self._server))

    async def _check_connections(self) -> None:
        self.loop = asyncio.get_running_loop()
        await uvicorn_.abort_slow(self._server)
        uvicorn_.close_surplus(self._server, self.fair_connections)

    def close(self) -> None:
        """Stop accepting connections, answer all requests that have arrived, and end the thread.

        Clients with open connections have CLOSE_GRACE_S seconds to send a request, whose response closes the
        connection. Responses that take longer than DRAIN_TIMEOUT_S are canceled.
        """
        refuse_connections(self._socket)
        for headers in (self._server.config.encoded_headers, self._server.server_state.default_headers):
            headers.append(uvicorn_.CLOSE_HEADER)
        sleep(uvicorn_.CLOSE_GRACE_S)
        self._server.should_exit = True
        self._thread.join(DRAIN_TIMEOUT_S + 2 * uvicorn_.CLOSE_GRACE_S + 5)


def refuse_connections(listening: socket.socket) -> None:
    """Drop the first packet of new connections, if possible, so that waiting connections can be accepted first.

    Closing a socket resets connections that wait to be accepted. Dropped packets are resent after 1 s. Other
    packets must pass: a dropped acknowledgment would leave a connection that only the client considers open.
    """
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *each) for each in DROP_SYN))
    program = struct.pack("HP", len(DROP_SYN), ctypes.addressof(code))
    with suppress(OSError):  # some containers do not support filters
        listening.setsockopt(socket.SOL_SOCKET, SO_ATTACH_FILTER, program)
