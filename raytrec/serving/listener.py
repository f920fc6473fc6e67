"""HTTP in a thread of this process."""

from __future__ import annotations

import socket
from threading import Thread
from typing import Any

from raytrec.common.errors import RunError

KEEP_ALIVE_S, DRAIN_S = 90, 30  # how long an idle connection stays; how long requests may take at the end
BACKLOG = 2048  # connections that wait to be accepted


class Listener:
    """Serves an application of ASGI until `close`, in a thread with an event loop.

    Processes of one user can listen on one port: the kernel deals connections to them (SO_REUSEPORT), and no
    proxy is between a client and the process that scores. (Serve's costs several times what scoring does.)

    Args:
        port: 0: any that is free.

    Raises:
        RunError: the address cannot be listened on.
    """

    def __init__(self, app: Any, host: str, port: int):
        import uvicorn

        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._socket = socket.socket(family, socket.SOCK_STREAM)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
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
            log_config=None,
            access_log=False,
            lifespan="off",
            ws="none",
            server_header=False,
            timeout_keep_alive=KEEP_ALIVE_S,
            timeout_graceful_shutdown=DRAIN_S,
        )
        self._server = uvicorn.Server(config)
        self._thread = Thread(target=self._server.run, args=([self._socket],), name="http", daemon=True)
        self._thread.start()

    @property
    def alive(self) -> bool:
        """Whether it listens, or is about to."""
        return self._thread.is_alive()

    def close(self) -> None:
        """Takes no further connections, and returns when requests that have begun are answered."""
        self._server.should_exit = True
        self._thread.join(DRAIN_S + 5)
