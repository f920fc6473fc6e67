"""Canonical rows as a Batch."""

from __future__ import annotations

from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from raytrec.data.assemble import Assembler, Rows
from raytrec.data.batch import Batch


class Collator(Assembler):
    """Puts pieces of rows together as one rank's Batch."""

    def __call__(self, pieces: list[Rows], padded_rows: int, global_rows: int, step: int = 0) -> Batch:
        """A Batch of `padded_rows` rows; those after the pieces' rows, and skipped rows, are padding."""
        rows = self.assemble(pieces, padded_rows)
        bags = rows.bags
        sparse = KeyedJaggedTensor(
            bags.keys,
            bags.ids,
            bags.weights,
            lengths=bags.lengths,
            stride=bags.rows,
            # Else TorchRec adds up the lengths on the device and waits for it, at every step.
            length_per_key=bags.counts,
        )
        return Batch(
            rows.dense,
            sparse,
            rows.labels,
            rows.weights,
            global_rows,
            step,
            rows.changed,
            rows.task_weights,
            rows.keys,
            rows.reserved,
            rows.side_features,
            requests=rows.requests,
            dense_of_candidates=rows.dense_of_candidates,
        )
