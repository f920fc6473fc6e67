"""What a run's start costs, counted: modules that its driver imports."""

import subprocess
import sys

SLOW = {"torch", "torchrec", "fbgemm_gpu", "mlflow", "matplotlib", "sqlalchemy"}
UNTIL_THE_WORKERS_ARE_ASKED_FOR = """
import sys
from raytrec.driver.session import begin_early
early = [name for name in ("ray", "numpy", "pyarrow", "pydantic") if name in sys.modules]
from raytrec import cli
from raytrec.driver import run, launch
before_ray = "ray" in sys.modules
import ray, ray.train
from raytrec.compat.ray_train import ControlledTrainer, LateTorchConfig
from raytrec.driver import coordinator, policies
from raytrec.worker import loop
LateTorchConfig(launch.TORCH_CONFIG, {}).backend_cls()
print(early, before_ray, sorted({name.partition(".")[0] for name in sys.modules} & %r))
"""


def test_the_driver_imports_nothing_slow_before_it_asks_for_workers():
    """Nor anything but the standard library and YAML before its warm process runs."""
    command = [sys.executable, "-c", UNTIL_THE_WORKERS_ARE_ASKED_FOR % SLOW]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == "[] False []\n"
