"""same_environment and replicas: all ranks have the same configuration, code, libraries and replicated tensors."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from itertools import takewhile

import torch

from raytrec.checks.live.outcome import START, Check, Outcome, Position, find_differing, format_ranks, read_flat_values
from raytrec.checks.live.registry import check
from raytrec.embeddings.hashing import hash_bits

MAX_VALUE_CHARS = 60  # maximum number of characters of a value that are shown
NETWORK = "NCCL's network"
# Device type → number of values hashed at a time, which fit in a CPU core's cache, or keep a GPU busy.
CHUNK = {"cpu": 1 << 16, "cuda": 1 << 22}
INTEGER_DTYPES = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int32}
HASH_MULTIPLIER = 6364136223846793005  # Knuth's 64-bit multiplier


@check("same_environment")
class SameEnvironment(Check):
    """Check that compares plain values (Position.about), such as the configuration and package versions, over ranks."""

    moments = frozenset({START})
    do = "use the same files, network, and versions of raytrec and its packages on every node; restart the run"

    def evaluate(self, position: Position, probed: bool) -> Outcome:
        """Return the outcome, which names the values that differ between ranks. Every rank must call this method."""
        problems = []
        for key, values, odd in find_differing(position.about, self.run.peers):
            usual = [rank for rank in range(len(values)) if rank not in odd]
            same = [rank for rank in odd if repr(values[rank]) == repr(values[odd[0]])]
            pair = values[odd[0]], values[usual[0]]
            excerpts = zip(pair, _excerpt_around_difference(*map(str, pair)), strict=True)
            odd_text, usual_text = ("missing" if value is None else repr(text) for value, text in excerpts)
            problem = f"{key} is {odd_text} on {format_ranks(same)} and {usual_text} on {format_ranks(usual)}"
            rest = [rank for rank in odd if rank not in same]
            problems.append(problem + (f", and has other values on {format_ranks(rest)}" if rest else ""))
        summary = f"{len(position.about)} facts are the same on all ranks"
        if network := position.about.get(NETWORK):
            summary += f"; NCCL's network is {network}"
        return self.outcome(position.step, problems, summary, float(len(problems)), 0.0)


def _excerpt_around_difference(one: str, other: str) -> list[str]:
    """Return an excerpt of each text around the first character at which the texts differ.

    An excerpt has at most MAX_VALUE_CHARS characters of the text, with "…" where text is omitted.
    """
    same = [*takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False))]
    start = max(0, len(same) - MAX_VALUE_CHARS // 3)
    end = start + MAX_VALUE_CHARS
    return ["…" * (start > 0) + text[start:end] + "…" * (len(text) > end) for text in (one, other)]


@check("replicas")
class Replicas(Check):
    """Check that compares hashes of tensors between ranks: dense layers, data-parallel tables, and their state."""

    do = (
        "resume the run (raytrec train --resume RUN, or submit its job again); if the same rank fails again, inspect "
        "its hardware; otherwise look for code that changes parameters or draws random numbers on one rank"
    )

    def evaluate(self, position: Position, probed: bool) -> Outcome:
        """Return the outcome, which names the tensors that differ between ranks. Every rank must call this method."""
        hashes, world = self.hashes(), self.run.peers.world
        problems = []
        for name, _, odd in find_differing(hashes, self.run.peers):
            others = "the other ranks" if world > 2 else f"rank {1 - odd[0]}"
            problems.append(f"{name} on {format_ranks(odd)} differs from {others}")
        summary = f"all replicated tensors are the same on all ranks ({len(hashes)})"
        return self.outcome(position.step, problems, summary, float(len(problems)), 0.0)

    def hashes(self) -> dict[str, int]:
        """Return the hash of each replicated tensor on this rank by name; {} if no tensor is replicated."""
        copies = dict(sorted(self._copies(), key=lambda pair: pair[0]))
        hashes = read_flat_values([fingerprint(tensor) for tensor in copies.values()])
        return {name: int(value) for name, (value,) in zip(copies, hashes, strict=True)}

    def _copies(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the logical name (checkpoint/state.py) and value of each tensor that every rank holds."""
        tables = self.run.tables
        for name, value in self.run.dense.items():
            kind, owner, *_ = name.split("/")
            # The update count of a sharded table exists only on ranks that hold a part of the table.
            if kind != "tables" or tables[owner].weight.replicated:
                yield name, value
        for table in tables.values():
            for kind, parts in {"weight": table.weight, **table.state}.items():
                if parts.replicated and parts.shards[0].values is not None:
                    yield f"tables/{table.name}/{kind}", parts.shards[0].values


@torch.no_grad()
def fingerprint(tensor: torch.Tensor) -> torch.Tensor:
    """Return a hash of a tensor's bits and their order, computed on the tensor's device: int64 scalar.

    The hash of a chunk is Σ bits × a pseudorandom odd multiplier for the position, mod 2⁶⁴ (vector multiply-shift
    hashing, Dietzfelbinger 1996). The hashes of chunks are the coefficients of a polynomial in HASH_MULTIPLIER. A
    single differing value of at most 4 bytes always changes the hash, because an odd multiplier has an inverse. For
    random multipliers, other differences change the hash with a probability of at least 1 − 2⁻³². A value of 8 bytes
    is hashed as two values of 4 bytes, so that high bits cannot cancel.
    """
    flat = tensor.detach().reshape(-1).contiguous()
    bits = flat.view(INTEGER_DTYPES[flat.element_size()])
    size = CHUNK.get(tensor.device.type, CHUNK["cuda"])
    multipliers = _make_multipliers(size, tensor.device)
    total = torch.tensor(bits.numel(), dtype=torch.int64, device=tensor.device)
    for chunk in bits.split(size):
        total = total * HASH_MULTIPLIER + (chunk * multipliers[: len(chunk)]).sum()
    return total


@cache
def _make_multipliers(size: int, device: torch.device) -> torch.Tensor:
    """Return odd multipliers that are the same on all ranks, int64 [size]."""
    return hash_bits(torch.arange(size, device=device)) | 1
