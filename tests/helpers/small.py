"""A small model with tables of uneven sizes, for tests on ranks."""

from raytrec.config.run_config import load_config
from raytrec.config.schema import Schema

SMALL_SCHEMA_PARTS = {
    "labels": ["y"],
    "dense": ["a", "b"],
    "sparse": {
        "user": {"table": "user"},
        "friends": {"table": "user", "pooling": "mean"},
        "tags": {"table": "tag", "pooling": "mean", "weights": "w"},
    },
    "tables": {"user": {"rows": 23, "dim": 8}, "tag": {"rows": 5, "dim": 8}},
}


def make_small_schema(**parts):
    """Return a Schema of PARTS, with some parts replaced."""
    return Schema.parse(SMALL_SCHEMA_PARTS | parts, "small")


SCHEMA = make_small_schema()


def make_small_config(world, plan, optimizer="adagrad", lr=0.1, tables=None, tasks=None, model=None, **train):
    """Return a RunConfig.

    `plan` is the value of plan.tables['*'], or plan.sharding_types if it is a list. `tables` is optim.tables.
    """
    plan = {"sharding_types": plan} if isinstance(plan, list) else {"tables": {"*": plan}}
    return load_config(
        {
            "run": {"seed": 3},
            "data": {"train": "unused/train", "global_batch_size": 12},
            "scaling": {"num_workers": world},
            "model": model or {"bottom_mlp": [6], "top_mlp": [6]},
            "tasks": tasks or [{}],
            "optim": {
                "embeddings": {"name": optimizer, "lr": lr},
                "tables": tables or {},
                "dense": {"name": "sgd", "lr": 0.1},
            },
            "plan": plan,
            "train": train,
        }
    )


def build_step_on_rank(config, schema=SCHEMA, device="cpu"):
    """Build the Step of this rank."""
    import torch

    from raytrec.worker.build import build_step

    return build_step(config, schema, torch.device(device))[0]


def make_batches(count, rank, world, balance="unequal", schema=SCHEMA, features=None, tasks=(), rows=12):
    """Return (random global batches, their local batches on this rank)."""
    from raytrec.checks.parity.batches import compute_row_bounds, make_local_batch, make_random_batches

    whole = make_random_batches(schema, rows, count, seed=1, tasks=tasks)
    return whole, [make_local_batch(b, schema, compute_row_bounds(rows, world, balance), rank, features) for b in whole]


def train_step(step, local):
    """Train a Step on local batches and return the outputs."""
    return list(step.train(iter(local), len(local)))


def gather_weights(step):
    """Return name → copy of each dense parameter and full table. This is a collective call."""
    from raytrec.embeddings.tables import tables

    dense = {name: parameter.detach().clone() for name, parameter in step.head.model.named_parameters()}
    return dense | {name: table.weight.dense() for name, table in tables(step.model).items()}


def make_reference_model(step, config, schema=SCHEMA):
    """Return a checks.parity.reference.Reference with the weights of a Step. This is a collective call."""
    from raytrec.checks.parity.reference import Reference
    from raytrec.models import build_model
    from raytrec.tasks.objective import Objective

    weights, model = gather_weights(step), build_model(schema, config.model)
    model.load_state_dict({name: weights.pop(name) for name, _ in model.named_parameters()}, strict=False)
    return Reference(schema, weights, model, objective=Objective.of(config, schema))


def max_weight_difference(weights, others):
    """Return the largest absolute difference of the tensors named in `others`."""
    return max(float((weights[name] - others[name]).abs().max()) for name in others)


def copy_local_state(step):
    """Return name → copies of this rank's shards of weights and optimizer state."""
    from raytrec.checkpoint.state import LogicalState

    found = {}
    for name, value in LogicalState(step.model, step.optimizer).tensors().items():
        parts = [s.tensor for s in value.local_shards()] if hasattr(value, "local_shards") else [value]
        found[name] = [part.detach().cpu().clone() for part in parts]
    return found


def assert_same_state(state, other):
    """Assert that two states from `copy_local_state` are bitwise equal."""
    import torch

    assert state.keys() == other.keys()
    for name, values in state.items():
        assert all(torch.equal(a, b) for a, b in zip(values, other[name], strict=True)), name


def make_objective(tasks, schema=SCHEMA, world=1, **options):
    """Return the Objective of task sections."""
    from raytrec.tasks.objective import Objective
    from raytrec.tasks.task import resolve_tasks

    return Objective(resolve_tasks(make_small_config(1, {}, tasks=tasks).tasks, schema), world, **options)


def batch_of_labels(labels, weights=None, rows=None, task_weights=None, keys=None):
    """Return a Batch with only labels, float32 [B] or [B, L]; `rows` is the row count (default: B)."""
    import torch

    from raytrec.data.batch import Batch

    labels = labels.unsqueeze(1) if labels.dim() == 1 else labels
    weights = torch.ones(len(labels)) if weights is None else weights
    return Batch(None, None, labels, weights, rows or len(labels), task_weights=task_weights, keys=keys)


def initial_rows(schema, table, seed, start, stop):
    """Return the initial values of rows [start, stop) of a table, float32 [stop - start, dim]."""
    import torch

    from raytrec.embeddings.hashing import compute_initial_values

    spec = schema.tables[table]
    return compute_initial_values(seed, table, torch.arange(start, stop), range(spec.dim), spec.rows)
