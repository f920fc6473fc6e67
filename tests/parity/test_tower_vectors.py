"""Retrieval models: tower vectors need only the tower's features, on ranks and in one process without Ray."""

from dataclasses import replace

import pytest
import torch
from ranks import run_on_ranks
from test_models import CASES, ModelCase

from raytrec.config.models.base import MODELS
from raytrec.config.run_config import load_config

ROWS = 12


def set_one_query(batch, schema, members):
    """Return the batch with the query of one row in all rows, so scores of one query are compared."""
    row = sum(torch.bincount(batch.bags[f][1], minlength=ROWS) for f in schema.sparse if f in members).argmax()
    dense, bags, side_features = batch.dense.clone(), dict(batch.bags), dict(batch.side_features)
    columns = [i for i, name in enumerate(schema.dense) if name in members]
    dense[:, columns] = dense[row, columns]
    for feature in members & set(bags):
        mine = bags[feature][1] == row
        ids, of, weights = (part[mine] for part in bags[feature])
        numbers = torch.arange(ROWS).repeat_interleave(len(of))
        bags[feature] = ids.repeat(ROWS), numbers, weights.repeat(ROWS)
        if feature in side_features:
            side_features[feature] = side_features[feature][mine].repeat(ROWS, 1)
    return replace(batch, dense=dense, bags=bags, side_features=side_features)


def compute_tower_vectors(rank, world, model, root):
    """Return the vectors of each tower with and without the features of the other tower, (logits, query
    vectors), and the vectors that one process computes for each tower from the checkpoint."""
    from raytrec.checkpoint.files import get_step_folder
    from raytrec.checkpoint.index import read_index
    from raytrec.checkpoint.save import CheckpointWriter
    from raytrec.checkpoint.state import LogicalState
    from raytrec.checks.parity.batches import compute_row_bounds, make_local_batch, make_random_batches
    from raytrec.config.features import resolve_features
    from raytrec.driver.evaluation import Checkpoint
    from raytrec.prediction.one_process import compute_outputs
    from raytrec.worker.build import build_step

    case = ModelCase(model, (world, 1))
    values = case.config().model_dump(by_alias=True) | {"tasks": [{"label": "y"}]}
    values["data"]["test"], values["eval"] = "unused", {"retrieval": {"items": "unused"}}
    config, schema = load_config(values), case.schema()
    whole = set_one_query(
        *make_random_batches(schema, ROWS, 1, seed=1), schema, config.model.tower_members(schema)["query"]
    )
    step, _ = build_step(config, schema, torch.device("cpu"))

    def evaluated(batch, tower=None):
        local = make_local_batch(
            batch, schema, compute_row_bounds(ROWS, world, "equal"), rank, resolve_features(schema, config.model)
        )
        (outputs,) = step.evaluate(iter([local]), tower)
        assert bool(outputs.tasks) == (tower is None)
        return outputs

    pairs = {}
    for tower, members in config.model.tower_members(schema).items():
        dense = whole.dense.clone()
        dense[:, [i for i, name in enumerate(schema.dense) if name not in members]] = 0
        bags = {f: bag if f in members else tuple(part[:0] for part in bag) for f, bag in whole.bags.items()}
        side_features = {f: values if f in members else values[:0] for f, values in whole.side_features.items()}
        alone = replace(whole, dense=dense, bags=bags, side_features=side_features)
        pairs[tower] = evaluated(whole, tower).vectors, evaluated(alone, tower).vectors
    outputs = evaluated(whole)
    saver, state = CheckpointWriter(root, config.checkpoint), LogicalState(step.model, step.optimizer)
    saver.save(1, state.tensors(), {})
    assert saver.collect_outcome().error is None
    folder = get_step_folder(root, 1)
    together = make_local_batch(whole, schema, [0, ROWS], 0, resolve_features(schema, config.model))
    saved = Checkpoint(config, schema, folder, read_index(folder))
    here = {tower: compute_outputs(saved, together, tower).numpy() for tower in pairs}
    return pairs, (outputs["y"].logits, outputs.vectors), here


@pytest.mark.slow
@pytest.mark.parametrize("model", [name for name in CASES if MODELS.parts[name].retrieves])
def test_tower_vectors_need_only_their_own_features(model, tmp_path):
    parts = run_on_ranks(2, compute_tower_vectors, model, str(tmp_path))
    vectors = {}
    for tower in ("query", "item"):
        of_rows, alone = (torch.cat([pairs[tower][i] for pairs, _, _ in parts]) for i in (0, 1))
        torch.testing.assert_close(alone, of_rows, rtol=0, atol=1e-6)
        torch.testing.assert_close(torch.from_numpy(parts[0][2][tower]), of_rows, rtol=0, atol=1e-6)
        assert of_rows.dtype == torch.float32 and of_rows.std() > 0
        vectors[tower] = of_rows.double()
    logits, queries = (torch.cat([given[i] for _, given, _ in parts]).double() for i in (0, 1))
    torch.testing.assert_close(queries, vectors["query"])
    scores = (vectors["query"] * vectors["item"]).sum(1)
    assert torch.corrcoef(torch.stack([scores, logits]))[0, 1] > 1 - 1e-5, "logits are linear in the scores"
