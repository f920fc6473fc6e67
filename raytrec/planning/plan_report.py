"""Predictions by `raytrec plan`, side by side, as console output, a picture or JSON."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rich.table import Column, Table

from raytrec.common.errors import ConfigError
from raytrec.common.formatting import format_rank_ranges
from raytrec.common.terminal import open_console, to_plain_text
from raytrec.config.run_config import RunConfig
from raytrec.config.schema import Schema
from raytrec.planning.dry_run import ClusterEstimate, compute_hourly_price
from raytrec.planning.machines import DEFAULT_DISK_GIB
from raytrec.planning.memory import GIB, TIERS, compute_rank_parts

MIN_SKEW = 1.25  # load of the busiest rank, in multiples of the mean, from which a table counts as skewed
DEVICE_NAMES = {"cuda": "GPU", "cpu": "memory"}  # labels of the tier "device", which is main memory on CPU


@dataclass(kw_only=True)
class Plans:
    """Predictions made by one `raytrec plan` command.

    Attributes:
        config: Configuration of the run.
        schema: Schema of the data.
        on: Predictions for the requested clusters.
        chosen: Predictions for the smallest clusters on which the run fits, one per machine type, smallest first.
        prices: Name of a machine → price per hour.
    """

    config: RunConfig
    schema: Schema
    on: list[ClusterEstimate]
    chosen: list[ClusterEstimate] = field(default_factory=list)
    prices: dict[str, float] = field(default_factory=dict)

    def cheapest(self) -> ClusterEstimate | None:
        """Return the prediction in `chosen` with the lowest price, or None if none of them has a price."""
        priced = [each for each in self.chosen if compute_hourly_price(each, self.prices) is not None]
        return min(priced, key=lambda each: compute_hourly_price(each, self.prices), default=None)

    def get_device(self, estimate: ClusterEstimate) -> str:
        """Return the device type of a cluster: cpu for CPU workers, cuda for GPUs and all known machine types."""
        return "cpu" if self.config.scaling.device == "cpu" and not estimate.cluster.machine else "cuda"

    def metrics(self) -> dict[str, Any]:
        """Return all predictions as JSON values, with memory in GiB and times in seconds.

        Keys: clusters (predictions in `on`), chosen, and the names (or None) of the smallest and cheapest in `chosen`.
        """
        cheapest = self.cheapest()
        return {
            "clusters": [self._to_dict(each) for each in self.on],
            "chosen": [self._to_dict(each) for each in self.chosen],
            "smallest": self.chosen[0].cluster.name if self.chosen else None,
            "cheapest": cheapest.cluster.name if cheapest else None,
        }

    def _to_dict(self, estimate: ClusterEstimate) -> dict[str, Any]:
        cluster, parts = estimate.cluster, estimate.memory.parts if estimate.memory else {}
        memory = {
            tier: {part: (sizes / GIB).tolist() for (place, part), sizes in parts.items() if place == tier}
            for tier in TIERS
        }
        return {
            "name": cluster.name,
            "hosts": cluster.hosts,
            "gpus": cluster.gpus,
            "device": self.get_device(estimate),
            "memory_gib": cluster.memory_gib,
            "host_memory_gib": cluster.host_memory_gib,
            "fits": estimate.fits,
            "refusal": str(estimate.refusal) if estimate.refusal else None,
            "lacks": [asdict(lack) for lack in estimate.lacks],
            "remedies": estimate.remedies,
            "tables": [asdict(table) for table in estimate.tables],
            "skewed": find_skewed_tables(self.schema, cluster.world),
            "memory": memory,
            "time": asdict(estimate.time) if estimate.time else None,
            "price_per_hour": compute_hourly_price(estimate, self.prices),
        }


def print_plans(plans: Plans) -> None:
    """Print the predicted memory and time of each cluster, its skewed tables, and the reasons why the run does not fit.

    For a single cluster that has a plan, also print the sharding. If clusters were chosen by machine type, print the
    smallest and, with prices, the cheapest of them, or that the run fits on no machine type.
    """
    console = open_console()
    estimates = plans.on or plans.chosen
    if len(estimates) == 1 and estimates[0].tables:
        console.print(_format_tables(plans, estimates[0]))
    if any(each.memory for each in estimates):
        console.print(_format_memory(plans, estimates))
    if any(each.time for each in estimates):
        console.print(_format_time(plans, estimates))
    for each in estimates:
        for name, load in find_skewed_tables(plans.schema, each.cluster.world).items():
            text = f"{each.cluster.name}: table {name} is skewed: with row_wise, the rank of its most frequent id has"
            remedy = "column_wise balances the load, but does not support rowwise_adagrad"
            console.print(f"{text} {load:.1f} × the mean load; {remedy}", soft_wrap=True, markup=False)
        for line in _describe_problems(plans, each):
            console.print(line, soft_wrap=True, markup=False)
    if plans.chosen:
        smallest, cheapest = plans.chosen[0], plans.cheapest()
        console.print(f"smallest: {smallest.cluster.name}", soft_wrap=True)
        if cheapest:
            price = compute_hourly_price(cheapest, plans.prices)
            console.print(f"cheapest: {cheapest.cluster.name}, {price:,.2f} per hour", soft_wrap=True)
    elif plans.prices or not plans.on:
        console.print("the run fits on none of the machine types", soft_wrap=True)


def find_skewed_tables(schema: Schema, world: int) -> dict[str, float]:
    """Return a mapping from tables that row_wise would skew to the lookups of the busiest rank, relative to the mean.

    The busiest rank holds the table's most frequent id (`statistics.*.hottest`). Lookups of all other ids are assumed
    to be distributed evenly. Tables with a value below MIN_SKEW are omitted.

    Args:
        schema: Schema with statistics.
        world: Number of ranks.
    """
    loads: dict[str, float] = {}
    for name, statistics in schema.statistics.items():
        load = 1 + (statistics.hottest[0] if statistics.hottest else 0.0) * (world - 1)
        table = schema.sparse[name].table
        loads[table] = max(load, loads.get(table, 0.0))
    return {table: load for table, load in loads.items() if load >= MIN_SKEW}


def _format_tables(plans: Plans, estimate: ClusterEstimate) -> Table:
    gib: dict[str, float] = {}
    device = plans.get_device(estimate)
    for (name, _), part in compute_rank_parts(estimate.tables, plans.config, plans.schema, device).items():
        gib[name] = gib.get(name, 0.0) + sum(part.size) / GIB
    rows, dim, size = (Column(name, justify="right") for name in ("rows", "dim", "total GiB"))
    lines = Table("table", rows, dim, "sharding_type", "compute_kernel", "ranks", size)
    for table in estimate.tables:
        shape, plan = (f"{table.rows:,}", str(table.dim)), (table.sharding_type, table.compute_kernel)
        ranks, total = format_rank_ranges(table.ranks), f"{gib[table.table]:.2f}"
        lines.add_row(to_plain_text(table.table), *shape, *plan, ranks, total)
    return lines


def _format_memory(plans: Plans, estimates: list[ClusterEstimate]) -> Table:
    """Return a table with the maximum GiB of each memory part over ranks, which divide a host's memory evenly."""
    names = {tier: tier for tier in TIERS}
    names["device"] = " or ".join(dict.fromkeys(DEVICE_NAMES[plans.get_device(each)] for each in estimates))
    keys = list(dict.fromkeys(key for each in estimates if each.memory for key in each.memory.parts))
    lines = _format_comparison("GiB per rank (maximum)", estimates)
    for tier, name in names.items():
        parts = [part for place, part in keys if place == tier]
        if not parts:
            continue
        for part in parts:
            lines.add_row(f"{name}: {part}", *(_format_gib(each, tier, part) for each in estimates))
        totals = (_format_gib(each, tier) for each in estimates)
        lines.add_row(f"{name}: total (of {_format_available(estimates, tier)})", *totals, style="bold")
        lines.add_section()
    return lines


def _format_comparison(title: str, estimates: list[ClusterEstimate]) -> Table:
    columns = (Column(each.cluster.name, justify="right") for each in estimates)
    return Table("", *columns, title=title, title_justify="left")


def _format_gib(estimate: ClusterEstimate, tier: str, part: str | None = None) -> str:
    if not estimate.memory:
        return "–"
    sizes = estimate.memory.of(tier) if part is None else estimate.memory.parts.get((tier, part))
    return "–" if sizes is None else f"{sizes.max() / GIB:.2f}"


def _format_available(estimates: list[ClusterEstimate], tier: str) -> str:
    rooms = [each.cluster.gib_by_tier[tier] for each in estimates]
    rooms = rooms if len({*rooms}) > 1 else rooms[:1]
    return ", ".join(f"{room:.0f}" if room < DEFAULT_DISK_GIB / 1000 else "enough" for room in rooms)


def _format_time(plans: Plans, estimates: list[ClusterEstimate]) -> Table:
    lines, times = _format_comparison("ms per step", estimates), [each.time for each in estimates]
    for part in next(time.parts for time in times if time):
        lines.add_row(part, *(f"{time.parts[part] * 1e3:.2f}" if time else "–" for time in times))
    lines.add_section()
    lines.add_row("step", *(f"{time.step * 1e3:.2f}" if time else "–" for time in times), style="bold")
    lines.add_row("rows/s", *(f"{time.rows_per_s:,.0f}" if time else "–" for time in times), style="bold")
    lines.add_row("bottleneck", *(time.bottleneck if time else "–" for time in times))
    lines.add_row("balance of lookups", *(f"{time.balance:.0%}" if time else "–" for time in times))
    if plans.prices:
        prices = [compute_hourly_price(each, plans.prices) for each in estimates]
        costs = (
            "–" if price is None or not time else f"{price / 3600 * 1e9 / time.rows_per_s:,.2f}"
            for price, time in zip(prices, times, strict=True)
        )
        lines.add_row("price per 10⁹ rows", *costs)
    return lines


def _describe_problems(plans: Plans, estimate: ClusterEstimate) -> list[str]:
    """Return lines that state why the run does not fit, and changes that would make it fit; [] if it fits."""
    name, lines = estimate.cluster.name, []
    places = {"device": "GPU memory" if plans.get_device(estimate) == "cuda" else "memory"}
    places |= {"host": "host memory", "disk": "disk space"}
    if estimate.refusal:
        lines.append(f"{name} has no plan: {estimate.refusal.what}; expected {estimate.refusal.expected}")
        needed, free = estimate.table_memory_gib
        more = f"{needed - free:.1f} GiB more than" if needed > free else "out of"
        lines.append(f"  tables need {needed:.1f} GiB with optimizer state, {more} the {free:.1f} GiB available")
    for lack in estimate.lacks:
        lines.append(
            f"{name} does not fit: rank {lack.rank} needs {lack.needs:.1f} GiB of {places[lack.tier]}, "
            f"{lack.needs - lack.has:.1f} GiB more than the {lack.has:.1f} GiB available to the rank"
        )
    if lines:
        remedies = "; or ".join(estimate.remedies) or "none of the attempted changes"
        lines.append(f"  the run would fit with: {remedies}")
    return lines


def draw(plans: Plans, path: str | Path) -> None:
    """Draw the shards of the first cluster that has a plan as a grid of tables × ranks, to an .svg or .png file.

    Raises:
        ConfigError: The file has another extension, or no cluster has a plan.
        RunError: The file cannot be written.
    """
    from raytrec.report.figures import style, tables
    from raytrec.report.report import convert_write_errors

    path = Path(path)
    if path.suffix not in (".svg", ".png"):
        raise ConfigError(f"{path.name} is not an .svg or .png file", where="--picture", expected="FILE.svg or .png")
    estimate = next((each for each in [*plans.on, *plans.chosen] if each.tables), None)
    if estimate is None:
        raise ConfigError(
            "no cluster has a plan to draw",
            where="--picture",
            do="omit --picture, and name a cluster with --on, to see why it has no plan",
        )
    sizes: list[dict[str, float]] = [{} for _ in range(estimate.cluster.world)]
    device = plans.get_device(estimate)
    for (table, rank), part in compute_rank_parts(estimate.tables, plans.config, plans.schema, device).items():
        sizes[rank][table] = sum(part.size)
    figure = tables.memory_map(sizes)
    with convert_write_errors(path, "picture", "--picture"):
        if path.suffix == ".png":
            style.save_png(figure, path)
        else:
            path.write_text(style.to_standalone_svg(style.to_svg(figure, "shards")), encoding="utf-8")
