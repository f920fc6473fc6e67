"""The notices of clouds that a spot machine goes, from servers that answer as the clouds' do. Offline."""

import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from raytrec.cluster import preemption as leave


class Metadata(BaseHTTPRequestHandler):
    """The metadata servers of EC2 (version 2, which asks for a token) and of GCP."""

    def do_PUT(self):
        assert self.path == "/latest/api/token" and self.headers["X-aws-ec2-metadata-token-ttl-seconds"]
        self.answer(200, "secret")

    def do_GET(self):
        going = self.server.going
        if self.path == "/latest/meta-data/spot/instance-action":
            if self.headers["X-aws-ec2-metadata-token"] != "secret":
                return self.answer(401, "")
            return self.answer(
                200 if going else 404, '{"action": "terminate", "time": "2026-11-22T08:22:00Z"}'
            )
        if self.path == "/computeMetadata/v1/instance/preempted":
            known = self.headers["Metadata-Flavor"] == "Google"
            return self.answer(200 if known else 403, "TRUE" if going else "FALSE")
        return self.answer(404, "")

    def answer(self, status, text):
        self.send_response(status)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *_):
        pass


@pytest.fixture
def metadata():
    server = ThreadingHTTPServer(("127.0.0.1", 0), Metadata)
    server.going = False
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()
    thread.join(10)


@pytest.mark.parametrize("notice", [leave.aws_notice, leave.gcp_notice])
def test_a_notice_is_heard(metadata, notice):
    base = f"http://127.0.0.1:{metadata.server_port}"
    assert notice(base) is False
    metadata.going = True
    assert notice(base) is True


@pytest.mark.parametrize("notice", [leave.aws_notice, leave.gcp_notice])
def test_a_server_that_does_not_answer_is_no_notice(metadata, notice):
    base = f"http://127.0.0.1:{metadata.server_port}"
    metadata.shutdown()
    metadata.server_close()
    assert notice(base) is False


def test_it_is_waited_for(metadata, monkeypatch):
    monkeypatch.setattr(leave, "LOOK_EVERY_S", 0.05)
    base = f"http://127.0.0.1:{metadata.server_port}"
    threading.Timer(0.3, lambda: setattr(metadata, "going", True)).start()
    waiting = threading.Thread(target=leave.wait_for, args=(lambda: leave.aws_notice(base),), daemon=True)
    waiting.start()
    waiting.join(20)
    assert not waiting.is_alive() and metadata.going


def test_a_proxy_is_never_asked(metadata, monkeypatch):
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    metadata.going = True
    assert leave.aws_notice(f"http://127.0.0.1:{metadata.server_port}") is True
