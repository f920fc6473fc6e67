"""Fetches a set from GroupLens: checksum verified, licence shown. Runs only when the user asks for it."""

from __future__ import annotations

import hashlib
import shutil
import urllib.error
import urllib.request
import zipfile
from pathlib import Path

from raytrec_datasets.writing import progress
from rich.console import Console

from raytrec.common.errors import DataError

BASE = "https://files.grouplens.org/datasets/movielens/"
MD5 = {  # as GroupLens publishes them
    "100k": "0e33842e24a9c977be4e0107933c0723",
    "1m": "c4d9eecfca2ab87c1945afe126590906",
    "20m": "cd245b17a1ae2cc31bb14903e1204af3",
    "25m": "6b51fb2759a8657d3bfcbfc42b592ada",
    "32m": "d472be332d4daa821edc399621853b57",
}


def fetch(name: str, folder: Path, base: str = BASE, md5: str | None = None) -> Path:
    """Downloads and extracts a set, unless it is there; the folder with its files.

    Args:
        name: a key of MD5.
        folder: where the zip and its content go.
        base, md5: the address of the folder with the zips, and the checksum to expect.

    Raises:
        DataError: no connection, or a wrong checksum (the zip is removed).
    """
    target = folder / f"ml-{name}"
    if target.is_dir():
        return target
    folder.mkdir(parents=True, exist_ok=True)
    archive, url = folder / f"ml-{name}.zip", f"{base}ml-{name}.zip"
    digest = _download(url, archive)
    if digest != (md5 or MD5[name]):
        archive.unlink()
        raise DataError(
            f"the checksum of the download is {digest}",
            where=url,
            expected=f"MD5 {md5 or MD5[name]}",
            do="try again; if it stays so, download the set yourself and give its folder with --source",
        )
    partial = folder / f".ml-{name}.partial"  # an interrupted extraction must not look like the set
    shutil.rmtree(partial, ignore_errors=True)
    with zipfile.ZipFile(archive) as content:
        for entry in content.namelist():
            if entry.rsplit("/", 1)[-1].upper().startswith("README"):
                Console(stderr=True).print(
                    content.read(entry).decode("utf-8", "replace"), highlight=False, markup=False
                )
        content.extractall(partial)  # drops absolute paths and '..' (zipfile's own rule)
    archive.unlink()
    if not (partial / target.name).is_dir():
        raise DataError(f"the zip holds no folder {target.name}", where=url)
    (partial / target.name).rename(target)
    shutil.rmtree(partial)
    return target


def _download(url: str, archive: Path) -> str:
    """Writes the file; its MD5."""
    digest = hashlib.md5(usedforsecurity=False)
    partial = archive.with_suffix(".partial")
    try:
        with urllib.request.urlopen(url, timeout=30) as answer, partial.open("wb") as file:
            size = int(answer.headers.get("Content-Length") or 0) or None
            with progress("downloading", size) as advance:
                while block := answer.read(1 << 20):
                    file.write(block)
                    digest.update(block)
                    advance(len(block))
    except (urllib.error.URLError, OSError) as error:
        partial.unlink(missing_ok=True)
        raise DataError(
            f"cannot download: {getattr(error, 'reason', error)}",
            where=url,
            do="download it yourself and give its folder with --source",
        ) from None
    shutil.move(partial, archive)
    return digest.hexdigest()
