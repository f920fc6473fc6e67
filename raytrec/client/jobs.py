"""Client of Ray's Job API (http://), which submits, queries and stops jobs.

The job of a run continues when the process that submitted it ends.
"""

from __future__ import annotations

import os
import re
import secrets
import shlex
import time
from collections.abc import Callable
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from raytrec.client.package import Source, code, find_user_modules, get_config_file_name
from raytrec.cluster.access import check_cluster_version, describe_token_source, use_token
from raytrec.common.errors import ConfigError, RunError
from raytrec.common.redaction import hide
from raytrec.compat.ray_core import NO_AGENT_TEXT, get_server_version, silence_uploads
from raytrec.config.run_config import load_config

DEFAULT_ADDRESS = "http://127.0.0.1:8265"
ADDRESS_VARIABLES = ("RAY_API_SERVER_ADDRESS", "RAY_ADDRESS")  # Ray's client prefers these variables to its argument
CLUSTER_READY_TIMEOUT_S = 60.0  # time for a cluster that already responds to become ready for jobs
STATES = {"SUCCEEDED": "finished", "FAILED": "failed", "STOPPED": "stopped"}  # states of jobs that have ended
T = TypeVar("T")


class Jobs:
    """Client of the Job API of a Ray cluster, which submits, queries and stops jobs.

    All methods raise a RunError if the cluster does not respond or refuses the token, or if Ray reports an error, such
    as an unknown job.

    Args:
        address: http(s)://HOST:PORT of the dashboard; default: RAY_API_SERVER_ADDRESS, else DEFAULT_ADDRESS, the
            dashboard of this machine.

    Raises:
        ConfigError: The address is not the URL of a dashboard.
        RunError: The token is missing, or the cluster cannot be reached, refuses it, or runs another version of Ray.
    """

    def __init__(self, address: str | None = None):
        self.address = (address or os.environ.get(ADDRESS_VARIABLES[0]) or DEFAULT_ADDRESS).rstrip("/")
        if not self.address.startswith(("http://", "https://")):
            raise ConfigError(
                f"'{self.address}' is not an address of the job API",
                where="--address" if address else ADDRESS_VARIABLES[0],
                expected=f"http(s)://HOST:PORT of the cluster's dashboard, such as {DEFAULT_ADDRESS}",
            )
        use_token()
        self._client = self._call_api(self._connect)
        check_cluster_version(get_server_version(self._client), where=self.address)

    def submit(
        self,
        source: Source,
        overrides: list[str] | None = None,
        include: list[str | Path] | tuple = (),
        root: str | None = None,
    ) -> str:
        """Submit a run as a job, and return the id of the job.

        If the same run was submitted before and interrupted, the job resumes it. The configuration, with overrides
        applied, is uploaded as a file, so that no command line shows its values. The code of raytrec and the modules
        that the configuration names are also uploaded.

        Args:
            source: Path of a config file, a mapping of its values, or a RunConfig; paths in it refer to the cluster.
            overrides: `section.key=value` strings.
            include: Additional files and folders that the job needs.
            root: Folder on the cluster to which relative paths refer; default: the cluster's RAYTREC_ROOT.

        Raises:
            ConfigError: The configuration is invalid, a file cannot be uploaded, or `root` contains a secret.
            RunError: The cluster does not respond, refuses the token or rejects the job.
        """
        name, config = get_config_file_name(source), load_config(source, overrides)
        patience = config.scaling.shutdown_grace_s + 30
        environment = {"RAY_JOB_STOP_WAIT_TIME_S": str(int(patience))}
        environment |= {"RAYTREC_ROOT": root} if root else {}
        with code([*find_user_modules(config), *map(Path, include)], reserved_names=(name,)) as folder:
            (folder / name).write_text(config.to_yaml(), encoding="utf-8")
            command = f"python -m raytrec train {shlex.quote(name)} --resume-latest"
            return self.start(command, {"working_dir": str(folder), "env_vars": environment}, Path(name).stem)

    def start(self, command: str, runtime_env: dict[str, Any], name: str) -> str:
        """Start a command as a job, and return the job's id, which begins with `name`.

        Args:
            command: Shell command, which runs in the job's working directory.
            runtime_env: Runtime environment of the job, such as {"working_dir": FOLDER, "env_vars": {}}.
            name: Prefix of the id; characters that URLs do not allow are replaced with underscores.

        Raises:
            ConfigError: The command or its environment variables contain a secret.
            RunError: The cluster does not respond, refuses the token or rejects the job.
        """
        _check_no_secrets(command, runtime_env)
        name = re.sub(r"[^A-Za-z0-9_.-]", "_", name)  # the name becomes part of URLs
        job = f"{name}-{datetime.now():%Y%m%d-%H%M%S}-{secrets.token_hex(2)}"
        submit = partial(self._client.submit_job, entrypoint=command, submission_id=job, runtime_env=runtime_env)
        deadline = time.monotonic() + CLUSTER_READY_TIMEOUT_S
        while True:
            try:
                return self._call_api(submit)
            except RunError as error:  # a cluster that has just been started is not ready for jobs
                if NO_AGENT_TEXT not in error.what or time.monotonic() > deadline:
                    raise
                time.sleep(1)

    def runs(self) -> list[dict[str, Any]]:
        """Return a dictionary for each submitted job, newest first.

        The keys are name (job id), folder (always None), state (finished, failed, stopped, or running, which includes
        waiting jobs) and unix_s (start time as Unix time in seconds; 0 if unknown).
        """
        runs = []
        for job in self._call_api(self._client.list_jobs):
            state, unix_s = STATES.get(str(job.status.value), "running"), (job.start_time or 0) / 1000
            if job.submission_id:
                runs.append({"name": job.submission_id, "folder": None, "state": state, "unix_s": unix_s})
        return sorted(runs, key=lambda run: run["unix_s"], reverse=True)

    def newest(self) -> str:
        """Return the id of the most recently submitted job.

        Raises:
            RunError: No job has been submitted.
        """
        for run in self.runs():
            return run["name"]
        raise RunError("no job has been submitted to this cluster", where=self.address)

    def find_job_to_stop(self) -> str:
        """Return the id of the only running (or waiting) job, or of the newest job if no job is running.

        Raises:
            RunError: Several jobs are running, or no job has been submitted.
        """
        running = [run["name"] for run in self.runs() if run["state"] == "running"]
        if len(running) > 1:
            what, do = f"{len(running)} jobs are running: {', '.join(running)}", "run `raytrec stop JOB`"
            raise RunError(what, where=self.address, expected="the id of the job to stop", do=do)
        return running[0] if running else self.newest()

    def status(self, job: str) -> str:
        """Return the status of a job: PENDING, RUNNING, SUCCEEDED, FAILED or STOPPED."""
        return str(self._call_api(lambda: self._client.get_job_status(job)).value)

    def exit_code(self, job: str) -> int:
        """Wait for a job to end, and return its exit code; 143 if the job was stopped, 1 if a failed job has none."""
        while (status := self.status(job)) not in STATES:
            time.sleep(0.5)
        if status == "STOPPED":
            return 143
        code = self._call_api(lambda: self._client.get_job_info(job)).driver_exit_code
        return (0 if status == "SUCCEEDED" else 1) if code is None else code

    def message(self, job: str) -> str:
        """Return Ray's message about the status of a job, such as the reason for a failure; empty if there is none."""
        return self._call_api(lambda: self._client.get_job_info(job)).message or ""

    def stop(self, job: str) -> bool:
        """Ask a job to save a checkpoint and end, without waiting. Return False if the job has already ended."""
        return self._call_api(lambda: self._client.stop_job(job))

    def read(self, job: str, log_offset: int) -> tuple[str, str]:
        """Return a job's log from character `log_offset` on, and the status before this query.

        The text is "" if the log of a job that has not ended cannot be read, as before its start.
        """
        status = self.status(job)
        try:
            return self._call_api(lambda: self._client.get_job_logs(job))[log_offset:], status
        except RunError:
            if status in STATES:
                raise
            return "", status

    def _connect(self) -> Any:
        from ray.job_submission import JobSubmissionClient

        silence_uploads()
        variables = {name: os.environ.pop(name) for name in ADDRESS_VARIABLES if name in os.environ}
        try:
            return JobSubmissionClient(self.address)
        finally:
            os.environ |= variables

    def _call_api(self, ask: Callable[[], T]) -> T:
        """Call a function that uses the job API, and return its result; convert errors of the API to RunErrors."""
        from ray.exceptions import AuthenticationError
        from requests.exceptions import RequestException

        try:
            return ask()
        except AuthenticationError:
            raise RunError(
                "the cluster refuses the token, or requires one",
                where=self.address,
                expected="the token with which the cluster was started, and RAY_AUTH_MODE unset or token",
                do=f"store this token in {describe_token_source()}",
            ) from None
        except (ConnectionError, RequestException):
            raise RunError(
                "no Ray cluster responds",
                where=self.address,
                expected="the address of a Ray dashboard; with https://, a trusted certificate",
                do="forward the dashboard's port (`ray dashboard cluster.yaml`, `kubectl port-forward`), or "
                "start a local cluster: `raytrec head`",
            ) from None
        except RuntimeError as error:
            raise RunError(f"Ray reports: {_shorten_traceback(str(error))}", where=self.address) from None


def _check_no_secrets(command: str, runtime_env: dict[str, Any]) -> None:
    """Check that the command and environment variables of a job, which Ray's dashboard shows, contain no secrets.

    Raises:
        ConfigError: The command or a variable contains a secret.
    """
    texts = {"the command": command, **runtime_env.get("env_vars", {})}
    if names := [name for name, value in texts.items() if hide(value) != value]:
        raise ConfigError(
            f"the cluster's dashboard would show the secret in {', '.join(names)}",
            where=hide(command),
            expected="addresses without a user name and password, and settings without secrets",
            do="provide the credentials on the nodes instead: roles, ~/.aws/credentials or MLFLOW_TRACKING_… variables",
        )


def _shorten_traceback(text: str) -> str:
    """Return the last line of a traceback sent by the job API, at most 500 characters, without its HTTP prefix."""
    text = re.sub(r"^Request failed with status code \d+: ", "", text)
    lines = [line.strip() for line in text.splitlines() if line.strip(" \".'")]
    return lines[-1][:500] if lines else text
