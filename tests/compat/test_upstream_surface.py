"""Private upstream names used by raytrec/compat: they exist, have the recorded form and are still used.

A failure names the part that changed in a new version. Read that part again, then adapt raytrec/compat and
the records in this file.
"""

import inspect
import re
from functools import cache, reduce
from importlib import import_module
from importlib.metadata import entry_points
from pathlib import Path

import pytest

from raytrec.compat.ray_data import PROGRESS_FIELDS
from raytrec.compat.ray_start import INFREQUENT_REPORTS_ENV, INFREQUENT_WORK_SETTINGS, SERVE_MODULES

# Upstream signatures as `module:name(parameters)`; one line per variant if supported releases differ.
SIGNATURES = (Path(__file__).parent / "signatures.txt").read_text().splitlines()
# Names without a signature: constants, values, modules.
NAMES = [
    "ray.serve._private.replica:add_port_to_grpc_server",
    *(f"{module}:__name__" for module in SERVE_MODULES),
    "torch.testing._internal.distributed.fake_pg:FakeStore",
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
    "ray._private.utils:estimate_available_memory",
    "ray._raylet:GcsClient",
    "ray._raylet:InnerGcsClient.drain_node",
    "ray._raylet:Config.initialize",
    "ray.train.v2.api.config:ScalingConfig._resources_per_worker_not_none",
    "ray.train.v2._internal.execution.failure_handling.default:RETRYABLE_CONTROLLER_ERRORS",
    "torch.autograd:Variable._execution_engine.queue_callback",
    "torch:_C._dispatch_has_kernel",
    "torch.autograd:_profiler_enabled",
    "torch.cuda:_is_in_bad_fork",
    "torch.distributed.rendezvous:TCPStore",
    "torch.utils.cpp_extension:TORCH_LIB_PATH",
    "torchrec.distributed.train_pipeline.runtime_forwards:BaseForward",
]
HTTP = "uvicorn.protocols.http.httptools_impl:HttpToolsProtocol"
TRAINER = "ray.train.v2.api.data_parallel_trainer:DataParallelTrainer."
EXECUTION = "ray.train.v2._internal.execution."
SCALING = EXECUTION + "scaling_policy.scaling_policy:ScalingPolicy."
CALLBACKS = "ray.train.v2._internal.callbacks."
CLEANER = CALLBACKS + "placement_group_callback:PlacementGroupCleanerCallback"
SERVICES = "ray._private.services:"
NODE = "ray._private.node:Node."
EXECUTOR = "ray.data._internal.execution.streaming_executor:StreamingExecutor"
PIPELINES = "torchrec.distributed.train_pipeline.train_pipelines:"
KERNELS = "torchrec.distributed.batched_embedding_kernel:"
LOOKUP = "torchrec.distributed.embedding_lookup:"
FUSED = "fbgemm_gpu.split_table_batched_embeddings_ops_training:SplitTableBatchedEmbeddingBagsCodegen"
METRICS = "ray.data._internal.execution.interfaces.op_runtime_metrics:OpRuntimeMetrics."
NAMES += [METRICS + name for name in PROGRESS_FIELDS]
# Class or function → expected parts of its source: code that compat replaces or sets, attributes it reads.
SOURCES = {
    # ray_core.py, names of libraries
    "ray.serve._private.replica:Replica._on_initialized": ['add_port_to_grpc_server(self._server, "[::]:0")'],
    "ray.serve._private.replica:Replica.initialize": ["is_first_init and RAY_SERVE_FREEZE_GC_ON_STARTUP"],
    # uvicorn_.py
    HTTP + ".connection_made": ["self.connections.add(self)", "self.transport = transport"],
    HTTP + ".data_received": ["self.parser.feed_data(data)", "except httptools.HttpParserError:"],
    HTTP + ".on_message_begin": ['self.url = b""', "self.headers = []"],
    HTTP + ".on_headers_complete": ["self.pipeline.appendleft((self.cycle, app))"],
    HTTP + ".on_message_complete": ["self.cycle.response_complete", "self.cycle.more_body = False"],
    HTTP + ".on_response_complete": ["self.transport.is_closing()", "self.pipeline.pop()"],
    HTTP: [
        "def on_body(self, body: bytes)",
        "def pause_writing(self)",
        "def resume_writing(self)",
        "def timeout_keep_alive_handler(self)",
        "def send_400_response(self, msg: str)",
        "on_response=self.on_response_complete",
    ],
    "uvicorn.protocols.http.httptools_impl:RequestResponseCycle": [
        'headers = self.default_headers + list(message.get("headers", []))',
        "self.keep_alive = False",
        "self.response_started = ",
        "                    self.transport.close()\n                self.on_response()",
    ],
    "uvicorn:Server.shutdown": ["for server in self.servers:", "connection.shutdown()"],
    "uvicorn:Server._serve": ["await self.shutdown(sockets=sockets)"],
    "uvicorn:Server.startup": ["config=config,", "server_state=self.server_state,", "app_state=self.lifespan.state,"],
    "uvicorn:Server.on_tick": ["self.server_state.default_headers = date_header + self.config.encoded_headers"],
    # ray_train.py
    TRAINER + "fit": [
        "self._initialize_and_run_controller(",
        *("scaling_policy=", "failure_policy=", "self._create_default_callbacks()"),
    ],
    TRAINER + "_initialize_and_run_controller": [
        "self._register_sigint_handler(controller)\n\n        ray.get(controller.run.remote())",
        "return ray.get(controller.get_result.remote())",
    ],
    SCALING + "_maybe_send_resource_request": ["self._get_num_workers_for_resource_request()"],
    SCALING + "before_controller_shutdown": ["self._cancel_resource_request()"],
    SCALING + "before_controller_abort": ["self._cancel_resource_request()"],
    CALLBACKS + "backend_setup:BackendSetupCallback.__init__": ["backend_cls()"],
    CALLBACKS + "backend_setup:BackendSetupCallback": ["self._backend.on_start(execution_group, self._backend_config)"],
    EXECUTION + "worker_group.worker_group:WorkerGroup": ["cb.before_init_train_context(workers)"],
    "ray.train.v2._internal.exceptions:WorkerHealthCheckFailedError": ["self.health_check_failure"],
    CLEANER + ".after_controller_start": ["(PlacementGroupCleaner)"],
    CLEANER: ["self._cleaner.start_monitoring.remote()"],
    EXECUTION + "controller.placement_group_cleaner:PlacementGroupCleaner._monitor_loop": ["is_actor_alive("],
    # ray_core.py
    SERVICES + "get_node_ip_address": ["not ray_constants.ENABLE_RAY_CLUSTER"],
    "ray._private.auto_init_hook:auto_init_ray": ["enable_auto_connect"],
    SERVICES + "start_gcs_server": ["GCS_SERVER_EXECUTABLE,"],
    SERVICES + "start_ray_client_server": ['"ray.util.client.server",'],
    "ray._private.worker:listen_error_messages": ["print_to_stdstream"],
    SERVICES + "start_ray_process": ["ConsolePopen("],
    SERVICES + "start_raylet": ["command = [\n        RAYLET_EXECUTABLE"],
    NODE + "__init__": ["ray_constants.SETUP_WORKER_FILENAME"],
    "ray.actor:_make_actor": ["ActorClassID.from_random()"],
    NODE + "start_head_processes": ["self.start_api_server(", "self.start_monitor()"],
    NODE + "start_ray_processes": ["self.start_log_monitor()"],
    "ray.dashboard.modules.dashboard_sdk:SubmissionClient": ["self._server_ray_version"],
    "ray.exceptions:RayActorError": ["def preempted("],
    # ray_data.py
    EXECUTOR + ".execute": [
        "self._cluster_autoscaler = create_cluster_autoscaler(",
        "self._cluster_autoscaler.get_total_resources()",
    ],
    EXECUTOR + ".run": ["self._scheduling_loop_step(self._topology)"],
    EXECUTOR: ["callback.on_execution_step(self)"],
    "ray.data:Dataset.__init__": ["self._set_uuid(_StatsManager.gen_dataset_id_from_stats_actor())"],
    # torch_.py
    "torch.autograd.profiler:record_function.__exit__": ["if not self.run_callbacks_on_exit:"],
    "torch.distributed.rendezvous:_create_c10d_store": ["TCPStore("],
    "torch.nn:Module.to": ["self._apply("],
    "torch.nn:Module.half": ["self._apply("],
    "torch.nn:Module.__init__": [f'super().__setattr__("{name}"' for name in ("_parameters", "_buffers", "_modules")],
    "torch.fx:GraphModule.recompile": ["cls = type(self)", "cls.forward = "],
    "torch.nn:Module._apply": ["module._apply(fn)"],
    "torch.distributed.checkpoint.api:CheckpointException": ["self._failures"],
    "torch.export.pt2_archive._package:load_pt2": ["PT2ArchiveContents(exported_programs, "],
    "torch._dynamo.callback:CompilationCallbackHandler.install_callbacks": [
        "self.run_start_callbacks(args)",
        "self.run_end_callbacks(args)",
    ],
    "torch._ops:OpOverload.__init__": ["self._schema = ", "self._overloadpacket = "],
    # torchrec_pipeline.py
    "torchrec.distributed.embedding_sharding:FusedKJTListSplitsAwaitable.__init__": ["t_list = _safe_tolist(t)"],
    "torchrec.distributed.dist_data:_check_int_overflow": ["if not values:"],
    "torchrec.distributed.train_pipeline.runtime_forwards:KJTAllToAllForward.__call__": [
        "torch.tensor([input_stride] * self._pg.size(), device=device)",
        "return KJTSplitsAllToAllMeta(\n                pg=self._pg,\n                _input=input,",
    ],
    "torchrec.distributed.train_pipeline.runtime_forwards:KJTAllToAllForward.__init__": ["self._splits_cumsum"],
    # torchrec_.py
    "torchrec.distributed.dist_data:KJTAllToAllTensorsAwaitable._wait_impl": [".wait()"],
    "torchrec.optim.keyed:OptimizerWrapper": ["self._optimizer"],
    "torchrec.optim.keyed:KeyedOptimizerWrapper": ["self._optimizer"],
    # torchrec_pipeline.py
    PIPELINES + "TrainPipelineSparseDist.copy_batch_to_gpu": ["self._next_batch("],
    PIPELINES + "TrainPipelineSparseDist.enqueue_batch": ["self.copy_batch_to_gpu("],
    PIPELINES + "TrainPipelineSparseDist.progress": [
        "if self._enqueue_batch_after_forward:",
        "self.start_sparse_data_dist(",
        "self.wait_sparse_data_dist(",
        "self._model_fwd(",
        "self._backward(losses)",
        "self._optimizer_step()",
    ],
    PIPELINES + "PrefetchTrainPipelineSparseDist.fill_pipeline": ["self._prefetch("],
    "torchrec.distributed.train_pipeline.utils:_rewrite_model": ["pipelined_forward"],
    PIPELINES + "TrainPipelineSparseDist": ["self._model = model", "self.contexts", "self.batches"],
    PIPELINES + "PrefetchTrainPipelineSparseDist": [
        "self._prefetch_stream",
        "self._default_stream",
        "module_input_post_prefetch",
        "module_contexts_post_prefetch",
    ],
    # torchrec_.py: customized lookups
    KERNELS + "BatchedFusedEmbedding.__init__": ["self.init_parameters()"],
    KERNELS + "BatchedFusedEmbeddingBag.__init__": ["self.init_parameters()"],
    KERNELS + "BatchedDenseEmbedding.__init__": ["self.init_parameters()"],
    KERNELS + "BatchedDenseEmbeddingBag.__init__": ["self.init_parameters()"],
    "torchrec.distributed.embedding:create_sharding_infos_by_sharding_device_group": [
        'optimizer_params = getattr(param, "_optimizer_kwargs", [{}])'
    ],
    "torchrec.distributed.embeddingbag:create_sharding_infos_by_sharding_device_group": [
        'optimizer_params = getattr(param, "_optimizer_kwargs", [{}])'
    ],
    "torchrec.distributed.embedding_sharding:group_tables": ["tuple(sorted(group_fused_params.items()))"],
    KERNELS + "BatchedFusedEmbedding": [
        "**fused_params",
        "self._emb_module",
        "def emb_module(",
        "SplitTableBatchedEmbeddingBagsCodegen(\n                embedding_specs",
        "pooling_mode=PoolingMode.NONE",
    ],
    KERNELS + "BatchedFusedEmbeddingBag": ["**fused_params", "self._emb_module", "def emb_module("],
    KERNELS + "BatchedFusedEmbeddingBag.flush": ["self._emb_module.flush()"],
    KERNELS + "BatchedFusedEmbeddingBag.purge": ["self._emb_module.reset_cache_states()"],
    KERNELS + "BatchedFusedEmbedding.flush": ["self._emb_module.flush()"],
    KERNELS + "BatchedFusedEmbedding.purge": ["self._emb_module.reset_cache_states()"],
    KERNELS + "BatchedFusedEmbeddingBag.forward": ["indices="],
    KERNELS + "_gen_named_parameters_by_table_fused": ["in enumerate(emb_module.embedding_specs)"],
    FUSED + ".split_embedding_weights": ["in enumerate(self.embedding_specs)"],
    FUSED + ".split_optimizer_states": ["in enumerate(self.embedding_specs)"],
    "torchrec.distributed.embeddingbag:ShardedEmbeddingBagCollection": ["self._lookups"],
    "torchrec.distributed.embedding:ShardedEmbeddingCollection": [
        "self._lookups",
        "features_by_shards = self._dedup_indices(ctx, features_by_shards)",
        "features_before_input_dist=features",
    ],
    "torchrec.distributed.embedding:ShardedEmbeddingCollection.compute_and_output_dist": ["ctx.sharding_contexts"],
    LOOKUP + "GroupedPooledEmbeddingsLookup": ["self._emb_modules"],
    LOOKUP + "GroupedEmbeddingsLookup": ["self._emb_modules"],
    KERNELS + "BatchedDenseEmbedding": [
        "pooling_mode=PoolingMode.NONE",
        "DenseTableBatchedEmbeddingBagsCodegen(\n                list(zip(self._local_rows",
    ],
    KERNELS + "BaseBatchedEmbedding": ["def config("],
    KERNELS + "BaseBatchedEmbeddingBag": ["def config("],
    # fbgemm.py
    FUSED + ".__init__": ['_preallocated_host_buffers.get("weights")', '_preallocated_host_buffers.get("momentum1")'],
    FUSED + "._prefetch": ["self.lock_cache_line", "self.lxu_cache_locking_counter"],
    FUSED + ".forward": ["self.iter_cpu.item() == 0"],
    FUSED + ".set_optimizer_step": ["self.iter"],
    FUSED: [
        *("self.iter_cpu", '"iter"', "self.hash_size_cumsum", '"hash_size_cumsum"', "weights_host", "self.max_D"),
        *("lxu_cache_weights", "lxu_cache_state", "cache_hash_size_cumsum", "self.gather_uvm_cache_stats"),
        *("self.prefetch_stream", "self.prefetch_pipeline", "self.lock_cache_line"),
        *("def flush(", "def reset_cache_states("),
        *("def get_uvm_cache_stats(", "use_local_cache", "def reset_uvm_cache_stats("),
    ],
}
# File, by package → expected file names, environment variables and error texts.
TEXTS = {
    "torchrec/distributed/dist_data.py": [  # of SplitsAllToAllAwaitable._wait_impl, which compat replaces
        "input_list = _safe_tolist_2d(self._input_tensor.view(self.num_workers, -1).T)"
    ],
    "torch/_inductor/config.py": [
        '"TORCHINDUCTOR_COMPILE_THREADS" in os.environ',
        "compile_threads: int | None = None if is_fbcode() else decide_compile_threads()",
    ],
    "ray/train/v2/_internal/constants.py": [
        '"RAY_TRAIN_HEALTH_CHECK_INTERVAL_S"',
        '"RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S"',
        '"RAY_TRAIN_ENABLE_PREEMPTION_WATCHER"',
        '"checkpoint_manager_snapshot.json"',
    ],
    "ray/_private/runtime_env/constants.py": ['"RAY_JOB_CONFIG_JSON_ENV_VAR"'],
    "ray/_private/runtime_env/working_dir.py": ['"working_dir_files"'],
    "ray/dashboard/modules/job/job_supervisor.py": ["RAY_JOB_CONFIG_JSON_ENV_VAR"],
    "ray/_common/utils.py": ['"ray_current_cluster"'],
    "ray/_private/node.py": ["timed out during startup"],
    "ray/_private/ray_constants.py": ['"ray::IDLE"'],
    "ray/util/client/worker.py": ["Initialization failure from server"],
    "ray/util/client/server/proxier.py": ["Starting Ray client server failed"],
    "ray/util/client/__init__.py": ["ersion mismatch"],
    "ray/dashboard/modules/job/job_head.py": ["No available agent"],
    "ray/core/generated/gcs_service_pb2_grpc.py": ["/ray.rpc.NodeInfoGcsService/CheckAlive"],
    "ray/core/generated/ray_client_pb2_grpc.py": ["/ray.rpc.RayletDriver/ClusterInfo"],
    "ray/core/src/ray/gcs/gcs_server": ["node has died"],
    "ray/core/src/ray/raylet/raylet": [
        "running low on memory",
        "prestart_worker_first_driver",
        "RAY_JOB_ID",
        *INFREQUENT_WORK_SETTINGS,
    ],
    "ray/_raylet.so": ["RAY_RAYLET_PID"],
    "ray/_private/runtime_env/context.py": ["self.override_worker_entrypoint"],
    "ray/_private/workers/setup_worker.py": ["--serialized-runtime-env-context", "--language"],
    "torch/fx/_symbolic_trace.py": ["is_fx_tracing will return true"],
    "mlflow/utils/mlflow_tags.py": ['"mlflow.parentRunId"'],
    "mlflow/utils/rest_utils.py": ["failed with error code {response.status_code}"],
    "mlflow/exceptions.py": ["self.json = json"],
    "mlflow/demo/generators/traces.py": ['"mlflow.experimentKind"'],
    "mlflow/environment_variables.py": [
        "MLFLOW_HTTP_REQUEST_MAX_RETRIES",
        "MLFLOW_HTTP_REQUEST_TIMEOUT",
        "MLFLOW_HTTP_RESPECT_RETRY_AFTER_HEADER",
        "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT",
        "MLFLOW_DISABLE_TELEMETRY",
        "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR",
    ],
    "ray/dashboard/modules/reporter/reporter_consts.py": [*(f'"{name}"' for name in INFREQUENT_REPORTS_ENV)],
}


def resolve_name(name):
    """Return the object named by `module:a.b` without binding it."""
    module, _, path = name.partition(":")
    return reduce(inspect.getattr_static, path.split("."), import_module(module))


def format_parameters(name):
    found = resolve_name(name)
    found = found.__func__ if isinstance(found, staticmethod | classmethod) else found
    found = found.fget if isinstance(found, property) else found
    plain = [p.replace(annotation=p.empty) for p in inspect.signature(found).parameters.values()]
    return ", ".join(re.sub(r"<.*>", "…", str(parameter)) for parameter in plain)


@cache
def read_source(name):
    found = resolve_name(name)
    found = found.__func__ if isinstance(found, staticmethod | classmethod) else found
    return inspect.getsource(inspect.unwrap(found))


@pytest.mark.parametrize("name", sorted({line.partition("(")[0] for line in SIGNATURES}))
def test_upstream_signature_is_unchanged(name):
    known = [line for line in SIGNATURES if line.startswith(f"{name}(")]
    assert f"{name}({format_parameters(name)})" in known


@pytest.mark.parametrize("name", NAMES)
def test_upstream_name_exists(name):
    resolve_name(name)


@pytest.mark.parametrize("owner", SOURCES)
def test_upstream_source_contains_expected_code(owner):
    missing = [text for text in SOURCES[owner] if text not in read_source(owner)]
    assert not missing, f"{owner} does not contain {missing}, so raytrec/compat has no effect"


@pytest.mark.parametrize("file", TEXTS)
def test_upstream_file_contains_expected_text(file):
    package, _, rest = file.partition("/")
    content = (Path(import_module(package).__file__).parent / rest).read_bytes()
    missing = [text for text in TEXTS[file] if text.encode() not in content]
    assert not missing, f"{file} does not contain {missing}"


def test_autoscaler_interface_is_unchanged():
    from ray.data._internal.cluster_autoscaler import ClusterAutoscaler

    methods = {"try_trigger_scaling", "on_executor_shutdown", "get_total_resources"}
    assert ClusterAutoscaler.__abstractmethods__ == methods


def test_preemption_drain_reason_exists():
    from ray.core.generated import autoscaler_pb2

    assert autoscaler_pb2.DrainNodeReason.Value("DRAIN_NODE_REASON_PREEMPTION")


def test_tcp_store_accepts_a_listening_socket():
    from torch.distributed import TCPStore

    assert "master_listen_fd: " in TCPStore.__init__.__doc__


def test_store_schemes_match_the_mlflow_registry():
    from mlflow.tracking._tracking_service.utils import _tracking_store_registry as known

    from raytrec.compat.mlflow_ import DATABASE_SCHEMES, STORE_ENTRY_POINT_GROUP, STORE_SCHEMES

    plugins = {plugin.name for plugin in entry_points(group=STORE_ENTRY_POINT_GROUP)}
    assert (
        known.group_name == STORE_ENTRY_POINT_GROUP
        and {*known._registry} == {*STORE_SCHEMES, *DATABASE_SCHEMES} | plugins
    )
