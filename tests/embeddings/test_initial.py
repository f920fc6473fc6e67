"""Initial values: their definition in NumPy, their randomness, and large tables."""

import hashlib
from unittest.mock import patch

import numpy as np
import pytest
import torch
from ranks import run_on_ranks
from small import initial_rows, make_small_config, make_small_schema

from raytrec.data.ids import hash_bits as hash_bits_in_numpy
from raytrec.embeddings.hashing import GOLDEN, VALUES_PER_BLOCK, compute_initial_values, hash_bits
from raytrec.embeddings.tables import fill_tables, tables
from raytrec.worker.build import build_step

BLOCK_ROWS = VALUES_PER_BLOCK // 8
BIG_SCHEMA = make_small_schema(sparse={"big": {"table": "big"}}, tables={"big": {"rows": 4 * BLOCK_ROWS, "dim": 8}})
IDS = torch.cat([torch.arange(300), torch.tensor([-1, -(2**63), 2**63 - 1, 2**31, 2**32, 8_000_000_000])])


def compute_by_definition(seed: int, table: str, ids: np.ndarray, columns: range, rows: int) -> np.ndarray:
    """Compute initial values with unsigned integers, one column at a time."""
    key = int.from_bytes(hashlib.blake2b(f"{seed}/{table}".encode(), digest_size=8).digest(), "big")
    with np.errstate(over="ignore"):
        starts = hash_bits_in_numpy(ids.astype(np.uint64) + np.uint64(key))
        out = []
        for column in columns:
            output = hash_bits_in_numpy(starts + np.uint64(column // 2 * (GOLDEN % 2**64) % 2**64))
            half = (output >> np.uint64(32 * (column % 2))).astype(np.uint32)
            signed = (half >> np.uint32(7)).astype(np.int64)  # 25 bits, in two's complement
            signed = np.where(signed >= 2**24, signed - 2**25, signed) | 1
            out.append(signed.astype(np.float32) * np.float32(1 / np.sqrt(rows) / 2**24))
    return np.stack(out, axis=1)


def test_hash_bits_match_unsigned_arithmetic():
    expected = hash_bits_in_numpy(IDS.numpy().astype(np.uint64))
    assert np.array_equal(hash_bits(IDS).numpy().astype(np.uint64), expected)
    # The first outputs of splitmix64 with seed 1234567, published with its reference implementation.
    first = hash_bits(torch.tensor([1234567, 1234567 + GOLDEN]))
    assert first.numpy().astype(np.uint64).tolist() == [6457827717110365317, 3203168211198807973]


@pytest.mark.parametrize("columns", [range(16), range(4, 8), range(3, 8), range(5, 6), range(4, 4)])
def test_initial_values_match_their_definition(columns):
    found = compute_initial_values(3, "user", IDS, columns, 1000)
    assert found.dtype == torch.float32
    assert found.shape == (len(IDS), len(columns))
    assert compute_initial_values(3, "user", IDS[:0], columns, 1000).shape == (0, len(columns))
    if columns:
        assert np.array_equal(found.numpy(), compute_by_definition(3, "user", IDS.numpy(), columns, 1000))


def test_seed_and_table_change_all_values():
    values = compute_initial_values(3, "user", IDS, range(8), 1000)
    for seed, table in ((4, "user"), (3, "item")):
        assert (values == compute_initial_values(seed, table, IDS, range(8), 1000)).float().mean() < 0.01
    assert len(values.unique()) > 0.99 * values.numel()
    assert not (values == 0).any()


# 2^20 values each: many rows, wide rows, and ids that differ only in high bits.
UNIFORMITY_CASES = {
    "rows": (torch.arange(2**17), 8),
    "columns": (torch.arange(2**10), 2**10),
    "high bits": (torch.arange(2**17) * 2**40, 8),
    "large ids": (torch.arange(2**17) + 2**62, 8),
}


@pytest.mark.parametrize("of", UNIFORMITY_CASES)
def test_initial_values_are_uniform_and_independent(of):
    """Each statistic is within 4.5 standard deviations of its value for independent uniform numbers."""
    ids, dim = UNIFORMITY_CASES[of]
    values = compute_initial_values(0, "table", ids, range(dim), 1).double()
    count = values.numel()
    assert values.abs().max() < 1
    assert values.mean().abs() < 4.5 * (1 / 3 / count) ** 0.5
    assert (values.square().mean() - 1 / 3).abs() < 4.5 * (4 / 45 / count) ** 0.5
    # Chi-square over 256 cells: 255 degrees of freedom, standard deviation √510.
    cells = torch.histc(values, 256, -1, 1)
    assert abs(((cells - count / 256) ** 2 / (count / 256)).sum().item() - 255) < 4.5 * 510**0.5
    neighbours = {
        "rows": (values[:-1], values[1:]),
        "columns of one number": (values[:, 0::2], values[:, 1::2]),
        "columns of two": (values[:, 1:-1:2], values[:, 2::2]),
        "diagonal": (values[:-1, :-1], values[1:, 1:]),
        "a number further": (values[:-1, 2:], values[1:, :-2]),
        "far rows": (values[: len(values) // 2], values[len(values) // 2 :]),
    }
    for name, (one, other) in neighbours.items():
        correlation = (one * other).mean() * 3
        assert correlation.abs() < 4.5 / one.numel() ** 0.5, name
        # Pairs in 16 × 16 cells detect dependence without correlation.
        pairs = ((one + 1) * 8).long() * 16 + ((other + 1) * 8).long()
        cells, expected = torch.bincount(pairs.flatten(), minlength=256).double(), one.numel() / 256
        assert abs(((cells - expected) ** 2 / expected).sum().item() - 255) < 4.5 * 510**0.5, name


def fill_big_table(rank, world):
    """Return the largest number of values created at once, and this rank's shards of a table of 4 blocks."""
    settings, sizes = make_small_config(world, {"sharding_type": "row_wise"}), []
    step, _ = build_step(settings, BIG_SCHEMA, torch.device("cpu"), fill=False)

    def noted(seed, table, ids, columns, rows):
        sizes.append(len(ids) * len(columns))
        return compute_initial_values(seed, table, ids, columns, rows)

    with patch("raytrec.embeddings.tables.compute_initial_values", noted):
        fill_tables(step.model, 3)
    return max(sizes), [(shard.rows, shard.values.clone()) for shard in tables(step.model)["big"].weight.local]


def test_tables_are_filled_block_by_block():
    """Each rank has two blocks; embeddings/test_tables.py compares small shards under all plans."""
    ranks, rows = run_on_ranks(2, fill_big_table), []
    for largest, shards in ranks:
        assert largest == VALUES_PER_BLOCK
        for held, values in shards:
            assert torch.equal(values, initial_rows(BIG_SCHEMA, "big", 3, held.start, held.stop))
            rows += held
    assert rows == list(range(4 * BLOCK_ROWS))
