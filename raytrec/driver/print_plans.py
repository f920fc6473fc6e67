"""What `raytrec plan` prints."""

from __future__ import annotations

from typing import Any

from raytrec.common.formatting import ranges
from raytrec.driver.plan import Plans
from raytrec.driver.predict import Prediction, price_of
from raytrec.embeddings.planner.footprint import GIB
from raytrec.embeddings.planner.machines import ENOUGH_GIB

TIER_NAMES = {"device": "GPU", "host": "host", "disk": "disk"}


def print_plans(plans: Plans) -> None:
    """Print predictions: tables of one cluster; memory and time of all side by side; what does not fit."""
    from raytrec.common.terminal import open_console

    console = open_console()
    shown = plans.on or plans.chosen
    if len(shown) == 1 and shown[0].tables:
        console.print(_tables(plans, shown[0]))
    if any(each.memory for each in shown):
        console.print(_memory(shown))
    if any(each.time for each in shown):
        console.print(_time(plans, shown))
    for each in shown:
        for line in _troubles(each):
            console.print(line, soft_wrap=True, markup=False)
    if plans.chosen:
        least, cheapest = plans.chosen[0], plans.cheapest()
        console.print(f"smallest: {least.cluster.name}", soft_wrap=True)
        if cheapest:
            price = price_of(cheapest, plans.prices)
            console.print(f"cheapest: {cheapest.cluster.name}, {price:,.2f} an hour", soft_wrap=True)


def _tables(plans: Plans, found: Prediction) -> Any:
    from rich.table import Table

    from raytrec.common.terminal import plain
    from raytrec.embeddings.planner.held import held

    gib: dict[str, float] = {}
    for (name, _), its in held(found.tables, plans.config, plans.schema).items():
        gib[name] = gib.get(name, 0.0) + its.size.total / GIB
    lines = Table()
    for column in ("table", "rows", "dim", "sharding_type", "compute_kernel", "ranks", "GiB in all"):
        lines.add_column(column, justify="right" if column in ("rows", "dim", "GiB in all") else "left")
    for table in found.tables:
        lines.add_row(
            plain(table.table),
            f"{table.rows:,}",
            str(table.dim),
            table.sharding_type,
            table.compute_kernel,
            ranges(table.ranks),
            f"{gib[table.table]:.2f}",
        )
    return lines


def _memory(shown: list[Prediction]) -> Any:
    """GiB of the fullest rank, part by part; of the host a rank's share."""
    keys = list(dict.fromkeys(key for each in shown if each.memory for key in each.memory.parts))
    lines = _side_by_side("GiB of a rank, at most", [each.name for each in shown])
    for tier, name in TIER_NAMES.items():
        parts = [part for place, part in keys if place == tier]
        if not parts:
            continue
        for part in parts:
            lines.add_row(f"{name}: {part}", *(_gib(each, tier, part) for each in shown))
        lines.add_row(f"{name}, of {_has(shown, tier)}", *(_gib(each, tier) for each in shown), style="bold")
        lines.add_section()
    return lines


def _side_by_side(title: str, names: list[str]) -> Any:
    from rich.table import Table

    lines = Table(title=title, title_justify="left")
    for column in ("", *names):
        lines.add_column(column, justify="right" if column else "left")
    return lines


def _gib(found: Prediction, tier: str, part: str | None = None) -> str:
    if not found.memory:
        return "–"
    sizes = found.memory.of(tier) if part is None else found.memory.parts.get((tier, part))
    return "–" if sizes is None else f"{sizes.max() / GIB:.2f}"


def _has(shown: list[Prediction], tier: str) -> str:
    rooms = [each.cluster.rooms[tier] for each in shown]
    rooms = rooms if len({*rooms}) > 1 else rooms[:1]
    return ", ".join(f"{room:.0f}" if room < ENOUGH_GIB / 1000 else "enough" for room in rooms)


def _time(plans: Plans, shown: list[Prediction]) -> Any:
    from raytrec.embeddings.planner.step_time import PARTS

    lines = _side_by_side("ms of a step", [each.name for each in shown])
    times = [each.time for each in shown]
    for part in PARTS:
        lines.add_row(part, *(f"{time.parts[part] * 1e3:.2f}" if time else "–" for time in times))
    lines.add_section()
    lines.add_row("step", *(f"{time.step * 1e3:.2f}" if time else "–" for time in times), style="bold")
    lines.add_row("rows/s", *(f"{time.rows_per_s:,.0f}" if time else "–" for time in times), style="bold")
    lines.add_row("bottleneck", *(time.bottleneck if time else "–" for time in times))
    lines.add_row("balance of lookups", *(f"{time.balance:.0%}" if time else "–" for time in times))
    if plans.prices:
        costs = [_cost(each, plans.prices) for each in shown]
        lines.add_row("price of 10⁹ rows", *costs)
    return lines


def _cost(found: Prediction, prices: dict[str, float]) -> str:
    price = price_of(found, prices)
    return f"{price / 3600 * 1e9 / found.time.rows_per_s:,.2f}" if price is not None and found.time else "–"


def _troubles(found: Prediction) -> list[str]:
    """What does not fit, by how much, and what would make it fit."""
    name, lines = found.name, []
    if found.refusal:
        lines.append(f"{name} does not fit: {found.refusal.what}; expected {found.refusal.expected}")
        needs, has = found.tables_gib
        more = f"{needs - has:.1f} more than" if needs > has else "of"
        lines.append(f"  tables take {needs:.1f} GiB with optimizer state, {more} the {has:.1f} for them")
    for lack in found.lacks:
        where = {"device": "GPU", "host": "share of its host", "disk": "share of its disk"}[lack.tier]
        lines.append(
            f"{name} does not fit: rank {lack.rank} needs {lack.needs:.1f} GiB of its {where}, "
            f"{lack.needs - lack.has:.1f} GiB more than the {lack.has:.1f} that it has"
        )
    if lines:
        helps = "; or ".join(found.remedies) or "none of the changes that were tried"
        lines.append(f"  it would fit with: {helps}")
    return lines
