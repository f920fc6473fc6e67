"""Programs rewritten for several users give the scores of full rows, and compute the users' part once."""

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from raytrec.models.interactions import DotInteraction
from raytrec.scoring.manifest import Input
from raytrec.scoring.single_rows import make_example_input, repeat_rows, rewrite_for_single_rows

DIM, FEATURES, ROWS = 8, 6, 40
INPUTS = [Input(kind="dense", width=DIM), *(Input(kind="bag", feature=f"f{i}", width=DIM) for i in range(FEATURES))]
USER = frozenset(range(5))  # the dense columns and four features


class Interactions(nn.Module):
    """Dot products of all pairs of vectors, and layers, as in DLRM."""

    def __init__(self):
        super().__init__()
        self.bottom, self.interact = nn.Linear(DIM, DIM), DotInteraction(1 + FEATURES)
        self.top = nn.Sequential(nn.Linear(DIM + self.interact.size, 64), nn.ReLU(), nn.Linear(64, 1))

    def forward(self, dense, *features):
        dense = self.bottom(dense)
        pairs = self.interact(torch.stack([dense, *features], dim=1))
        return (self.top(torch.cat([dense, pairs], dim=1)).squeeze(1),)


class TimeFirst(nn.Module):
    """Program whose rows are the second dimension of a tensor, with a size that is a multiple of the rows."""

    def forward(self, dense, *features):
        steps_LBD = torch.stack([dense, *features[:4]]).cumsum(0)
        flat_ND = steps_LBD.transpose(0, 1).reshape(5 * dense.shape[0], DIM)
        return ((flat_ND.view(-1, 5, DIM).mean(1) * features[5] + steps_LBD[-1]).sum(1),)


class SharedDense(nn.Module):
    """Program whose first four dense columns are those of users, with a hidden layer on these columns and a feature."""

    def __init__(self):
        super().__init__()
        self.register_buffer("columns", torch.tensor([0, 2]), persistent=False)
        self.layers = nn.Sequential(nn.Linear(2 + DIM, 256), nn.ReLU(), nn.Linear(256, DIM))

    def forward(self, dense, *features):
        users_BD = self.layers(torch.cat([dense.index_select(1, self.columns), features[0]], 1)) * dense[:, 1, None]
        return ((users_BD * features[5]).sum(1) + dense[:, 5] + dense.sum(1),)


def export(module):
    batch = torch.export.Dim("batch", min=2, max=1024)
    examples = tuple(make_example_input(each, 7) for each in INPUTS)
    shapes = {"dense": {0: batch}, "features": tuple({0: batch} for _ in INPUTS[1:])}
    return torch.export.export(module.eval(), examples, dynamic_shapes=shapes).module(check_guards=False)


def run(program, users, once=USER, columns=()):
    """Return (scores, FLOPs) of the whole program and of the rewritten one."""
    users_B, columns_Un, results = torch.tensor(users), None, []
    rewritten = rewrite_for_single_rows(program, INPUTS, once, columns)
    few = [make_example_input(each, max(users) + 1 if i in once else ROWS) for i, each in enumerate(INPUTS)]
    if columns:
        columns_Un = torch.randn(max(users) + 1, DIM)
        few[0][:, columns] = columns_Un[users_B][:, columns]
    whole = [repeat_rows(each, users_B) if i in once else each for i, each in enumerate(few)]
    for call in (lambda: program.forward(*whole), lambda: rewritten(*few, users_B, columns_Un)):
        with torch.inference_mode(), FlopCounterMode(display=False) as counter:
            results.append((call()[0], counter.get_total_flops()))
    return results


ONE_USER, FOUR_USERS, MANY_USERS = [0] * ROWS, [i // 10 for i in range(ROWS)], [0, *range(ROWS - 1)]


@pytest.mark.parametrize("users", [ONE_USER, FOUR_USERS, MANY_USERS], ids=["one", "four", "many"])
@pytest.mark.parametrize("module, once", [(Interactions, USER), (Interactions, {6}), (TimeFirst, USER)])
def test_rewritten_programs_score_like_whole_ones(module, once, users):
    torch.manual_seed(0)
    (expected, _), (actual, _) = run(export(module()), users, once)
    torch.testing.assert_close(actual, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("users, share", [(ONE_USER, 0.55), (FOUR_USERS, 0.6)], ids=["one", "four"])
def test_first_layers_and_dot_products_of_users_are_computed_once(users, share):
    (_, whole), (_, divided) = run(export(Interactions()), users)
    assert 0 < divided < share * whole


def test_refreshed_programs_follow_changed_weights():
    program, users_B = export(Interactions()), torch.tensor(FOUR_USERS)
    rewritten = rewrite_for_single_rows(program, INPUTS, USER)
    few = [make_example_input(each, 4 if i in USER else ROWS) for i, each in enumerate(INPUTS)]
    whole = [repeat_rows(each, users_B) if i in USER else each for i, each in enumerate(few)]
    with torch.no_grad():
        for value in program.state_dict().values():
            value.copy_(torch.randn_like(value))
        assert not torch.allclose(rewritten(*few, users_B)[0], program.forward(*whole)[0], rtol=1e-3)
        rewritten.refresh()
        torch.testing.assert_close(rewritten(*few, users_B)[0], program.forward(*whole)[0], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("users", [ONE_USER, FOUR_USERS], ids=["one", "four"])
def test_layers_on_dense_columns_of_users_are_computed_once(users):
    torch.manual_seed(0)
    (expected, whole), (actual, divided) = run(export(SharedDense()), users, {1, 2}, [0, 1, 2, 3])
    torch.testing.assert_close(actual, expected, rtol=1e-6, atol=1e-6)
    assert divided == whole * (max(users) + 1) / ROWS
