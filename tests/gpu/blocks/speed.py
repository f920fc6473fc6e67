"""12: steps use tensor cores, the GPU is not idle, and reading keeps up with training.

Measurements use the functions of `make bench-gpu` (benchmarks/gpu.py).
"""

from __future__ import annotations

from dataclasses import replace

from here import BlockCannotRun, BlockContext

MAX_IDLE_SHARE = 0.1  # share of an fp32 step of 8192 rows (about 20 ms on an H100)
MIN_THROUGHPUT_SHARE = 0.9  # share of the throughput of reading or training alone, whichever is slower
READERS, ROUNDS = 12, 3


def run(here: BlockContext) -> None:
    import gpu

    if here.stand_in:
        raise BlockCannotRun("a stand-in has no speed")
    device, cuda = here.device, here.kind == "cuda"
    size = gpu.size_for(device)
    with here.group():
        peaks = gpu.peaks_of(here.about_device()) if cuda else gpu.measured_peaks(device)
        here.found["data_sheet"] = "of this device" if cuda and peaks else "none"
        rows = size.batches[-1]
        lookups = gpu.lookups(size, size.batches[0], device, peaks)
        _measured(here, lookups, f"lookup, {size.batches[0]} rows")
        del lookups
        gpu.free(device)
        layers = _measured(here, gpu.dense(size, rows, device, peaks, compiled=False), f"dense, {rows} rows")
        steps = gpu.whole_steps(size, size.batches[0], device, peaks, gpu.PRECISIONS if cuda else ("fp32",))
        _measured(here, steps, f"step, {size.batches[0]} rows")
        if not cuda:
            return
        if peaks:
            wanted = min(3.0, 0.6 * peaks.tf32 / peaks.fp32)
            times = layers["tf32"].rows_per_s / layers["fp32"].rows_per_s
            assert times >= wanted, f"tf32 is {times:.1f} × as fast as fp32; expected with tensor cores: {wanted:.1f} ×"
        idle = {side.name: _idle(side) for side in steps}
        here.found["idle"] = {name: round(share, 3) for name, share in idle.items()}
        assert idle["fp32"] < MAX_IDLE_SHARE, f"the GPU is idle for {idle['fp32']:.0%} of an fp32 step"
        del steps
        gpu.free(device)
        _reading_keeps_up(here, size)


def _measured(here: BlockContext, sides, title: str):
    import gpu

    figures = gpu.measure(sides, here.device, ROUNDS, here.size(0.02, 0.1, 0.3))
    here.found[title] = {
        name: f"{f.ms:.2f} ms" + (f", {f.share:.0%} of the most" if f.share else "") for name, f in figures.items()
    }
    return figures


def _idle(side, steps: int = 30) -> float:
    """Return the share of time without a running kernel or copy during some steps."""
    import torch
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        side.steps(steps)
        torch.cuda.synchronize()
    on_gpu = [e for e in profiler.events() if e.device_type == DeviceType.CUDA and not e.is_user_annotation]
    return idle_share([(e.time_range.start, e.time_range.end) for e in on_gpu])


def idle_share(spans: list[tuple[float, float]]) -> float:
    """Return the share of the time from the first start to the last end that no span covers."""
    spans = sorted(spans)
    busy, until = 0.0, spans[0][0]
    for start, end in spans:
        busy += max(0.0, end - max(start, until))
        until = max(until, end)
    return 1 - busy / (until - spans[0][0])


def _reading_keeps_up(here: BlockContext, size) -> None:
    """Compare training from Parquet (MLPerf layers) with reading alone and training alone."""
    import gpu

    from raytrec.config.schema import Schema
    from raytrec.worker.build import build_step

    values = Schema.load(str(here.data / "schema.yaml")).model_dump(by_alias=True)
    values["tables"] = {name: table | {"dim": size.dim} for name, table in values["tables"].items()}
    rows = size.batches[0]
    step, _ = build_step(gpu.config_of(size, rows), Schema.parse(values, "check"), here.device)
    with gpu.ingest(here.data, rows, here.device, None, READERS) as sides:
        reading = sides[0].source
        kept = [next(reading) for _ in range(4)]

        def from_memory(count: int) -> None:
            for _ in step.train((kept[i % 4] for i in range(count)), count):
                pass

        def from_parquet(count: int) -> None:
            for _ in step.train(reading, count):
                pass

        training = [
            replace(sides[0], name="train", steps=from_memory),
            replace(sides[0], name="both", steps=from_parquet),
        ]
        figures = gpu.measure([sides[0], *training], here.device, ROUNDS, 1.0)
    alone = min(figures[sides[0].name].rows_per_s, figures["train"].rows_per_s)
    both = figures["both"].rows_per_s
    here.found["rows_per_s"] = {name: round(f.rows_per_s) for name, f in figures.items()}
    assert both >= MIN_THROUGHPUT_SHARE * alone, (
        f"{both:,.0f} rows/s from Parquet; the slower part alone reaches {alone:,.0f} rows/s"
    )
