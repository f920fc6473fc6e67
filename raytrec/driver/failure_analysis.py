"""Find the root cause among the errors of a worker group."""

from __future__ import annotations

import traceback
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path

from raytrec.cluster.local_ray import read_stderr_tails
from raytrec.cluster.session import find_log_folder
from raytrec.common.errors import RaytrecError, RunError, get_root_cause
from raytrec.common.messages import Restart
from raytrec.common.redaction import hide
from raytrec.compat.ray_core import is_node_loss, is_out_of_memory, unwrap_health_check_failure
from raytrec.config.run_config import RunConfig


class FailureKind(IntEnum):
    """Kind of a failure of a rank. If ranks fail in several ways, the kind with the smallest value is the cause."""

    RESTART = 0  # a requested restart
    RAYTREC_ERROR = 1  # an error for users, which would recur
    NODE = 2  # the node is lost
    DEATH = 3  # the process has ended
    ERROR = 4  # an exception of the rank itself
    CONSEQUENCE = 5  # a collective in which another rank did not take part


@dataclass(frozen=True)
class Cause:
    """Reason why a rank failed.

    Attributes:
        kind: Kind of the failure.
        rank: Rank that failed.
        text: Predicate without a subject, such as "lost its node"; for RAYTREC_ERROR, `what` of the error, and for
            RESTART, the reason.
        error: Root cause of the exception raised by the rank, or of Ray's error about its process.
    """

    kind: FailureKind
    rank: int
    text: str
    error: BaseException

    @property
    def sentence(self) -> str:
        """Return the text as a clause, whose subject is the rank unless the kind is RAYTREC_ERROR or RESTART."""
        if self.kind in (FailureKind.RAYTREC_ERROR, FailureKind.RESTART):
            return self.text
        return f"rank {self.rank} {self.text}"


# Lower-case phrases of CUDA and its libraries in errors of a rank's GPU. The rank gets such an error from its
# next call. If this call is a collective, the message also names the collective, but the GPU is the cause.
# Sources in torch 2.13.0: c10/cuda/CUDAException.cpp,
# CUDACachingAllocator.cpp, ATen/cuda/Exceptions.h (cuBLAS and its like: "CUDA error: CUBLAS_STATUS_…");
# c10d/NCCLUtils.cpp for errors of CUDA in NCCL 2.29.7, and for two ranks on one GPU (ncclInvalidUsage).
GPU_ERROR_PHRASES = (
    *("cuda error", "cuda driver error", "cuda failure", "cudnn error", "cudnn_status_", "cublas_status_"),
    *("cufft error", "out of memory", "ecc error", "ncclinvalidusage"),
)
# Lower-case phrases of gloo and NCCL in errors that occur because another rank has ended (torch 2.13.0).
COLLECTIVE_ERROR_PHRASES = (
    *("gloo", "nccl", "c10d", "socket"),
    *("connection closed by peer", "connection reset", "timed out waiting"),
)


def find_cause(failures: dict[int, BaseException]) -> Cause:
    """Return the failure of the kind that explains all others (FailureKind); ties go to the lowest rank.

    Args:
        failures: Rank → exception raised by the rank, or Ray's error about the end of its process.
    """
    return min((_classify(rank, error) for rank, error in failures.items()), key=lambda c: (c.kind, c.rank))


def _classify(rank: int, error: BaseException) -> Cause:
    """Return the cause of one rank's failure, from an exception as in `find_cause`."""
    from ray.exceptions import RayActorError, RaySystemError

    inner = unwrap_health_check_failure(error)
    cause = get_root_cause(inner)
    text = str(cause).strip()
    if isinstance(cause, RaytrecError):
        return Cause(FailureKind.RAYTREC_ERROR, rank, cause.what, cause)
    if isinstance(cause, Restart):
        return Cause(FailureKind.RESTART, rank, text, cause)
    if is_node_loss(inner):
        return Cause(FailureKind.NODE, rank, "lost its node", cause)
    if is_out_of_memory(inner):
        return Cause(FailureKind.DEATH, rank, "was killed by Ray because its node ran low on memory", cause)
    if isinstance(inner, (RayActorError, RaySystemError)):
        return Cause(FailureKind.DEATH, rank, "died: its process was killed or crashed", cause)
    is_consequence = not _find_line(GPU_ERROR_PHRASES, text) and _find_line(COLLECTIVE_ERROR_PHRASES, text)
    kind = FailureKind.CONSEQUENCE if is_consequence else FailureKind.ERROR
    return Cause(kind, rank, f"raised {type(cause).__name__}: {extract_main_line(text)}".rstrip(": "), cause)


def extract_main_line(text: str) -> str:
    """Return the most specific line of an error's text; empty if the text is empty.

    CUDA errors end with advice, NCCL errors name the event after "Last error:", and torch may append C++
    frames to both. If no line contains one of GPU_ERROR_PHRASES, the last line of the message is returned.
    """
    message, _, detail = text.partition("\nException raised from ")[0].partition("Last error:")
    lines = [line.strip() for line in (detail or message).splitlines() if line.strip()]
    return _find_line(GPU_ERROR_PHRASES, "\n".join(lines)) or (lines[-1] if lines else "")


def _find_line(words: tuple[str, ...], text: str) -> str:
    """Return the first line that contains one of the lower-case `words` in any case; empty if there is none."""
    return next((line for line in text.splitlines() if any(word in line.lower() for word in words)), "")


def to_raytrec_error(error: Exception, config: RunConfig, sentence: str) -> RaytrecError:
    """Write the traceback of an error of Ray Train to error.txt in run.dir, and return an error with the cause.

    If the root cause is a RaytrecError, it is returned. Otherwise, a RunError is returned. It contains `sentence`,
    the cause found by the coordinator, or, if `sentence` is empty, the main line or class name of the root cause.
    """
    cause = get_root_cause(error)
    where = write_traceback(error, config)
    if isinstance(cause, RaytrecError):
        return cause
    reason = sentence or extract_main_line(str(cause)) or type(cause).__name__
    return RunError(f"the workers failed: {reason}", where=where)


def write_traceback(error: Exception, config: RunConfig) -> str:
    """Write the traceback of an error to error.txt in run.dir, and return a clause that names the file.

    The function appends the last lines that the processes of a local Ray cluster wrote to stderr, because the cluster
    removes its logs when it stops. If the file cannot be written, the clause states the reason.
    """
    path, logs = Path(config.run.dir) / "error.txt", find_log_folder()
    try:
        stderr_tails = read_stderr_tails(logs) if logs else ""
        text = hide("".join(traceback.format_exception(error)) + stderr_tails)
        path.write_bytes(text.encode(errors="backslashreplace"))  # file names need not be UTF-8
    except OSError as os_error:
        return f"the traceback could not be written to {path}: {os_error.strerror}"
    return f"the traceback is in {path}"
