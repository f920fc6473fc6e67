"""Table shard: an actor with a part of an export's rows, which answers lookups over Arrow Flight."""

from __future__ import annotations

import hmac
import secrets
import weakref
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from threading import Lock, Thread
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.flight as flight
import torch

from raytrec.common.errors import RunError
from raytrec.common.storage import make_absolute
from raytrec.scoring.load import check_files, copy_to_disk, list_table_names, select_files, unlink_files
from raytrec.scoring.lookups import TableRows
from raytrec.scoring.manifest import read_manifest
from raytrec.scoring.table_files import open_tables
from raytrec.serving.table_shards.connection import read_tls_files
from raytrec.serving.table_shards.messages import StackRequest, decode_request, decode_version

MAX_VERSIONS = 4  # versions in memory: the current, previous and prepared export, and the challenger


@dataclass(eq=False)
class LoadedTables:
    """Mapped tables of an export, without its programs.

    Attributes:
        version: Version of the export.
        stacks: Rows of each stack, in the order of the manifest.
        shapes: Rows and dim of each stack.
    """

    version: str
    stacks: list[TableRows]
    shapes: list[tuple[int, int]]


def load_tables(uri: str, part: tuple[int, int]) -> LoadedTables:
    """Map the tables of an export into memory.

    Args:
        uri: Local path, s3:// or gs:// URI.
        part: (number, count) of the process among processes that load the tables; each compares the checksums of its
            part of the files.

    Raises:
        RunError: There is no export, or it is damaged.
    """
    place = make_absolute(uri)
    manifest, (number, count) = read_manifest(place), part
    names = sorted(list_table_names(manifest))
    with ExitStack() as copies:
        folder, copied = copy_to_disk(place, select_files(manifest, names), copies)
        check_files(folder, select_files(manifest, names[number::count]), True, place, background=True)
        tables = open_tables(folder, manifest)
        if copied:
            unlink_files(folder, names)
        stacks = [tables[each.tables[0]].stack for each in manifest.stacks]
        loaded = LoadedTables(manifest.version, stacks, manifest.stack_shapes)
        weakref.finalize(loaded, copies.pop_all().close)
    return loaded


class _TokenCheck(flight.ServerMiddlewareFactory):
    """Check of the token before a stream is opened."""

    def __init__(self, token: str):
        super().__init__()
        self._expected = f"Bearer {token}".encode()

    def start_call(self, info: flight.CallInfo, headers: Mapping[str, Sequence[str]]) -> None:
        """Raise FlightUnauthenticatedError if the token is missing or wrong."""
        given = headers.get("authorization", [""])[0]
        if not hmac.compare_digest(given.encode(), self._expected):
            raise flight.FlightUnauthenticatedError("the token is missing or wrong")


class _LookupServer(flight.FlightServerBase):
    def __init__(self, shard: TableShard, host: str, token: str):
        tls, place = read_tls_files(), f"[{host}]" if ":" in host else host
        super().__init__(
            f"grpc{'+tls' if tls else ''}://{place}:0",
            middleware={"token": _TokenCheck(token)},
            tls_certificates=[tls[:2]] if tls else [],
        )
        self._shard, self.location = shard, f"grpc{'+tls' if tls else ''}://{place}:{self.port}"

    def do_exchange(self, context: Any, descriptor: Any, reader: Any, writer: Any) -> None:
        """Answer the requests of a stream until the client or a malformed request ends the stream."""
        for chunk in reader:
            if chunk.app_metadata is None:
                raise ValueError("the message is not a request")
            writer.write_metadata(self._shard.answer(memoryview(chunk.app_metadata)))


class TableShard:
    """Actor with a part of the rows of exports; replicas call `open`, then ask over Flight.

    Args:
        number: Number of the shard.
        count: Number of shards.
        host: Address to listen on, on any free port; None: the node's address in the Ray cluster, which is loopback
            for a local cluster.
    """

    def __init__(self, number: int, count: int, host: str | None = None):
        torch.set_num_threads(1)
        self._number, self._count, self._lock = number, count, Lock()
        self._versions: OrderedDict[str, LoadedTables] = OrderedDict()
        if host is None:
            import ray

            host = ray.util.get_node_ip_address()
        self._token = secrets.token_urlsafe(32)
        self.server = _LookupServer(self, host, self._token)
        Thread(target=self.server.serve, name="flight", daemon=True).start()

    def open(self, uri: str, version: str) -> tuple[str, str]:
        """Load the tables of an export unless they are loaded, and return the shard's location and token.

        The tables of the longest unused of MAX_VERSIONS versions are released.

        Raises:
            RunError: The export cannot be used, or has another version.
        """
        if version not in self._versions:  # replicas that connect again do not wait for another version
            with self._lock:
                if version not in self._versions:
                    self._load(uri, version)
        return self.server.location, self._token

    def _load(self, uri: str, version: str) -> None:
        tables = load_tables(uri, (self._number, self._count))
        if tables.version != version:
            what = f"the export has been changed in place from version {version} to {tables.version}"
            raise RunError(what, where=uri)
        self._versions[version] = tables
        if len(self._versions) > MAX_VERSIONS:
            self._versions.popitem(last=False)

    def answer(self, request: memoryview) -> pa.Buffer:
        """Return the answer to a request.

        Raises:
            ValueError: The request is malformed, or the shard does not have the version.
        """
        version = decode_version(request)
        tables = self._versions.get(version)
        if tables is None:
            raise ValueError(f"shard {self._number} has {', '.join(self._versions) or 'no version'}, not {version}")
        with suppress(KeyError):  # released meanwhile
            self._versions.move_to_end(version)
        requests = zip(tables.stacks, decode_request(request, tables.shapes), strict=True)
        with torch.inference_mode():
            parts = [_look_up(stack, each) for stack, each in requests if len(each.rows)]
        values = [part.numpy().reshape(-1) for part in parts]
        return pa.py_buffer(values[0] if len(values) == 1 else np.concatenate([np.empty(0, np.float32), *values]))


def _look_up(stack: TableRows, request: StackRequest) -> torch.Tensor:
    """Return the vectors of single rows, then the sums of bags, float32 [s + b, dim]."""
    vectors_ND = stack.vectors(torch.from_numpy(request.rows.copy()))
    if not len(request.lengths):
        return vectors_ND
    single = len(request.rows) - int(request.lengths.sum())
    pooled = vectors_ND[single:]
    if request.weights is not None:
        pooled = pooled * torch.from_numpy(request.weights.copy()).unsqueeze(1)
    sums = torch.segment_reduce(pooled, "sum", lengths=torch.from_numpy(request.lengths.copy()), unsafe=True)
    return torch.cat([vectors_ND[:single], sums])
