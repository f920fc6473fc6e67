"""Record the first 50 losses of an example configuration, on ranks without Ray.

    .venv/bin/python tests/golden/losses.py [NAME...]     # record again

Record again only in a commit that changes the computation on purpose (another row order, other initial
values, another kernel, a new version of torch, TorchRec, FBGEMM or NumPy) and gives the reason. If a commit
only moves, renames or simplifies code, different losses are a bug.
"""

import hashlib
import json
import sys
import tempfile
from importlib.metadata import version
from itertools import islice
from pathlib import Path

STEPS, WORKERS = 50, (1, 2)
EPOCH_STEPS = 30  # the last step is smaller; the 50 steps reach the second epoch
HERE = Path(__file__).parent
ROOT = HERE.parents[1]
# Configuration → (shape of its data, rows of a global batch). All other settings, including the model size,
# come from the configuration file; GPU settings are overridden.
EXAMPLES = {
    "synthetic": ("synthetic", 256),
    "criteo_kaggle": ("criteo_kaggle", 256),
    "criteo_1tb_8xa100": ("criteo_1tb", 32),
    "criteo_1tb_2x8xh100": ("criteo_1tb", 32),
    "movielens": ("movielens", 256),
    "sequence": ("movielens", 256),
    "two_tower": ("movielens", 256),
    "ml1m": ("ml1m", 256),
    "adult": ("adult", 256),
    "own": ("own", 256),
}


def record(name: str, workers: int, data: Path) -> dict:
    """Return {"rows": hash of all batches, "losses": losses of the global batches} of an example.

    Args:
        data: folder of the generated data sets; later calls reuse them.
    """
    from golden.shapes import write
    from ranks import run_on_ranks

    shape, batch_rows = EXAMPLES[name]
    folder = data / f"{shape}-{batch_rows}"
    if not folder.exists():
        write(shape, EPOCH_STEPS * batch_rows - batch_rows // 3, folder)
    ranks = run_on_ranks(workers, train, name, str(folder), batch_rows)
    rows = hashlib.sha256("".join(digest for digest, _ in ranks).encode()).hexdigest()[:16]
    # A rank's loss is its part × workers (tasks/objective.py), so the mean over ranks is the batch loss.
    losses = [sum(parts) / workers for parts in zip(*(losses for _, losses in ranks), strict=True)]
    return {"rows": rows, "losses": losses}


def train(rank: int, world: int, name: str, folder: str, batch_rows: int) -> tuple[str, list[float]]:
    """Train one rank; return (hash of its batches, its loss at each step)."""
    import torch

    from raytrec.config.features import resolve_features
    from raytrec.config.run_config import load_config
    from raytrec.config.schema import Schema
    from raytrec.data.fragments import scan
    from raytrec.data.item_reader import read_item
    from raytrec.data.read_plans import ReadPlan
    from raytrec.data.stream import Stream
    from raytrec.worker.build import build_step
    from raytrec.worker.loop import make_train_order

    class Direct(Stream):
        """Stream that reads in this process instead of Ray Data tasks, in the same row order."""

        def _tables(self, items):
            return (read_item(item, self.dataset.form) for item in items)

    settings = [f"data.train={folder}/train", "data.valid=null", "data.test=null", "scaling.device=cpu"]
    settings += [f"data.global_batch_size={batch_rows}", "train.eval_every_steps=null", "train.epochs=2"]
    settings += ["data.holdout=null", "train.early_stopping=null", "checkpoint.keep_best=0"]
    settings += ["train.matmul=fp32", "train.compile=false", "plan.qcomms={}"]  # GPU settings
    config = load_config(ROOT / "jobs" / f"{name}.yaml", [*settings, f"scaling.num_workers={world}"])
    schema = Schema.load(f"{folder}/schema.yaml")
    step, _ = build_step(config, schema, torch.device("cpu"))
    losses = []
    step.model.register_forward_hook(lambda model, inputs, outputs: losses.append(outputs[0].item()))
    features = resolve_features(schema, config.model)
    dataset = scan(f"{folder}/train", ReadPlan(schema))
    stream = Direct(dataset, make_train_order(config), rank=rank, world=world, features=features)
    seen, digest = stream.epochs(config.train.epochs), hashlib.sha256()
    for _ in step.train(_hash_batches(islice(seen, STEPS), digest), STEPS):
        pass
    seen.close()
    return digest.hexdigest(), losses


def _hash_batches(batches, digest):
    for batch in batches:
        for part in (batch.dense, batch.labels, batch.weights, batch.sparse.values(), batch.sparse.lengths()):
            digest.update(part.numpy().tobytes())
        yield batch


def describe_environment() -> dict:
    """Return the library versions and the CPU, which affect the last bits of a loss."""
    import torch

    libraries = "torch", "torchrec", "fbgemm-gpu-cpu", "numpy", "pyarrow"
    cpu = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    return {
        **{name: version(name) for name in libraries},
        "kernels": torch.backends.cpu.get_cpu_capability(),
        "cpu": cpu[0].partition(":")[2].strip() if cpu else "",
    }


def main(names: list[str]) -> None:
    """Record these examples, or all examples."""
    with tempfile.TemporaryDirectory() as data:
        for name in names or EXAMPLES:
            runs = {str(workers): record(name, workers, Path(data)) for workers in WORKERS}
            text = json.dumps({"environment": describe_environment(), "workers": runs}, indent=1)
            (HERE / f"{name}.json").write_text(text + "\n")
            print(name, *(run["losses"][-1] for run in runs.values()), flush=True)


if __name__ == "__main__":
    sys.path[:0] = [str(HERE.parent), str(HERE.parent / "helpers")]
    from golden.losses import main  # import under the module name that ranks use

    main(sys.argv[1:])
