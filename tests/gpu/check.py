"""`make gpu-check`: test raytrec on the hardware of this machine.

    python tests/gpu/check.py [--device auto|cpu|cuda] [--only parity,train] [--smallest]

Each block (blocks/__init__.py) runs in a separate process with a time limit, so a crash or hang does not stop
other blocks. A block ends at its first failure. No network is needed. The final table lists the result of
each block: passed, failed, or cannot run here, with the reason. gpu-check.json has the measurements. The exit
status is 1 if a block failed.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import traceback
from contextlib import nullcontext, suppress
from dataclasses import asdict, dataclass
from importlib import import_module
from pathlib import Path
from time import perf_counter
from typing import Annotated, Any

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
TESTS = HERE.parent
sys.path[:0] = [str(HERE), str(TESTS / "helpers"), str(TESTS / "parity"), str(ROOT / "benchmarks")]

import typer  # noqa: E402
from blocks import BLOCK_TIMEOUTS_S  # noqa: E402
from here import BlockCannotRun, BlockContext  # noqa: E402

SYNTHETIC_ROWS = {"smallest": 6_000, "cpu": 20_000, "cuda": 300_000}  # rows of synthetic training data
PASSED, FAILED, CANNOT_RUN = "passed", "failed", "cannot run here"


@dataclass
class BlockResult:
    """Result of a block.

    Attributes:
        why: reason of a failure, or why this machine cannot run the block; empty if the block passed.
        found: measurements of the block.
        about: package versions and device of the block's process.
    """

    name: str
    result: str
    why: str
    seconds: float
    found: dict[str, Any]
    about: dict[str, Any]


def run_block(name: str, limit_s: int, here: BlockContext) -> BlockResult:
    """Run a block in a separate process and wait until it ends."""
    here.folder.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-W", "ignore", __file__, "--child", name, "--device", here.kind]
    command += ["--folder", str(here.shared), *(["--smallest"] if here.smallest else [])]
    command += ["--stand-in"] if here.stand_in else []
    began, log = perf_counter(), here.folder / "log.txt"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([*sys.path[:4], os.environ.get("PYTHONPATH", "")])}
    late = False
    with log.open("wb") as output:
        options = {"stdout": output, "stderr": output, "env": environment, "start_new_session": True}
        process = subprocess.Popen(command, cwd=HERE, **options)
        try:
            process.wait(limit_s)
        except subprocess.TimeoutExpired:
            late = True
        finally:
            _end(process)
    printed = here.folder / "outcome.json"
    values = json.loads(printed.read_text()) if printed.exists() else {"found": {}, "about": {}}
    if late:
        values |= {"result": FAILED, "why": f"not done after {limit_s} s; last output: {_tail(log)}"}
    elif "result" not in values:
        values |= {"result": FAILED, "why": f"the process ended with {_end_of(process)}: {_tail(log)}"}
    return BlockResult(name, seconds=round(perf_counter() - began, 1), **values)


def _end(process: subprocess.Popen) -> None:
    """Kill the process group of a block."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _end_of(process: subprocess.Popen) -> str:
    code = process.returncode
    return signal.Signals(-code).name if code < 0 else f"exit code {code}"


def _tail(log: Path) -> str:
    """Return the last non-empty line of a log."""
    printed = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return printed[-1][-300:] if printed else "none"


def run_block_here(name: str, here: BlockContext) -> None:
    """Run a block in this process and write outcome.json."""
    import faulthandler

    faulthandler.enable()
    values = {"found": here.found, "about": {}}
    try:
        with _device(here.stand_in):
            values["about"] = describe_machine(here)
            _write(here, values)  # kept if the process dies
            import_module(name if "." in name else f"blocks.{name}").run(here)
        values |= {"result": PASSED, "why": ""}
    except BlockCannotRun as reason:
        values |= {"result": CANNOT_RUN, "why": str(reason)}
    except BaseException as error:
        traceback.print_exc()
        values |= {"result": FAILED, "why": _why(error)}
    _write(here, values)


def _write(here: BlockContext, values: dict[str, Any]) -> None:
    (here.folder / "outcome.json").write_text(json.dumps(values, default=str))


def _why(error: BaseException) -> str:
    """Return the first line of an error and its location in the block."""
    printed = str(error).strip().splitlines() or ["an assertion"]
    kind = "" if isinstance(error, AssertionError) else f"{type(error).__name__}: "
    frames = [f for f in traceback.extract_tb(error.__traceback__) if "gpu/blocks" in f.filename]
    place = f" ({Path(frames[-1].filename).name}:{frames[-1].lineno}, {frames[-1].name})" if frames else ""
    return f"{kind}{printed[0]}{place}"


def _device(stand_in: bool) -> Any:
    """Return a context with the GPU stand-in (tests/helpers/standin), or a null context."""
    if not stand_in:
        return nullcontext()
    from standin import use_stand_in_gpu

    return use_stand_in_gpu()


def describe_machine(here: BlockContext) -> dict[str, Any]:
    """Return the package versions and the device name."""
    import platform

    from blocks.environment import PACKAGES, driver_version, gpu_name, installed_version

    facts = {"python": platform.python_version(), "cores": os.cpu_count(), "device": "cpu"}
    facts |= {name: found for name in PACKAGES if (found := installed_version(name))}
    if here.real:  # through NVML, because torch would create a CUDA context
        facts |= {"device": gpu_name(), "driver": driver_version()}
    elif here.kind == "cuda":
        facts["device"] = "stand-in for a GPU"
    return facts


def find_device() -> str:
    """Return "cuda" if torch can use a GPU or an NVIDIA driver is loaded, else "cpu"."""
    code = "import torch; print(torch.cuda.is_available())"
    answer = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True)
    return "cuda" if "True" in answer.stdout or Path("/dev/nvidiactl").exists() else "cpu"


def prepare_data(here: BlockContext) -> None:
    """Generate the synthetic training data."""
    rows = SYNTHETIC_ROWS["smallest" if here.smallest else here.kind]
    command = [sys.executable, "-m", "raytrec", "prepare", "synthetic"]
    command += ["--out", str(here.data), "--rows", str(rows)]
    subprocess.run(command, check=True, capture_output=True, timeout=300)


def _print_log(folder: Path) -> None:
    """Print the output of a failed block and the tracebacks of its workers."""
    for path in [folder / "log.txt", *sorted(folder.rglob("error.txt"))]:
        print(f"\n--- {path.relative_to(folder.parent)} ---\n{path.read_text(errors='replace')[-4000:]}")


def print_table(outcomes: list[BlockResult]) -> None:
    """Print the result table."""
    from rich.console import Console
    from rich.table import Table

    facts = next((o.about for o in outcomes if o.about), {})
    table = Table(title=", ".join(str(facts[k]) for k in ("device", "driver", "torch") if k in facts), show_lines=True)
    for column in ("block", "result", "s", "what was found"):
        table.add_column(column, justify="right" if column == "s" else "left", overflow="fold")
    colors = {PASSED: "green", FAILED: "red", CANNOT_RUN: "yellow"}
    for o in outcomes:
        printed = o.why or "; ".join(f"{k} {_short(v)}" for k, v in o.found.items())
        table.add_row(o.name, f"[{colors[o.result]}]{o.result}[/]", f"{o.seconds:.0f}", printed)
    Console().print(table)


def _short(value: Any) -> str:
    text = f"{value:.4g}" if isinstance(value, float) else str(value)
    return text if len(text) < 120 else text[:117] + "…"


def run_blocks(
    kind: str,
    shared: Path,
    blocks: dict[str, int] = BLOCK_TIMEOUTS_S,
    *,
    smallest: bool = False,
    stand_in: bool = False,
) -> list[BlockResult]:
    """Run blocks one after the other.

    Args:
        kind: cpu or cuda.
        shared: output folder of all blocks.
        blocks: block name -> time limit in seconds.
        smallest: use the smallest sizes.
        stand_in: use the GPU stand-in (tests/helpers/standin).
    """
    outcomes = []
    for name, limit_s in blocks.items():
        here = BlockContext(kind, smallest, shared / name, shared, stand_in)
        outcomes.append(last := run_block(name, limit_s, here))
        print(f"{name}: {last.result}, {last.seconds:.0f} s{'. ' * bool(last.why)}{last.why}", flush=True)
    return outcomes


def main(
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    only: Annotated[str, typer.Option(help="Comma-separated blocks to run. Default: all.")] = "",
    smallest: Annotated[bool, typer.Option(help="Use the smallest sizes.")] = False,
    stand_in: Annotated[bool, typer.Option(help="Use the GPU stand-in (tests/helpers/standin).")] = False,
    out: Annotated[Path, typer.Option(help="Output file of the measurements.")] = Path("gpu-check.json"),
    child_of: Annotated[str, typer.Option("--child", hidden=True)] = "",
    folder: Annotated[Path | None, typer.Option(hidden=True)] = None,
) -> None:
    """Check this machine, block by block."""
    if child_of:
        return run_block_here(child_of, BlockContext(device, smallest, folder / child_of, folder, stand_in))
    device = find_device() if device == "auto" else device
    wanted = set(filter(None, only.split(",")))
    if unknown := wanted - BLOCK_TIMEOUTS_S.keys():
        raise typer.BadParameter(f"no block {', '.join(sorted(unknown))}; there are {[*BLOCK_TIMEOUTS_S]}")
    chosen = {name: limit_s for name, limit_s in BLOCK_TIMEOUTS_S.items() if name in wanted or not wanted}
    print(f"{len(chosen)} blocks on {device}" + " (torch finds no GPU)" * (device == "cpu"), flush=True)
    began = perf_counter()
    with tempfile.TemporaryDirectory(prefix="gpu-check-", ignore_cleanup_errors=True) as place:
        shared = Path(place)
        prepare_data(BlockContext(device, smallest, shared, shared))
        outcomes = run_blocks(device, shared, chosen, smallest=smallest, stand_in=stand_in)
        for outcome in outcomes:
            if outcome.result == FAILED:
                _print_log(shared / outcome.name)
    print_table(outcomes)
    facts = next((o.about for o in outcomes if o.about), {})
    blocks = [{k: v for k, v in asdict(o).items() if k != "about"} for o in outcomes]
    values = {"about": facts, "seconds": round(perf_counter() - began, 1), "blocks": blocks}
    out.write_text(json.dumps(values, indent=1, default=str) + "\n")
    raise typer.Exit(any(o.result == FAILED for o in outcomes))


if __name__ == "__main__":
    typer.run(main)
