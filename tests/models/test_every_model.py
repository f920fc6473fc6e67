"""Each model against its definition, written once more in plain torch, and what it refuses."""

import copy

import pytest
import references
import torch

from raytrec.common.errors import ConfigError
from raytrec.config.models.ranking import DcnSection, DlrmSection
from raytrec.config.models.retrieval import TwoTowerSection
from raytrec.config.models.sequences import SequenceSection
from raytrec.config.schema import Schema
from raytrec.models import build_model
from raytrec.models.inputs import Sequence

ROWS, DIM, LENGTH = 7, 4, 5


def schema(**changes):
    values = {
        "labels": ["y"],
        "dense": ["age", "price"],
        "sparse": {
            "user": {"table": "user"},
            "item": {"table": "item"},
            "tags": {"table": "tag", "pooling": "mean"},
            "history": {"table": "item", "pooling": "sequence"},
        },
        "tables": {name: {"rows": 9, "dim": DIM} for name in ("user", "item", "tag")},
    }
    return Schema.parse(values | changes, "test")


def randomized(model):
    """With parameters that begin as 0 drawn, too (biases, recency), so that none goes unnoticed."""
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) / max(parameter.shape, default=1) ** 0.5)
    return model


def inputs(lengths=(0, 1, 2, 3, 4, 5, 5), dims=None):
    """dense, the pooled features by name, and a sequence of these lengths."""
    torch.manual_seed(2)
    pooled = {f: torch.randn(ROWS, (dims or {}).get(f, DIM)) for f in ("user", "item", "tags")}
    present = torch.arange(LENGTH) < torch.tensor(lengths).unsqueeze(1)
    vectors = torch.randn(ROWS, LENGTH, DIM) * present.unsqueeze(2)
    return torch.randn(ROWS, 2), pooled, Sequence(vectors, present)


@pytest.mark.parametrize("rank", [None, 3])
@pytest.mark.parametrize("deep", ["stacked", "parallel"])
def test_dcn(rank, deep):
    tables = {"user": {"rows": 9, "dim": 8}, "item": {"rows": 9, "dim": 4}, "tag": {"rows": 9, "dim": 12}}
    section = DcnSection(bottom_mlp=[5, 3], cross_layers=2, cross_rank=rank, deep=deep, top_mlp=[6, 5])
    model = randomized(build_model(schema(tables=tables), section))
    dense, pooled, _ = inputs(dims={"user": 8, "tags": 12})
    pooled["history"] = torch.randn(ROWS, 4)
    vectors = [pooled[f] for f in ("user", "item", "tags", "history")]
    expected = references.dcn(
        model, dense, vectors, bottom=2, cross=2, rank=rank, top=2, parallel=deep == "parallel"
    )
    torch.testing.assert_close(model(dense, pooled), expected)


def test_cross_layers_are_those_of_torchrec():
    from torchrec.modules.crossnet import CrossNet, LowRankCrossNet

    from raytrec.models.dcn import Cross

    x = torch.randn(ROWS, 6)
    for rank, theirs in ((3, LowRankCrossNet(6, 2, low_rank=3)), (None, CrossNet(6, 2))):
        ours = Cross(6, 2, rank)
        with torch.no_grad():
            for i, layer in enumerate(ours.layers):
                if rank:
                    theirs.V_kernels[i].copy_(layer[0].weight)
                    theirs.W_kernels[i].copy_(layer[1].weight)
                else:
                    theirs.kernels[i].copy_(layer[0].weight)
                theirs.bias[i].copy_(layer[-1].bias.normal_().view_as(theirs.bias[i]))
        torch.testing.assert_close(ours(x), theirs(x))


def test_mlperfs_model_can_be_said():
    tables = {f"c{i}": {"rows": 3, "dim": 128} for i in range(26)}
    criteo = Schema.parse(
        {
            "labels": ["label"],
            "dense": [f"d{i}" for i in range(13)],
            "sparse": {f"c{i}": {"table": f"c{i}"} for i in range(26)},
            "tables": tables,
        },
        "criteo",
    )
    section = DcnSection(
        bottom_mlp=[512, 256, 128], cross_layers=3, cross_rank=512, top_mlp=[1024, 1024, 512, 256]
    )
    shapes = {name: tuple(p.shape) for name, p in build_model(criteo, section).named_parameters()}
    assert shapes["bottom.0.weight"] == (512, 13) and shapes["bottom.4.weight"] == (128, 256)
    assert [shapes[f"cross.layers.{i}.0.weight"] for i in range(3)] == [(512, 27 * 128)] * 3
    assert [shapes[f"deep.{i}.weight"][0] for i in (0, 2, 4, 6)] == [1024, 1024, 512, 256]
    assert shapes["logit.weight"] == (1, 256)


TOWERS = {"query": ["user", "age", "hist*"], "item": ["item", "tags", "price"]}


@pytest.mark.parametrize("normalize", [False, True])
def test_two_towers(normalize):
    section = TwoTowerSection(name="two_tower", towers=TOWERS, tower_mlp=[6, 3], normalize=normalize)
    model = randomized(build_model(schema(), section))
    dense, pooled, _ = inputs()
    pooled["history"] = torch.randn(ROWS, DIM)
    query = torch.cat([dense[:, :1], pooled["user"], pooled["history"]], 1)
    item = torch.cat([dense[:, 1:], pooled["item"], pooled["tags"]], 1)
    q, i = references.tower(model, "query", query, 1), references.tower(model, "item", item, 1)
    if normalize:
        q, i = q / q.square().sum(1, keepdim=True).sqrt(), i / i.square().sum(1, keepdim=True).sqrt()
    expected = model.scale * torch.einsum("bd,bd->b", q, i) + model.bias
    torch.testing.assert_close(model(dense, pooled), expected)
    # Each tower alone, from its own features alone.
    torch.testing.assert_close(model.query(dense, {f: pooled[f] for f in ("user", "history")}), q)
    torch.testing.assert_close(model.item(dense, {f: pooled[f] for f in ("item", "tags")}), i)


SEVERAL = [
    DlrmSection(bottom_mlp=[3], top_mlp=[6]),
    DcnSection(cross_layers=1, top_mlp=[6], deep="parallel"),
    SequenceSection(name="sequence", max_length=LENGTH, top_mlp=[6]),
    TwoTowerSection(name="two_tower", towers=TOWERS, tower_mlp=[6, 3]),
]


@pytest.mark.parametrize("section", SEVERAL, ids=lambda section: section.name)
def test_several_outputs_share_all_but_the_last_layer(section):
    dense, pooled, history = inputs()
    pooled["history"] = history if section.name == "sequence" else torch.randn(ROWS, DIM)
    model = randomized(build_model(schema(), section, 3))
    logits = model(dense, pooled)
    assert logits.shape == (ROWS, 3)
    logits[:, 1].sum().backward()
    grads = {name: parameter.grad for name, parameter in model.named_parameters()}
    assert all(grad is not None for grad in grads.values())
    of_last = next((grad for name, grad in grads.items() if name.endswith("logit.weight")), None)
    if of_last is not None:
        assert (of_last.abs().sum(1) > 0).tolist() == [False, True, False]
    assert build_model(schema(), section)(dense, pooled).shape == (ROWS,)


@pytest.mark.parametrize("outputs", [0, 1, 2])
@pytest.mark.parametrize("normalize", [False, True])
def test_two_towers_give_vectors_beside_logits(outputs, normalize):
    section = TwoTowerSection(name="two_tower", towers=TOWERS, tower_mlp=[6, 3], normalize=normalize)
    model = randomized(build_model(schema(), section, outputs, vectors=True))
    dense, pooled, _ = inputs()
    pooled["history"] = torch.randn(ROWS, DIM)
    given = model(dense, pooled)
    query, item = model.query(dense, pooled).view(ROWS, outputs + 1, 3), model.item(dense, pooled)
    scale = model.scale.view(-1)
    torch.testing.assert_close(given[:, outputs:], torch.cat([scale[-1] * query[:, -1], item], 1))
    for place in range(outputs):
        expected = scale[place] * (query[:, place] * item).sum(1) + model.bias.view(-1)[place]
        torch.testing.assert_close(given[:, place], expected)
    assert len(list(model.named_parameters())) == 9 + (outputs > 0)


def test_models_without_vectors_refuse_to_give_them():
    with pytest.raises(ConfigError, match=r"model\.name=dlrm gives none"):
        build_model(schema(), DlrmSection(), 1, vectors=True)


def test_a_sequence_is_read_for_its_target():
    section = SequenceSection(
        name="sequence", max_length=LENGTH, attention_mlp=[6, 5], bottom_mlp=[3], top_mlp=[6]
    )
    model = randomized(build_model(schema(), section))
    assert model.target_of == {"history": "item"}
    dense, pooled, history = inputs()
    read = []
    for row, length in enumerate(history.present.sum(1).tolist()):
        past = list(history.vectors[row, :length])
        read.append(references.attention(model, 0, past, pooled["item"][row], 2))
    vectors = [pooled["user"], pooled["item"], pooled["tags"], torch.stack(read)]
    expected = references.dlrm(model, "dlrm.", dense, vectors, bottom=2, top=1)
    torch.testing.assert_close(model(dense, {**pooled, "history": history}), expected)
    # Which of the ids is the most recent makes a difference, what lies behind the last one does not.
    turned = Sequence(history.vectors[-1:].flip(1), history.present[-1:])
    one = {f: v[-1:] for f, v in pooled.items()}
    assert not torch.allclose(model(dense[-1:], {**one, "history": turned}), expected[-1:])
    noise = history.vectors + torch.randn(ROWS, LENGTH, DIM) * ~history.present.unsqueeze(2)
    noise[0] = history.vectors[0]
    torch.testing.assert_close(
        model(dense, {**pooled, "history": Sequence(noise, history.present)}), expected
    )


def test_an_empty_sequence_has_no_gradient_and_no_nan():
    model = randomized(build_model(schema(), SequenceSection(name="sequence", max_length=LENGTH)))
    dense, pooled, history = inputs(lengths=(0,) * ROWS)
    vectors = history.vectors.clone().requires_grad_()
    model(dense, {**pooled, "history": Sequence(vectors, history.present)}).sum().backward()
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    assert gradients and all(torch.isfinite(g).all() for g in gradients)
    assert float(model.attention[0].recency.grad.abs().max()) == 0


SPARSE, TABLES = schema().model_dump()["sparse"], schema().model_dump()["tables"]
USER = {"sparse": {"user": {"table": "user"}}, "tables": {"user": {"rows": 3, "dim": 4}}}


@pytest.mark.parametrize(
    "section,changes,message",
    [
        (DcnSection(bottom_mlp=[4]), {"dense": []}, "no dense columns"),
        (("query", ["usr"]), {}, "did you mean 'user'"),
        (("query", ["user", "age", "item"]), {}, "in both towers: item"),
        (("query", ["user"]), {}, "in neither tower: age, history"),
        (
            {},
            {"sparse": {"user": {"table": "user"}}, "tables": {"user": {"rows": 3, "dim": 4}}},
            "no sequence",
        ),
        ({"target": "itm"}, {}, "did you mean 'item'"),
        (
            {},
            {"sparse": schema().model_dump()["sparse"] | {"last": {"table": "item"}}},
            "model.target to one of",
        ),
        ({}, {"tables": TABLES | {"tag": {"rows": 3, "dim": 8}}}, "dims 4, 8"),
    ],
)
def test_refused(section, changes, message):
    if isinstance(section, tuple):
        towers = TOWERS | {section[0]: section[1]}
        section = TwoTowerSection(name="two_tower", towers=towers)
    elif isinstance(section, dict):
        section = SequenceSection(name="sequence", **section)
    with pytest.raises(ConfigError, match=message):
        build_model(schema(**changes), section)


def test_a_target_that_has_been_said():
    changed = schema(sparse=SPARSE | {"last": {"table": "item"}})
    section = SequenceSection(name="sequence", target="last")
    assert build_model(changed, section).target_of == {"history": "last"}


def test_rows_do_not_know_of_each_other():
    """So that dealing them to ranks changes nothing."""
    dense, pooled, history = inputs()
    sections = [
        (DcnSection(), torch.randn(ROWS, DIM)),
        (TwoTowerSection(name="two_tower", towers=TOWERS), torch.randn(ROWS, DIM)),
        (SequenceSection(name="sequence", max_length=LENGTH), history),
    ]
    for section, read in sections:
        model = randomized(build_model(schema(), copy.deepcopy(section)))
        whole = model(dense, {**pooled, "history": read})
        for row in range(ROWS):
            rows = slice(row, row + 1)
            part = (
                Sequence(read.vectors[rows], read.present[rows]) if isinstance(read, Sequence) else read[rows]
            )
            one = {f: v[rows] for f, v in pooled.items()} | {"history": part}
            torch.testing.assert_close(model(dense[rows], one)[0], whole[row])


def test_order_can_be_learnt():
    """Where the newest id alone decides, attention finds it, and the mean of the ids does not."""
    from ranked_rows import auc_of

    from raytrec.checks.parity import reference

    values = schema(dense=[]).model_dump()
    del values["sparse"]["tags"], values["tables"]["tag"]
    planted = Schema.parse(values, "test")
    generator = torch.Generator().manual_seed(0)

    def batch(rows):
        users, items = torch.randint(0, 9, (2, rows), generator=generator)
        history = torch.randint(0, 9, (rows, LENGTH), generator=generator)
        labels = (history[:, -1] % 3 == items % 3).float()
        one, each = torch.arange(rows), torch.ones(rows)
        bags = {
            "user": (users, one, each),
            "item": (items, one, each),
            "history": (history.flatten(), one.repeat_interleave(LENGTH), torch.ones(rows * LENGTH)),
        }
        return reference.GlobalBatch(torch.empty(rows, 0), labels.unsqueeze(1), bags)

    def auc(section, by_id):
        torch.manual_seed(3)
        tables = {name: torch.randn(9, DIM) / 3 for name in planted.tables}
        one = reference.Reference(planted, tables, build_model(planted, section), by_id)
        optimizer = torch.optim.Adam(one.parameters(), lr=0.02)
        reference.train(one, (batch(256) for _ in range(150)), [optimizer])
        test = batch(2000)
        return auc_of(one(test).detach().double().sigmoid(), test.labels[:, 0])

    sections = {"bottom_mlp": [], "top_mlp": [16]}
    read = SequenceSection(name="sequence", max_length=LENGTH, **sections)
    assert auc(read, {"history": LENGTH}) > 0.9
    assert auc(DlrmSection(**sections), {}) < 0.8
