"""The folder that an export is written to."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from contextlib import AbstractContextManager, suppress

from raytrec.common.errors import ConfigError, os_errors
from raytrec.common.output_folder import OutputFolder
from raytrec.common.reading import NotReadable, json_values
from raytrec.common.storage import join_uri
from raytrec.scoring.manifest import EXPORT, FileEntry, Manifest, read_manifest

UNFINISHED = "_export.json"  # what has been written, as long as not all has


class Target:
    """Folder that an export is written to; complete files stay when it is interrupted.

    Args:
        folder: The folder.
        binding: Hash of everything that determines the export.
        request: Hash of the same with the run in place of the checkpoint.

    Attributes:
        files: Complete files.
    """

    def __init__(self, folder: OutputFolder, binding: str, request: str):
        self.folder, self.binding, self.request = folder, binding, request
        self.files: dict[str, FileEntry] = {}

    def complete(self) -> Manifest | None:
        """Return the manifest if the export is complete; otherwise find out which files are complete.

        Deletes the files of the same request from another checkpoint, which the run may have removed.

        Raises:
            ConfigError: The folder holds something else.
        """
        with _written(self.folder.uri):
            names = self.folder.names()
            if EXPORT in names:
                manifest = read_manifest(self.folder.uri)
                if manifest.binding == self.binding:
                    return manifest
                raise self._other(f"another export, {manifest.version}")
            if UNFINISHED in names:
                try:
                    unfinished = json_values(self.folder.read(UNFINISHED))
                except NotReadable:
                    raise self._other(
                        f"an export that was interrupted, and its {UNFINISHED} is damaged"
                    ) from None
                if unfinished["binding"] != self.binding:
                    if unfinished.get("request") != self.request:
                        raise self._other("an export of something else that was interrupted")
                    for name in unfinished["files"].keys() & names:
                        self.folder.delete(name)
                    return None
                there = {name: FileEntry(**entry) for name, entry in unfinished["files"].items()}
                self.files = {name: entry for name, entry in there.items() if name in names}
            elif names:
                raise self._other(f"other files, such as {min(names)}")
        return None

    def _other(self, what: str) -> ConfigError:
        return ConfigError(
            f"this folder holds {what}",
            where=f"--out {self.folder.uri}",
            expected="a new folder, or one that the same `raytrec export` has begun to fill",
            do="choose another --out, or remove the folder yourself",
        )

    def _note(self) -> None:
        """Write the names of the complete files."""
        entries = {name: entry.model_dump() for name, entry in self.files.items()}
        unfinished = {"binding": self.binding, "request": self.request, "files": entries}
        self.folder.write(UNFINISHED, json.dumps(unfinished).encode())

    def write(self, name: str, data: Iterable[bytes]) -> None:
        """Write a file, unless it is complete.

        Raises:
            RunError: The file cannot be written.
        """
        if name in self.files:
            return
        digest, size = hashlib.sha256(), 0
        with _written(join_uri(self.folder.uri, name)):
            if not self.files:
                self._note()  # first of all, so that the folder is this export's
            with self.folder.stream(name, f"{self.folder.partial}/{name.replace('/', '-')}") as stream:
                for piece in data:
                    stream.write(piece)
                    digest.update(piece)
                    size += len(piece)
            self.files[name] = FileEntry(bytes=size, sha256=digest.hexdigest())
            self._note()

    def commit(self, manifest: Manifest) -> None:
        """Write the manifest, with which the export is complete."""
        with _written(join_uri(self.folder.uri, EXPORT)):
            self.folder.write(EXPORT, manifest.to_json().encode())
            with suppress(FileNotFoundError):  # the same export, at the same time, on a store without locks
                self.folder.delete(UNFINISHED)
            self.folder.remove(self.folder.partial)


def _written(where: str) -> AbstractContextManager[None]:
    do = "make room, and give the same command again: complete files stay"
    return os_errors("the export cannot be written", where=where, do=do)
