"""DIEN: interests, and how they change towards a target.

Zhou et al. 2019, arXiv:1809.03672.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.functional import linear, softplus

from raytrec.config.models.sequences import DienSection
from raytrec.config.schema import Schema
from raytrec.models.inputs import Sequence, dim_of, mlp
from raytrec.models.parts.packed import turn


class DIEN(nn.Module):
    """Each sequence becomes the last state of an AUGRU over the states of a GRU; then an MLP over the dense
    columns, those states and all other features but the negatives, the target among them.

    With the ids' vectors e_1 … e_T from the oldest to the most recent one, and the target's vector e_a:
        h_t = GRU(e_t, h_{t−1}), as wide as e
        a_t = softmax over t of h_t W e_a
        the sequence's vector is the last state of AUGRU(h_t, a_t); 0 of an empty sequence
    With negatives n_1 … n_T, one for each id, the model's own loss of a row is
        −α · Σ over t from 1 to T − 1 of ln σ(⟨h_t, e_{t+1}⟩) + ln(1 − σ(⟨h_t, n_{t+1}⟩))
    A row has negatives in the order of its ids, as both are given; where one has none, that term is left out.
    Activations of the MLP are PReLU (see din.py).

    Args:
        schema: any dense columns, sparse features of any dims, at least one of pooling: sequence.
        config: target, negatives and α; sizes and dropout.
        outputs: logits of a row, which share all layers but the last.

    Returns (forward):
        float32 [B]: the logit of each row; [B, outputs] for several; with negatives [B, outputs + 1], the
        last of which is the own loss: in eval mode, 0.

    Raises:
        ConfigError: no sequence; a target that there is not, or that has to be named; negatives of a table
            that no sequence has.
    """

    def __init__(self, schema: Schema, config: DienSection, outputs: int = 1):
        super().__init__()
        config.check(schema)
        self.config, self.target_of = config, config.targets(schema)
        self.held_against = config.held_against(schema)
        self.features = [feature for feature in schema.sparse if feature != config.negatives]
        # A feature's name cannot name a module: it may have dots.
        self.interests = nn.ModuleList(
            Interests(dim_of(schema, feature), dim_of(schema, target))
            for feature, target in self.target_of.items()
        )
        sizes = [len(schema.dense) + sum(dim_of(schema, f) for f in self.features), *config.top_mlp]
        self.top = mlp(sizes, config.dropout, nn.PReLU)
        self.logit = nn.Linear(sizes[-1], outputs)

    def forward(self, dense: torch.Tensor, inputs: dict[str, torch.Tensor | Sequence]) -> torch.Tensor:
        read, own_B = {}, dense.new_zeros(dense.shape[0])
        for (feature, target), interests in zip(self.target_of.items(), self.interests, strict=True):
            read[feature], states_BLD = interests(inputs[feature], inputs[target])
            if self.training and feature in self.held_against:
                held = inputs[self.config.negatives]
                own_B = own_B + self.config.auxiliary_weight * auxiliary(states_BLD, inputs[feature], held)
        vectors = [read[f] if f in read else inputs[f] for f in self.features]
        logits_BT = self.logit(self.top(torch.cat([dense, *vectors], dim=1)))
        if self.config.own_loss:
            return torch.cat([logits_BT, own_B.unsqueeze(1)], dim=1)
        return logits_BT.squeeze(1)


class Interests(nn.Module):
    """A sequence's interests, and what has become of them for a target.

    Args:
        dim: of the sequence's vectors. target_dim: of the target's.

    Returns (forward):
        (float [B, dim], the last state for the target; float [B, L, dim], the state after each id, the most
        recent first, any numbers where there is none).
    """

    def __init__(self, dim: int, target_dim: int):
        super().__init__()
        self.extractor = nn.GRU(dim, dim, batch_first=True)
        self.attention = nn.Linear(target_dim, dim, bias=False)
        self.evolution = AUGRU(dim, dim)

    def forward(self, sequence: Sequence, target_BD: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        lengths_B, there_BT = sequence.present.sum(1), sequence.present  # the first ones, in either order
        states_BTD = self._states(turn(sequence.vectors, lengths_B))
        scores_BT = torch.einsum("btd,bd->bt", states_BTD, self.attention(target_BD))
        scores_BT = scores_BT.float().masked_fill(~there_BT, torch.finfo(torch.float32).min)
        weights_BT = scores_BT.softmax(1) * there_BT
        return self.evolution(states_BTD, weights_BT), turn(states_BTD, lengths_B)

    def _states(self, steps_BTD: torch.Tensor) -> torch.Tensor:
        """The GRU's, on a GPU in float32 in any case.

        torch's autocast gives cuDNN's RNNs float16 whatever it was asked for (ATen/cudnn/AutocastRNN.cpp), in
        which most gradients of a mean over a large batch are 0.
        """
        if not steps_BTD.is_cuda:
            return self.extractor(steps_BTD)[0]
        with torch.autocast("cuda", enabled=False):
            return self.extractor(steps_BTD.float())[0]


def auxiliary(states_BLD: torch.Tensor, sequence: Sequence, negatives: Sequence) -> torch.Tensor:
    """Σ over ids but the oldest of −ln σ(⟨h, e⟩) − ln(1 − σ(⟨h, n⟩)), with the state h before the id e, and
    its negative n: float32 [B]. All have the most recent first."""
    length = min(states_BLD.shape[1], negatives.vectors.shape[1] + 1) - 1
    before_BLD = states_BLD[:, 1 : length + 1]
    # The state before an id is there where there is an older id.
    here_BL = sequence.present[:, 1 : length + 1] & negatives.present[:, :length]
    real_BL = (before_BLD * sequence.vectors[:, :length]).sum(2).float()
    drawn_BL = (before_BLD * negatives.vectors[:, :length]).sum(2).float()
    return ((softplus(-real_BL) + softplus(drawn_BL)) * here_BL).sum(1)


class AUGRU(nn.Module):
    """A GRU whose update gate is weakened by how much each step matters (Zhou et al. 2019, section 4.3).

    With the gates of nn.GRU, h_t = (1 − a_t·u_t) ∘ h_{t−1} + a_t·u_t ∘ h̃_t, where u_t is the share of what is
    new (1 − z of nn.GRU), and h_0 = 0. A step of weight 0 changes nothing.

    Args:
        inputs: width of the steps. width: of the state.

    Returns (forward):
        float [B, width]: the last state.
    """

    def __init__(self, inputs: int, width: int):
        super().__init__()
        self.cell = nn.GRUCell(inputs, width)  # its weights alone: r, z, n below each other

    def forward(self, steps_BTD: torch.Tensor, weights_BT: torch.Tensor) -> torch.Tensor:
        cell = self.cell
        given_BTG = linear(steps_BTD, cell.weight_ih, cell.bias_ih)
        state_BH = given_BTG.new_zeros(steps_BTD.shape[0], cell.hidden_size)
        for given_BG, weight_B in zip(given_BTG.unbind(1), weights_BT.unbind(1), strict=True):
            reset_BH, keep_BH, new_BH = given_BG.chunk(3, dim=1)
            of_reset_BH, of_keep_BH, of_new_BH = linear(state_BH, cell.weight_hh, cell.bias_hh).chunk(3, 1)
            candidate_BH = torch.tanh(new_BH + torch.sigmoid(reset_BH + of_reset_BH) * of_new_BH)
            update_BH = weight_B.unsqueeze(1) * torch.sigmoid(-keep_BH - of_keep_BH)
            state_BH = state_BH + update_BH * (candidate_BH - state_BH)
        return state_BH
