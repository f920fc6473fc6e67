"""Stand-in for CUDA: runs GPU code on a machine without a GPU, with the errors it would raise on a GPU.

Stand-in tensors report the device cuda:N. Their values are in host memory and are computed by the CPU code of
torch, FBGEMM and gloo, so complete training steps run with correct results. As on CUDA:

- Operators reject tensors on two devices, also in backward and in optimizers, by the rules of torch's own list
  (`dispatch`). Collectives of "nccl" groups reject tensors in host memory.
- Every wait of the host for the device is recorded with its location (`Gpu.waits`).
- Streams and events have their own clocks. `Gpu.work(seconds)` adds work to the current stream, and the host
  waits for it at the same operations as on CUDA.
- Host memory is pageable or pinned; only copies from or to pinned memory are asynchronous.
- Tables of fused kernels are on the device for planners, shards and checkpoints.

Not simulated: speed, rounding, CUDA-only kernels (FBGEMM's fused Adam, caches of UVM tables, dense kernels
that return unpooled vectors of several tables) and out-of-memory errors.
`stream_order.check_stream_order` reports accesses to the same memory on two streams without an order.

    with use_stand_in_gpu() as gpu:
        torch.zeros(3, device="cuda") + torch.zeros(3)      # RuntimeError: … at least two devices
        gpu.waits                                           # [HostWait("item", "…/worker/step.py:train"), …]

`ranks.run_on_ranks(..., device="cuda")` runs the stand-in in several processes.
"""

from standin.device import StandInGpu, use_stand_in_gpu
from standin.host_waits import HostWait

__all__ = ["HostWait", "StandInGpu", "use_stand_in_gpu"]
