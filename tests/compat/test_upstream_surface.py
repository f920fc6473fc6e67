"""Every private name of upstream that raytrec/compat uses: it is there, as it was read, and still called.

A failure names what a new version has moved: read that part of it again, then adapt raytrec/compat and what
is recorded here.
"""

import inspect
import re
from functools import cache, reduce
from importlib import import_module
from importlib.metadata import entry_points
from pathlib import Path

import pytest

from raytrec.compat.ray_core import REPORTS_SELDOM, SELDOM
from raytrec.compat.ray_data import PROGRESS

# Lines `module:name(parameters)`, as upstream has them; one for each, where supported releases differ.
SIGNATURES = (Path(__file__).parent / "signatures.txt").read_text().splitlines()
# Names without a signature: constants, values, modules.
NAMES = [
    "ray._private.worker:_global_node",
    "ray._private.worker:print_to_stdstream",
    "ray._private.auto_init_hook:enable_auto_connect",
    "ray._private.ray_constants:ENABLE_RAY_CLUSTER",
    "ray._private.ray_constants:ENABLE_RAY_CLUSTERS_ENV_VAR",
    "ray._private.services:ConsolePopen",
    "ray._private.services:RAYLET_EXECUTABLE",
    "ray._private.ray_constants:SETUP_WORKER_FILENAME",
    "ray._raylet:ActorClassID.size",
    "ray._common.constants:HEAD_NODE_RESOURCE_NAME",
    "ray._common.utils:get_system_memory",
    "ray._raylet:GcsClient",
    "ray._raylet:InnerGcsClient.drain_node",
    "ray._raylet:Config.initialize",
    "ray.train.v2.api.config:ScalingConfig._resources_per_worker_not_none",
    "ray.train.v2._internal.execution.failure_handling.default:RETRYABLE_CONTROLLER_ERRORS",
    "torch.autograd:Variable._execution_engine.queue_callback",
    "torch.distributed.rendezvous:TCPStore",
    "torchrec.distributed.train_pipeline.runtime_forwards:BaseForward",
]
PLAIN = "torchrec.distributed.train_pipeline.train_pipelines:TrainPipelineSparseDist"
PREFETCH = "torchrec.distributed.train_pipeline.train_pipelines:PrefetchTrainPipelineSparseDist"
TRAINER = "ray.train.v2.api.data_parallel_trainer:DataParallelTrainer."
SCALING = "ray.train.v2._internal.execution.scaling_policy.scaling_policy:ScalingPolicy."
CALLBACKS = "ray.train.v2._internal.callbacks.placement_group_callback:"
FUSED = "fbgemm_gpu.split_table_batched_embeddings_ops_training:SplitTableBatchedEmbeddingBagsCodegen."
KERNELS = "torchrec.distributed.batched_embedding_kernel:"
EXECUTOR = "ray.data._internal.execution.streaming_executor:StreamingExecutor."
METRICS = "ray.data._internal.execution.interfaces.op_runtime_metrics:OpRuntimeMetrics."
NAMES += [METRICS + name for name in PROGRESS]
# (what we override, replace or set, who upstream uses it, how that reads there)
CALLED = [
    # ray_train.py
    ("_initialize_and_run_controller", TRAINER + "fit", "self._initialize_and_run_controller("),
    ("policies", TRAINER + "fit", "scaling_policy="),
    ("policies", TRAINER + "fit", "failure_policy="),
    ("_create_default_callbacks", TRAINER + "fit", "self._create_default_callbacks()"),
    (
        "_register_sigint_handler",
        TRAINER + "_initialize_and_run_controller",
        "self._register_sigint_handler(controller)\n\n        ray.get(controller.run.remote())",
    ),
    ("result", TRAINER + "_initialize_and_run_controller", "return ray.get(controller.get_result.remote())"),
    (
        "_get_num_workers_for_resource_request",
        SCALING + "_maybe_send_resource_request",
        "self._get_num_workers_for_resource_request()",
    ),
    ("_cancel_resource_request", SCALING + "before_controller_shutdown", "self._cancel_resource_request()"),
    ("_cancel_resource_request", SCALING + "before_controller_abort", "self._cancel_resource_request()"),
    (
        "TorchConfig.backend_cls",
        "ray.train.v2._internal.callbacks.backend_setup:BackendSetupCallback.__init__",
        "backend_cls()",
    ),
    (
        "_TorchBackend.on_start",
        "ray.train.v2._internal.callbacks.backend_setup:BackendSetupCallback",
        "self._backend.on_start(execution_group, self._backend_config)",
    ),
    (
        "before_init_train_context",
        "ray.train.v2._internal.execution.worker_group.worker_group:WorkerGroup",
        "cb.before_init_train_context(workers)",
    ),
    # ray_cleaner.py
    (
        "PlacementGroupCleaner",
        CALLBACKS + "PlacementGroupCleanerCallback.after_controller_start",
        "(PlacementGroupCleaner)",
    ),
    (
        "start_monitoring",
        CALLBACKS + "PlacementGroupCleanerCallback",
        "self._cleaner.start_monitoring.remote()",
    ),
    (
        "is_actor_alive",
        "ray.train.v2._internal.execution.controller.placement_group_cleaner:PlacementGroupCleaner._monitor_loop",
        "is_actor_alive(",
    ),
    # ray_core.py
    (
        "ENABLE_RAY_CLUSTER",
        "ray._private.services:get_node_ip_address",
        "not ray_constants.ENABLE_RAY_CLUSTER",
    ),
    ("enable_auto_connect", "ray._private.auto_init_hook:auto_init_ray", "enable_auto_connect"),
    ("gcs_server", "ray._private.services:start_gcs_server", "GCS_SERVER_EXECUTABLE,"),
    (
        "ray.util.client.server",
        "ray._private.services:start_ray_client_server",
        '"ray.util.client.server",',
    ),
    ("print_to_stdstream", "ray._private.worker:listen_error_messages", "print_to_stdstream"),
    ("ConsolePopen", "ray._private.services:start_ray_process", "ConsolePopen("),
    ("RAYLET_EXECUTABLE", "ray._private.services:start_raylet", "command = [\n        RAYLET_EXECUTABLE"),
    ("SETUP_WORKER_FILENAME", "ray._private.node:Node.__init__", "ray_constants.SETUP_WORKER_FILENAME"),
    ("ActorClassID", "ray.actor:_make_actor", "ActorClassID.from_random()"),
    ("start_api_server", "ray._private.node:Node.start_head_processes", "self.start_api_server("),
    ("start_monitor", "ray._private.node:Node.start_head_processes", "self.start_monitor()"),
    ("start_log_monitor", "ray._private.node:Node.start_ray_processes", "self.start_log_monitor()"),
    # ray_data.py
    (
        "create_cluster_autoscaler",
        EXECUTOR + "execute",
        "self._cluster_autoscaler = create_cluster_autoscaler(",
    ),
    ("get_total_resources", EXECUTOR + "execute", "self._cluster_autoscaler.get_total_resources()"),
    ("_scheduling_loop_step", EXECUTOR + "run", "self._scheduling_loop_step(self._topology)"),
    ("on_execution_step", EXECUTOR.rstrip("."), "callback.on_execution_step(self)"),
    (
        "gen_dataset_id_from_stats_actor",
        "ray.data:Dataset.__init__",
        "self._set_uuid(_StatsManager.gen_dataset_id_from_stats_actor())",
    ),
    # torch_.py
    ("TCPStore", "torch.distributed.rendezvous:_create_c10d_store", "TCPStore("),
    ("Work.wait", "torchrec.distributed.dist_data:KJTAllToAllTensorsAwaitable._wait_impl", ".wait()"),
    ("_apply", "torch.nn:Module.to", "self._apply("),
    ("_apply", "torch.nn:Module.half", "self._apply("),
    ("_apply", "torch.nn:Module._apply", "module._apply(fn)"),
    # torchrec_pipeline.py
    ("_next_batch", PLAIN + ".copy_batch_to_gpu", "self._next_batch("),
    ("copy_batch_to_gpu", PLAIN + ".enqueue_batch", "self.copy_batch_to_gpu("),
    (
        "start_sparse_data_dist",
        PLAIN + ".progress",
        "self.start_sparse_data_dist(",
    ),
    ("wait_sparse_data_dist", PLAIN + ".progress", "self.wait_sparse_data_dist("),
    ("custom_model_fwd", PLAIN + ".progress", "self._model_fwd("),
    ("_backward", PLAIN + ".progress", "self._backward(losses)"),
    ("_optimizer_step", PLAIN + ".progress", "self._optimizer_step()"),
    ("_prefetch", PREFETCH + ".fill_pipeline", "self._prefetch("),
    (
        "BaseForward",
        "torchrec.distributed.train_pipeline.utils:_rewrite_model",
        "pipelined_forward",
    ),
    # fbgemm_lookups.py
    ("init_parameters", KERNELS + "BatchedFusedEmbedding.__init__", "self.init_parameters()"),
    ("init_parameters", KERNELS + "BatchedFusedEmbeddingBag.__init__", "self.init_parameters()"),
    ("init_parameters", KERNELS + "BatchedDenseEmbedding.__init__", "self.init_parameters()"),
    ("init_parameters", KERNELS + "BatchedDenseEmbeddingBag.__init__", "self.init_parameters()"),
    *[
        (
            "_optimizer_kwargs",
            f"torchrec.distributed.{name}:create_sharding_infos_by_sharding_device_group",
            'optimizer_params = getattr(param, "_optimizer_kwargs", [{}])',
        )
        for name in ("embedding", "embeddingbag")
    ],
    *[
        (
            f"preallocated_host_buffers of {name}",
            FUSED + "__init__",
            f'_preallocated_host_buffers.get("{name}")',
        )
        for name in ("weights", "momentum1")
    ],
    (
        "raytrec_mapped",
        "torchrec.distributed.embedding_sharding:group_tables",
        "tuple(sorted(group_fused_params.items()))",
    ),
    ("raytrec_mapped", KERNELS + "BatchedFusedEmbedding", "**fused_params"),
    ("raytrec_mapped", KERNELS + "BatchedFusedEmbeddingBag", "**fused_params"),
    # fbgemm.py
    ("lock_cache_line", FUSED + "_prefetch", "self.lock_cache_line"),
    ("lxu_cache_locking_counter", FUSED + "_prefetch", "self.lxu_cache_locking_counter"),
    ("iter_cpu", FUSED + "forward", "self.iter_cpu.item() == 0"),
    ("set_optimizer_step", FUSED + "set_optimizer_step", "self.iter"),
]
# Attributes that are made in __init__: the class whose source sets them.
SET = [
    ("torchrec.distributed.embeddingbag:ShardedEmbeddingBagCollection", "self._lookups"),
    ("torchrec.distributed.embedding:ShardedEmbeddingCollection", "self._lookups"),
    ("torchrec.distributed.embedding_lookup:GroupedPooledEmbeddingsLookup", "self._emb_modules"),
    ("torchrec.distributed.embedding_lookup:GroupedEmbeddingsLookup", "self._emb_modules"),
    ("torchrec.distributed.batched_embedding_kernel:BatchedFusedEmbedding", "self._emb_module"),
    ("torchrec.distributed.batched_embedding_kernel:BatchedFusedEmbedding", "def emb_module("),
    (
        "torchrec.distributed.batched_embedding_kernel:BatchedFusedEmbedding",
        "SplitTableBatchedEmbeddingBagsCodegen(\n                embedding_specs",
    ),
    ("torchrec.distributed.batched_embedding_kernel:BatchedFusedEmbedding", "pooling_mode=PoolingMode.NONE"),
    ("torchrec.distributed.batched_embedding_kernel:BatchedDenseEmbedding", "pooling_mode=PoolingMode.NONE"),
    (
        "torchrec.distributed.batched_embedding_kernel:BatchedDenseEmbedding",
        "DenseTableBatchedEmbeddingBagsCodegen(\n                list(zip(self._local_rows",
    ),
    ("torchrec.distributed.batched_embedding_kernel:BaseBatchedEmbedding", "def config("),
    ("torchrec.distributed.batched_embedding_kernel:BatchedFusedEmbeddingBag", "self._emb_module"),
    ("torchrec.distributed.batched_embedding_kernel:BatchedFusedEmbeddingBag", "def emb_module("),
    ("torchrec.distributed.batched_embedding_kernel:BaseBatchedEmbeddingBag", "def config("),
    ("torchrec.optim.keyed:OptimizerWrapper", "self._optimizer"),
    ("torchrec.optim.keyed:KeyedOptimizerWrapper", "self._optimizer"),
    (PLAIN, "self._model = model"),
    (PLAIN, "self.contexts"),
    (PLAIN, "self.batches"),
    (PREFETCH, "self._prefetch_stream"),
    (PREFETCH, "self._default_stream"),
    (PREFETCH, "module_input_post_prefetch"),
    (PREFETCH, "module_contexts_post_prefetch"),
    ("ray.dashboard.modules.dashboard_sdk:SubmissionClient", "self._server_ray_version"),
    ("ray.train.v2._internal.exceptions:WorkerHealthCheckFailedError", "self.health_check_failure"),
    ("ray.exceptions:RayActorError", "def preempted("),
    ("torch.distributed.checkpoint.api:CheckpointException", "self._failures"),
    *[
        (FUSED.rstrip("."), name)
        for name in (
            "self.iter_cpu",
            '"iter"',
            "self.hash_size_cumsum",
            '"hash_size_cumsum"',
            "weights_host",
            "self.max_D",
            "lxu_cache_weights",
            "lxu_cache_state",
            "cache_hash_size_cumsum",
            "self.gather_uvm_cache_stats",
            "self.prefetch_stream",
            "self.prefetch_pipeline",
            "self.lock_cache_line",
        )
    ],
]
# (file below its package, text): names of files and variables, and texts of errors.
TEXTS = [
    ("ray/train/v2/_internal/constants.py", '"RAY_TRAIN_HEALTH_CHECK_INTERVAL_S"'),
    ("ray/train/v2/_internal/constants.py", '"RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S"'),
    ("ray/train/v2/_internal/constants.py", '"RAY_TRAIN_ENABLE_PREEMPTION_WATCHER"'),
    ("ray/train/v2/_internal/constants.py", '"checkpoint_manager_snapshot.json"'),
    ("ray/_private/runtime_env/constants.py", '"RAY_JOB_CONFIG_JSON_ENV_VAR"'),
    ("ray/_private/runtime_env/working_dir.py", '"working_dir_files"'),
    ("ray/dashboard/modules/job/job_supervisor.py", "RAY_JOB_CONFIG_JSON_ENV_VAR"),
    ("ray/_common/utils.py", '"ray_current_cluster"'),
    ("ray/_private/ray_constants.py", '"ray::IDLE"'),
    ("ray/util/client/worker.py", "Initialization failure from server"),
    ("ray/util/client/server/proxier.py", "Starting Ray client server failed"),
    ("ray/util/client/__init__.py", "ersion mismatch"),
    ("ray/dashboard/modules/job/job_head.py", "No available agent"),
    ("ray/core/generated/gcs_service_pb2_grpc.py", "/ray.rpc.NodeInfoGcsService/CheckAlive"),
    ("ray/core/generated/ray_client_pb2_grpc.py", "/ray.rpc.RayletDriver/ClusterInfo"),
    ("ray/core/src/ray/gcs/gcs_server", "node has died"),
    ("ray/core/src/ray/raylet/raylet", "running low on memory"),
    ("ray/core/src/ray/raylet/raylet", "prestart_worker_first_driver"),
    ("ray/core/src/ray/raylet/raylet", "RAY_JOB_ID"),
    ("ray/_raylet.so", "RAY_RAYLET_PID"),
    *[("ray/core/src/ray/raylet/raylet", name) for name in SELDOM],
    *[("ray/dashboard/modules/reporter/reporter_consts.py", f'"{name}"') for name in REPORTS_SELDOM],
    ("ray/_private/runtime_env/context.py", "self.override_worker_entrypoint"),
    ("ray/_private/workers/setup_worker.py", "--serialized-runtime-env-context"),
    ("ray/_private/workers/setup_worker.py", "--language"),
    ("torch/fx/_symbolic_trace.py", "is_fx_tracing will return true"),
    ("mlflow/utils/mlflow_tags.py", '"mlflow.parentRunId"'),
    ("mlflow/utils/rest_utils.py", "failed with error code {response.status_code}"),
    ("mlflow/exceptions.py", "self.json = json"),
    ("mlflow/demo/generators/traces.py", '"mlflow.experimentKind"'),
    ("mlflow/environment_variables.py", "MLFLOW_HTTP_REQUEST_MAX_RETRIES"),
    ("mlflow/environment_variables.py", "MLFLOW_HTTP_REQUEST_TIMEOUT"),
    ("mlflow/environment_variables.py", "MLFLOW_HTTP_RESPECT_RETRY_AFTER_HEADER"),
    ("mlflow/environment_variables.py", "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT"),
    ("mlflow/environment_variables.py", "MLFLOW_DISABLE_TELEMETRY"),
]


def find(name):
    """What `module:a.b` names, without binding it."""
    module, _, path = name.partition(":")
    return reduce(inspect.getattr_static, path.split("."), import_module(module))


def parameters(name):
    found = find(name)
    found = found.__func__ if isinstance(found, staticmethod | classmethod) else found
    found = found.fget if isinstance(found, property) else found
    plain = [p.replace(annotation=p.empty) for p in inspect.signature(found).parameters.values()]
    return ", ".join(re.sub(r"<.*>", "…", str(parameter)) for parameter in plain)


@cache
def source(name):
    found = find(name)
    found = found.__func__ if isinstance(found, staticmethod | classmethod) else found
    return inspect.getsource(inspect.unwrap(found))


@pytest.mark.parametrize("name", sorted({line.partition("(")[0] for line in SIGNATURES}))
def test_it_takes_what_it_took(name):
    known = [line for line in SIGNATURES if line.startswith(f"{name}(")]
    assert f"{name}({parameters(name)})" in known


@pytest.mark.parametrize("name", NAMES)
def test_it_is_there(name):
    find(name)


@pytest.mark.parametrize("ours, caller, text", CALLED)
def test_upstream_still_uses_what_is_replaced(ours, caller, text):
    assert text in source(caller), f"{caller} has no {text}: what compat does with {ours} has no effect"


@pytest.mark.parametrize("owner, text", SET)
def test_upstream_still_has_the_attribute(owner, text):
    assert text in source(owner), f"{owner} has no {text}"


@pytest.mark.parametrize("file, text", TEXTS)
def test_upstream_still_says_it(file, text):
    package, _, rest = file.partition("/")
    place = Path(import_module(package).__file__).parent / rest
    assert text.encode() in place.read_bytes(), f"{file} has no {text}"


def test_nothing_more_is_asked_of_an_autoscaler():
    from ray.data._internal.cluster_autoscaler import ClusterAutoscaler

    methods = {"try_trigger_scaling", "on_executor_shutdown", "get_total_resources"}
    assert ClusterAutoscaler.__abstractmethods__ == methods


def test_a_drain_still_has_its_reason():
    from ray.core.generated import autoscaler_pb2

    assert autoscaler_pb2.DrainNodeReason.Value("DRAIN_NODE_REASON_PREEMPTION")


def test_a_store_still_takes_a_socket_that_listens():
    from torch.distributed import TCPStore

    assert "master_listen_fd: " in TCPStore.__init__.__doc__


def test_addresses_of_stores_are_those_that_mlflow_knows():
    from mlflow.tracking._tracking_service.utils import _tracking_store_registry as known

    from raytrec.compat.mlflow_ import DATABASES, PLUGINS, SCHEMES

    plugins = {plugin.name for plugin in entry_points(group=PLUGINS)}
    assert known.group_name == PLUGINS and {*known._registry} == {*SCHEMES, *DATABASES} | plugins
