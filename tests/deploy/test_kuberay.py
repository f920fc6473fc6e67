"""Test deploy/kuberay offline with Ray's autoscaler and against the APIs of Kubernetes and KubeRay.

No installable package contains KubeRay's definitions, so this file declares the fields in use, as of
KubeRay 1.7.0 (ray-operator/apis/ray/v1). kubernetes-validate checks the fields of Kubernetes.
"""

import copy
import os
import subprocess
import sys
from typing import Any, Literal

import kubernetes_validate
import pydantic
import pytest
import yaml
from launching import ROOT, NodePlanner
from pydantic import BaseModel, ConfigDict, Field
from ray.autoscaler._private.kuberay.autoscaling_config import _derive_autoscaling_config_from_ray_cr

from raytrec.serving.deployment import compute_replicas
from raytrec.serving.options import ServiceOptions

FOLDER, KUBERNETES = ROOT / "deploy" / "kuberay", "1.33"
WORKER, READER = {"CPU": 1, "GPU": 1}, {"CPU": 1}
Count = pydantic.NonNegativeInt


class StrictModel(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class Autoscaler(StrictModel):
    version: Literal["v1", "v2"]
    idleTimeoutSeconds: Count
    env: list[dict[str, Any]]
    resources: dict[str, Any]
    securityContext: dict[str, Any]


class Auth(StrictModel):
    mode: Literal["token"]


class Head(StrictModel):
    rayStartParams: dict[str, str]
    template: dict[str, Any]


class Group(Head):
    groupName: str = Field(pattern="^[a-z][a-z0-9-]*$")
    replicas: Count
    minReplicas: Count
    maxReplicas: Count
    priority: int = 0


class Cluster(StrictModel):
    rayVersion: str = Field(pattern=r"^\d+\.\d+\.\d+$")
    authOptions: Auth
    enableInTreeAutoscaling: Literal[True]
    autoscalerOptions: Autoscaler
    headGroupSpec: Head
    workerGroupSpecs: list[Group]


class Job(StrictModel):
    entrypoint: str
    submissionMode: Literal["K8sJobMode", "HTTPMode", "SidecarMode", "InteractiveMode"]
    backoffLimit: Count
    shutdownAfterJobFinishes: bool
    ttlSecondsAfterFinished: Count
    submitterPodTemplate: dict[str, Any]
    rayClusterSpec: Cluster


class Service(StrictModel):
    excludeHeadPodFromServeSvc: bool
    serveConfigV2: str
    rayClusterConfig: Cluster


def load_documents(name):
    return list(yaml.safe_load_all((FOLDER / name).read_text()))


@pytest.fixture(scope="module")
def cluster():
    return load_documents("raycluster.yaml")[0]


@pytest.fixture(scope="module")
def job():
    return load_documents("rayjob.yaml")[0]


@pytest.fixture(scope="module")
def service():
    return load_documents("rayservice.yaml")[0]


@pytest.fixture(scope="module")
def pods(cluster, job, service):
    """Pod templates of the cluster, the job and the service by name."""
    spec, of_service = cluster["spec"], service["spec"]["rayClusterConfig"]
    found = {group["groupName"]: group["template"] for group in spec["workerGroupSpecs"]}
    found["head"] = spec["headGroupSpec"]["template"]
    found |= {f"service-{g['groupName']}": g["template"] for g in of_service["workerGroupSpecs"]}
    found["service-head"] = of_service["headGroupSpec"]["template"]
    return found | {"submitter": job["spec"]["submitterPodTemplate"]}


def derive_autoscaling_config(cluster):
    """Return the configuration that Ray's autoscaler derives from a RayCluster in the head's pod."""
    document = copy.deepcopy(cluster)
    document["metadata"]["namespace"] = "raytrec"
    return _derive_autoscaling_config_from_ray_cr(document)


def test_kuberay_knows_every_field(cluster, job, service):
    known = {"RayCluster": (cluster, Cluster), "RayJob": (job, Job), "RayService": (service, Service)}
    for kind, (document, model) in known.items():
        assert (document["apiVersion"], document["kind"]) == ("ray.io/v1", kind)
        model.model_validate(document["spec"])
    with pytest.raises(pydantic.ValidationError, match="idleTimeout"):
        wrong = cluster["spec"]["autoscalerOptions"] | {"idleTimeout": 5}
        Cluster.model_validate(cluster["spec"] | {"autoscalerOptions": wrong})


def test_kubernetes_accepts_every_object_and_pod(pods):
    for document in load_documents("base.yaml"):
        kubernetes_validate.validate(document, KUBERNETES, strict=True)
    for name, template in pods.items():
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name} | template["metadata"]}
        kubernetes_validate.validate(pod | {"spec": template["spec"]}, KUBERNETES, strict=True)
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(pod | {"spec": {"containrs": []}}, KUBERNETES, strict=True)


def test_rayjob_uses_the_raycluster_with_the_pinned_ray(cluster, job):
    assert job["spec"]["rayClusterSpec"] == cluster["spec"]
    pinned = (ROOT / "requirements" / "cuda.txt").read_text()
    assert f"\nray=={cluster['spec']['rayVersion']}\n" in pinned


def test_rayservice_matches_the_cluster_and_serve_options(cluster, service, pods):
    ours, others = service["spec"]["rayClusterConfig"], cluster["spec"]
    same = ("rayVersion", "authOptions", "autoscalerOptions", "enableInTreeAutoscaling")
    assert all(ours[name] == others[name] for name in same)
    assert ours["headGroupSpec"]["rayStartParams"] == others["headGroupSpec"]["rayStartParams"]
    config = yaml.safe_load(service["spec"]["serveConfigV2"])
    (application,) = config["applications"]
    served = ServiceOptions(**application["args"])
    assert (config["proxy_location"], application["route_prefix"], served.host) == ("Disabled", None, "0.0.0.0")
    for name in ("service-head", "service-cpu"):
        (container,) = pods[name]["spec"]["containers"]
        env = {each["name"]: each for each in container["env"]}
        token = env.pop("RAYTREC_SERVE_TOKEN")["valueFrom"]["secretKeyRef"]
        assert token == {"name": "raytrec-serve", "key": "token"}
        assert not [name for name in env if name.startswith("RAY_SERVE")]
        assert {"name": "serve", "containerPort": served.port} in container["ports"]
    assert container["readinessProbe"]["httpGet"] == {"path": "/ready", "port": "serve"}
    (scaling,) = (each["autoscaling_config"] for each in application["deployments"])
    assert scaling["policy"]["policy_function"] == f"{compute_replicas.__module__}:{compute_replicas.__name__}"
    (group,) = ours["workerGroupSpecs"]
    cpus = int(container["resources"]["limits"]["cpu"]) * group["maxReplicas"]
    assert scaling["max_replicas"] <= cpus, "more replicas than there are CPUs for"


def test_rayjob_resumes_the_latest_run(job):
    spec = job["spec"]
    script = spec["entrypoint"].split()[1]
    assert (ROOT / script).is_file() and (ROOT / spec["entrypoint"].split()[2]).is_file()
    assert "--resume-latest" in (ROOT / script).read_text()
    assert spec["backoffLimit"] > 0 and spec["shutdownAfterJobFinishes"]


def test_pods_have_minimal_privileges(pods, cluster):
    for name, template in pods.items():
        spec = template["spec"]
        assert spec["securityContext"]["runAsNonRoot"] and spec["securityContext"]["runAsUser"] > 0
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        for container in spec["containers"]:
            assert container["securityContext"]["allowPrivilegeEscalation"] is False
            assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
            assert "privileged" not in container["securityContext"]
            assert set(container["resources"]) == {"requests", "limits"}
        # Only the autoscaler next to the head uses the API of Kubernetes, to start pods.
        assert (spec.get("automountServiceAccountToken") is False) == (name not in ("head", "service-head"))
        assert not spec.get("hostNetwork")
    text = yaml.safe_dump([cluster, *load_documents("base.yaml")])
    assert "hostPath" not in text and "LoadBalancer" not in text and "NodePort" not in text


def test_kuberay_files_contain_no_token(cluster, job, service):
    text = yaml.safe_dump([cluster, job, service])
    assert "RAY_AUTH_TOKEN" not in text and "stringData" not in text


def test_network_policy_restricts_access_to_pods(pods):
    _, policy = load_documents("base.yaml")
    selected = policy["spec"]["podSelector"]["matchLabels"]
    for template in pods.values():
        assert selected.items() <= template["metadata"]["labels"].items()
    ours, operator, clients = policy["spec"]["ingress"]
    assert [port["port"] for port in clients["ports"]] == [8000]
    assert ours == {"from": [{"podSelector": {"matchLabels": selected}}]}
    assert [port["port"] for port in operator["ports"]] == [8265]
    assert policy["spec"]["policyTypes"] == ["Ingress"]


def test_all_pods_mount_the_shared_folder(pods, cluster):
    claim, _ = load_documents("base.yaml")
    assert claim["spec"]["accessModes"] == ["ReadWriteMany"]
    groups = (group["groupName"] for group in cluster["spec"]["workerGroupSpecs"])
    for name in ("head", "service-head", "service-cpu", *groups):
        spec = pods[name]["spec"]
        (container,) = spec["containers"]
        root = next(e["value"] for e in container["env"] if e["name"] == "RAYTREC_ROOT")
        volume = next(m["name"] for m in container["volumeMounts"] if m["mountPath"] == root)
        source = next(v for v in spec["volumes"] if v["name"] == volume)
        assert source["persistentVolumeClaim"]["claimName"] == claim["metadata"]["name"]


def test_pod_grace_period_exceeds_the_preemption_notice(pods):
    for name, template in pods.items():
        (container,) = template["spec"]["containers"]
        if name in ("head", "submitter") or name.startswith("service"):
            continue
        command = container["lifecycle"]["preStop"]["exec"]["command"]
        assert command[:5] == ["python", "-m", "raytrec.cluster.preemption", "now", "--seconds"]
        assert template["spec"]["terminationGracePeriodSeconds"] > int(command[5])
    head = pods["head"]["spec"]
    stop = next(e["value"] for e in head["containers"][0]["env"] if e["name"] == "RAY_JOB_STOP_WAIT_TIME_S")
    assert head["terminationGracePeriodSeconds"] > int(stop)


def test_autoscaler_resources_match_the_pods(cluster):
    types = derive_autoscaling_config(cluster)["available_node_types"]
    head = types.pop("headgroup")
    assert head["resources"]["CPU"] == 0 and head["max_workers"] == 0
    gpus = {name: kind["resources"].get("GPU", 0) for name, kind in types.items()}
    assert gpus == {"gpu-spot": 4, "gpu-on-demand": 4, "cpu": 0}
    assert all(kind["min_workers"] == 0 for kind in types.values())


def test_autoscaler_prefers_spot_to_on_demand_pods(cluster):
    """Availability 0 is the CloudResourceMonitor's value for a group whose pods did not start."""
    planner = NodePlanner(derive_autoscaling_config(cluster))
    workers = [WORKER] * 8
    assert planner.wanted(workers=workers) == {"gpu-spot": 2}
    assert planner.wanted(workers=workers, availabilities={"gpu-spot": 0.0}) == {"gpu-on-demand": 2}
    assert planner.wanted(workers=workers, availabilities={"gpu-spot": 1.0}) == {"gpu-spot": 2}
    assert planner.wanted(workers=[WORKER] * 20) == {"gpu-spot": 4, "gpu-on-demand": 1}


def test_readers_get_cpu_nodes_and_idle_nodes_are_removed(cluster):
    config = derive_autoscaling_config(cluster)
    planner, idle = NodePlanner(config), 60 * config["idle_timeout_minutes"]
    assert planner.wanted(tasks=[READER] * 15) == {"cpu": 1}
    nodes = [planner.node("gpu-spot", idle_s=idle + 1), planner.node("cpu", idle_s=idle - 1)]
    assert planner.unwanted(nodes) == {"gpu-spot": 1}
    assert planner.unwanted(nodes, workers=[WORKER]) == {}


@pytest.mark.slow
def test_pending_pods_time_out(cluster):
    """Ray's autoscaler reads the timeouts from its environment when it starts."""
    env = {e["name"]: e["value"] for e in cluster["spec"]["autoscalerOptions"]["env"]}
    code = "from ray.autoscaler.v2.instance_manager.config import InstanceReconcileConfig as c\n"
    code += "from ray.autoscaler._private.constants import RAY_AUTOSCALER_AVAILABILITY_RECOVERY_S as r\n"
    code += "print(c().allocate_status_timeout_s, r)"
    command = [sys.executable, "-c", code]
    out = subprocess.run(command, env=os.environ | env, capture_output=True, text=True, timeout=120)
    given_up, recovered = map(int, out.stdout.split())
    assert given_up <= 900 and recovered > given_up
