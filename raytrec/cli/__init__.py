"""Command line of raytrec. Commands only parse arguments, call the library and print results."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable
from contextlib import nullcontext
from functools import wraps
from typing import Annotated, Any

import typer
from raytrec_datasets import app as prepare_app

from raytrec.cli import runs, saved, service
from raytrec.cli.options import with_options

app = typer.Typer(
    name="raytrec",
    help="Train recommender models whose embedding tables outgrow one GPU.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
app.add_typer(prepare_app, name="prepare")
# Packages that an installation without extras lacks.
EXTRA_PACKAGES = ("ray", "torch", "torchrec", "fbgemm_gpu", "mlflow", "psutil", "matplotlib", "jinja2", "safetensors")
COMMANDS: list[Callable[..., None]] = [
    *(runs.train, runs.tune, service.submit, service.head, service.follow_job, service.stop_job),
    *(saved.evaluate, saved.predict, saved.index, saved.convert, runs.check, runs.doctor, runs.plan),
    *(saved.export, service.serve, service.promote, service.verify, service.skew),
    *(saved.report, saved.track, saved.compare, saved.inspect, runs.config),
]
# Commands with workers → purpose of the warm process (warm_process.MODULES).
WORKER_COMMANDS = dict.fromkeys((runs.train, runs.check, saved.evaluate, saved.predict, saved.index), "training")
WORKER_COMMANDS[service.serve] = "serving"


def _wrap_command(command: Callable[..., None]) -> Callable[..., None]:
    """Return a command that exits with 128 plus the signal's number if a signal interrupts the command.

    Commands with workers first start the warm process, which imports torch and other packages for the workers, unless
    the command joins a running cluster.
    """

    @wraps(command)
    def run(**options: Any) -> None:
        try:
            if command in WORKER_COMMANDS and not options.get("address"):
                from raytrec.cluster.session import warm_up_early

                warm_up_early(WORKER_COMMANDS[command])
            command(**options)
        except KeyboardInterrupt as error:
            print("interrupted", file=sys.stderr)
            raise typer.Exit(128 + getattr(error, "signal", signal.SIGINT)) from None

    return run


for command in COMMANDS:
    app.command(command.__name__.removesuffix("_job"))(with_options(_wrap_command(command)))

deltas_app = typer.Typer(help="Apply a run's deltas to exports.", no_args_is_help=True)
deltas_app.command("apply")(with_options(_wrap_command(saved.apply_deltas)))
app.add_typer(deltas_app, name="deltas")


def _version(is_requested: bool) -> None:
    if is_requested:
        from raytrec import __version__

        print(__version__)
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


def main(arguments: list[str] | None = None) -> None:
    """Run the `raytrec` command. A RaytrecError is printed without a traceback; the exit code is then 1.

    Args:
        arguments: Command-line arguments; None: use sys.argv, and end the process afterwards.
    """
    from raytrec.common.processes import exit_after_block, handle_hangup_as_sigterm
    from raytrec.common.terminal import tolerate_stream_errors

    if arguments is None:
        handle_hangup_as_sigterm()
    with exit_after_block() if arguments is None else nullcontext(), tolerate_stream_errors():
        _run(arguments)


def _run(arguments: list[str] | None) -> None:
    """Run one command, and raise SystemExit with its exit code."""
    from raytrec.common.errors import RaytrecError

    try:
        try:
            app(arguments)
        except (ModuleNotFoundError, OSError) as error:
            raise _explain_failed_import(error) from error
    except RaytrecError as error:
        from raytrec.cluster.session import leave
        from raytrec.tracking.progress_log import ERROR, write_message

        prefix = "\033[1;31merror:\033[0m" if sys.stderr.isatty() else "error:"
        print(f"{prefix} {error}", file=sys.stderr)
        write_message(ERROR, error.parts)
        leave(1)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(130)


def _explain_failed_import(error: ModuleNotFoundError | OSError) -> Exception:
    """Return a RunError if a package of an extra is missing or FBGEMM's library cannot be loaded, else `error`."""
    from raytrec.common.errors import RunError

    if isinstance(error, OSError):
        if "fbgemm_gpu" not in str(error):
            return error
        return RunError(
            f"FBGEMM cannot be loaded: {error.__cause__ or error}",
            where=str(error).rpartition(": ")[2],
            expected="a loadable library; on Linux, that of the CUDA packages requires NVIDIA's driver",
            do="install the CPU packages if this machine has no driver (docs/install.md), else run `raytrec doctor`",
        )
    package = (error.name or "").partition(".")[0]
    if package not in EXTRA_PACKAGES:
        return error
    return RunError(
        f"{package} is not installed" if error.name == package else f"{package} lacks the module {error.name}",
        where=sys.prefix,
        expected="the packages for CPUs or GPUs to train and export, or raytrec[score] to score",
        do="install the packages as in docs/install.md",
    )
