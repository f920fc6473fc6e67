"""`raytrec plan --from-run`: the plan of a run, and the one that its recorded lookups would give."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from pydantic import Field

from raytrec.common.errors import ConfigError, RunError
from raytrec.common.messages import RANKS
from raytrec.config.base import NonNegativeInt, Section
from raytrec.config.features import resolve_features
from raytrec.config.run_config import RunConfig, load_config
from raytrec.config.schema import Schema
from raytrec.config.tables import Sharding
from raytrec.driver.plan import Plans, default_cluster
from raytrec.driver.predict import Prediction, Predictor
from raytrec.driver.preflight import check_fit
from raytrec.driver.resume import stored_schema
from raytrec.embeddings.planner.constraints import resolve_constraints
from raytrec.embeddings.planner.footprint import DTYPE_BYTES
from raytrec.embeddings.planner.machines import Cluster, cluster_of
from raytrec.embeddings.planner.rates import Rates
from raytrec.embeddings.planner.recorded import Recorded, with_recorded
from raytrec.tracking.aggregate import by_step, skip_warmup, sum_over_time
from raytrec.tracking.run_folder import CONFIG, PLAN, RunFolder, existing_run

if TYPE_CHECKING:
    from raytrec.embeddings.planner.held import PlannedTable


@dataclass(kw_only=True)
class Replan(Plans):
    """Two predictions by recorded statistics: `on` has that of the run's plan, and of the one of now.

    Attributes:
        expected, recorded: table → ids of a row, by the schema and as looked up.
        rank_bytes: recorded rank → bytes of rows that it has looked up in a step, with its last number of
            workers; step_s: seconds of a step then, the median of intervals.
    """

    expected: dict[str, float]
    recorded: dict[str, float]
    rank_bytes: dict[int, float]
    step_s: float

    @property
    def gain(self) -> float | None:
        """The share of rows/s by which the plan of now is ahead; None: a time is not known."""
        run, now = (each.time for each in self.on)
        return now.rows_per_s / run.rows_per_s - 1 if run and now else None

    @property
    def summary(self) -> str:
        """The measured step, and what a new plan would gain, in sentences."""
        (run, now), measured = self.on, f"a step took {self.step_s * 1e3:.2f} ms (median)"
        if now.refusal:
            return f"{measured}; no plan is found now"
        if self.gain is not None:
            return f"{measured}, {run.time.step * 1e3:.2f} predicted; planned now: {self.gain:+.1%} rows/s"
        more = max(self.bytes_of(now).values()) / max(1.0, *self.bytes_of(run).values()) - 1
        return f"{measured}; planned now: {more:+.1%} bytes on the busiest rank (times need --rates)"

    def bytes_of(self, found: Prediction) -> dict[int, float]:
        """Rank → bytes of rows that it would look up in a step; empty without a plan."""
        world, batch = found.cluster.world, self.config.data.global_batch_size
        out = dict.fromkeys(range(world if found.tables else 0), 0.0)
        for table in found.tables:
            rows = world * table.rows if table.sharding_type == "data_parallel" else table.rows
            ids = batch * (self.expected | self.recorded)[table.table]
            for rank, its_rows, columns in table.shards:
                out[rank] += ids * its_rows / rows * columns * DTYPE_BYTES[table.dtype]
        return out

    def metrics(self) -> dict[str, Any]:
        """Everything, as JSON has it."""
        run, now = (self._of(each) | {"rank_bytes": self.bytes_of(each)} for each in self.on)
        return {
            "run": run,
            "now": now,
            "gain": self.gain,
            "ids_of_a_row": {"expected": self.expected, "recorded": self.recorded},
            "recorded": {"rank_bytes": self.rank_bytes, "step_s": self.step_s},
        }


def replan(
    place: str | Path, overrides: list[str], on: str | None = None, rates: str | Path | None = None
) -> Replan:
    """The plan of a run next to the one that it would be given now.

    Args:
        place: the run folder.
        overrides, rates: as in plan.plan, for both.
        on: its machines; default: plan.default_cluster.

    Raises:
        RunError: it is not a run, has recorded no lookups, or its plan is not one of its tables.
        ConfigError, SchemaError: as in plan.plan; machines with more or fewer GPUs than the run had workers.
    """
    from raytrec.embeddings.planner.loads import lengths_of_tables

    folder = existing_run(place)
    run = RunFolder.read(folder)
    schema, before = stored_schema(folder), load_config(str(folder / CONFIG))
    config = load_config(before, overrides)
    workers = run.starts[-1].workers if run.starts else 0
    lines = [line for line in skip_warmup(run.ranks) if line.world == workers and line.steps]
    lengths = Recorded(run.ranks).lengths(before, schema)
    if not lines or not lengths:
        raise RunError(
            "the run has recorded no lookups since its workers began",
            where=str(folder / RANKS),
            expected="lines of its ranks, one for each tracking.every_steps steps",
            do="train it for longer, with tracking.every_steps; without records: raytrec plan CONFIG",
        )
    on_cpu = all(entry.get("device") in ("cpu", "disk") for line in lines for entry in line.tables.values())
    of_run = {"num_workers": workers, "device": "cpu" if on_cpu else "cuda"}
    config = config.model_copy(update={"scaling": config.scaling.model_copy(update=of_run)})
    check_fit(config, schema, here=False)
    cluster = cluster_of(on) if on else default_cluster(config)
    if cluster.world != workers:
        raise ConfigError(
            f"{cluster.name} has {cluster.world} GPUs, the run {workers} workers",
            where=f"--on {on}",
            expected="a GPU for each worker of the run",
            do="plan other machines without --from-run",
        )
    tables = _planned(run, config, schema, cluster)
    expecting = with_recorded(config, schema, lengths)
    predict = Predictor(config, expecting, Rates.load(rates) if rates else None)
    of_plan, now = predict.of_plan(cluster, tables), predict(cluster, remedies=True)
    of_plan.name, now.name = "the run's plan", "planned now"
    of_features = lengths_of_tables(schema, resolve_features(schema, config.model))
    expected = {table: sum(ids) for table, ids in of_features.items()}
    rank_bytes = {line.rank: line.added("lookup_bytes") / line.steps for line in sum_over_time(lines)}
    slowest = [max(line.seconds / line.steps for line in ranks) for ranks in by_step(lines).values()]
    return Replan(
        config=config,
        schema=expecting,
        on=[of_plan, now],
        expected=expected,
        recorded=lengths,
        rank_bytes=rank_bytes,
        step_s=median(slowest),
    )


def balance_of(loads: Collection[float]) -> float:
    """The mean of ranks ÷ the most; 1: even."""
    return sum(loads) / len(loads) / max(loads) if max(loads) else 1.0


class Entry(Section):
    """A table's entry in plan.json."""

    table: str
    sharding_type: Sharding
    compute_kernel: str
    ranks: list[NonNegativeInt] = Field(min_length=1)

    def shards(self, rows: int, dim: int, cluster: Cluster) -> list[tuple[int, int, int]]:
        """(rank, rows, columns) of each shard, as TorchRec cuts a table.

        Raises:
            ValueError: these ranks cannot have a table of this size.
        """
        kind, ranks = self.sharding_type, self.ranks
        if kind == "data_parallel":
            return [(rank, rows, dim) for rank in range(cluster.world)]
        over = {"row_wise": len(ranks), "table_row_wise": len(ranks), "grid_shard": cluster.gpus}.get(kind, 1)
        parts, block = len(ranks) // over, -(-rows // over)  # of columns; rows of a shard
        if parts * over != len(ranks) or dim % parts or max(ranks) >= cluster.world:
            raise ValueError(f"{rows} × {dim} {kind} on ranks {ranks} of {cluster.world}")
        cut = [min(block, max(0, rows - block * i)) for i in range(over)]
        return [(rank, cut[i % over], dim // parts) for i, rank in enumerate(ranks)]


def _planned(run: RunFolder, config: RunConfig, schema: Schema, cluster: Cluster) -> list[PlannedTable]:
    """The run's own plan.

    Raises:
        RunError: plan.json is not a plan of these tables on as many ranks.
    """
    from raytrec.embeddings.planner.held import PlannedTable

    constraints, out = resolve_constraints(config, schema), []
    try:
        if odd := sorted({*run.plan} ^ {*schema.tables}):
            raise ValueError(f"tables of only one of plan and schema: {', '.join(odd)}")
        for name, spec in schema.tables.items():
            entry = Entry.model_validate(run.plan[name])
            shards = entry.shards(spec.rows, spec.dim, cluster)
            kinds, ranks = (entry.sharding_type, entry.compute_kernel), sorted({each[0] for each in shards})
            dtype = constraints[name].dtype
            out.append(PlannedTable(name, spec.rows, spec.dim, *kinds, ranks, shards, dtype))
    except ValueError as error:
        raise RunError(
            f"the plan does not fit the run: {' '.join(str(error).split())}",
            where=str(run.path / PLAN),
            expected=f"an entry for each table of schema.yaml, on ranks of {cluster.world}",
            do="bring plan.json back from a copy; give the run's hosts with --on",
        ) from None
    return out
