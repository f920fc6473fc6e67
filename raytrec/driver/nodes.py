"""Inspect the GPUs, CPUs and memory of the Ray nodes, and choose the device for training."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from raytrec.cluster.session import pin_to_node
from raytrec.common.errors import ConfigError
from raytrec.common.formatting import format_count
from raytrec.common.machine import (
    REINSTALL_ADVICE,
    check_fbgemm_support,
    get_build_device,
    get_smallest_gpu_memory,
    list_gpu_kinds,
)
from raytrec.compat.ray_core import find_nodes_without_gpus, has_autoscaler, list_alive_nodes, measure_system_memory
from raytrec.config.run_config import RunConfig
from raytrec.config.schema import Schema
from raytrec.doctor.nodes import collect_answers
from raytrec.planning.machines import find_gpu
from raytrec.planning.memory import GIB, HOST_RESERVE_SHARE, estimate_copy_bytes
from raytrec.planning.validation import validate_constraints

NODE_ANSWER_TIMEOUT_S = 60.0  # nodes may have to start a process first; a listed node may be gone


@dataclass(frozen=True)
class GpuNode:
    """Ray node that has GPUs, with the packages and memory found on it.

    Attributes:
        address: Address of the node.
        gpus: Number of GPUs registered with Ray.
        built_for: Device for which the node's torch is built, cpu or cuda; None: no response, or no torch.
        gpu_memory: Usable memory of the node's smallest GPU in bytes; None: unknown.
        host_memory: Main memory in bytes; None: unknown.
        kinds: Name and compute capability of each GPU; empty: unknown.
    """

    address: str
    gpus: int
    built_for: str | None = None
    gpu_memory: int | None = None
    host_memory: int | None = None
    kinds: tuple[tuple[str, tuple[int, int]], ...] = ()


def count_local_cpus(config: RunConfig) -> int:
    """Return the number of logical CPUs that a local cluster needs for max_workers workers and their readers."""
    return int(config.scaling.max_workers * build_worker_bundle(config, "cpu")["CPU"])


def build_worker_bundle(config: RunConfig, device: str, cpu_nodes_read_rows: bool = False) -> dict[str, float]:
    """Return the resources that Ray reserves for a worker: name of the resource → amount.

    The resources include the CPUs of the worker's readers, so read tasks themselves request no CPUs. Otherwise, read
    tasks of an evaluation would wait forever if workers and paused read tasks of training held all CPUs.

    Args:
        config: Configuration of the run.
        device: cpu or cuda.
        cpu_nodes_read_rows: True if nodes without GPUs read all rows, so that workers need no CPUs for readers.
    """
    scaling = config.scaling
    cpus: float = scaling.cpus_per_worker + (0 if cpu_nodes_read_rows else config.data.readers)
    return {"CPU": cpus} | ({"GPU": 1.0} if device == "cuda" else {})


def is_local() -> bool:
    """Return True if every node of the cluster runs on this machine, with a loopback address."""
    import ray

    return all(node["NodeManagerAddress"] == "127.0.0.1" for node in ray.nodes())


def list_gpu_nodes() -> list[GpuNode]:
    """Return the alive nodes with GPUs.

    The packages and memory of a node that does not respond within NODE_ANSWER_TIMEOUT_S are unknown (GpuNode).
    The Ray tasks that inspect the nodes request neither CPUs nor GPUs, so that they do not wait for other work.
    """
    import ray

    nodes = [node for node in list_alive_nodes() if node["Resources"].get("GPU")]
    if is_local():
        answers = [inspect_this_node() for _ in nodes]
    else:
        inspect = ray.remote(max_retries=0)(inspect_this_node)
        references = [inspect.options(**pin_to_node(node["NodeID"])).remote() for node in nodes]
        answers = collect_answers(references, NODE_ANSWER_TIMEOUT_S)
    found = [{} if isinstance(info, Exception) else info for info in answers]  # the workers will report a lost node
    return [
        GpuNode(node["NodeManagerAddress"], int(node["Resources"]["GPU"]), **info)
        for node, info in zip(nodes, found, strict=True)
    ]


def inspect_this_node() -> dict[str, Any]:
    """Return the fields of GpuNode except address and gpus, as measured on the machine of this process."""
    return {
        "built_for": get_build_device(),
        "gpu_memory": get_smallest_gpu_memory(),
        "host_memory": measure_system_memory(),
        "kinds": tuple(list_gpu_kinds()),
    }


def choose_device(config: RunConfig, nodes: list[GpuNode], console: Any) -> str:
    """Return cpu or cuda: scaling.device or, with auto, cuda if the cluster has usable GPUs.

    Args:
        config: Configuration of the run.
        nodes: Nodes with GPUs (list_gpu_nodes).
        console: RunConsole that shows a note if GPUs cannot be used, or if their bandwidth is unknown.

    Raises:
        ConfigError: The workers and their readers need more GPUs or CPUs than the cluster has, and there is
            no autoscaler; scaling.device is auto, and the cluster has an autoscaler but currently no GPUs;
            scaling.device is cuda, but torch on a node with GPUs is built for CPUs; FBGEMM supports none of the
            GPUs, and there is no autoscaler; or train.compile is graphs, but training runs on CPUs.
    """
    scaling, grows = config.scaling, has_autoscaler()
    if grows and not nodes and scaling.device == "auto":
        raise ConfigError(
            "the cluster currently has no GPUs, but its autoscaler may start nodes with GPUs",
            where="scaling.device=auto (the default)",
            expected="cuda or cpu, so that the autoscaler starts nodes of the right kind",
            do="set scaling.device=cuda, or scaling.device=cpu",
        )
    device = scaling.device if scaling.device != "auto" else ("cuda" if nodes else "cpu")
    if device == "cuda" and (cpu_builds := [node.address for node in nodes if node.built_for == "cpu"]):
        place = "this machine" if is_local() else ", ".join(cpu_builds)
        advice = REINSTALL_ADVICE.format(device="cuda")
        problem = f"the packages on {place} are for CPUs (torch or FBGEMM)"
        if scaling.device == "cuda":
            raise ConfigError(
                problem,
                where="scaling.device=cuda",
                expected="the packages of requirements/cuda.txt on every node with GPUs",
                do=f"{advice}; or set scaling.device=cpu",
            )
        console.note(f"GPUs are available, but {problem}: the workers use CPUs. To use GPUs: {advice}")
        device = "cpu"
    if config.train.compile == "graphs" and device == "cpu":
        why = "the packages are for CPUs" if nodes else "the cluster has no GPUs"
        raise ConfigError(
            f"CUDA graphs require GPUs, but {'scaling.device is cpu' if scaling.device == 'cpu' else why}",
            where="train.compile=graphs",
            expected="training on GPUs, with the packages for GPUs",
            do="set train.compile=true",
        )
    if not grows:  # with an autoscaler, the run waits for new nodes
        refusals = [check_fbgemm_support(kind, node.address) for node in nodes for kind in node.kinds]
        if device == "cuda" and refusals and all(refusals) and all(node.kinds for node in nodes):
            raise refusals[0]  # otherwise workers check their own GPUs
        _check_capacity(config, device, sum(node.gpus for node in nodes))
    names = sorted({name for node in nodes for name, _ in node.kinds if not find_gpu(name)})
    if device == "cuda" and names:
        console.note(f"the bandwidths of {', '.join(names)} are unknown: tables are sharded as for a V100")
    return device


def _check_capacity(config: RunConfig, device: str, gpus: int) -> None:
    """Check that the nodes would have room for the minimum number of workers if no other work ran on them.

    Raises:
        ConfigError: The nodes have too few GPUs or CPUs.
    """
    least = config.scaling.min_workers
    read_elsewhere = reads_on_cpu_nodes(config, device)
    resources = build_worker_bundle(config, device, read_elsewhere)
    if device == "cuda" and gpus < least:
        raise ConfigError(
            f"the cluster has {format_count(gpus, 'GPU')} for {format_count(least, 'worker')}",
            where="scaling.num_workers, scaling.device" if gpus else "scaling.device=cuda",
            expected="one GPU for each worker",
            do="lower scaling.num_workers, or set scaling.device=cpu" if gpus else "set scaling.device=cpu",
        )
    nodes = [node["Resources"] for node in list_alive_nodes()]
    if sum(int(min(node.get(name, 0) // n for name, n in resources.items())) for node in nodes) < least:
        with_gpus = " with GPUs" if device == "cuda" else ""
        cpus = int(sum(node.get("CPU", 0) for node in nodes if device == "cpu" or node.get("GPU")))
        own = ["scaling.cpus_per_worker"] + ["data.readers"] * (not read_elsewhere)
        keys = ["scaling.num_workers"] * (least > 1) + own
        raise ConfigError(
            f"the nodes{with_gpus} have no room for {format_count(least, 'worker')}"
            f"{'' if read_elsewhere else ' with readers'} ({format_count(cpus, 'CPU')} in total)",
            where=", ".join(keys),
            expected=f"{format_count(int(resources['CPU']), 'CPU')} on one node for each worker ({' plus '.join(own)})",
            do=f"lower {' or '.join(keys)}, or use a larger cluster",
        )


def reads_on_cpu_nodes(config: RunConfig, device: str) -> bool:
    """Return True if GPU workers reserve no CPUs for readers, which run on other CPUs (data.read_on); False on CPUs.

    With read_on=auto, this is the case if nodes without GPUs have a CPU for each reader, or if the cluster has an
    autoscaler, which then provides CPUs on nodes of any kind.
    """
    if device != "cuda" or config.data.read_on != "auto":
        return device == "cuda" and config.data.read_on == "cpu_nodes"
    required_cpus = config.scaling.max_workers * config.data.readers
    return has_autoscaler() or sum(find_nodes_without_gpus().values()) >= required_cpus


def check_constraints(config: RunConfig, schema: Schema, device: str, nodes: list[GpuNode], console: Any) -> None:
    """Check that tables can be placed as configured with every number of workers from the minimum to the maximum.

    Limits of memory are checked where the memory is known. The console shows a warning if copies for checkpoints and
    rows read ahead may leave too little main memory for the processes.

    Args:
        config: Configuration of the run.
        schema: Schema of the run.
        device: cpu or cuda.
        nodes: Nodes with GPUs (list_gpu_nodes).
        console: RunConsole that shows the warning.

    Raises:
        ConfigError: A constraint of plan.*, such as the ranks of a table or the memory, cannot be met.
    """
    min_workers, max_workers, local = config.scaling.min_workers, config.scaling.max_workers, is_local()
    memory = int(config.plan.memory_gib * GIB) if config.plan.memory_gib else None
    if memory is None and device == "cuda":
        memory = min((node.gpu_memory for node in nodes if node.gpu_memory), default=None)
    elif memory is None and local:
        memory = measure_system_memory() // max_workers
    for workers in range(min_workers, max_workers + 1):
        hosts = {"ranks_per_host": workers if local else None, "host_share": _compute_host_share(nodes, workers, local)}
        constraints = validate_constraints(config, schema, device, world=workers, memory=memory, **hosts)
    share = _compute_host_share(nodes, min_workers, local)
    if device == "cuda" and share and config.checkpoint.async_save:
        copies, ahead = estimate_copy_bytes(config, schema, constraints, min_workers)
        if copies + ahead > (1 - HOST_RESERVE_SHARE) * share:
            console.warn(
                f"checkpoints copy {copies / GIB:.1f} GiB from each GPU to main memory, and {ahead / GIB:.1f} GiB of "
                f"rows are read ahead, which may leave too little of each worker's {share / GIB:.1f} GiB for its "
                "processes; set checkpoint.async_save=false to avoid the copies"
            )


def _compute_host_share(nodes: list[GpuNode], workers: int, local: bool) -> int | None:
    """Return the smallest main memory per worker on any node, in bytes; None if unknown."""
    if local:
        return measure_system_memory() // workers
    measured = [node for node in nodes if node.host_memory]
    return min((node.host_memory // min(node.gpus, workers) for node in measured), default=None)
