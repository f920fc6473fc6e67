"""Private names of Ray Train's backend for torch (2.60.0).

Apart from the others because it imports torch.
"""

from __future__ import annotations

from ray.train.torch.config import _TorchBackend

TorchBackend = _TorchBackend
