"""Pages of table rows in memory-mapped files."""

from __future__ import annotations

import mmap

import torch

from raytrec.common.memory import is_page_resident, prefetch_pages


def prefetch_rows(values: torch.Tensor, rows: torch.Tensor, sampled: int) -> None:
    """Prefetch the pages of rows unless a sample shows that the rows are already in memory.

    Without prefetching, each page fault blocks.

    Args:
        values: Rows of a table, mapped from files, [n, width].
        rows: Row numbers, int64 [N].
        sampled: At least this number of rows are sampled (if there are as many), and fewer than twice as many.
    """
    address, width = values.data_ptr(), values.stride(0) * values.itemsize
    sample = rows[:: max(1, len(rows) // sampled)].tolist()
    page_bytes = mmap.PAGESIZE
    if all(is_page_resident((address + row * width) // page_bytes * page_bytes) for row in sample):
        return
    starts = address + rows * width
    pages = (torch.cat([starts, starts + (width - 1)]) // page_bytes).unique()
    is_first = torch.ones(len(pages) + 1, dtype=torch.bool)
    is_first[1:-1] = pages.diff() > 1
    run_starts = is_first.nonzero().squeeze(1)
    for page, count in zip(pages[run_starts[:-1]].tolist(), run_starts.diff().tolist(), strict=True):
        prefetch_pages(page * page_bytes, count * page_bytes)
