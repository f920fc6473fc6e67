"""Finds the root cause among the errors of a worker group."""

from __future__ import annotations

import traceback
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path

from raytrec.cluster.local_ray import last_words
from raytrec.cluster.session import logs_here
from raytrec.common.errors import RaytrecError, RunError, root_cause
from raytrec.common.messages import Restart
from raytrec.common.redaction import hide
from raytrec.compat.ray_core import lost_its_node, ran_out_of_memory, reported
from raytrec.config.run_config import RunConfig


class Kind(IntEnum):
    """Kinds of errors, the ones that explain the others first."""

    RESTART = 0  # asked for
    OURS = 1  # an error for people; trying again would lead to it again
    NODE = 2  # the node has gone
    DEATH = 3  # the process has gone
    ERROR = 4  # its own exception
    FOLLOWED = 5  # a collective that another rank did not take part in


@dataclass(frozen=True)
class Cause:
    """Why a rank failed.

    Attributes:
        text: one line.
        error: the error itself.
    """

    kind: Kind
    rank: int
    text: str
    error: BaseException

    @property
    def sentence(self) -> str:
        """The text, with the rank where it lacks that."""
        if self.kind in (Kind.OURS, Kind.RESTART):
            return self.text
        return f"rank {self.rank} {self.text}"


# In errors of CUDA and its libraries about this process's own GPU. The host sees them at its next call, which
# may be a collective: the message then names that, too. Lower case; torch 2.13.0: c10/cuda/CUDAException.cpp,
# CUDACachingAllocator.cpp, ATen/cuda/Exceptions.h (cuBLAS and its like: "CUDA error: CUBLAS_STATUS_…");
# c10d/NCCLUtils.cpp for errors of CUDA in NCCL 2.29.7, and for two ranks on one GPU (ncclInvalidUsage).
OWN_GPU = (
    *("cuda error", "cuda driver error", "cuda failure", "cudnn error", "cudnn_status_", "cublas_status_"),
    *("cufft error", "out of memory", "ecc error", "ncclinvalidusage"),
)
# In errors of gloo and NCCL when a rank has gone (torch 2.13.0).
COLLECTIVE = (
    "gloo",
    "nccl",
    "connection closed by peer",
    "timed out waiting",
    "socket",
    "c10d",
    "connection reset",
)


def find_cause(failures: dict[int, BaseException]) -> Cause:
    """The one that explains the others.

    Args:
        failures: rank → what its process raised, or Ray's error about its end.
    """
    return min((_classify(rank, error) for rank, error in failures.items()), key=lambda c: (c.kind, c.rank))


def _classify(rank: int, error: BaseException) -> Cause:
    from ray.exceptions import RayActorError, RaySystemError

    inner = reported(error)
    cause = root_cause(inner)
    text = str(cause).strip()
    if isinstance(cause, RaytrecError):
        return Cause(Kind.OURS, rank, cause.what, cause)
    if isinstance(cause, Restart):
        return Cause(Kind.RESTART, rank, text, cause)
    if lost_its_node(inner):
        return Cause(Kind.NODE, rank, "lost its node", cause)
    if ran_out_of_memory(inner):
        return Cause(Kind.DEATH, rank, "was ended by Ray, because its node ran low on memory", cause)
    if isinstance(inner, (RayActorError, RaySystemError)):
        return Cause(Kind.DEATH, rank, "died: its process was ended, or crashed", cause)
    followed = not _line_with(OWN_GPU, text) and _line_with(COLLECTIVE, text)
    kind = Kind.FOLLOWED if followed else Kind.ERROR
    return Cause(kind, rank, f"raised {type(cause).__name__}: {main_line(text)}", cause)


def main_line(text: str) -> str:
    """The most specific line of an error, "" where there is none.

    CUDA's errors end with advice, NCCL's have what happened after "Last error:", and torch may add the frames
    of C++ to either. Otherwise it is the last line.
    """
    said, _, last = text.partition("\nException raised from ")[0].partition("Last error:")
    lines = [line.strip() for line in (last or said).splitlines() if line.strip()]
    return _line_with(OWN_GPU, "\n".join(lines)) or (lines[-1] if lines else "")


def _line_with(words: tuple[str, ...], text: str) -> str:
    """The first line that has one of the words, whatever their case; "" where none has."""
    return next((line for line in text.splitlines() if any(word in line.lower() for word in words)), "")


def explain(error: Exception, config: RunConfig, sentence: str) -> RaytrecError:
    """The RaytrecError behind what Ray raised; the traceback goes to error.txt in the run folder."""
    cause = root_cause(error)
    where = write_story(error, config)
    if isinstance(cause, RaytrecError):
        return cause
    return RunError(
        f"training failed: {sentence or main_line(str(cause)) or type(cause).__name__}", where=where
    )


def write_story(error: Exception, config: RunConfig) -> str:
    """Writes the traceback to error.txt, with the last lines of a local Ray, whose logs it outlives."""
    story, logs = Path(config.run.dir) / "error.txt", logs_here()
    try:
        said = last_words(logs) if logs else ""
        story.write_text(hide("".join(traceback.format_exception(error)) + said))
    except OSError as full:
        return f"the traceback could not be written to {story}: {full.strerror}"
    return f"the traceback is in {story}"
