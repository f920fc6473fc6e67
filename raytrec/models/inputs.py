"""Inputs of models: sequences, their ids, and candidates of requests.

If the schema has candidates, a row of a batch is a request, and each of its candidates is an example.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

import torch
from torch.nn.functional import pad
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from raytrec.config.features import Features
from raytrec.config.schema import Schema
from raytrec.data.batch import Batch


class Sequence(NamedTuple):
    """Sequence feature with one embedding per id.

    Attributes:
        vectors: Embedding of each id (times its weight, if the feature has weights), most recent first;
            float32 [B, L, dim], 0 at positions without an id.
        present: True at positions with an id, bool [B, L]. Ids occupy the first positions of a row.
        side_features: Numbers and times (seconds since 1970) of each id, in the order of `side_features` in
            the schema; float64 [B, L, n], 0 at positions without an id. None: the feature has no side
            features.
        lengths: Number of ids in each row, int32 [B], on the host. None: the number is not known on the host and
            must be computed from `present`.
    """

    vectors: torch.Tensor
    present: torch.Tensor
    side_features: torch.Tensor | None = None
    lengths: torch.Tensor | None = None


# Key of the ids in the inputs of models that read ids. The value maps features to ids, int64 [B, L] for sequences,
# else [B, 1] (SequenceLookup).
IDS = "ids that were looked up"


class SequenceLookup:
    """Converter from embeddings to the inputs of a model that reads the vector of each id in a sequence.

    Args:
        features: Features of the run.
        with_ids: Features whose ids are added to the inputs under the key IDS (ModelSection.reads_ids).
    """

    def __init__(self, features: Features, with_ids: Collection[str] = ()):
        self._lengths, self._keys = dict(features.sequences), features.keys
        self._with_ids = tuple(with_ids)

    def __call__(self, embeddings: dict[str, torch.Tensor], batch: Batch) -> dict[str, Any]:
        """Return feature → input of the model: a Sequence if the model reads it id by id, else the embeddings.

        If `with_ids` is not empty, the ids of these features are added under the key IDS.

        Args:
            embeddings: Output of PooledEmbeddings: feature → float32 [B, dim]; [B, L, dim] for sequences read
                id by id, [N, dim] for candidates.
            batch: Batch whose ids were looked up.
        """
        host_FB = None if batch.lengths is None else batch.lengths.view(len(self._keys), -1)
        lengths_FB = batch.sparse.lengths().view(len(self._keys), -1)
        side_features, inputs = batch.side_features or {}, dict(embeddings)
        for feature, length in self._lengths.items():
            places_L = torch.arange(length, device=lengths_FB.device)
            place = self._keys.index(feature)
            lengths_B, host_B = lengths_FB[place], None if host_FB is None else host_FB[place]
            present_BL = places_L < lengths_B.unsqueeze(1)
            side = side_features.get(feature)
            if side is not None:
                # No bag has more than `length` ids. FBGEMM's jagged_to_padded_dense lacks float64 on CPU (1.8.0).
                mask_BLn = present_BL.unsqueeze(2).expand(-1, -1, side.shape[1])
                side = side.new_zeros(mask_BLn.shape).masked_scatter_(mask_BLn, side)
            inputs[feature] = Sequence(embeddings[feature], present_BL, side, host_B)
        if self._with_ids:
            inputs[IDS] = {feature: self._ids(feature, batch.sparse) for feature in self._with_ids}
        return inputs

    def _ids(self, feature: str, sparse: KeyedJaggedTensor) -> torch.Tensor:
        """Return the ids of a sequence, int64 [B, L]; for other features, the first id of each row, [B, 1].

        The id at a position without an id is -1.
        """
        starts_FB = sparse.offsets()[:-1].view(len(self._keys), -1)
        lengths_FB, place = sparse.lengths().view(len(self._keys), -1), self._keys.index(feature)
        back_L = torch.arange(self._lengths.get(feature, 1), device=starts_FB.device)
        places_BL = starts_FB[place].unsqueeze(1) + back_L
        absent_BL = back_L >= lengths_FB[place].unsqueeze(1)
        ids = torch.cat([sparse.values(), sparse.values().new_full((1,), -1)])
        return ids[places_BL.masked_fill(absent_BL, -1)]


REQUESTS = "requests of examples"  # key of the RequestInputs in the inputs of models that encode each request once


class RequestInputs(NamedTuple):
    """Inputs of a batch of R requests, for models that encode each request only once.

    Attributes:
        example_requests: Index of each example's request, ascending, int64 [N].
        dense: Dense columns of the requests, float32 [R, dense columns]; candidate columns are 0.
        max_examples: Maximum number of examples of a request, at least 1.
    """

    example_requests: torch.Tensor
    dense: torch.Tensor
    max_examples: int


class RequestExpander:
    """Converter from inputs of requests to inputs of examples, with one example per candidate.

    Args:
        schema: Schema of the data.
        encoded: Features that the model encodes once per request (`encode_requests_once`); inputs of these
            features keep one row per request.
    """

    def __init__(self, schema: Schema, encoded: Collection[str] = ()):
        columns = schema.select_candidate_names(schema.dense)
        self._columns = [schema.dense.index(name) for name in columns]
        self._candidates, self._keys = schema.select_candidate_names(schema.sparse), list(schema.sparse)
        self._fixed = {*self._candidates, *encoded}
        self._encodes = bool(encoded)

    def __call__(self, batch: Batch, inputs: Mapping[str, Any]) -> tuple[torch.Tensor, dict[str, Any]]:
        """Return the dense columns, float32 [N, n], and feature → input, [N, ...], of N candidates.

        If some features are encoded once per request, a RequestInputs is added under the key REQUESTS. If the batch
        has no candidates, one padding row is returned, because few layers support empty batches.

        Args:
            batch: R requests with their candidates.
            inputs: Feature → input, [R, ...]; [N, ...] for features of candidates.
        """
        requests_N, dense_of_candidates = batch.requests, batch.dense_of_candidates
        if not len(requests_N):
            requests_N, dense_of_candidates = requests_N.new_zeros(1), pad(dense_of_candidates, (0, 0, 0, 1))
            inputs = {**inputs, **{name: pad(inputs[name], (0, 0, 0, 1)) for name in self._candidates}}
        dense_Nn = batch.dense.index_select(0, requests_N)
        for place, column in enumerate(self._columns):
            dense_Nn[:, column] = dense_of_candidates[:, place]
        rows = dict(inputs)
        bags = [name for name, of in inputs.items() if name not in self._fixed and not isinstance(of, Sequence)]
        if bags:  # one index_select for all features, because there may be hundreds
            widths = [inputs[name].shape[1] for name in bags]
            wide_NS = torch.cat([inputs[name] for name in bags], 1).index_select(0, requests_N)
            rows |= zip(bags, wide_NS.split(widths, 1), strict=True)
        for name, of in inputs.items():
            if isinstance(of, Sequence) and name not in self._fixed:
                parts = of._replace(lengths=None if requests_N.is_cuda else of.lengths)
                rows[name] = Sequence(*(None if x is None else x.index_select(0, requests_N) for x in parts))
        if self._encodes:
            lengths = batch.sparse.lengths() if batch.lengths is None else batch.lengths
            lengths_B = lengths.view(len(self._keys), -1)[self._keys.index(self._candidates[0])]
            rows[REQUESTS] = RequestInputs(requests_N, batch.dense, max(int(lengths_B.max()), 1))
        return dense_Nn, rows


def encode_requests_once(
    encode: Callable[[torch.Tensor, dict[str, Any]], torch.Tensor], dense: torch.Tensor, inputs: dict[str, Any]
) -> torch.Tensor:
    """Return the encoding of each example's request, [N, ...]; each request is encoded only once.

    Args:
        encode: Function from (dense columns, inputs) of R requests to their encodings, [R, ...].
        dense: Dense columns of the examples, float32 [N, n], which are encoded if rows are not requests.
        inputs: Inputs of the model, with RequestInputs under the key REQUESTS if rows are requests.
    """
    requests = inputs.get(REQUESTS)
    if requests is None:
        return encode(dense, inputs)
    return encode(requests.dense, inputs).index_select(0, requests.example_requests)
