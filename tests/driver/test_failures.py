"""Test root causes of failures, the retry policy, and the report to the driver."""

import pytest
from ray.exceptions import ActorDiedError, NodeDiedError, OutOfMemoryError
from ray.train.v2.api.exceptions import ControllerError, WorkerGroupError

from raytrec.common.errors import DataError
from raytrec.common.messages import Restart
from raytrec.config.run_config import RunConfig
from raytrec.driver.failure_analysis import FailureKind, extract_main_line, find_cause, write_traceback

GLOO_ERROR = RuntimeError("[../third_party/gloo/gloo/pair.cc:547] Connection closed by peer [127.0.0.1]")
OURS = DataError("label 'y' is 7", where="part-0.parquet")


@pytest.mark.parametrize(
    "failures,kind,sentence",
    [
        ({0: GLOO_ERROR, 1: ActorDiedError()}, FailureKind.DEATH, "rank 1 died: its process was killed or crashed"),
        ({0: GLOO_ERROR, 1: KeyError("user"), 2: GLOO_ERROR}, FailureKind.ERROR, "rank 1 raised KeyError: 'user'"),
        ({0: KeyError("x"), 1: OURS}, FailureKind.RAYTREC_ERROR, "label 'y' is 7"),
        ({0: GLOO_ERROR, 2: NodeDiedError("gone")}, FailureKind.NODE, "rank 2 lost its node"),
        ({0: ActorDiedError(), 1: NodeDiedError("gone")}, FailureKind.NODE, "rank 1 lost its node"),
        ({0: Restart("at step 3"), 1: GLOO_ERROR}, FailureKind.RESTART, "at step 3"),
        ({0: GLOO_ERROR, 1: OutOfMemoryError("the node was")}, FailureKind.DEATH, "rank 1 was killed by Ray because"),
        ({1: RuntimeError("Timed out waiting 60000ms")}, FailureKind.CONSEQUENCE, "rank 1 raised RuntimeError"),
    ],
)
def test_find_cause_returns_the_root_cause(failures, kind, sentence):
    cause = find_cause(failures)
    assert cause.kind == kind and cause.sentence.startswith(sentence)


# Messages of torch 2.13.0 (c10/cuda/CUDAException.cpp, CUDACachingAllocator.cpp, c10d/NCCLUtils.hpp and
# .cpp, c10d/ProcessGroupNCCL.cpp) for errors that occur in a collective.
ADVICE = """
CUDA kernel errors might be asynchronously reported at some other API call
For debugging consider passing CUDA_LAUNCH_BLOCKING=1
Compile with `TORCH_USE_CUDA_DSA` to enable device-side assertions.
"""
FRAMES = """
Exception raised from c10_cuda_check_implementation at /pytorch/c10/cuda/CUDAException.cpp:44:
frame #0: c10::Error::Error(c10::SourceLocation, std::string) + 0x80 (0x7f in libc10.so)
frame #5: c10d::ProcessGroupNCCL::WorkNCCL::synchronizeInternal() + 0x1d (0x7f in libtorch_cuda.so)
"""
NCCL = "NCCL error in: /pytorch/torch/csrc/distributed/c10d/NCCLUtils.cpp:94, {}, NCCL version 2.29.7\n{}"
NCCL_CUDA = NCCL.format(
    "unhandled cuda error (run with NCCL_DEBUG=INFO for details)",
    "ncclUnhandledCudaError: Call to CUDA function failed.\nLast error:\n"
    "Cuda failure 700 'an illegal memory access was encountered'",
)
NCCL_USAGE = NCCL.format(
    "invalid usage (run with NCCL_DEBUG=WARN for details)",
    "ncclInvalidUsage: This usually reflects invalid usage of NCCL library.\nLast error:\n"
    "Duplicate GPU detected : rank 1 and rank 0 both on CUDA device 1b000",
)
ILLEGAL = "CUDA error: an illegal memory access was encountered"
ECC = "CUDA error: uncorrectable ECC error encountered"
OOM = "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.11 GiB"


@pytest.mark.parametrize(
    "text,message",
    [
        (ILLEGAL + ADVICE + FRAMES, ILLEGAL),
        (ECC + ADVICE, ECC),
        (f"[Rank 1] Process group watchdog thread terminated with exception: {ECC}{ADVICE}{FRAMES}", ECC),
        (OOM + FRAMES, OOM),
        ("cuDNN error: CUDNN_STATUS_EXECUTION_FAILED" + FRAMES, "cuDNN error: CUDNN_STATUS_EXECUTION_FAILED"),
        ("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`" + FRAMES, "CUBLAS_"),
        (NCCL_CUDA, "Cuda failure 700 'an illegal memory access was encountered'"),
        (NCCL_USAGE, "Duplicate GPU detected"),
    ],
)
def test_gpu_error_in_a_collective_is_the_cause(text, message):
    """Rank 1 has the error; the other ranks only lost rank 1. The cause quotes the main line."""
    lost = NCCL.format("remote process exited or there was a network error", "ncclRemoteError: A call failed")
    cause = find_cause({0: RuntimeError(lost), 1: RuntimeError(text), 2: RuntimeError(lost)})
    assert (cause.kind, cause.rank) == (FailureKind.ERROR, 1) and message in cause.text, cause
    assert message in extract_main_line(text) and "\n" not in extract_main_line(text)


@pytest.mark.parametrize(
    "text",
    [
        "[Rank 1] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=42, OpType=ALLREDUCE, "
        "NumelIn=1, NumelOut=1, Timeout(ms)=300000) ran for 300041 milliseconds before timing out.",
        "NCCL communicator was aborted on rank 1. Original reason for failure was: [Rank 1] Watchdog caught "
        "collective operation timeout: WorkNCCL(SeqNum=42, OpType=ALLTOALL_BASE) ran for 300041 milliseconds",
        NCCL.format(
            "remote process exited or there was a network error",
            "ncclRemoteError: A call failed possibly due to a network error or a remote process exiting "
            "prematurely.\nLast error:\nsocketProgress: Connection closed by remote peer 10.0.0.2<41231>",
        ),
        NCCL.format(
            "unhandled system error (run with NCCL_DEBUG=INFO for details)",
            "ncclSystemError: System call (e.g. socket, malloc) or external library call failed or device "
            "error. \nLast error:\nsocketStartConnect: Connect to 10.0.0.2<41231> failed : Software caused "
            "connection abort",
        ),
        "NCCL timeout in: /pytorch/torch/csrc/distributed/c10d/NCCLUtils.hpp:118" + FRAMES,
    ],
)
def test_nccl_errors_about_peers_are_consequences(text):
    assert find_cause({1: RuntimeError(text)}).kind == FailureKind.CONSEQUENCE


@pytest.mark.parametrize("text,line", [("", ""), ("\n", ""), ("a\nb\n", "b"), ("bad value" + FRAMES, "bad value")])
def test_main_line_excludes_stack_frames(text, line):
    assert extract_main_line(text) == line


@pytest.fixture
def coordinator(ray_cluster):
    import ray

    from raytrec.driver.coordinator import start_coordinator

    actor = start_coordinator(5, 60)
    yield actor
    ray.kill(actor)


def make_decisions(coordinator, budget, *failures):
    """Return the decisions of the failure policy for a sequence of group errors."""

    from raytrec.driver.policies import GroupFailurePolicy

    policy = GroupFailurePolicy(coordinator, budget, 1)
    errors = [f if isinstance(f, Exception) else WorkerGroupError("", f) for f in failures]
    return [policy.make_decision(training_failed_error=e).value for e in errors]


def test_policy_retries_transient_failures_within_budget(coordinator):
    died, node = {0: GLOO_ERROR, 1: ActorDiedError()}, {1: NodeDiedError("gone")}
    several = died, node, died, node, {0: Restart("x")}, died
    assert make_decisions(coordinator, 2, *several) == ["RETRY"] * 5 + ["RAISE"]
    assert make_decisions(coordinator, 8, {1: OURS}) == ["RAISE"], "a data error would occur again"
    assert make_decisions(coordinator, 0, died) == ["RAISE"]
    same = {0: GLOO_ERROR, 1: KeyError("user")}
    assert make_decisions(coordinator, 8, same, same) == ["RETRY", "RAISE"], "the same error, same step"
    assert make_decisions(coordinator, 8, same, died, same) == ["RETRY"] * 3
    memory = [{0: RuntimeError(f"CUDA out of memory. {left} is free")} for left in ("1.25 GiB", "921.60 MiB")]
    assert make_decisions(coordinator, 8, *memory) == ["RETRY", "RAISE"], "the same error with different numbers"
    assert make_decisions(coordinator, 8, ControllerError(ValueError("a bug"))) == ["RAISE"]


def test_coordinator_reports_the_cause_to_the_driver(coordinator):
    import ray

    make_decisions(coordinator, 1, {0: GLOO_ERROR, 1: ActorDiedError()})
    (event,) = ray.get(coordinator.get.remote(1))
    assert event.details["cause"] == "rank 1 died: its process was killed or crashed"
    assert event.details["again"] and ray.get(coordinator.cause.remote()) == event.details["cause"]


@pytest.mark.parametrize("text", ["Größe – 名前", "file \udcff.parquet"])
def test_traceback_of_any_text_is_written(tmp_path, text):
    config = RunConfig.model_validate({"data": {"train": "x"}, "run": {"dir": str(tmp_path)}})
    try:
        raise KeyError(text)
    except KeyError as error:
        assert write_traceback(error, config) == f"the traceback is in {tmp_path / 'error.txt'}"
    assert "KeyError" in (tmp_path / "error.txt").read_text(encoding="utf-8")
