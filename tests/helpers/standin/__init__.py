"""A stand-in for CUDA, so that code for GPUs runs, and fails as it would there, on a machine that has none.

Tensors on it claim to lie on cuda:N. Their values lie in host memory, and torch's, FBGEMM's and gloo's
CPU code computes them, so whole training steps run and their results are right. What is like CUDA:

- Operations refuse tensors of two devices, and collectives of "nccl" groups refuse tensors in host memory.
- Whatever makes the host wait for the device is recorded with its place (`Gpu.waits`).
- Streams and events have their own clocks. `Gpu.work(seconds)` puts work on the current stream, and the
  host waits for it where it would wait on CUDA.
- Host memory is pageable or pinned, and only a copy from or to pinned memory is asynchronous.
- Tables of fused kernels lie on the device; planners, shards and checkpoints see them there.

What is not: speed, rounding, CUDA's own kernels (FBGEMM's fused Adam, caches of UVM tables, dense ones that
give each id's vector of several tables), memory that
runs out. Gradients inside backward are not distinguished by device, as autograd's engine makes them as
ordinary tensors.

    with cuda() as gpu:
        torch.zeros(3, device="cuda") + torch.zeros(3)      # RuntimeError: … at least two devices
        gpu.waits                                           # [Wait("item", "…/worker/step.py:train"), …]

`ranks.on_ranks(..., device="cuda")` does so in several processes.
"""

from standin.device import Gpu, Wait, cuda

__all__ = ["Gpu", "Wait", "cuda"]
