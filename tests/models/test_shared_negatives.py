"""Negatives shared by all rows of a global batch, compared with a loop over queries and negatives, and on
ranks compared with one process."""

from unittest.mock import patch

import pytest
import torch
from made import LENGTH, LENGTHS, ROWS, SPARSE, inputs, loss, schema
from made import make as make_model
from ranks import run_on_ranks

from raytrec.common.collectives import Peers
from raytrec.common.errors import ConfigError
from raytrec.config.models import SECTIONS
from raytrec.models.inputs import IDS, Sequence
from raytrec.models.parts import shared_negatives
from raytrec.models.parts.sampled_loss import SampledLoss

SCHEMA = schema("user", "item", "history", "negatives", dense=())
DRAWN = {"negatives": "negatives", "max_negatives": 3, "share_negatives": True}
MODELS = {
    "mf": {},
    "two_tower": {"towers": {"query": ["user"], "item": ["item"]}, "tower_mlp": [6, 4]},
    "sasrec": {"max_length": LENGTH, "dropout": 0.0, "positions": "order", "temperature": 0.5},
    "hstu": {"max_length": LENGTH, "dropout": 0.0, "positions": "order"},
}
KINDS = ["softmax", "bce", "bpr"]


def make(name, kind, **keys):
    of = SCHEMA
    if name == "two_tower":
        of = schema("user", "item", "negatives", dense=())
    return make_model(name, of, loss=kind, **DRAWN | MODELS[name] | keys)


def make_inputs_with_ids():
    """Return inputs with few distinct ids; equal ids have equal vectors."""
    dense, found = inputs(SCHEMA)
    table, g = torch.randn(5, 8), torch.Generator().manual_seed(1)
    ids = {"item": torch.randint(0, 5, (ROWS, 1), generator=g)}
    found["item"] = table[ids["item"].squeeze(1)].requires_grad_()
    for name in ("history", "negatives"):
        drawn = torch.randint(0, 5, found[name].present.shape, generator=g)
        ids[name] = torch.where(found[name].present, drawn, -1)
        vectors = table[drawn] * found[name].present.unsqueeze(2)
        found[name] = Sequence(vectors.requires_grad_(), found[name].present)
    return dense, found | {IDS: ids}


def iterate_queries(name, model, dense, found, i):
    """Yield (query, score bias, item vector, item id) for each query of a row."""
    item, own = found["item"], found[IDS]["item"][i, 0]
    if name in ("sasrec", "hstu"):
        history, ids = found["history"], found[IDS]["history"]
        for back in range(LENGTHS[i]):  # more recent ids are excluded
            cut = Sequence(history.vectors[i : i + 1, back:], history.present[i : i + 1, back:])
            query = model.query(dense[:1], {"history": cut})[0]
            vector = history.vectors[i, back - 1] if back else item[i]
            yield query / model.config.temperature, 0.0, vector, ids[i, back - 1] if back else own
        return
    query = model.query(dense, found)[i]
    bias = model.bias if name == "two_tower" else found["user"][i, -1] + model.bias[0]
    yield query * (model.scale if name == "two_tower" else 1), bias, item[i], own


def compute_losses(name, kind, model, dense, found, log_shares=0.0):
    """Return the loss of each row, by a loop over queries and the negatives that are not their own item.

    Args:
        log_shares: numbers that are subtracted from the scores of the negatives, [ROWS, 3] or one for all.
    """
    present, losses = found["negatives"].present, []
    drawn, ids = found["negatives"].vectors[present], found[IDS]["negatives"][present]
    shares = torch.as_tensor(log_shares).expand(present.shape)[present]
    for i in range(ROWS):
        total = torch.zeros(())
        for query, bias, vector, own in iterate_queries(name, model, dense, found, i):
            items = model.item(dense, {"item": torch.stack([vector, *drawn[ids != own]])})
            scores = items @ query + bias
            total = total + loss(kind, scores[0], (scores[1:] - shares[ids != own]).unbind())
        losses.append(total / LENGTH if name in ("sasrec", "hstu") else total)
    return torch.stack(losses)


@pytest.mark.parametrize("name,kind", [(n, k) for n in MODELS for k in KINDS])
def test_shared_negatives_match_a_loop_over_queries(name, kind):
    model, (dense, found) = make(name, kind), make_inputs_with_ids()
    given = model(dense, found)[:, 1]
    torch.testing.assert_close(given, compute_losses(name, kind, model, dense, found))
    wanted = [*model.parameters(), found["negatives"].vectors, found["item"]]
    whole = torch.autograd.grad(given.sum(), wanted, allow_unused=True)
    with patch.dict(shared_negatives.MAX_SCORES_PER_BLOCK, cpu=20):  # one or two queries at a time
        parts = torch.autograd.grad(model(dense, found)[:, 1].sum(), wanted, allow_unused=True)
    torch.testing.assert_close(parts, whole)
    assert whole[-2][~found["negatives"].present].count_nonzero() == 0


@pytest.mark.parametrize("name", ["mf", "two_tower", "sasrec"])
def test_log_share_corrects_scores_of_frequent_negatives(name):
    """exp(score) is divided by the ratio of a negative's sampling probability to the uniform one."""
    drawn = {**SPARSE["negatives"], "side_features": ["other", "log_share"]}
    features = ["user", "item"] if name == "two_tower" else ["user", "item", "history"]
    of = schema(*features, dense=(), negatives=drawn)
    model = make_model(name, of, **DRAWN | MODELS[name] | {"log_share": "log_share"})
    dense, found = make_inputs_with_ids()
    side = torch.randn(*found["negatives"].present.shape, 2, dtype=torch.float64)
    found["negatives"] = found["negatives"]._replace(side_features=side)
    expected = compute_losses(name, "softmax", model, dense, found, side[:, :, 1].float())
    torch.testing.assert_close(model(dense, found)[:, 1], expected)


def test_gbce_weight_matches_the_paper():
    """β of gBCE as in the paper: α · (t · (1 − 1 ÷ α) + 1 ÷ α), with α = K ÷ (items − 1)."""
    own, others = torch.tensor(0.7), [torch.tensor(x) for x in (-1.0, 0.3, 0.1, 2.0)]
    for t, items in (0.75, 21), (1.0, 9), (0.5, 5), (0.0, 100):
        alpha = 4 / (items - 1)
        weight = alpha * (t * (1 - 1 / alpha) + 1 / alpha)
        found = SampledLoss("bce", t, items)(own, torch.stack(others), torch.tensor(4))
        torch.testing.assert_close(found, loss("bce", own, others, weight))
    model = make("sasrec", "bce", gbce=0.5)
    assert (model.loss.gbce, model.loss.items) == (0.5, SCHEMA.tables["item"].rows)


def parts(rank, world, kind, most, counts):
    """Return this rank's losses, and the gradients of its queries, items and negatives."""
    torch.manual_seed(0)
    query, items = torch.randn(sum(counts), 3), torch.randn(sum(counts), 3)
    drawn, ids, share = torch.randn(6, 3), torch.tensor([0, 1, 2, -1, 1, 3]), torch.randn(6)
    bias, own_ids = torch.randn(sum(counts)), torch.arange(sum(counts)) % 4
    mine = slice(sum(counts[:rank]), sum(counts[: rank + 1])) if world > 1 else slice(None)
    taken = slice(rank * 6 // world, (rank + 1) * 6 // world)
    leaves = [x.clone().requires_grad_() for x in (query[mine], items[mine], drawn[taken], bias[mine])]
    made = shared_negatives.SharedNegatives(SampledLoss(kind, 0.5, 9))
    shared_negatives.share_negatives_across_ranks(made, Peers(alone=world == 1))
    own = shared_negatives.ItemBatch(leaves[1], own_ids[mine])
    negatives = shared_negatives.ItemBatch(leaves[2], ids[taken], share[taken] if kind == "softmax" else None)
    losses = made(leaves[0], own, negatives, most, leaves[3])
    grads = torch.autograd.grad((losses * (1 + own_ids[mine])).sum(), leaves)
    return [losses.detach(), *grads]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("most", [6, 5], ids=["negatives travel", "queries travel"])
@pytest.mark.parametrize("counts", [(4, 1), (2, 0, 3)], ids=str)
def test_shared_negatives_on_ranks_match_one_process(kind, most, counts):
    whole = parts(0, 1, kind, 9, counts)
    of_ranks = run_on_ranks(len(counts), parts, kind, most, counts)
    for place, expected in enumerate(whole):
        together = torch.cat([found[place] for found in of_ranks])
        torch.testing.assert_close(together, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "name,keys,where",
    [
        ("mf", {"share_negatives": True}, "model.share_negatives"),
        ("two_tower", {"share_negatives": True} | MODELS["two_tower"], "model.share_negatives"),
        ("sasrec", {"negatives": "negatives", "gbce": 0.5}, "model.gbce"),
        ("mf", {"negatives": "negatives", "log_share": "x"}, "model.log_share"),
        ("mf", {**DRAWN, "log_share": "x", "loss": "bpr"}, "model.log_share"),
        ("mf", {**DRAWN, "log_share": "x"}, "'x' is not a side feature of negatives"),
        ("ncf", {"negatives": "negatives", "share_negatives": True}, "model.share_negatives"),
    ],
)
def test_shared_negative_keys_are_validated(name, keys, where):
    of = schema("user", "item", dense=()) if name == "two_tower" else SCHEMA
    with pytest.raises(ConfigError) as caught:
        SECTIONS[name].model_validate({"name": name} | keys).check(of)
    assert where in str(caught.value)


def test_blocks_fit_the_free_memory_of_the_gpu():
    gpu = torch.device("cuda")
    for free, scores in ((80 << 30, 1 << 27), (80 << 20, 1 << 20), (0, 1)):
        with patch("torch.cuda.mem_get_info", lambda device, free=free: (free, 80 << 30)):
            assert shared_negatives.choose_block_scores(gpu) == scores
    assert shared_negatives.choose_block_scores(torch.device("cpu")) == 1 << 24
