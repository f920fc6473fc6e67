"""A rank of `benchmarks/plan.py`: measures rates, steps and memory of plans, in turns.

    python benchmarks/plan_side.py RANK WORLD STORE

It reads lines of JSON. {"sample": "s"}: a look at the machine's rates; "cpu s":
collectives in seconds of CPU. {"case": NAME}: builds that plan.
{"steps": n}: trains. {"memory": true}: bytes that this plan has taken, at most. It answers each by a line.
"""

from __future__ import annotations

import ctypes
import gc
import json
import sys
from pathlib import Path
from time import perf_counter, process_time
from typing import Any

import numpy as np
import torch
from plan_cases import CASES, config_of, ids_of
from rank_group import join_group
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from raytrec.data.batch import Batch
from raytrec.embeddings.tables import tables
from raytrec.planning.probe import Probe
from raytrec.worker.build import build_step

STATUS = Path("/proc/self/status")


def anonymous() -> int:
    """Bytes of this process's own memory."""
    return 1024 * int(STATUS.read_text(encoding="utf-8").split("RssAnon:")[1].split()[0])


def peak() -> int:
    """The most that it had since `forget_peak`, files included."""
    return 1024 * int(STATUS.read_text(encoding="utf-8").split("VmHWM:")[1].split()[0])


def resident() -> int:
    return 1024 * int(STATUS.read_text(encoding="utf-8").split("VmRSS:")[1].split()[0])


def release() -> None:
    """Gives what is free back, and begins a new peak."""
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")


class Case:
    """A plan that trains on batches in memory."""

    def __init__(self, name: str, rank: int, world: int):
        case = CASES[name]
        self._before = resident()
        config, schema = config_of(case, world), case.schema
        rows = config.data.global_batch_size // world
        self._step, _ = build_step(config, schema, torch.device("cpu"), fill=False)
        for table in tables(self._step.model).values():
            for part in (table.weight, *table.state.values()):
                for shard in part.local:  # else its pages would not be there
                    shard.values.fill_(0.01)
        made = np.random.default_rng(rank)
        lengths = torch.tensor([ids_of(case, name) for name in schema.sparse], dtype=torch.int32)
        bounds = [schema.tables[spec.table].rows for spec in schema.sparse.values()]
        self._batches = []
        for _ in range(4):
            ids = [made.integers(0, n, rows * int(k)) for n, k in zip(bounds, lengths, strict=True)]
            sparse = KeyedJaggedTensor(
                list(schema.sparse),
                torch.from_numpy(np.concatenate(ids)),
                lengths=lengths.repeat_interleave(rows),
                length_per_key=[len(of) for of in ids],
            )
            labels = torch.from_numpy(made.integers(0, 2, (rows, 1)).astype(np.float32))
            dense = torch.from_numpy(made.normal(size=(rows, len(schema.dense))).astype(np.float32))
            self._batches.append(Batch(dense, sparse, labels, torch.ones(rows), rows * world))

    def train(self, steps: int) -> list[float]:
        """[seconds, seconds of CPU] of a step, the median."""
        batches = (self._batches[i % 4] for i in range(steps))
        times = [(perf_counter(), process_time()) for _ in self._step.train(batches, steps)]
        return np.median(np.diff(times, axis=0), axis=0).tolist()

    def memory(self) -> int:
        """Bytes that it takes, at most, batches aside that are beyond the pipeline's."""
        spare = sum(t.numel() * t.element_size() for t in _tensors(self._batches[0]))
        return peak() - self._before - spare


def _tensors(batch: Batch) -> list[torch.Tensor]:
    return [batch.dense, batch.labels, batch.weights, batch.sparse.values(), batch.sparse.lengths()]


def serve(rank: int, world: int, store: str) -> None:
    """Does what the lines say, until there are none."""
    join_group(rank, world, store)
    probe, case = Probe(torch.device("cpu")), None
    for line in sys.stdin:
        told: dict[str, Any] = json.loads(line)
        if "sample" in told:
            answer: Any = probe.sample(process_time if told["sample"] == "cpu s" else perf_counter)
        elif "case" in told:
            case = None
            release()
            case = Case(told["case"], rank, world)
            answer = case.train(6)
        elif "steps" in told:
            answer = case.train(told["steps"])
        else:
            answer = case.memory()
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    serve(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
