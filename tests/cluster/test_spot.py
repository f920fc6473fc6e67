"""Test spot machines, the fallback to on-demand machines, and preemption notices on fake clouds."""

import copy
import json
import threading
from collections import Counter
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from botocore.exceptions import ClientError
from launching import AWS_CONFIG, GCP_CONFIG, prepare_launcher_config
from ray.autoscaler._private.loader import load_function_or_class
from ray.autoscaler.v2.instance_manager.config import AutoscalingConfig
from ray.autoscaler.v2.instance_manager.node_provider import NodeProviderAdapter

from raytrec.cluster import preemption

TAGS = {"ray-node-type": "worker", "ray-launch-config": "h", "ray-node-name": "n"}
TAGS |= {"ray-user-node-type": "gpu"}


class CachedConfig:
    """Configuration with the interface that the autoscaler expects."""

    def __init__(self, config):
        self._config = AutoscalingConfig(config, skip_content_hash=True)

    def get_cached_autoscaling_config(self):
        return self._config


@pytest.fixture(scope="module")
def cloud(tmp_path_factory):
    """Fake AWS account, and cluster.yaml filled in for it, as `ray up` does before it starts the head."""
    import boto3
    from moto import mock_aws

    with pytest.MonkeyPatch.context() as patch, mock_aws():
        patch.setenv("HOME", str(tmp_path_factory.mktemp("home")))  # where Ray keeps the ssh key
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
            patch.setenv(name, "test")
        ec2, iam = boto3.resource("ec2", "us-west-2"), boto3.client("iam", "us-west-2")
        profile = iam.create_instance_profile(InstanceProfileName="raytrec")["InstanceProfile"]["Arn"]
        zone = {"Name": "availability-zone", "Values": ["us-west-2a"]}
        subnet = next(iter(ec2.subnets.filter(Filters=[zone])))
        group = ec2.create_security_group(GroupName="raytrec", Description="-", VpcId=subnet.vpc_id)
        config = prepare_launcher_config(AWS_CONFIG)
        filled_in = {
            "SubnetIds": [subnet.id],
            "SecurityGroupIds": [group.id],
            "ImageId": "ami-12345678",
            "IamInstanceProfile": {"Arn": profile},
        }
        for kind in config["available_node_types"].values():
            kind["node_config"] |= {k: v for k, v in filled_in.items() if k in kind["node_config"]}
        provider = load_function_or_class(config["provider"]["module"])
        config = provider.fillout_available_node_types_resources(config)
        yield ec2, provider, provider.bootstrap_config(config)


@pytest.fixture
def account(cloud, monkeypatch):
    """(EC2, provider, config, remaining spot machines) of the fake account; no machine runs."""
    import botocore.client

    ec2, provider, config = cloud
    for instance in ec2.instances.all():
        instance.terminate()
    ask, left = botocore.client.BaseClient._make_api_call, {"spot": 100}

    def answer(self, operation, request):
        """Launch up to MaxCount available machines, as EC2 does; moto always launches MinCount."""
        if operation == "RunInstances":
            count = request["MaxCount"]
            if "InstanceMarketOptions" in request:
                count = min(count, left["spot"])
                left["spot"] -= count
            if not count:
                said = {"Error": {"Code": "InsufficientInstanceCapacity", "Message": "no spot capacity"}}
                raise ClientError(said, operation)
            request = request | {"MinCount": count, "MaxCount": count}
        return ask(self, operation, request)

    monkeypatch.setattr(botocore.client.BaseClient, "_make_api_call", answer)
    return ec2, provider, copy.deepcopy(config), left


def launch(provider, config, count):
    """Launch machines through the autoscaler's adapter and return its errors."""
    config = copy.deepcopy(config)
    config.pop("head_node")  # as `ray up` does for the head
    adapter = NodeProviderAdapter(provider(config["provider"], "raytrec"), CachedConfig(config))
    adapter._launch_nodes_by_type("gpu", count, "request")
    return adapter.poll_errors()


def list_running(ec2):
    return [i for i in ec2.instances.all() if i.state["Name"] in ("pending", "running")]


@pytest.mark.slow
def test_ec2_accepts_every_node_type(account):
    """boto3 checks each key against EC2's API."""
    ec2, provider, config, _ = account
    for name, kind in config["available_node_types"].items():
        provider(config["provider"], "raytrec").create_node(kind["node_config"], TAGS | {"ray-user-node-type": name}, 1)
    machines = {i.instance_type: i for i in list_running(ec2)}
    assert set(machines) == {"m7i.2xlarge", "g6.12xlarge", "c7i.4xlarge"}
    assert {i.metadata_options["HttpTokens"] for i in machines.values()} == {"required"}
    spot = {t for t, i in machines.items() if i.instance_lifecycle == "spot"}
    assert spot == {"g6.12xlarge", "c7i.4xlarge"}


@pytest.mark.slow
def test_node_resources_match_ec2_instance_types(account):
    """The autoscaler uses EC2's own data of the instance types."""
    ec2, _, config, _ = account
    for name in ("gpu", "cpu"):
        node_type = config["available_node_types"][name]
        names = [node_type["node_config"]["InstanceType"]]
        (described,) = ec2.meta.client.describe_instance_types(InstanceTypes=names)["InstanceTypes"]
        gpus = sum(each["Count"] for each in described.get("GpuInfo", {}).get("Gpus", []))
        assert node_type["resources"]["CPU"] == described["VCpuInfo"]["DefaultVCpus"]
        assert node_type["resources"].get("GPU", 0) == gpus


@pytest.mark.slow
def test_ray_adds_no_security_group_or_rule(account):
    """Given the security group of cluster.yaml, Ray creates no group and opens no port."""
    ec2, _, config, _ = account
    (group,) = ec2.security_groups.filter(GroupNames=["raytrec"])
    assert group.ip_permissions == []
    assert [g.group_name for g in ec2.security_groups.all() if g.group_name.startswith("ray-")] == []
    assert "head_node" in config and config["head_node"] == {}  # no role with all permissions either


@pytest.mark.slow
@pytest.mark.parametrize(
    ("free", "expected"), [(100, {"spot": 3}), (1, {"spot": 1, "on demand": 2}), (0, {"on demand": 3})]
)
def test_spot_machines_are_preferred_to_on_demand(account, free, expected):
    ec2, provider, config, left = account
    left["spot"] = free
    assert launch(provider, config, 3) == []
    machines = list_running(ec2)
    assert Counter(machine.instance_lifecycle or "on demand" for machine in machines) == expected
    assert all({"Key": "ray-user-node-type", "Value": "gpu"} in machine.tags for machine in machines)


@pytest.mark.slow
def test_config_mistake_fails_the_on_demand_request(account):
    ec2, provider, config, _ = account
    config["available_node_types"]["gpu"]["node_config"]["IamInstanceProfile"] = {"Arn": "arn:aws:iam::1:x/no"}
    (error,) = launch(provider, config, 1)
    assert "not found" in str(error.__cause__)
    assert list_running(ec2) == []


class TextHandler(BaseHTTPRequestHandler):
    """Request handler that answers with text."""

    def answer(self, status, text):
        self.send_response(status)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *_):
        pass


@contextmanager
def serve(handler, **about):
    """Run a server on loopback and set `about` and `address` as its attributes."""
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        vars(server).update(about, address=f"http://127.0.0.1:{server.server_port}")
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


class Google(TextHandler):
    """Compute Engine's API for launching machines; spot machines can be sold out."""

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.asked.append(body)
        sold_out = body.get("scheduling", {}).get("provisioningModel") == "SPOT" and self.server.sold_out
        self.answer(200, json.dumps({"name": "sold-out" if sold_out else "fine", "status": "RUNNING"}))

    def do_GET(self):
        done = {"name": "fine", "status": "DONE"}
        if self.path.split("?")[0].endswith("/operations/sold-out"):
            errors = [{"code": "ZONE_RESOURCE_POOL_EXHAUSTED", "message": "no capacity"}]
            done = {"name": "sold-out", "status": "DONE", "error": {"errors": errors}}
        self.answer(200, json.dumps(done))


@pytest.fixture
def google(monkeypatch):
    from google.auth.credentials import AnonymousCredentials
    from googleapiclient import discovery
    from ray.autoscaler._private.gcp import config as gcp

    def build(_=None):
        options = {"credentials": AnonymousCredentials(), "client_options": {"api_endpoint": server.address}}
        return discovery.build("compute", "v1", requestBuilder=gcp.build_request, **options)

    monkeypatch.setattr(gcp, "_create_compute", build)
    for name in ("_create_crm", "_create_iam"):
        monkeypatch.setattr(gcp, name, lambda _=None: None)
    with serve(Google, asked=[], sold_out=True) as server:
        yield server


@pytest.mark.parametrize("sold_out", [True, False], ids=["sold-out", "available"])
def test_gcp_falls_back_to_on_demand_machines(google, sold_out):
    google.sold_out = sold_out
    config = prepare_launcher_config(GCP_CONFIG)
    config["provider"]["project_id"] = "project-1"
    provider = load_function_or_class(config["provider"]["module"])(config["provider"], "raytrec")
    created = provider.create_node_with_resources_and_labels(
        config["available_node_types"]["gpu"]["node_config"], TAGS, 2, {}, {}
    )
    assert len(created) == 2
    models = [body["scheduling"]["provisioningModel"] for body in google.asked]
    assert models == (["SPOT", "STANDARD"] * 2 if sold_out else ["SPOT"] * 2)
    assert all(body["scheduling"]["onHostMaintenance"] == "TERMINATE" for body in google.asked)


def find_unknown_keys(value, name, schemas, where=""):
    """Return the keys of a value that Google's API description does not contain."""
    schema = schemas[name] if isinstance(name, str) else name
    schema = schemas[schema["$ref"]] if "$ref" in schema else schema
    if isinstance(value, list):
        return [key for each in value for key in find_unknown_keys(each, schema["items"], schemas, where)]
    if not isinstance(value, dict) or "properties" not in schema:
        return []
    missing = [f"{where}{key}" for key in value if key not in schema["properties"]]
    known = [(key, each) for key, each in value.items() if key in schema["properties"]]
    return missing + [
        k for key, each in known for k in find_unknown_keys(each, schema["properties"][key], schemas, f"{where}{key}.")
    ]


def test_gcp_api_knows_every_node_type_key(google):
    from googleapiclient.discovery_cache import get_static_doc

    schemas = json.loads(get_static_doc("compute", "v1"))["schemas"]
    for name, kind in prepare_launcher_config(GCP_CONFIG)["available_node_types"].items():
        assert find_unknown_keys(kind["node_config"], "Instance", schemas) == [], name
        models = schemas["Scheduling"]["properties"]["provisioningModel"]["enum"]
        assert kind["node_config"].get("scheduling", {}).get("provisioningModel", "SPOT") in models
    assert find_unknown_keys({"scheduling": {"preemptable": True}}, "Instance", schemas) == ["scheduling.preemptable"]


class Metadata(TextHandler):
    """The metadata servers of EC2 (version 2, which asks for a token) and of GCP."""

    def do_PUT(self):
        assert self.path == "/latest/api/token" and self.headers["X-aws-ec2-metadata-token-ttl-seconds"]
        self.answer(200, "secret")

    def do_GET(self):
        going = self.server.going
        if self.path == "/latest/meta-data/spot/instance-action":
            if self.headers["X-aws-ec2-metadata-token"] != "secret":
                return self.answer(401, "")
            notice = '{"action": "terminate", "time": "2026-11-22T08:22:00Z"}'
            return self.answer(200 if going else 404, notice)
        if self.path == "/computeMetadata/v1/instance/preempted":
            known = self.headers["Metadata-Flavor"] == "Google"
            return self.answer(200 if known else 403, "TRUE" if going else "FALSE")
        return self.answer(404, "")


@pytest.fixture
def metadata():
    with serve(Metadata, going=False) as server:
        yield server


@pytest.mark.parametrize("notice", [preemption.has_aws_notice, preemption.has_gcp_notice])
def test_preemption_notice_is_detected(metadata, monkeypatch, notice):
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")  # the query must not use a proxy
    assert notice(metadata.address) is False
    metadata.going = True
    assert notice(metadata.address) is True
    metadata.shutdown()
    metadata.server_close()
    assert notice(metadata.address) is False


def test_wait_for_polls_until_a_notice_arrives(monkeypatch):
    monkeypatch.setattr(preemption, "POLL_INTERVAL_S", 0.01)
    answers = iter([False, False, True])
    preemption.wait_for(lambda: next(answers))
    assert not list(answers)
