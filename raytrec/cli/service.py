"""Commands of services."""

from __future__ import annotations

from typing import Annotated

import typer

from raytrec.cli.options import AllowCode


def serve(
    uri: Annotated[str, typer.Argument(metavar="URI", help="Export: a local folder, s3:// or gs://.")],
    name: Annotated[str | None, typer.Option(help="Of the service; default: the run's.")] = None,
    address: Annotated[
        str | None, typer.Option(help="auto or HOST:PORT of a Ray cluster; default: a new local one.")
    ] = None,
    replicas: Annotated[
        str, typer.Option(metavar="N|MIN:MAX", help="Processes that answer; MIN:MAX by load.")
    ] = "1",
    host: Annotated[str, typer.Option(help="That it listens on; 0.0.0.0: all interfaces.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="That it listens on.")] = 8000,
    no_token: Annotated[bool, typer.Option("--no-token", help="Answer without a token.")] = False,
    allow_code: AllowCode = False,
):
    """Serve an export over HTTP, on Ray Serve, until Ctrl-C."""
    from raytrec.serving.command import serve as run

    run(
        uri,
        name=name,
        address=address,
        replicas=replicas,
        host=host,
        port=port,
        no_token=no_token,
        allow_code=allow_code,
    )


def promote(
    uri: Annotated[str | None, typer.Argument(metavar="[URI]", help="Export that is to answer.")] = None,
    service: Annotated[str, typer.Option(help="The service's address.")] = "http://127.0.0.1:8000",
    name: Annotated[str | None, typer.Option(help="The service's name, for its token.")] = None,
    rollback: Annotated[bool, typer.Option("--rollback", help="The version before instead.")] = False,
):
    """Have all replicas of a service answer with another export, once all have loaded and checked it."""
    from raytrec.serving.command import promote as run

    print(f"version      {run(uri, service=service, name=name, rollback=rollback)}")
