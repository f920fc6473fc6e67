"""Options of a service, and the service's token."""

from __future__ import annotations

import os
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, ValidationError

from raytrec.cluster.access import load_or_create_token
from raytrec.common.errors import ConfigError, DataError, RunError, convert_os_errors
from raytrec.common.storage import make_absolute
from raytrec.config.base import Number, Section
from raytrec.scoring.manifest import read_manifest, to_plain_name

TOKEN = "RAYTREC_SERVE_TOKEN"
Location = Annotated[str, AfterValidator(lambda place: place and make_absolute(place))]  # local path or URI


class ServiceOptions(Section):
    """Options of `raytrec serve`, and arguments of the service's application on KubeRay."""

    uri: Location
    """Location of the export, which every node must be able to read; with follow, of the folder of deltas."""
    name: str | None = None
    """Name of the service; default: the run's name."""
    host: str = "127.0.0.1"
    """Address on which replicas listen, on each node that has a replica."""
    port: int = 8000
    """Port on which replicas listen, on each node that has a replica."""
    no_token: bool = False
    """Serve without a token. Otherwise, an application on KubeRay requires RAYTREC_SERVE_TOKEN."""
    allow_code: bool = False
    """Allow transforms of the export to name code."""
    promote_from: Location | None = None
    """Folder of the exports that POST /promote accepts; default: the folder that contains uri."""
    log_requests: Location | None = None
    """Folder, writable from every node, for a sample of requests and their scores; default: no log."""
    log_sample: float = Field(default=0.01, gt=0, le=1)
    """Share of requests that are logged."""
    follow: bool = False
    """Follow a run, and serve its newest state: uri is the run's folder of deltas (export.deltas.to)."""
    table_shards: int = Field(default=0, ge=0)
    """Number of actors that hold the tables; 0: each replica maps all tables."""
    table_cache_mib: float = Field(default=64, ge=0)
    """Maximum size of each replica's cache of rows from table shards, in MiB."""
    table_timeout_ms: float = Field(default=50, gt=0)
    """Timeout of a lookup in table shards, in milliseconds."""
    on_missing_shard: Literal["fail", "zeros"] = "fail"
    """fail: requests get status 503 if a shard does not respond; zeros: the vectors of that shard are 0."""

    def fill_name(self) -> ServiceOptions:
        """Return the options with a name; the default is the run's name, reduced to [A-Za-z0-9_.-].

        Raises:
            RunError: There is no export, or no folder of deltas; raised only if there is no name.
            DataError: The URI is not valid, or its store cannot be reached; raised only if there is no name.
        """
        return self.model_copy(update={"name": self.name or self._read_run()})

    def _read_run(self) -> str:
        if not self.follow:
            return to_plain_name(read_manifest(self.uri).source.run)
        from raytrec.deltas.chain import find_stream

        if stream := find_stream(self.uri):
            return to_plain_name(stream.run)
        what, expected = "no run has written deltas to this folder", "a run's export.deltas.to folder"
        raise RunError(what, where=self.uri, expected=expected)


class Promotion(Section):
    """Body of POST /promote: a promotion, a challenger (with share or shadow), or a rollback (empty)."""

    uri: str = Field(default=None, validate_default=False, min_length=1)
    share: Number | None = Field(default=None, gt=0, le=1, strict=True)
    shadow: bool = Field(default=False, strict=True)

    @classmethod
    def parse(cls, body: bytes) -> Promotion:
        """Parse a body.

        Raises:
            DataError: The body is invalid.
        """
        try:
            promotion, what = cls.model_validate_json(body), "share and shadow require a uri"
            if promotion.uri or not (promotion.share or promotion.shadow):
                return promotion
        except ValidationError as error:
            mistake = error.errors()[0]
            what = f"invalid {mistake['loc'][0]}: {mistake['msg']}" if mistake["loc"] else mistake["msg"]
        expected, do = '{"uri": …[, "share": 0.1][, "shadow": true]} or {}', "see POST /promote in GET /openapi.json"
        raise DataError(what, where="the body", expected=expected, do=do)


def token_file(name: str) -> Path:
    """Return the path of this user's file with the token of a service.

    Raises:
        ConfigError: The name contains a slash or characters that are not printable.
    """
    if "/" in name or not name.isprintable():
        raise ConfigError(
            f"{name!r} is not a valid name of a service",
            where="--name",
            expected="printable characters other than /",
            do="choose another name",
        )
    home = os.environ.get("XDG_CONFIG_HOME")
    return (Path(home) if home else Path.home() / ".config") / "raytrec" / f"serve-{name}.token"


def read_token(name: str) -> str:
    """Return RAYTREC_SERVE_TOKEN, or else the token in the service's file, which is created if missing.

    Raises:
        RunError: The file cannot be created or read.
    """
    if token := os.environ.get(TOKEN):
        return token
    with _convert_token_errors(name):
        return load_or_create_token(token_file(name))


def find_token(name: str | None) -> str:
    """Return the token of a client: RAYTREC_SERVE_TOKEN, or the content of the service's file; "" if there is none.

    Args:
        name: Name of the service; None: no file is read.

    Raises:
        RunError: The file cannot be read.
    """
    if (token := os.environ.get(TOKEN)) or not name:
        return token or ""
    with _convert_token_errors(name):
        return load_or_create_token(token_file(name)) if token_file(name).exists() else ""


def _convert_token_errors(name: str) -> AbstractContextManager[None]:
    do = f"make the file accessible to this user, or set {TOKEN}"
    what = f"the token of service {name} cannot be stored or read"
    return convert_os_errors(what, where=str(token_file(name)), do=do)
