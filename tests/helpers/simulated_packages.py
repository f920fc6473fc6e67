"""Simulated upstream packages: a folder for sys.path with package metadata."""

from pathlib import Path

PACKAGE_METADATA = "Metadata-Version: 2.1\nName: {}\nVersion: {}\n"


def install_simulated_packages(folder: Path, modules: dict[str, str] | None = None, **versions: str) -> str:
    """Write the metadata of simulated packages and return the folder for sys.path.

    Args:
        folder: folder to write to.
        modules: file → text, e.g. {"torch/version.py": "cuda = '13.0'"}.
        versions: package name (with _ instead of -) → version.
    """
    for name, version in versions.items():
        info = folder / f"{name}-{version}.dist-info"
        info.mkdir(parents=True, exist_ok=True)
        (info / "METADATA").write_text(PACKAGE_METADATA.format(name.replace("_", "-"), version))
        (info / "RECORD").write_text(f"{name}/__init__.py,sha256={version},1\n")
    for name, text in (modules or {}).items():
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return str(folder)
