"""A Ray cluster, from a notebook or another program.

The same few lines serve both ways of reaching it:

    from raytrec import Cluster
    cluster = Cluster("ray://127.0.0.1:10001")    # what it starts lives with this process
    cluster = Cluster("http://127.0.0.1:8265")    # what it starts is a job, and outlives this process
    run = cluster.train("jobs/movielens.yaml", ["train.epochs=3"])
    run.watch()

Neither torch nor torchrec is needed here; Ray is, in the cluster's version.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from raytrec.client.package import Source
from raytrec.client.run import Run
from raytrec.common.errors import ConfigError
from raytrec.config.overrides import Overrides, as_texts


class Cluster:
    """A Ray cluster that is running.

    Args:
        address: ray://HOST:PORT (Ray client) or http(s)://HOST:PORT (the dashboard, with the job API).

    Raises:
        ConfigError: no such address. RunError: no cluster there, no token, or another version of Ray.
    """

    def __init__(self, address: str):
        if address.startswith("ray://"):
            from raytrec.client.ray_client import RayClient as Way
        elif address.startswith(("http://", "https://")):
            from raytrec.client.job_run import JobApi as Way  # type: ignore[assignment]
        else:
            raise ConfigError(
                f"'{address}' is not the address of a cluster",
                expected="ray://HOST:10001 (Ray client), or http://HOST:8265 (job API)",
            )
        logging.getLogger("ray.widgets.util").setLevel(logging.WARNING)  # in notebooks it wants ipywidgets
        self.address = address
        self._way = Way(address)

    def train(
        self, source: Source, overrides: Overrides | None = None, include: list[str | Path] | tuple = ()
    ) -> Run:
        """Starts a run, or resumes it if the same one was interrupted; returns at once.

        raytrec's code, as it is here, and modules that the config names go up with it.

        Args:
            source: a config file, its values, or a RunConfig. Its paths are those of the cluster, relative
                ones from its RAYTREC_ROOT.
            overrides: `section.key=value` strings, or a mapping: {"train.epochs": 3}.
            include: further files and folders that it needs.
        """
        return self._way.train(source, as_texts(overrides), tuple(map(Path, include)))

    def run(self, run: str | Path) -> Run:
        """An existing run: by its name in RAYTREC_ROOT/runs or its folder; over http://, by its job's id."""
        return self._way.run(str(run))

    def runs(self) -> list[dict[str, Any]]:
        """The runs in RAYTREC_ROOT/runs, the newest first: name, folder, state, unix_s (when it began); over
        http://, the jobs of the cluster: the name is the job's id, the folder None."""
        return self._way.runs()

    def close(self) -> None:
        """Ends the connection; with ray://, also the runs that it has started."""
        self._way.close()

    def __repr__(self) -> str:
        return f"<Cluster {self.address}>"
