"""An HTTP service in this process, without Ray, and requests in all supported body formats."""

import json
import urllib.error
import urllib.request

import numpy as np
import pyarrow as pa

from raytrec.serving.app import Service
from raytrec.serving.bodies import ARROW, JSON
from raytrec.serving.listener import Listener
from raytrec.serving.loaded_exports import LoadedExports

TOKEN = "a token"


class ServedApp:
    """HTTP service and its client.

    Args:
        service: service to run; default: a service without an export (see `serve`).
    """

    def __init__(self, service=None):
        self.service = service = service or Service(None, TOKEN)
        self._listener = Listener(service, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self._listener.port}"

    def serve(self, export):
        """Switch the service to an export and return its scorer."""
        self.service.versions = LoadedExports(str(export))
        return self.service.versions.current.scorer

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    def close(self):
        self._listener.close()

    def ask(self, path, body=None, kind=JSON, accept=JSON, token=TOKEN, method=None, headers=None, key=None):
        """Send a request, with additional headers and `key` as X-Request-Key, and return (status, body, headers)."""
        if body is not None and not isinstance(body, bytes):
            body = json.dumps(body).encode()
        known = {"Content-Type": kind, "Accept": accept, "Authorization": f"Bearer {token}"}
        headers = known | (headers or {})
        headers |= {"X-Request-Key": key} if key else {}
        request = urllib.request.Request(self.url + path, body, headers, method=method)
        try:
            with urllib.request.urlopen(request, timeout=30) as answer:
                return answer.status, answer.read(), answer.headers
        except urllib.error.HTTPError as error:
            return error.code, error.read(), error.headers

    def scores(self, body, **options):
        status, content, headers = self.ask("/predict", body, **options)
        assert status == 200, content
        answer = json.loads(content)
        assert answer["version"] == headers["X-Model-Version"]
        return answer["predictions"]

    def scores_of_forms(self, rows, table):
        """Yield (body format, predictions) of the same rows for each body format.

        Args:
            rows: rows as dicts, for JSON bodies.
            table: the same rows as an Arrow table.
        """
        columns = {name: [row[name] for row in rows] for name in rows[0]}
        yield "rows", self.scores({"rows": rows})
        yield "columns", self.scores({"columns": columns})
        yield "Arrow", self.scores(to_arrow_stream(table), kind=ARROW)
        _, content, headers = self.ask("/predict", to_arrow_stream(table), kind=ARROW, accept=ARROW)
        answer = pa.ipc.open_stream(content).read_all()
        assert answer.schema.metadata[b"version"].decode() == headers["X-Model-Version"]
        yield "Arrow in Arrow", answer.to_pydict()


def to_arrow_stream(table, **options):
    """Serialize a table as an Arrow stream.

    Args:
        table: table to serialize.
        options: arguments of pyarrow.ipc.IpcWriteOptions.
    """
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema, options=pa.ipc.IpcWriteOptions(**options)) as writer:
        writer.write_table(table)
    return sink.getvalue().to_pybytes()


def assert_predictions_equal(predictions, expected):
    """Assert that predictions equal the columns of a table or mapping."""
    for name in getattr(expected, "column_names", expected):
        values = expected[name]
        values = values.to_pylist() if isinstance(values, pa.ChunkedArray) else values
        np.testing.assert_allclose(predictions[name], values, rtol=1e-6, atol=1e-6, err_msg=name)
