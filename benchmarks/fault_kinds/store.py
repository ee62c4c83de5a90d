"""A server of S3 in this process."""

import logging
from functools import cache
from pathlib import Path
from threading import RLock
from typing import Any

BUCKET = "bucket"
LOCK = RLock()
KEYS = {"aws_access_key_id": "AKIAEXAMPLEEXAMPLE", "aws_secret_access_key": "secretsecretsecret"}
REGION = "us-east-1"


def store() -> str:
    """Return the address of the server, which has one bucket and starts on first use."""
    with LOCK:
        return _start()


@cache
def _start() -> str:
    from moto.server import ThreadedMotoServer

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    address = "http://{}:{}".format(*server.get_host_and_port())
    _client(address).create_bucket(Bucket=BUCKET)
    return address


def _client(address: str) -> Any:
    import boto3

    return boto3.client("s3", endpoint_url=address, region_name=REGION, **KEYS)


def upload(folder: Path, prefix: str) -> None:
    """Upload the files of a folder to the bucket."""
    client = _client(store())
    for path in folder.iterdir():
        if path.is_file():
            client.upload_file(str(path), BUCKET, f"{prefix}/{path.name}")


def objects(prefix: str) -> dict[str, bytes]:
    """Return the objects of the bucket, by the names below a prefix."""
    client = _client(store())
    pages = client.get_paginator("list_objects_v2").paginate(Bucket=BUCKET, Prefix=f"{prefix}/")
    names = [one["Key"] for page in pages for one in page.get("Contents", [])]
    return {
        name.removeprefix(f"{prefix}/"): client.get_object(Bucket=BUCKET, Key=name)["Body"].read() for name in names
    }


def environment(address: str) -> dict[str, str]:
    """Return the environment of commands that use only the store at this address."""
    named = {key.upper(): value for key, value in KEYS.items()}
    return {**named, "AWS_ENDPOINT_URL": address, "AWS_REGION": REGION, "AWS_CONFIG_FILE": "/none/config"} | {
        "AWS_SHARED_CREDENTIALS_FILE": "/none/credentials"
    }
