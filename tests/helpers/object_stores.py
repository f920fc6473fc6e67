"""Object stores on loopback: S3 (moto) and Google Cloud Storage (gcp-storage-emulator).

Each store is a separate process, because pyarrow holds the GIL while it closes a broken stream and waits for
the store.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from contextlib import contextmanager
from unittest.mock import patch

from heads import find_free_ports

BUCKET, START_S = "bucket", 120
# Credentials of the client; it does not look for others.
S3_CREDENTIALS = {
    "AWS_ACCESS_KEY_ID": "test",
    "AWS_SECRET_ACCESS_KEY": "test",
    "AWS_DEFAULT_REGION": "us-east-1",
    "AWS_EC2_METADATA_DISABLED": "true",
}


@contextmanager
def run_s3_store():
    """Run an S3 store and yield the URI of a bucket."""
    import boto3

    (port,) = find_free_ports(1)
    keys = S3_CREDENTIALS | {"AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}"}
    with _serving(port, "moto.server", "-H", "127.0.0.1", "-p", port), patch.dict(os.environ, keys):
        boto3.client("s3").create_bucket(Bucket=BUCKET)
        yield f"s3://{BUCKET}"


@contextmanager
def run_gcs_store():
    """Run a Google Cloud Storage emulator and yield the URI of a bucket."""
    (port,) = find_free_ports(1)
    options = ["--host", "127.0.0.1", "--port", port, "--in-memory", "--default-bucket", BUCKET]
    with tempfile.NamedTemporaryFile("w", suffix=".json") as account:
        json.dump(_service_account(), account)
        account.flush()
        keys = {
            "CLOUD_STORAGE_EMULATOR_ENDPOINT": f"http://127.0.0.1:{port}",
            "GOOGLE_APPLICATION_CREDENTIALS": account.name,
        }
        with _serving(port, "gcp_storage_emulator", "start", *options), patch.dict(os.environ, keys):
            yield f"gs://{BUCKET}"


def _service_account():
    """Return a service account whose tokens are signed by the client."""
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric import rsa

    encoding, form = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8
    key = rsa.generate_private_key(65537, 2048).private_bytes(encoding, form, serialization.NoEncryption())
    return {
        "type": "service_account",
        "project_id": "test",
        "private_key_id": "1",
        "private_key": key.decode(),
        "client_email": "test@test.iam.gserviceaccount.com",
        "client_id": "1",
        "token_uri": "http://127.0.0.1:9/token",
    }


@contextmanager
def _serving(port, module, *arguments):
    """Run a module as a process, wait until it answers HTTP requests, and kill it at the end of the block."""
    command = [sys.executable, "-m", module, *map(str, arguments)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    address, until = f"http://127.0.0.1:{port}", time.monotonic() + START_S
    try:
        while not _answers(address):
            assert process.poll() is None and time.monotonic() < until, module
            time.sleep(0.1)
        yield
    finally:
        process.kill()
        process.wait()


def _answers(address):
    try:
        with urllib.request.urlopen(address, timeout=5):
            return True
    except urllib.error.HTTPError:
        return True
    except OSError:
        return False
