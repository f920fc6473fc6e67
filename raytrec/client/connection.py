"""One connection of Ray client: calls, answers, errors."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import RLock
from typing import Any

from raytrec.client.package import code
from raytrec.cluster.access import RAY, check_cluster, check_ray, check_versions, use_token
from raytrec.cluster.session import on_node
from raytrec.common.errors import RunError, first_line, last_line, root_cause
from raytrec.compat.ray_core import NOT_STARTED, NOT_TAKEN, head_nodes
from raytrec.compat.versions import require_versions

ANSWER_S = 120  # for what takes a second, while a cluster may first start a process for it


class Connection:
    """One connection of Ray client, apart from what else this process does with Ray.

    Args:
        places: files and folders of the user that its processes have, with raytrec's code.
    """

    def __init__(self, address: str, places: tuple[Path, ...]):
        self.address, self._lock, self._remote = address, RLock(), {}
        use_token()
        require_versions()
        check_cluster(address, address)

        with code(places) as folder:
            self._context = _connect(address, folder)
        check_ray(self._context.ray_version, where=address)
        with self.used():
            self._head, *_ = head_nodes()

    @contextmanager
    def used(self) -> Iterator[None]:
        """Ray in this block is this connection's. Not by two threads at a time: the context is swapped."""
        with self._lock, self._context:
            yield

    def call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """The answer of a function that is called there."""
        import ray

        with self.used():
            if function not in self._remote:
                self._remote[function] = ray.remote(function).options(**on_node(self._head))
        return self.ask(self._remote[function], *arguments)

    def ask(self, remote: Any, *arguments: Any, timeout: float | None = ANSWER_S) -> Any:
        """The answer of a remote function or method, its errors as they were raised there."""
        with self.used():
            reference = remote.remote(*arguments)
        return self.result(reference, timeout)

    def actor(self, kind: type) -> Any:
        import ray

        with self.used():
            return ray.remote(kind).options(**on_node(self._head)).remote()

    def is_done(self, reference: Any) -> bool:
        import ray

        with self.used():
            return bool(ray.wait([reference], timeout=0)[0])

    def result(self, reference: Any, timeout: float | None = ANSWER_S) -> Any:
        import ray
        from ray.exceptions import GetTimeoutError, RayError

        try:
            with self.used():
                return ray.get(reference, timeout=timeout)
        except GetTimeoutError:
            raise RunError(f"the cluster has not answered for {timeout} s", where=self.address) from None
        except ConnectionError as error:
            raise RunError(
                f"the connection to the cluster is lost: {first_line(error)}",
                where=self.address,
                do="connect again: Cluster(ADDRESS); what was started here has ended, and resumes from "
                "its last checkpoint when it is started again",
            ) from None
        except RayError as error:
            cause = root_cause(error)
            if cause is error or isinstance(cause, RayError):
                cause = RunError(f"Ray reports: {first_line(cause)}", where=self.address)
            raise cause from None

    def close(self) -> None:
        self._context.disconnect()


def _connect(address: str, folder: Path) -> Any:
    """A connection whose processes work in a copy of a folder.

    On a busy machine, the process that Ray 2.60 starts for a client may end before it has begun, without an
    error (`proxier.start_specific_server`); so that is worth another try.
    """
    import ray

    for again in (True, True, False):
        try:
            return ray.init(
                address,
                namespace="raytrec",
                allow_multiple=True,
                log_to_driver=False,
                logging_level=logging.ERROR,
                runtime_env={"working_dir": str(folder)},
            )
        except Exception as error:
            if not (again and NOT_STARTED in str(error)):
                raise _not_connected(address, error) from None


def _not_connected(address: str, error: Exception) -> RunError:
    """Return the error for people about a Ray client that could not connect.

    Raises:
        RunError: the cluster runs another version of Ray or Python.
    """
    text = str(error)
    check_versions(
        text,
        where=address,
        expected="the same Python, X.Y, on both sides: with ray:// they exchange code",
        do="use that Python here; or the job API, Cluster('http://HOST:8265'), which takes any",
    )
    if NOT_TAKEN in text:
        return RunError(
            f"the cluster does not take this connection: {last_line(text, '')}",
            where=address,
            expected=f"Ray {RAY} on the cluster, as here, and room for one more process on its head",
            do="look at ray_client_server*.err among the logs of the head",
        )
    return RunError(
        f"cannot connect: {first_line(error)}",
        where=address,
        expected="the address of Ray client, such as ray://127.0.0.1:10001, and the cluster's token",
        do="forward its port (`ray attach -p 10001 cluster.yaml`, `kubectl port-forward`)",
    )
