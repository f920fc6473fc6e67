"""ESMM: conversions learned on all impressions, by way of clicks (Ma et al. 2018, arXiv:1804.07931)."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from raytrec.config.models.multitask import ESMMSection
from raytrec.config.schema import Schema
from raytrec.models.inputs import mlp
from raytrec.models.parts.fields import SideBySide


class ESMM(nn.Module):
    """pCTCVR = pCTR · pCVR: two towers that share the embeddings, and the log-odds of both products.

    The click's logit is a, with pCTR = σ(a). The conversion's tower gives b, with pCVR = σ(b), which no label
    reaches on its own: the conversion's logit is that of p = σ(a) · σ(b), so that it is learned from all
    impressions and not from clicked ones alone. As (1 − p) ÷ p = (1 + e⁻ᵃ)(1 + e⁻ᵇ) − 1, this is
    −ln(e⁻ᵃ + e⁻ᵇ + e⁻ᵃ⁻ᵇ), exact where p is next to 0 or to 1. P(conversion | click) is the quotient of the
    two predictions.

    Args:
        schema: any dense columns, sparse features of any dims.
        config: which task is which; sizes and dropout.
        tasks: the two, in the order of their columns.

    Returns (forward):
        float32 [B, 2], in the order of the tasks.
    """

    def __init__(self, schema: Schema, config: ESMMSection, tasks: Mapping[str, int]):
        super().__init__()
        self.beside = SideBySide(schema)
        last = (config.tower_mlp or [self.beside.width])[-1]
        self.click, self.conversion = (
            nn.Sequential(mlp([self.beside.width, *config.tower_mlp], config.dropout), nn.Linear(last, 1))
            for _ in range(2)
        )
        self.click_first = next(iter(tasks)) == config.click

    def forward(self, dense: torch.Tensor, pooled: dict[str, torch.Tensor]) -> torch.Tensor:
        x_BN = self.beside(dense, pooled)
        click_B1, given_click_B1 = self.click(x_BN).float(), self.conversion(x_BN).float()
        against_B3 = torch.cat([-click_B1, -given_click_B1, -click_B1 - given_click_B1], dim=1)
        both_B1 = -against_B3.logsumexp(dim=1, keepdim=True)
        return torch.cat([click_B1, both_B1] if self.click_first else [both_B1, click_B1], dim=1)
