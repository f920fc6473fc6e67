"""The items of one rank, and how many of them have a score that is not below a given one.

A score is the dot product of two float32 vectors, summed up in float64 and rounded to float32: equal vectors
have equal scores, in whichever block they are.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

CELLS = 1 << 22  # queries × items of a block: 56 MiB while it is counted
MOST_CELLS = 1 << 28  # the same on a GPU, if it has so much memory
BYTES = 128  # of a GPU's free memory for each of them: four times what it takes
UNSURE = 8  # where more than this part of a block is not decided in float32, all of it is in float64


@dataclass(frozen=True)
class Items:
    """The items of one rank, by their keys.

    Attributes:
        keys: int64 [N], rising. vectors: float32 [N, D], in their order.
    """

    keys: torch.Tensor
    vectors: torch.Tensor

    @classmethod
    def make(cls, keys_N: torch.Tensor, vectors_ND: torch.Tensor) -> Items:
        """Of items in any order."""
        keys, order = keys_N.to(vectors_ND.device).sort()
        return cls(keys, vectors_ND[order])

    def find(self, keys_K: torch.Tensor) -> torch.Tensor:
        """The places of keys, int64 [K]; -1 where this rank has no such item."""
        if not len(self.keys):
            return torch.full_like(keys_K, -1)
        places = torch.searchsorted(self.keys, keys_K).clamp(max=len(self.keys) - 1)
        return torch.where(self.keys[places] == keys_K, places, -1)

    def scores(self, queries_QD: torch.Tensor, places_Q: torch.Tensor) -> torch.Tensor:
        """The score of an item for each query, float32 [Q]; 0 where the place is -1."""
        if not len(self.keys):
            return torch.zeros(len(places_Q), device=queries_QD.device)
        items = self.vectors[places_Q.clamp(min=0)].to(queries_QD.device).double()
        here = (places_Q >= 0).to(queries_QD.device)
        return (queries_QD.double() * items).sum(1).float().where(here, 0)

    def count_above(
        self,
        queries_QD: torch.Tensor,
        scores_QR: torch.Tensor,
        active: Sequence[int],
        left_out: torch.Tensor,
        cells: int,
    ) -> torch.Tensor:
        """How many items have a score that is not below each given one, int64 [Q, R]; NaN is below nothing.

        Args:
            active: of each of the R, how many queries have it, the first ones; 0 for the others.
            left_out: [2, P], queries and places of items that do not count for them; -1: of none.
            cells: queries × items that are held at a time.
        """
        device, block = queries_QD.device, max(1, cells // max(1, len(queries_QD)))
        left_out = left_out[:, left_out[1].argsort()]
        starts = torch.arange(0, len(self.keys) + block, block, device=left_out.device)
        bounds = torch.searchsorted(left_out[1].contiguous(), starts).tolist()
        above_QR = torch.zeros(scores_QR.shape, dtype=torch.int64, device=device)
        is_exact = torch.get_float32_matmul_precision() == "highest"
        compare = not_below_fast if device.type == "cuda" and is_exact else not_below
        for number, start in enumerate(range(0, len(self.keys), block)):
            items = self.vectors[start : start + block].to(device)
            of, places = left_out[:, bounds[number] : bounds[number + 1]].to(device)
            counted = torch.ones(len(queries_QD), len(items), dtype=torch.bool, device=device)
            counted[of, places - start] = False
            above = compare(queries_QD, items, scores_QR, active)
            for place, of_place in enumerate(above):
                above_QR[: active[place], place] += (of_place & counted[: active[place]]).sum(1)
        return above_QR


def cells_for(device: torch.device) -> int:
    """How many queries × items a block has."""
    if device.type != "cuda":
        return CELLS
    return min(MOST_CELLS, max(CELLS, torch.cuda.mem_get_info(device)[0] // BYTES))


def not_below(
    queries_QD: torch.Tensor, items_ND: torch.Tensor, scores_QR: torch.Tensor, active: Sequence[int]
) -> Iterator[torch.Tensor]:
    """Of each of the R, where an item's score is not below the given one: bool [active, N]."""
    products_QN = (queries_QD.double() @ items_ND.double().T).float()
    for scores_Q, count in zip(scores_QR.unbind(1), active, strict=True):
        yield ~(products_QN[:count] < scores_Q[:count].unsqueeze(1))


def not_below_fast(
    queries_QD: torch.Tensor, items_ND: torch.Tensor, scores_QR: torch.Tensor, active: Sequence[int]
) -> Iterator[torch.Tensor]:
    """The same, by products in float32, and in float64 only where these do not decide: most GPUs have a 32nd
    or a 64th of the speed in float64.

    A product of D terms in float32 is off by at most D · 2⁻²⁴ · ‖query‖ · ‖item‖, in whatever order they are
    added (Higham 2002, 3.1), and the rounding of a score by 2⁻²⁴ of it. The limits here are twice as wide.
    """
    unit = 2.0**-23
    lengths = torch.outer(*(part.double().norm(dim=1).float() for part in (queries_QD, items_ND)))
    lengths.mul_((queries_QD.shape[1] + 2) * unit)
    products_QN = queries_QD @ items_ND.T
    for place, count in enumerate(active):
        given = scores_QR[:count, place].unsqueeze(1)
        limits, beyond = lengths[:count] + (given.abs() * unit + 1e-30), products_QN[:count] - given
        above = beyond > limits
        unsure = ~(above | (beyond < -limits))  # NaN, too
        yield _decided(queries_QD[:count], items_ND, given.squeeze(1), above, unsure)


def _decided(
    queries_QD: torch.Tensor,
    items_ND: torch.Tensor,
    scores_Q: torch.Tensor,
    above: torch.Tensor,
    unsure: torch.Tensor,
) -> torch.Tensor:
    """What is above, where it is unsure by products in float64."""
    of, places = unsure.nonzero(as_tuple=True)
    if len(of) * UNSURE > unsure.numel():
        return next(not_below(queries_QD, items_ND, scores_Q.unsqueeze(1), [len(scores_Q)]))
    for part in torch.arange(len(of), device=of.device).split(max(1, CELLS // queries_QD.shape[1])):
        of_part, place = of[part], places[part]
        exactly = (queries_QD[of_part].double() * items_ND[place].double()).sum(1).float()
        above[of_part, place] = ~(exactly < scores_Q[of_part])
    return above
