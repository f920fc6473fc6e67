"""Look up the embeddings that a model's programs read, pooled per bag or as sequences, in plain torch.

A bag contains the ids of one feature in one row. B is the number of rows, D the dim of a table.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any
from weakref import proxy

import torch

from raytrec.common.errors import RunError
from raytrec.config.features import Features
from raytrec.config.schema import Table
from raytrec.data.assembler import AssembledTensors
from raytrec.embeddings.hashing import assign_fallback_rows, ids_to_keys, unhash_bits
from raytrec.scoring.manifest import InputKind
from raytrec.scoring.stored_tables import RowChanges, StackedTable, encode_changes

MAX_CACHED_GROUPINGS = 64  # maximum number of cached results of Lookups._group_features
Tensors = dict[tuple[InputKind, str], torch.Tensor]  # (kind, feature) → input of a program; see manifest.Input


class IdRows:
    """Mapping from a table's managed ids to their rows.

    Args:
        table: Settings of the table in the schema; may be None if only `ids`, `read` and len() are used.
        keys: Keys (hashes) of the ids that have their own row, int64 [n], ascending.
        rows: Rows of these ids, int64 [n].
    """

    def __init__(self, table: Table, keys: torch.Tensor, rows: torch.Tensor):
        self._table, self._keys, self._rows = table, keys, rows

    @property
    def ids(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the ids that have their own row, in the order of their keys, and their rows, int64 [n] each."""
        return unhash_bits(self._keys), self._rows

    def replace(self, listed_L: torch.Tensor, ids_N: torch.Tensor, rows_N: torch.Tensor) -> IdRows:
        """Return a copy in which rows lose their ids, and some of these rows are assigned to new ids.

        Args:
            listed_L: Rows that lose their ids, int64 [L]; rows without an id are allowed.
            ids_N: New ids, int64 [N].
            rows_N: Row of each of these ids, int64 [N]; must be in `listed_L`.

        Raises:
            ValueError: An id would have two rows.
        """
        is_kept = torch.ones(self._table.rows, dtype=torch.bool).index_fill_(0, listed_L, False)[self._rows]
        keys, order = torch.cat([self._keys[is_kept], ids_to_keys(ids_N)]).sort()
        if not bool(keys.diff().all()):
            raise ValueError("an id has two rows")
        return IdRows(self._table, keys, torch.cat([self._rows[is_kept], rows_N])[order])

    def __call__(self, ids_N: torch.Tensor) -> torch.Tensor:
        """Return each id's own row or, for ids without one, a shared fallback row: int64 [N] → int64 [N]."""
        keys_N = ids_to_keys(ids_N)
        shared_N = assign_fallback_rows(keys_N, self._table.own_rows, self._table.ids.fallback_rows)
        if not len(self._keys):
            return shared_N
        places_N = torch.searchsorted(self._keys, keys_N).clamp(max=len(self._keys) - 1)
        return torch.where(self._keys[places_N] == keys_N, self._rows[places_N], shared_N)

    def read(self, first: int, end: int) -> torch.Tensor:
        """Return ids and rows, int64 [n, 2], of the ids with key + 2⁶³ in [first, end), in ascending order of keys."""
        bounds = torch.tensor([first - 2**63, end - 1 - 2**63])
        begin, stop = torch.searchsorted(self._keys, bounds[0]), torch.searchsorted(self._keys, bounds[1], right=True)
        return torch.stack([unhash_bits(self._keys[begin:stop]), self._rows[begin:stop]], 1)

    def __len__(self) -> int:
        return len(self._keys)


@dataclass(frozen=True)
class _FeatureGroup:
    """Features without weights that are looked up together: one stack has their tables, and each bag contains one id.

    Attributes:
        stack: Rows of all tables of the stack; see StackedTable.
        places: Indices of the f features among the schema's sparse features.
        inputs: Keys of the features in `Tensors`.
        first_rows_f1: First row of each feature's table in the stack, int64 [f, 1].
    """

    stack: Any
    places: list[int]
    inputs: list[tuple[InputKind, str]]
    first_rows_f1: torch.Tensor


class Lookups:
    """Lookup and pooling of ids in the tables of an export.

    With fp32 tables, the results equal the output of embeddings.pooling.PooledEmbeddings and
    models.inputs.SequenceLookup in training. With other precisions, they equal the output for the stored values.

    Args:
        features: Features of the model.
        tables: Tables by name.
        ids: Rows of managed ids, by table.

    Attributes:
        tables: Tables by name.
        ids: Rows of managed ids, by table; entries may be replaced between calls.
        is_remote: True if the tables are in other processes.
    """

    is_remote = False

    def __init__(self, features: Features, tables: Mapping[str, StackedTable], ids: Mapping[str, IdRows]):
        self._features, self.tables, self.ids = features, tables, dict(ids)
        self._specs = list(features.schema.sparse.items())
        self._tables = [tables[spec.table] for _, spec in self._specs]
        lookups = proxy(self)  # without a reference cycle, the last reference frees the tables
        self._group = lru_cache(MAX_CACHED_GROUPINGS)(lambda *key: lookups._group_features(*key))

    def __call__(self, rows: AssembledTensors, needed_features: Collection[str]) -> Tensors:
        """Return the programs' inputs of `needed_features` and of the dense columns, with B rows each.

        Args:
            rows: B rows with ids that are in range (or managed ids) and dense values.
            needed_features: Names of sparse features.
        """
        bags, side_features = rows.bags, rows.side_features or {}
        inputs: Tensors = {("dense", ""): rows.dense}
        lengths_FB = bags.lengths.view(len(bags.keys), bags.rows)
        has_one_id = (lengths_FB.numpy() == 1).all(1).tolist()
        groups, others = self._group(tuple(has_one_id), tuple(needed_features))
        is_one_lookup = not others and not self.ids and [len(g.places) * bags.rows for g in groups] == [len(bags.ids)]
        ids = () if is_one_lookup else bags.ids.split(bags.counts)
        for group in groups:
            parts = (self.find_table_rows(self._specs[place][1].table, ids[place]) for place in group.places)
            rows_N = bags.ids if is_one_lookup else torch.cat([*parts])
            rows_fB = rows_N.view(len(group.places), bags.rows) + group.first_rows_f1
            vectors_ND = group.stack.vectors(rows_fB.flatten())
            vectors_fBD = vectors_ND.view(*rows_fB.shape, vectors_ND.shape[1])
            inputs |= zip(group.inputs, vectors_fBD.unbind(), strict=True)
        weights = [None] * len(bags.counts) if bags.weights is None else bags.weights.split(bags.counts)
        for place in others:
            values = ids[place], lengths_FB[place], weights[place], side_features.get(bags.keys[place])
            inputs |= self._look_up_feature(place, *values)
        return inputs

    def _group_features(
        self, has_one_id: tuple[bool, ...], needed_features: tuple[str, ...]
    ) -> tuple[list[_FeatureGroup], list[int]]:
        """Return groups of features that are looked up together, and the indices of all other needed features.

        Args:
            has_one_id: For each feature, True if all of its bags contain one id.
            needed_features: Features to look up.
        """
        places: dict[Any, list[int]] = {}
        others = []
        for place, (feature, spec) in enumerate(self._specs):
            if feature not in needed_features:
                continue
            is_joined = has_one_id[place] and not spec.weights and feature not in self._features.sequences
            (places.setdefault(self._tables[place].stack, []) if is_joined else others).append(place)
        groups = []
        for stack, members in places.items():
            inputs: list[tuple[InputKind, str]] = [("bag", self._specs[place][0]) for place in members]
            first_rows_f1 = torch.tensor([[self._tables[place].first_row] for place in members])
            groups.append(_FeatureGroup(stack, members, inputs, first_rows_f1))
        return groups, others

    def finish_loading(self) -> None:
        """Prepare the lookups for requests, after the golden rows have been scored. This class does nothing."""

    def take_missing_shards(self) -> set[int]:
        """Return the shards that this thread's lookups could not reach since the last call; mapped tables have none."""
        return set()

    def prepare_update(
        self, deltas: Sequence[Mapping[str, RowChanges]], version: str, number: int
    ) -> Callable[[], None]:
        """Prepare new rows, and return a function that writes them to the tables, to be called in the scoring thread.

        Until that call, lookups return the old rows.

        Args:
            deltas: Table → new rows, for each of several consecutive deltas (changes that a run has published).
            version: Name of the state after these deltas.
            number: Number of the last of these deltas.

        Raises:
            ValueError: The precision of a table cannot represent a value; see `TablePrecision.encode`.
            OSError: The system refuses to make the tables writable.
            UnavailableError: A table shard does not have the new state; only if `is_remote`.
        """
        encoded = [item for changes in deltas for item in encode_changes(self.tables, changes).items()]
        for stack, (rows, _) in encoded:
            stack.prepare_writing(rows)

        def update() -> None:
            for stack, (rows, stored) in encoded:
                stack.write(rows, stored)

        return update

    @property
    def refusal(self) -> RunError | None:
        """Return the error with which a table shard refused the current state, or None; mapped tables return None."""
        return None

    def make_reader(self, table: str) -> Callable[[int, int], torch.Tensor]:
        """Return a function from (first, end) to the stored rows [first, end) of a table's current state, [n, …]."""
        stack, first_row = self.tables[table].stack, self.tables[table].first_row
        return lambda first, end: stack.read(first_row + first, first_row + end)

    def find_table_rows(self, table: str, ids_N: torch.Tensor) -> torch.Tensor:
        """Return the rows of ids in a table: int64 [N] → int64 [N]; ids that are not managed are row indices."""
        return self.ids[table](ids_N) if table in self.ids else ids_N

    def _look_up_feature(
        self,
        place: int,
        ids_N: torch.Tensor,
        lengths_B: torch.Tensor,
        weights_N: torch.Tensor | None,
        side: torch.Tensor | None,
    ) -> Tensors:
        """Return the inputs of one feature, with any number of ids per row.

        Args:
            place: Index of the feature among the schema's sparse features.
            ids_N: Ids of all rows, int64.
            lengths_B: Number of ids of each row.
            weights_N: Weights of the ids, float32; None: no feature has weights.
            side: Side features, float64 [N, n]; None: the feature has none.
        """
        (feature, spec), table = self._specs[place], self._tables[place]
        vectors_ND = table.stack.vectors(self.find_table_rows(spec.table, ids_N) + table.first_row)
        bag_weights_N = weights_N if spec.weights else None
        if bag_weights_N is not None:
            vectors_ND = vectors_ND * bag_weights_N.unsqueeze(1)
        if feature not in self._features.sequences:
            mean = self._features.is_mean(feature)
            return {("bag", feature): pool_bags(vectors_ND, lengths_B, bag_weights_N, mean)}
        present_BL = torch.arange(self._features.sequences[feature]) < lengths_B.unsqueeze(1)
        inputs: Tensors = {
            ("vectors", feature): pad_sequences(vectors_ND, present_BL),
            ("present", feature): present_BL,
        }
        if side is not None:
            inputs["side_features", feature] = pad_sequences(side, present_BL)
        return inputs


def pool_bags(
    vectors_ND: torch.Tensor, lengths_B: torch.Tensor, weights_N: torch.Tensor | None, mean: bool
) -> torch.Tensor:
    """Return the sum or mean of the vectors of each bag, float32 [B, D]; zeros for empty bags.

    Args:
        vectors_ND: Vectors of all bags, float32, already multiplied by their weights.
        lengths_B: Number of vectors of each bag, integer.
        weights_N: Weights, float32; None: the vectors are not weighted.
        mean: True to divide each sum by the sum of the bag's weights (unless the sum is 0) or, without weights, by
            the bag's length.
    """
    sums_BD = torch.segment_reduce(vectors_ND, "sum", lengths=lengths_B.long(), unsafe=True)
    return divide_by_totals(sums_BD, lengths_B, weights_N) if mean else sums_BD


def divide_by_totals(sums_BD: torch.Tensor, lengths_B: torch.Tensor, weights_N: torch.Tensor | None) -> torch.Tensor:
    """Return the means of bags from their sums, float32 [B, D]; see pool_bags."""
    if weights_N is None:
        totals_B = lengths_B.clamp(min=1).float()
    else:
        totals_B = torch.segment_reduce(weights_N, "sum", lengths=lengths_B.long(), unsafe=True)
        totals_B = totals_B.where(totals_B != 0, 1.0)
    return sums_BD / totals_B.unsqueeze(1)


def pad_sequences(values_Nx: torch.Tensor, present_BL: torch.Tensor) -> torch.Tensor:
    """Return the values of ids, [N, width], as a padded tensor, [B, L, width]; 0 where `present_BL` is False."""
    padded = values_Nx.new_zeros(*present_BL.shape, values_Nx.shape[1])
    padded[present_BL] = values_Nx
    return padded
