"""Check that a worker group trains like a single process, for `raytrec check`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from time import perf_counter, time
from typing import Any

from rich.table import Table
from rich.text import Text

from raytrec.cluster.session import describe_connection
from raytrec.common.errors import convert_os_errors
from raytrec.common.formatting import format_count
from raytrec.common.messages import Compared
from raytrec.common.terminal import open_console, to_bold_text, to_plain_text
from raytrec.config.overrides import Overrides
from raytrec.config.run_config import RunConfig, load_config
from raytrec.config.schema import Schema
from raytrec.driver.console import RunConsole
from raytrec.driver.launch import open_session, run_group
from raytrec.driver.preflight import check_fit
from raytrec.driver.prepare import resolve
from raytrec.driver.recorder import Watch, write_json
from raytrec.driver.run import describe_store
from raytrec.driver.track import DELIVERY_TIMEOUT_S
from raytrec.tracking.journal import append_line
from raytrec.tracking.run_folder import CHECK_RESULT
from raytrec.worker.context import WorkerTask
from raytrec.worker.loop import check_worker


@dataclass(frozen=True)
class CheckResult:
    """Comparison of sharded training with a single process, as returned by `check`.

    Attributes:
        name: Name of the check (run.name).
        findings: One mapping per comparison: {check, name, error, absolute, limit, passed}. check is forward,
            gradient, weights or state; name is a feature, table, optimizer state or dense parameter. absolute is
            the largest difference, error is its ratio to the reference (checks.parity.compare.Finding), and limit is
            the largest error that passes. Values that are not finite are None.
        plan: One mapping per table: {table, sharding_type, compute_kernel, ranks (list of ranks with the table)}; the
            plan is that of the full tables.
        path: Folder that contains check.json.
        world_size: Number of workers.
        seconds: Duration of the check in seconds.
        mlflow_run_id: Id of the MLflow run; None without MLflow.
        next_steps: Lines that name commands or addresses with which to inspect the result; [] without MLflow.
    """

    name: str
    findings: list[dict[str, Any]]
    plan: list[dict[str, Any]]
    path: Path
    world_size: int
    seconds: float
    mlflow_run_id: str | None
    next_steps: list[str]

    @property
    def passed(self) -> bool:
        """Return True if every comparison is within its limit."""
        return all(finding["passed"] for finding in self.findings)

    @property
    def metrics(self) -> dict[str, Any]:
        """Return the metrics of check.json and MLflow by name.

        These are passed, comparisons, failed, world_size, seconds, mlflow_run_id, and, from each check's worst
        comparison, check.CHECK.error and check.CHECK.absolute.
        """
        figures = {
            "passed": self.passed,
            "comparisons": len(self.findings),
            "failed": sum(not finding["passed"] for finding in self.findings),
            "world_size": self.world_size,
            "seconds": self.seconds,
            "mlflow_run_id": self.mlflow_run_id,
        }
        for check, worst in self.worst.items():
            figures |= {f"check.{check}.error": worst["error"], f"check.{check}.absolute": worst["absolute"]}
        return figures

    @property
    def worst(self) -> dict[str, dict[str, Any]]:
        """Return check → its comparison with the largest or non-finite error; omit checks without comparisons."""
        groups = {c: [f for f in self.findings if f["check"] == c] for c in CHECK_LABELS}
        return {
            check: max(findings, key=lambda f: float("inf") if f["error"] is None else f["error"])
            for check, findings in groups.items()
            if findings
        }


def check(source: str | Path | dict | RunConfig, overrides: Overrides | None = None) -> CheckResult:
    """Compare a configuration's sharded training with plain torch.nn modules in a single process.

    The comparison covers the forward pass, gradients, weights and optimizer state. It uses the features, plan,
    kernels, optimizers and collectives of the run, on the configured cluster and number of workers. Tables have at
    most 199 rows, batches are random and small, eps of optimizers is at least 1e-5, dropout is off, and
    train.matmul and plan.qcomms are fp32. Rows are examples, not requests with candidates. Only the schema of the
    data is read. The result is written to check.json in run.dir and, if tracking is enabled, to MLflow.

    Args:
        source: Config file, its values, or a RunConfig.
        overrides: `section.key=value` strings, or a mapping such as {"train.epochs": 3}.

    Returns:
        CheckResult: All comparisons. A comparison that exceeds its limit does not raise an error.

    Raises:
        ConfigError, SchemaError: The input is invalid or does not fit the cluster, or MLflow's store cannot be opened.
        DataError: A path is not valid, or its store cannot be reached.
        RunError: Ray cannot be started or joined, a worker failed, or the folder cannot be written.
        Interrupted: Ctrl-C or SIGTERM ended the check.

    Example:
        >>> raytrec.check("films.yaml", ["plan.sharding_types=[row_wise]"]).passed
        True
    """
    from raytrec.tracking.delivery import Delivery

    began = perf_counter()
    config = resolve(load_config(source, overrides), source, "check")
    folder = Path(config.run.dir)
    schema = Schema.load(config.data.schema_uri).model_copy(update={"candidates": []})
    check_fit(config, schema, on_this_machine=False)  # the tables of the check are small
    fault = "cannot write the folder of the check"
    with convert_os_errors(fault, where=str(folder)):
        folder.mkdir(parents=True, exist_ok=True)
    status = "FAILED"
    with RunConsole(config.run.name) as console:
        delivery = Delivery(folder, config, console.warn) if config.tracking.enabled else None
        if delivery:
            delivery.deliver()
        try:
            console.phase(describe_connection(config.scaling.address))
            with open_session(config):
                precisions = {"train.matmul": config.train.matmul}
                precisions |= {f"plan.qcomms.{name}": value for name, value in config.plan.qcomms}
                for setting, precision in precisions.items():
                    if precision != "fp32":
                        console.note(f"checking in fp32, because {setting}={precision} would hide errors")
                task = WorkerTask(config, schema, {}, None, "")
                comparison = run_group(check_worker, task, Watch(console))
            result = CheckResult(
                config.run.name,
                path=folder,
                seconds=round(perf_counter() - began, 3),
                mlflow_run_id=delivery.run_id if delivery else None,
                next_steps=[describe_store(delivery.uri)] if delivery else [],
                **comparison,
            )
            with convert_os_errors(fault, where=str(folder)):
                write_json(folder / CHECK_RESULT, result.metrics | {"plan": result.plan, "findings": result.findings})
                append_line(folder, Compared(step=0, unix_s=time(), figures=result.metrics))
            status = "FINISHED" if result.passed else "FAILED"
        except KeyboardInterrupt:
            status = "KILLED"
            raise
        finally:
            if delivery and (lost := delivery.finish(status, DELIVERY_TIMEOUT_S)):
                console.warn(lost)
    return result


CHECK_LABELS = {  # check → its name in the table
    "forward": "pooled embeddings",
    "gradient": "gradient",
    "weights": "weights, 20 steps",
    "state": "state, 20 steps",
}


def print_check(result: CheckResult) -> None:
    """Print a table of each check's worst comparison to stdout, then all failed comparisons and the next steps."""
    console = open_console()
    title = to_bold_text(result.name) + Text(f": {format_count(result.world_size, 'worker')} against one process")
    console.print(title, soft_wrap=True)
    table = Table()
    for column in ("check", "compared", "max abs error", "relative", "limit", "result"):
        table.add_column(column, justify="left" if column in ("check", "result") else "right")
    for check, worst in result.worst.items():
        findings = [f for f in result.findings if f["check"] == check]
        table.add_row(
            CHECK_LABELS[check],
            str(len(findings)),
            _format_error(worst["absolute"]),
            _format_error(worst["error"]),
            f"{worst['limit']:.0e}",
            Text("pass", "green") if all(f["passed"] for f in findings) else Text("FAIL", "red"),
        )
    console.print(table)
    failed = [
        f"FAIL  {f['name']} ({CHECK_LABELS[f['check']]}): relative error {_format_error(f['error'])}, "
        f"limit {f['limit']:.0e}"
        for f in result.findings
        if not f["passed"]
    ]
    for line in [*failed, *result.next_steps]:
        console.print(to_plain_text(line), soft_wrap=True)


def _format_error(value: float | None) -> str:
    return "not finite" if value is None else f"{value:.1e}"
