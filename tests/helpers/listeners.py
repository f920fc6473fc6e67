"""Plain ASGI application, and raw HTTP requests to the HTTP listener that runs it."""

import socket
from contextlib import closing

GET = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"
WAIT_S = 20


class Echo:
    """Application that answers with the size of the body, or with `answer_bytes`, and counts requests."""

    def __init__(self, answer_bytes=None, reads=True):
        self.begun, self.answer_bytes, self.reads = 0, answer_bytes, reads

    async def __call__(self, scope, receive, send):
        self.begun += 1
        size, more = 0, self.reads
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                return
            size += len(message["body"])
            more = message["more_body"]
        body = b"%d" % size if self.answer_bytes is None else b"x" * self.answer_bytes
        headers = [(b"content-length", b"%d" % len(body))]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body})


def connect(listener):
    return closing(socket.create_connection(("127.0.0.1", listener.port), timeout=WAIT_S))


def read_all(connection):
    """Read from the connection until the listener closes it."""
    found = b""
    try:
        while part := connection.recv(1 << 16):
            found += part
    except ConnectionResetError:
        pass
    return found


def parse_statuses(answers):
    return [int(part[:3]) for part in answers.split(b"HTTP/1.1 ")[1:]]
