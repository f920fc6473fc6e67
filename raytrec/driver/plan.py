"""`raytrec plan`: sharding, memory and time of a run on machines that are not here."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from raytrec.common.errors import ConfigError
from raytrec.common.reading import NotReadable
from raytrec.common.storage import read_yaml
from raytrec.config.run_config import RunConfig, load_config
from raytrec.config.schema import Schema
from raytrec.driver.predict import Prediction, Predictor, price_of
from raytrec.driver.preflight import check_fit
from raytrec.embeddings.planner.footprint import GIB
from raytrec.embeddings.planner.machines import MACHINES, Cluster, cluster_of, machine_of
from raytrec.embeddings.planner.rates import Rates

ANY = "any"  # --on: of every machine as many as it takes


@dataclass(kw_only=True)
class Plans:
    """The predictions of one command.

    Attributes:
        on: those that were asked for; chosen: machine by machine the smallest cluster, the fewest GPUs first.
        prices: machine → price an hour.
    """

    config: RunConfig
    schema: Schema
    on: list[Prediction]
    chosen: list[Prediction] = field(default_factory=list)
    prices: dict[str, float] = field(default_factory=dict)

    def cheapest(self) -> Prediction | None:
        """Of the chosen ones with a price."""
        priced = [(price, each) for each in self.chosen if (price := price_of(each, self.prices)) is not None]
        return min(priced, key=lambda pair: pair[0])[1] if priced else None

    def metrics(self) -> dict[str, Any]:
        """Everything, as JSON has it: bytes in GiB, one number a rank; seconds."""
        cheapest = self.cheapest()
        return {
            "clusters": [self._of(each) for each in self.on],
            "chosen": [self._of(each) for each in self.chosen],
            "smallest": self.chosen[0].cluster.name if self.chosen else None,
            "cheapest": cheapest.cluster.name if cheapest else None,
        }

    def _of(self, found: Prediction) -> dict[str, Any]:
        from raytrec.embeddings.planner.memory_by_part import TIERS

        cluster, parts = found.cluster, found.memory.parts if found.memory else {}
        memory = {
            tier: {part: (sizes / GIB).tolist() for (place, part), sizes in parts.items() if place == tier}
            for tier in TIERS
        }
        return {
            "name": cluster.name,
            "hosts": cluster.hosts,
            "gpus": cluster.gpus,
            "device": "cpu" if self.config.scaling.device == "cpu" and not cluster.machine else "cuda",
            "memory_gib": cluster.memory_gib,
            "host_memory_gib": cluster.host_memory_gib,
            "fits": found.fits,
            "refusal": str(found.refusal) if found.refusal else None,
            "lacks": [asdict(lack) for lack in found.lacks],
            "remedies": found.remedies,
            "tables": [asdict(table) for table in found.tables],
            "memory": memory,
            "time": asdict(found.time) if found.time else None,
            "price_per_hour": price_of(found, self.prices),
        }


def plan(
    source: str | Path | dict,
    overrides: list[str],
    on: str | None = None,
    rates: str | Path | None = None,
    prices: str | Path | None = None,
) -> Plans:
    """The predictions for a configuration. Reads its schema, and no data.

    Args:
        source: a config file or its values; data.schema, or schema.yaml above data.train, must be there.
        overrides: `section.key=value` strings.
        on: machines, by comma: 2x8xh100-sxm,4x48gib (machines.cluster_of); any: of every known machine as
            many as it takes; default, without prices: `default_cluster`.
        rates: file of Rates; default: data sheets of named machines, and no times of others.
        prices: file of machine → price an hour, of which the smallest and the cheapest cluster are chosen.

    Raises:
        ConfigError, SchemaError: what is wrong with the input.
    """
    from raytrec.driver.prepare import resolve

    config = resolve(load_config(source, overrides), source)
    schema = Schema.load(config.data.schema_uri)
    check_fit(config, schema, here=False)
    known = _prices(prices) if prices else {}
    predict = Predictor(config, schema, Rates.load(rates) if rates else None)
    names = [name.strip() for name in (on or "").split(",") if name.strip()]
    clusters = [cluster_of(name) for name in names if name != ANY]
    if not names and not known:
        clusters = [default_cluster(config)]
    choices = list(MACHINES.values()) if ANY in names else [machine_of(name, str(prices)) for name in known]
    chosen = predict.choose(choices, known)
    on_these = [predict(cluster, remedies=True) for cluster in clusters]
    return Plans(config=config, schema=schema, on=on_these, chosen=chosen, prices=known)


def default_cluster(config: RunConfig) -> Cluster:
    """GPUs, or workers on CPU, with 80 GiB each: as many as scaling.num_workers, at most 8 a host."""
    workers = config.scaling.max_workers
    gpus = max(count for count in range(1, 9) if workers % count == 0)
    return Cluster.described(workers // gpus, gpus, 80)


def _prices(path: str | Path) -> dict[str, float]:
    """Machine → price an hour.

    Raises:
        ConfigError: the file is not that.
    """
    expected = "a mapping of machines to prices an hour, such as 8xh100-sxm: 55.04"
    try:
        values = read_yaml(str(path))
    except (OSError, NotReadable) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"cannot read the prices: {reason}", where=str(path), expected=expected) from None
    numbers = isinstance(values, dict) and all(
        isinstance(price, int | float) and not isinstance(price, bool) and price >= 0
        for price in values.values()
    )
    if not values or not numbers:
        raise ConfigError("not a table of prices", where=str(path), expected=expected)
    return {machine_of(str(name), str(path)).name: float(price) for name, price in values.items()}


def draw(plans: Plans, path: str | Path) -> None:
    """Writes the picture of the first cluster's shards, tables × ranks, as .svg or .png.

    Raises:
        ConfigError: another kind of file, or no plan.
    """
    from raytrec.embeddings.planner.held import held
    from raytrec.report.figures import shards, style
    from raytrec.report.report import writing

    path = Path(path)
    if path.suffix not in (".svg", ".png"):
        raise ConfigError(f"{path.name} is not a picture", where="--picture", expected=".svg or .png")
    found = next((each for each in [*plans.on, *plans.chosen] if each.tables), None)
    if found is None:
        raise ConfigError("there is no plan to draw", where="--picture")
    sizes: list[dict[str, float]] = [{} for _ in range(found.cluster.world)]
    for (table, rank), its in held(found.tables, plans.config, plans.schema).items():
        sizes[rank][table] = its.size.total
    made = shards.memory_map(sizes)
    with writing(path):
        if path.suffix == ".png":
            style.save_png(made, path)
        else:
            path.write_text(style.alone(style.to_svg(made, "shards")), encoding="utf-8")
