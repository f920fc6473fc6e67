"""DIEN: evolution of a user's interests towards a target.

Zhou et al. 2019, arXiv:1809.03672.
"""

from __future__ import annotations

from itertools import repeat
from typing import Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.nn.functional import linear, softplus

from raytrec.config.models.sequences import DienSection
from raytrec.config.schema import Schema
from raytrec.models.inputs import Sequence
from raytrec.models.parts.layers import ConcatInputs, SequenceModules, mlp_and_linear
from raytrec.models.parts.packed_sequences import reverse_sequences


class DIEN(nn.Module):
    """Model that encodes each sequence with a GRU and an AUGRU, followed by an MLP.

    A sequence is encoded as the last state of an AUGRU (GRU with attentional update gate), which reads the states
    of a GRU. The MLP reads the dense columns, the encoded sequences, and all other features (including the target)
    except the negatives, which are ids drawn at random (`model.negatives`).

    For id vectors e_1 … e_T, oldest first, and the target's vector e_a:
        h_t = GRU(e_t, h_{t−1}), as wide as e
        a_t = softmax over t of h_t W e_a, with a learned matrix W
        the encoding is the last state of AUGRU(h_t, a_t); 0 for an empty sequence
    With negatives n_1 … n_T, one per id, the model's own loss for a row, which is added to the tasks' losses, is
        −α · Σ over t from 1 to T − 1 of [ln σ(⟨h_t, e_{t+1}⟩) + ln(1 − σ(⟨h_t, n_{t+1}⟩))]
    summed over the sequences that share the negatives' table, with α = model.auxiliary_weight. A row's negatives are
    in the same order as its ids. Terms for ids without a negative are omitted.
    The MLP's activations are PReLU (see DIN in target_attention.py).

    Args:
        schema: Schema with any dense columns and sparse features of any dims, at least one with pooling:
            sequence in addition to the negatives.
        config: Target, negatives, α, layer sizes and dropout.
        outputs: Number of logits per row; all layers except the last are shared.

    Raises:
        ConfigError: The schema has no sequence, or the target does not exist or is ambiguous.
    """

    def __init__(self, schema: Schema, config: DienSection, outputs: int = 1):
        super().__init__()
        self.config, self.supervised_sequences = config, config.get_supervised_sequences(schema)
        self.interests = SequenceModules(schema, config.targets(schema), InterestEvolution)
        self.concat_inputs = ConcatInputs(schema, {*schema.dense, *schema.sparse} - {config.negatives})
        width = self.concat_inputs.width
        self.top, self.logit = mlp_and_linear(width, config.top_mlp, outputs, config.dropout, nn.PReLU)

    def forward(self, dense: torch.Tensor, inputs: dict[str, torch.Tensor | Sequence]) -> torch.Tensor:
        """Return the logit of each row, float32 [B]; [B, outputs] if there are several outputs.

        With negatives, the shape is [B, outputs + 1], where the last column is the model's own loss. In eval
        mode, the own loss is 0.
        """
        encoded, own_B = dict(inputs), dense.new_zeros(dense.shape[0])
        for feature, (last_BD, states_BLD) in self.interests(inputs).items():
            encoded[feature] = last_BD
            if self.training and feature in self.supervised_sequences:
                negatives = inputs[self.config.negatives]
                own_B = own_B + self.config.auxiliary_weight * compute_auxiliary_loss(
                    states_BLD, inputs[feature], negatives
                )
        logits_BT = self.logit(self.top(self.concat_inputs(dense, encoded)))
        if self.config.own_loss:
            return torch.cat([logits_BT, own_B.unsqueeze(1)], dim=1)
        return logits_BT.squeeze(1)


class InterestEvolution(nn.Module):
    """GRU that extracts interests from a sequence, followed by an AUGRU that weights them by a target.

    Args:
        dim: Width of the sequence's vectors.
        target_dim: Width of the target's vector.
    """

    def __init__(self, dim: int, target_dim: int):
        super().__init__()
        self.extractor = nn.GRU(dim, dim, batch_first=True)
        self.attention = nn.Linear(target_dim, dim, bias=False)
        self.evolution = AUGRU(dim, dim)

    def forward(self, sequence: Sequence, target_BD: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the last state of the AUGRU, float [B, dim], and all states of the GRU, float [B, L, dim].

        The GRU's states are in the order of the ids, most recent first. States at positions without an id are
        undefined. `target_BD` contains the target's vectors.
        """
        lengths_B, present_BT = sequence.present.sum(1), sequence.present  # `present` marks a prefix in either order
        states_BTD = self._states(reverse_sequences(sequence.vectors, lengths_B))
        scores_BT = torch.einsum("btd,bd->bt", states_BTD, self.attention(target_BD))
        scores_BT = scores_BT.float().masked_fill(~present_BT, torch.finfo(torch.float32).min)
        weights_BT = scores_BT.softmax(1) * present_BT
        return self.evolution(states_BTD, weights_BT), reverse_sequences(states_BTD, lengths_B)

    def _states(self, steps_BTD: torch.Tensor) -> torch.Tensor:
        """Return the state of the GRU after each step; on GPUs, the states are always computed in float32.

        PyTorch's autocast runs cuDNN's RNNs in float16 regardless of the requested dtype
        (ATen/cudnn/AutocastRNN.cpp). In float16, most gradients of a mean over a large batch would be 0.
        """
        if not steps_BTD.is_cuda:
            return self.extractor(steps_BTD)[0]
        with torch.autocast("cuda", enabled=False):
            return self.extractor(steps_BTD.float())[0]


def compute_auxiliary_loss(states_BLD: torch.Tensor, sequence: Sequence, negatives: Sequence) -> torch.Tensor:
    """Return −Σ [ln σ(⟨h, e⟩) + ln(1 − σ(⟨h, n⟩))] over all ids except the oldest, float32 [B].

    For each id, h is the GRU's state after the next older id, e is the id's vector, and n is the vector of the
    id's negative. Ids without a negative are omitted. All inputs are ordered from most recent to oldest.
    """
    length = min(states_BLD.shape[1], negatives.vectors.shape[1] + 1) - 1
    before_BLD = states_BLD[:, 1 : length + 1]
    # A state precedes an id only if the row contains an older id.
    valid_BL = sequence.present[:, 1 : length + 1] & negatives.present[:, :length]
    real_BL = (before_BLD * sequence.vectors[:, :length]).sum(2).float()
    drawn_BL = (before_BLD * negatives.vectors[:, :length]).sum(2).float()
    return ((softplus(-real_BL) + softplus(drawn_BL)) * valid_BL).sum(1)


class AUGRU(nn.Module):
    """GRU whose update gate is scaled by a weight for each step (Zhou et al. 2019, section 4.3).

    With the gates of nn.GRU, h_t = (1 − a_t·u_t) ∘ h_{t−1} + a_t·u_t ∘ h̃_t, where u_t is the share of the
    new state (1 − z of nn.GRU), and h_0 = 0. A step with weight 0 does not change the state. The
    states are always computed in float32, like those of the GRU on GPUs.

    Args:
        inputs: Width of each step's input.
        width: Width of the hidden state.
    """

    def __init__(self, inputs: int, width: int):
        super().__init__()
        self.cell = nn.GRUCell(inputs, width)  # used only for its weights (r, z and n, stacked)

    @torch.compiler.disable
    def forward(self, steps_BTD: torch.Tensor, weights_BT: torch.Tensor) -> torch.Tensor:
        """Return the state after all steps, float32 [B, width], for inputs [B, T, inputs] and weights [B, T]."""
        cell = self.cell
        inputs_BTG = linear(steps_BTD, cell.weight_ih, cell.bias_ih)
        with torch.autocast(inputs_BTG.device.type, enabled=False):
            return _Evolve.apply(inputs_BTG.float(), weights_BT.unsqueeze(2), cell.weight_hh, cell.bias_hh)


class _Evolve(torch.autograd.Function):
    """Autograd function that runs all steps of an AUGRU and returns the last state, float32 [B, H].

    Steps are sequential, so their cost on a GPU is dominated by kernel launches. Terms that do not depend on
    the previous state are therefore computed for all steps at once. In backward, this is possible for most
    terms, because they are linear in the gradient of the step's state. The loops launch 10 kernels per step
    in total, where autograd would launch 35.
    """

    @staticmethod
    def forward(
        ctx: Any, inputs_BTG: torch.Tensor, weights_BT1: torch.Tensor, of_state_GH: torch.Tensor, bias_G: torch.Tensor
    ) -> torch.Tensor:
        (rows, steps, _), width = inputs_BTG.shape, of_state_GH.shape[1]
        sizes = [2 * width, width]  # widths of both gates, and of the new state
        gates_TBG = inputs_BTG.new_zeros(steps, rows, 3 * width)
        candidates_TBH = inputs_BTG.new_zeros(steps, rows, width)
        states_TBH = inputs_BTG.new_zeros(steps + 1, rows, width)
        state_BH, saved = states_TBH[0], (gates_TBG, candidates_TBH, states_TBH[1:])
        # In exported programs, writing to part of a tensor copies the whole tensor.
        saves = not torch.compiler.is_exporting()
        places = zip(*(each.unbind(0) for each in saved), strict=True) if saves else repeat((None,) * 3)
        parts = zip(inputs_BTG.unbind(1), weights_BT1.unbind(1), places, strict=False)
        for inputs_BG, weight_B1, (gates, candidate, state) in parts:
            both_B2H, new_BH = inputs_BG.split(sizes, 1)
            gates_BG = torch.addmm(bias_G, state_BH, of_state_GH.t(), out=gates)
            of_both_B2H, of_state_BH = gates_BG.split(sizes, 1)
            reset_BH, keep_BH = of_both_B2H.add_(both_B2H).sigmoid_().chunk(2, 1)
            candidate_BH = torch.addcmul(new_BH, reset_BH, of_state_BH, out=candidate).tanh_()
            state_BH = torch.lerp(state_BH, candidate_BH.lerp(state_BH, keep_BH), weight_B1, out=state)
        ctx.save_for_backward(weights_BT1, of_state_GH, states_TBH[:-1], gates_TBG, candidates_TBH)
        return state_BH

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_BH: torch.Tensor) -> tuple[torch.Tensor, ...]:
        weights_BT1, of_state_GH, states_TBH, gates_TBG, candidates_TBH = ctx.saved_tensors
        reset_TBH, keep_TBH, of_state_TBH = gates_TBG.chunk(3, 2)
        share_TBH = (1 - keep_TBH).mul_(weights_BT1.transpose(0, 1))
        back_TBH = states_TBH - candidates_TBH
        # Factors by which the gradient of a state is multiplied to get the gradients of the candidate's input, and of
        # the terms that the previous state adds to the gates and the candidate.
        of_new_TBH = torch.addcmul(share_TBH, share_TBH * candidates_TBH, candidates_TBH, value=-1)
        added_TBG = torch.empty_like(gates_TBG)
        of_reset_TBH, of_keep_TBH, of_new_state_TBH = added_TBG.chunk(3, 2)
        torch.mul(of_new_TBH, reset_TBH, out=of_new_state_TBH)
        torch.mul(of_new_state_TBH, of_state_TBH, out=of_reset_TBH).addcmul_(of_reset_TBH, reset_TBH, value=-1)
        torch.mul(back_TBH, share_TBH, out=of_keep_TBH).mul_(keep_TBH)
        grads_TBH = torch.empty_like(states_TBH)
        grads_TBH[-1] = grad_BH
        for step in range(len(grads_TBH) - 1, -1, -1):
            grad_BH, added_BG = grads_TBH[step], added_TBG[step]
            added_BG.unflatten(1, (3, -1)).mul_(grad_BH.unsqueeze(1))
            if step:
                carried_BH = torch.addcmul(grad_BH, grad_BH, share_TBH[step], value=-1)
                torch.addmm(carried_BH, added_BG, of_state_GH, out=grads_TBH[step - 1])
        of_weights_TB1 = back_TBH.mul_(grads_TBH).mul_(keep_TBH - 1).sum(2, keepdim=True)
        of_state_GH = added_TBG.flatten(0, 1).t() @ states_TBH.flatten(0, 1)
        of_bias_G = added_TBG.sum((0, 1))
        torch.mul(of_new_TBH, grads_TBH, out=of_new_state_TBH)
        return added_TBG.transpose(0, 1), of_weights_TB1.transpose(0, 1), of_state_GH, of_bias_G
