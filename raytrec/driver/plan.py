"""`raytrec plan`, and the schema of `raytrec inspect --from-run`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import Field, TypeAdapter, ValidationError

from raytrec.common.errors import ConfigError, RunError, os_errors
from raytrec.common.messages import RANKS
from raytrec.common.reading import NotReadable
from raytrec.common.storage import read_yaml
from raytrec.config.base import NonNegativeFloat
from raytrec.config.run_config import RunConfig, load_config
from raytrec.config.schema import Schema
from raytrec.driver.preflight import check_fit
from raytrec.driver.resume import stored_schema
from raytrec.planning.dry_run import Predictor
from raytrec.planning.loads import recorded_lengths, with_lengths
from raytrec.planning.machines import MACHINES, Cluster, cluster_of, machine_of
from raytrec.planning.rates import Rates
from raytrec.planning.report import Plans
from raytrec.tracking.run_folder import CONFIG, RunFolder, existing_run

PRICES = TypeAdapter(Annotated[dict[str, NonNegativeFloat], Field(min_length=1)])
ANY = "any"  # --on: of every machine as many as it takes


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
    from raytrec.worker.build import unsharded

    config = resolve(load_config(source, overrides), source)
    schema = Schema.load(config.data.schema_uri)
    check_fit(config, schema, here=False)
    known = _prices(prices) if prices else {}
    predict = Predictor(config, schema, unsharded, Rates.load(rates) if rates else None)
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
    where = {"where": str(path), "expected": "machines and prices an hour, such as 8xh100-sxm: 55.04"}
    with os_errors("cannot read the prices", ConfigError, **where):
        try:
            prices = PRICES.validate_python(read_yaml(str(path)))
        except NotReadable as error:
            raise ConfigError(f"cannot read the prices: {error}", **where) from None
        except ValidationError:
            raise ConfigError("not a table of prices", **where) from None
    return {machine_of(name, str(path)).name: price for name, price in prices.items()}


def read_run_schema(place: str | Path) -> Schema:
    """Read the schema of a run, with the ids per row that its ranks have recorded.

    Raises:
        RunError: The folder contains no run, or its ranks have recorded no lookups.
    """
    folder = existing_run(place)
    config, schema = load_config(str(folder / CONFIG)), stored_schema(folder)
    lengths = recorded_lengths(RunFolder.read(folder).ranks, config, schema)
    if not lengths:
        raise RunError(
            "the run has recorded no lookups since its workers began",
            where=str(folder / RANKS),
            expected="lines of its ranks, one for each tracking.every_steps steps",
            do="train it for longer, with tracking.every_steps",
        )
    return with_lengths(config, schema, lengths)
