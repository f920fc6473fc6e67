"""What goes up with a job: raytrec's own code, the configuration, and modules of yours that it names."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

from raytrec.config import RunConfig, load_config
from raytrec.errors import ConfigError
from raytrec.trust import code_in

OURS = ("raytrec", "raytrec_datasets")
LEFT_OUT = shutil.ignore_patterns("__pycache__", "*.pyc", ".git", ".venv", ".ipynb_checkpoints")
LARGEST_BYTES = 100 << 20  # data belong on storage that all nodes reach; Ray's own limit is 500 MiB


@contextmanager
def packed(
    source: str | Path | dict | RunConfig,
    overrides: list[str] | None = None,
    include: list[str | Path] | tuple = (),
) -> Iterator[Path]:
    """A folder to hand to Ray as the working directory of a job; removed with the block.

    It holds raytrec's code as it is here, so that the cluster needs its dependencies alone and computes what
    the code here says; NAME.yaml, the configuration with its overrides, which therefore stand in no command
    line; and the user's modules.

    Args:
        source: a config file, its values, or a RunConfig. Its paths are those of the cluster.
        overrides: `section.key=value` strings.
        include: further files and folders, which keep their place below the working directory.

    Raises:
        ConfigError: the config is wrong, or what it names or `include` is not there, or is too large.
    """
    config = load_config(source, overrides)
    with code([*user_modules(config), *map(Path, include)]) as folder:
        (folder / config_name(source)).write_text(config.to_yaml())
        yield folder


@contextmanager
def code(places: list[Path] | tuple = ()) -> Iterator[Path]:
    """raytrec's code, and other files and folders, in a folder that is removed with the block.

    Raises:
        ConfigError: a file is not there, or all together is too large.
    """
    folder = Path(tempfile.mkdtemp(prefix="raytrec-job-"))  # 0700
    try:
        for package in OURS:
            shutil.copytree(Path(find_spec(package).origin).parent, folder / package, ignore=LEFT_OUT)
        for place in places:
            _copy(place, folder)
        _check_size(folder)
        yield folder
    finally:
        shutil.rmtree(folder)


def config_name(source: str | Path | dict | RunConfig) -> str:
    """The name of the config's file in the package."""
    return f"{Path(source).stem}.yaml" if isinstance(source, (str, Path)) else "run.yaml"


def user_modules(config: RunConfig) -> list[Path]:
    """The files or folders, in the working directory, of modules that the configuration names. Others are
    installed, or they are missing, which the run says."""
    named = code_in(config.model_dump(by_alias=True, mode="json"))
    named.pop("scaling.address", None)
    tops = {name.partition(":")[0].partition(".")[0] for name in named.values()}
    places = [place for top in sorted(tops) for place in (Path(top), Path(f"{top}.py"))]
    return [place for place in places if place.exists() and place.stem not in OURS]


def _copy(place: Path, folder: Path) -> None:
    if not place.exists():
        raise ConfigError("there is no such file or folder", where=f"--include {place}")
    inside = place.absolute().is_relative_to(Path.cwd())
    target = folder / (place.absolute().relative_to(Path.cwd()) if inside else place.name)
    target.parent.mkdir(parents=True, exist_ok=True)
    if place.is_dir():
        shutil.copytree(place, target, ignore=LEFT_OUT, dirs_exist_ok=True)
    else:
        shutil.copy2(place, target)


def _check_size(folder: Path) -> None:
    sizes = {file: file.stat().st_size for file in folder.rglob("*") if file.is_file()}
    if (total := sum(sizes.values())) > LARGEST_BYTES:
        largest = max(sizes, key=sizes.get)
        raise ConfigError(
            f"what goes up with the job has {total >> 20} MiB",
            where=f"the largest file is {largest.relative_to(folder)}, {sizes[largest] >> 20} MiB",
            expected=f"at most {LARGEST_BYTES >> 20} MiB: code and small files",
            do="put data where the cluster's nodes reach them, and name that place in the config",
        )
