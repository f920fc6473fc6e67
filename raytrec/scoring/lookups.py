"""Lookup of the bags and sequences that are inputs of a model's programs, in plain torch.

Rows of tables are stored in files in one of four precisions:

    fp32, fp16     [n, dim]
    int8           uint8 [n, dim + 8]: steps of 0 to 255, then scale and offset, float32
    int4           uint8 [n, dim ÷ 2 + 4]: two steps of 0 to 15 per byte, the first in the low bits, then scale
                   and offset, float16

A value is step · scale + offset. The layouts of int8 and int4 follow FBGEMM's row-wise quantization:
each row contains its own scale and offset.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from raytrec.common.errors import ConfigError
from raytrec.config.features import Features
from raytrec.config.schema import Table
from raytrec.data.assembler import AssembledTensors
from raytrec.embeddings.hashing import assign_fallback_rows, ids_to_keys
from raytrec.scoring.manifest import InputKind, PrecisionName

MAX_FLOAT16 = 65_504  # the largest float16; int4 stores scale and offset in float16
Tensors = dict[tuple[InputKind, str], torch.Tensor]  # by kind and feature; see manifest.Input


@dataclass(frozen=True)
class TablePrecision:
    """Format of a table's rows in files.

    Attributes:
        dtype: dtype of the stored rows.
        bits: Bits of a quantized value; 0: values are not quantized.
        scale_dtype: dtype of a quantized row's scale and offset.
    """

    dtype: torch.dtype
    bits: int = 0
    scale_dtype: torch.dtype = torch.float32

    def width(self, dim: int) -> int:
        """Return the number of stored elements of a row of `dim` values."""
        return dim * self.bits // 8 + 2 * self.scale_dtype.itemsize if self.bits else dim

    def encode(self, rows_ND: torch.Tensor) -> torch.Tensor:
        """Encode rows for storage.

        Args:
            rows_ND: float32 [n, dim].

        Raises:
            ConfigError: A value is too large for the precision.
        """
        halves = torch.float16 in (self.dtype, self.scale_dtype)
        if halves and not bool((rows_ND.abs() <= MAX_FLOAT16).all()):
            name = next(name for name, each in PRECISIONS.items() if each == self)
            raise ConfigError(
                f"a table contains NaN or values beyond ±{MAX_FLOAT16:,}",
                where=f"--quantize {name}",
                expected="values in the range of float16",
                do="use int8 or fp32",
            )
        if not self.bits:
            return rows_ND.to(self.dtype)
        levels = 2**self.bits - 1
        offsets_N1 = rows_ND.amin(1, keepdim=True).to(self.scale_dtype)
        spans_N1 = rows_ND.amax(1, keepdim=True) - offsets_N1.float()
        scales_N1 = (spans_N1 / levels).to(self.scale_dtype)
        divisors_N1 = scales_N1.float().where(scales_N1 > 0, 1.0)
        steps_ND = ((rows_ND - offsets_N1.float()) / divisors_N1).round().clamp(0, levels).byte()
        if self.bits == 4:
            steps_ND = steps_ND[:, ::2] | steps_ND[:, 1::2] << 4
        return torch.cat([steps_ND, scales_N1.view(torch.uint8), offsets_N1.view(torch.uint8)], 1)

    def decode(self, stored: torch.Tensor) -> torch.Tensor:
        """Return the values of stored rows: float32 [n, dim]."""
        if not self.bits:
            return stored.float()
        width = stored.shape[1] - 2 * self.scale_dtype.itemsize
        scale_offset_N2 = stored[:, width:].contiguous().view(self.scale_dtype).float()
        steps_ND = stored[:, :width]
        if self.bits == 4:
            steps_ND = torch.stack([steps_ND & 15, steps_ND >> 4], 2).flatten(1)
        return torch.addcmul(scale_offset_N2[:, 1:], steps_ND.float(), scale_offset_N2[:, :1])


PRECISIONS: dict[PrecisionName, TablePrecision] = {
    "fp32": TablePrecision(torch.float32),
    "fp16": TablePrecision(torch.float16),
    "int8": TablePrecision(torch.uint8, bits=8),
    "int4": TablePrecision(torch.uint8, bits=4, scale_dtype=torch.float16),
}


class TableRows(Protocol):
    """Table whose rows can be read."""

    def vectors(self, rows_N: torch.Tensor) -> torch.Tensor:
        """Return the vectors of rows: int64 [N] → float32 [N, dim]."""
        ...


class BlockTable:
    """Table stored in blocks of rows.

    Args:
        blocks: Stored rows, [block_rows, …] each; the last block may have fewer rows.
        block_rows: Number of rows of each block except the last.
        precision: Format of the stored rows.
    """

    def __init__(self, blocks: Sequence[torch.Tensor], block_rows: int, precision: TablePrecision):
        self._blocks, self._block_rows, self._precision = list(blocks), block_rows, precision

    def vectors(self, rows_N: torch.Tensor) -> torch.Tensor:
        """Return the vectors of rows: int64 [N] → float32 [N, dim]."""
        decode = self._precision.decode
        if len(self._blocks) == 1:
            return decode(self._blocks[0].index_select(0, rows_N))
        sorted_N, order_N = rows_N.sort()
        starts = torch.arange(len(self._blocks) + 1) * self._block_rows
        counts = torch.searchsorted(sorted_N, starts).diff().tolist()
        block_parts = sorted_N.split(counts)
        parts = [
            block.index_select(0, part - number * self._block_rows)
            for number, (block, part) in enumerate(zip(self._blocks, block_parts, strict=True))
            if len(part)
        ]
        if not parts:
            return decode(self._blocks[0][:0])
        vectors_ND = decode(torch.cat(parts))
        return torch.empty_like(vectors_ND).index_copy_(0, order_N, vectors_ND)


class IdRows:
    """Rows of a table's managed ids.

    Args:
        table: Schema of the table.
        keys: Keys of the ids that have their own row, int64 [n], ascending.
        rows: Rows of these ids, int64 [n].
    """

    def __init__(self, table: Table, keys: torch.Tensor, rows: torch.Tensor):
        self._table, self._keys, self._rows = table, keys, rows

    def __call__(self, ids_N: torch.Tensor) -> torch.Tensor:
        """Return each id's own row or a shared one: int64 [N] → int64 [N]."""
        keys_N = ids_to_keys(ids_N)
        shared_N = assign_fallback_rows(keys_N, self._table.own_rows, self._table.ids.fallback_rows)
        if not len(self._keys):
            return shared_N
        places_N = torch.searchsorted(self._keys, keys_N).clamp(max=len(self._keys) - 1)
        return torch.where(self._keys[places_N] == keys_N, self._rows[places_N], shared_N)


class Lookups:
    """Lookup and pooling of ids in the tables of an export.

    The results equal the output of embeddings.pooling.PooledEmbeddings and models.inputs.SequenceLookup in
    training.

    Args:
        features: Features of the model.
        tables: Tables by name.
        ids: Rows of managed ids, by table.
    """

    def __init__(self, features: Features, tables: Mapping[str, TableRows], ids: Mapping[str, IdRows]):
        self._features, self._tables, self._ids = features, tables, ids

    def __call__(self, rows: AssembledTensors, needed_features: Collection[str]) -> Tensors:
        """Return the inputs of `needed_features`, with B rows each, and the dense columns."""
        inputs: Tensors = {("dense", ""): rows.dense}
        bags = rows.bags
        weights = [None] * len(bags.keys) if bags.weights is None else bags.weights.split(bags.counts)
        ids, lengths = bags.ids.split(bags.counts), bags.lengths.view(len(bags.keys), -1)
        single = (lengths == 1).all(1).tolist()
        for feature, ids_N, lengths_B, weights_N, is_single in zip(
            bags.keys, ids, lengths, weights, single, strict=True
        ):
            if feature not in needed_features:
                continue
            spec = self._features.schema.sparse[feature]
            vectors_ND = self._tables[spec.table].vectors(self.find_table_rows(spec.table, ids_N))
            bag_weights_N = weights_N if spec.weights else None
            if bag_weights_N is not None:
                vectors_ND = vectors_ND * bag_weights_N.unsqueeze(1)
            if feature in self._features.sequences:
                side = (rows.side_features or {}).get(feature)
                inputs |= self._pad_inputs(feature, vectors_ND, lengths_B, side)
            elif is_single and bag_weights_N is None:
                inputs["bag", feature] = vectors_ND
            else:
                mean = self._features.is_mean(feature)
                inputs["bag", feature] = pool_bags(vectors_ND, lengths_B, bag_weights_N, mean)
        return inputs

    def find_table_rows(self, table: str, ids_N: torch.Tensor) -> torch.Tensor:
        """Return the rows of ids in a table: int64 [N] → int64 [N]."""
        return self._ids[table](ids_N) if table in self._ids else ids_N

    def _pad_inputs(
        self, feature: str, vectors_ND: torch.Tensor, lengths_B: torch.Tensor, side: torch.Tensor | None
    ) -> Tensors:
        present_BL = torch.arange(self._features.sequences[feature]) < lengths_B.unsqueeze(1)
        inputs: Tensors = {
            ("vectors", feature): _pad_sequences(vectors_ND, present_BL),
            ("present", feature): present_BL,
        }
        if side is not None:
            inputs["side_features", feature] = _pad_sequences(side, present_BL)
        return inputs


def pool_bags(
    vectors_ND: torch.Tensor, lengths_B: torch.Tensor, weights_N: torch.Tensor | None, mean: bool
) -> torch.Tensor:
    """Return pooled bags of vectors, float32 [B, D]; 0 for empty bags.

    Args:
        vectors_ND: Vectors, already multiplied by their weights.
        lengths_B: Number of vectors of each bag.
        weights_N: Weights; None: the vectors are not weighted.
        mean: True to divide each sum by the sum of the bag's weights, unless that is 0, or without weights by
            the bag's length.
    """
    sums_BD = torch.segment_reduce(vectors_ND, "sum", lengths=lengths_B.long(), unsafe=True)
    if not mean:
        return sums_BD
    if weights_N is None:
        totals_B = lengths_B.clamp(min=1).float()
    else:
        totals_B = torch.segment_reduce(weights_N, "sum", lengths=lengths_B.long(), unsafe=True)
        totals_B = totals_B.where(totals_B != 0, 1.0)
    return sums_BD / totals_B.unsqueeze(1)


def _pad_sequences(values_Nx: torch.Tensor, present_BL: torch.Tensor) -> torch.Tensor:
    """Return values of present ids, row after row, as a padded tensor: [N, …] → [B, L, …]; 0 elsewhere."""
    padded = values_Nx.new_zeros(*present_BL.shape, values_Nx.shape[1])
    padded[present_BL] = values_Nx
    return padded
