"""Sequences read from their oldest id to the most recent one."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.functional import linear


def turn(values_BLx: torch.Tensor, lengths_B: torch.Tensor) -> torch.Tensor:
    """The first `length` entries of each row in the reverse order, what is behind them after them: [B, L, …].

    It makes what is most recent first what is oldest first, and the reverse.
    """
    places_L = torch.arange(values_BLx.shape[1], device=values_BLx.device)
    turned_BL = lengths_B.unsqueeze(1) - 1 - places_L
    places_BL = torch.where(turned_BL >= 0, turned_BL, places_L)
    if values_BLx.dim() == 2:
        return values_BLx.gather(1, places_BL)
    return values_BLx.gather(1, places_BL.unsqueeze(2).expand_as(values_BLx))


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
        state_BH = given_BTG.new_zeros(len(steps_BTD), cell.hidden_size)
        for given_BG, weight_B in zip(given_BTG.unbind(1), weights_BT.unbind(1), strict=True):
            reset_BH, keep_BH, new_BH = given_BG.chunk(3, dim=1)
            of_reset_BH, of_keep_BH, of_new_BH = linear(state_BH, cell.weight_hh, cell.bias_hh).chunk(3, 1)
            candidate_BH = torch.tanh(new_BH + torch.sigmoid(reset_BH + of_reset_BH) * of_new_BH)
            update_BH = weight_B.unsqueeze(1) * torch.sigmoid(-keep_BH - of_keep_BH)
            state_BH = state_BH + update_BH * (candidate_BH - state_BH)
        return state_BH
