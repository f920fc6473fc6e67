"""A cluster that was started without a token, and a driver that has one."""

from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest

from raytrec.cluster.access import check_token
from raytrec.common.errors import RunError
from raytrec.compat.ray_core import GCS_CALL

TOKEN = "5" * 64


@pytest.fixture
def token(monkeypatch):
    """This process's own, whatever lies at home."""
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    monkeypatch.setenv("RAY_AUTH_TOKEN", TOKEN)
    own = (("authorization", f"Bearer {TOKEN}"),)
    monkeypatch.setattr("raytrec.cluster.access._token", lambda: own)  # Ray has read its settings
    monkeypatch.setattr("ray._private.ray_constants.ENABLE_RAY_CLUSTER", False)  # 127.0.0.1 stays what it is


class Gcs(grpc.GenericRpcHandler):
    """Answers on the way that GCS does."""

    def __init__(self, asks):
        self.asks = asks

    def service(self, call):
        def answer(request, context):
            if self.asks and f"Bearer {TOKEN}" not in dict(context.invocation_metadata()).values():
                context.abort(grpc.StatusCode.UNAUTHENTICATED, "InvalidAuthToken")
            return b""

        return grpc.unary_unary_rpc_method_handler(answer) if call.method == GCS_CALL else None


@pytest.mark.parametrize("asks", [True, False])
def test_a_cluster_that_asks_for_no_token_is_told_at_once(token, asks):
    server = grpc.server(ThreadPoolExecutor(2), handlers=[Gcs(asks)])
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        if asks:
            return check_token(f"127.0.0.1:{port}")
        with pytest.raises(RunError, match="started without a token") as error:
            check_token(f"127.0.0.1:{port}")
        assert f"scaling.address=127.0.0.1:{port}" in str(error.value)
        assert "RAY_AUTH_MODE to disabled" in str(error.value)
    finally:
        server.stop(None)
