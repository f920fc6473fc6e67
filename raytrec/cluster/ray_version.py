"""Whether the Ray of a cluster is the one that raytrec is made for."""

from __future__ import annotations

from raytrec.common.errors import RunError
from raytrec.compat.versions import OTHERS

(RAY,) = OTHERS["ray"]  # raytrec touches private parts of Ray, each place read for this version


def check_ray(cluster: str, *, where: str) -> None:
    """Compares the version of a cluster's Ray with ours.

    Args:
        cluster: its version.
        where: its address, for the error.

    Raises:
        RunError: it is another one.
    """
    if cluster != RAY:
        raise RunError(
            f"the cluster runs Ray {cluster}, and this raytrec is made for Ray {RAY}",
            where=where,
            expected=f"Ray {RAY} on every node",
            do="install requirements/cuda.txt (or cpu.txt) of this raytrec on the cluster, or use the "
            "raytrec that the cluster was set up with",
        )


def check_ray_here() -> None:
    """Compares the version of Ray that is installed here.

    Raises:
        RunError: it is another one.
    """
    import ray

    if ray.__version__ != RAY:
        raise RunError(
            f"Ray {ray.__version__} is installed here, and this raytrec is made for Ray {RAY}",
            where=str(ray.__file__),
            expected=f"Ray {RAY}, here and on the cluster",
            do="pip install --no-deps -r requirements/notebook.txt",
        )
