"""Object stores on loopback, as far as pyarrow can tell: S3 by moto, Google's by gcp-storage-emulator."""

import os
from contextlib import contextmanager
from unittest.mock import patch

BUCKET = "bucket"
# Which credentials a client has, and that it looks for no others.
KEYS = {
    "AWS_ACCESS_KEY_ID": "test",
    "AWS_SECRET_ACCESS_KEY": "test",
    "AWS_DEFAULT_REGION": "us-east-1",
    "AWS_EC2_METADATA_DISABLED": "true",
}


@contextmanager
def s3():
    """Gives the URI of a bucket."""
    import boto3
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    try:
        host, port = server.get_host_and_port()
        with patch.dict(os.environ, KEYS | {"AWS_ENDPOINT_URL": f"http://{host}:{port}"}):
            boto3.client("s3").create_bucket(Bucket=BUCKET)
            yield f"s3://{BUCKET}"
    finally:
        server.stop()


@contextmanager
def gs():
    """Gives the URI of a bucket."""
    from gcp_storage_emulator.server import create_server
    from heads import free_ports

    (port,) = free_ports(1)
    address = {"CLOUD_STORAGE_EMULATOR_ENDPOINT": f"http://127.0.0.1:{port}"}
    with (
        create_server("127.0.0.1", port, in_memory=True, default_bucket=BUCKET),
        patch.dict(os.environ, address),
    ):
        yield f"gs://anonymous@{BUCKET}"
