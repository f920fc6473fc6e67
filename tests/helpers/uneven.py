"""Run folder of a run with uneven lookups per table: plan, rank lines and start event."""

import json

from recorded import RUN_START_UNIX_S

from raytrec.common.messages import PHASES, RankLine, Start
from raytrec.config.run_config import load_config
from raytrec.config.schema import Schema
from raytrec.driver.prepare import write_config
from raytrec.planning.dry_run import dry_run
from raytrec.planning.machines import Cluster

IDS_PER_ROW = {"t0": 20.0, "t1": 1.0, "t2": 20.0, "t3": 1.0, "t4": 1.0, "t5": 1.0}  # ids per row in the run
GLOBAL_BATCH_SIZE = 8192


def uneven_schema(**statistics):
    """Return a Schema of six equal tables whose statistics claim one id per row."""
    known = {"mean_length": 1, "p99_length": 1, "max_length": 1, "distinct": 4000, "hottest": [0.1, 0.4]}
    names = {name: name.replace("t", "f") for name in IDS_PER_ROW}
    return Schema.parse(
        {
            "labels": ["label"],
            "sparse": {feature: {"table": table, "pooling": "sum"} for table, feature in names.items()},
            "tables": {table: {"rows": 5000, "dim": 64} for table in names},
            "statistics": {feature: known for feature in names.values()} | statistics,
        },
        "uneven",
    )


def uneven_config(folder, workers=2, **plan):
    """Return a RunConfig for the schema on CPU."""
    return load_config(
        {
            "run": {"dir": str(folder), "name": "uneven"},
            "data": {"train": str(folder / "train"), "global_batch_size": GLOBAL_BATCH_SIZE, "lanes": 24 * workers},
            "optim": {"embeddings": {"name": "adagrad"}},
            "model": {"bottom_mlp": [16], "top_mlp": [16]},
            "scaling": {"num_workers": workers, "device": "cpu"},
            "plan": {"sharding_types": ["table_wise"]} | plan,
        }
    )


def plan_uneven_run(config, schema, hosts=1):
    """Return the plan of a run with this configuration."""
    workers = config.scaling.num_workers
    return dry_run(config, schema, Cluster(hosts, workers // hosts, 80, 640, 1e6))


def make_rank_lines(tables, workers, steps=10, intervals=3, ids=IDS_PER_ROW):
    """Return the lines of ranks.jsonl for a number of ids per row and table."""
    lines = []
    for number in range(intervals):
        for rank in range(workers):
            held = {}
            for table in tables:
                copied = table.sharding_type == "data_parallel"
                of_rank = [(rows, columns) for at, rows, columns in table.shards if at == rank]
                for rows, columns in of_rank:
                    share = 1 / workers if copied else rows / table.rows
                    lookups = steps * GLOBAL_BATCH_SIZE * ids[table.table] * share
                    held[table.table] = {
                        **{"rows": rows, "columns": columns, "replicated": copied, "device": "cpu"},
                        **{"lookups": lookups, "lookup_bytes": lookups * columns * 4},
                    }
            lines.append(
                RankLine(
                    **{"rank": rank, "world": workers, "attempt": 0, "steps": steps, "system": {}},
                    **{"first_step": number * steps, "step": (number + 1) * steps, "unix_s": RUN_START_UNIX_S},
                    **{"seconds": 0.4 + 0.1 * rank, "phases_s": dict.fromkeys(PHASES, 0.0), "tables": held},
                )
            )
    return lines


def write_uneven_run(folder, workers=2, lines=None):
    """Write a made-up run folder with a real plan."""
    folder.mkdir(parents=True)
    schema, config = uneven_schema(), uneven_config(folder, workers)
    tables = plan_uneven_run(config, schema)
    entries = [
        {key: getattr(table, key) for key in ("table", "sharding_type", "compute_kernel", "ranks")} for table in tables
    ]
    (folder / "schema.yaml").write_text(schema.to_yaml())
    write_config(folder, config)
    (folder / "plan.json").write_text(json.dumps(entries))
    start = Start(total=60, step=0, workers=workers, unix_s=RUN_START_UNIX_S)
    (folder / "events.jsonl").write_text(json.dumps(start.line()) + "\n")
    lines = make_rank_lines(tables, workers) if lines is None else lines
    (folder / "ranks.jsonl").write_text("".join(json.dumps(line.line()) + "\n" for line in lines))
    return folder
