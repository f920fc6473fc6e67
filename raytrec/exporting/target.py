"""The folder that an export is written to."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass

from raytrec.common.documents import document
from raytrec.common.errors import os_errors
from raytrec.common.output_folder import ClaimedFolder
from raytrec.common.storage import join_uri
from raytrec.scoring.manifest import EXPORT, FileEntry, Manifest, read_manifest

UNFINISHED = "_export.json"  # what has been written, as long as not all has


@dataclass(frozen=True)
class ExportClaim:
    """The claim of an export that is being written (_export.json).

    Attributes:
        binding, request: See Target.
        files: Complete files.
    """

    binding: str
    files: dict[str, FileEntry]
    request: str = ""


class Target:
    """Folder that an export is written to; complete files stay when it is interrupted.

    Args:
        folder: The folder.
        binding: Hash of everything that determines the export.
        request: Hash of the same with the run in place of the checkpoint.

    Attributes:
        files: Complete files.
    """

    def __init__(self, folder: ClaimedFolder, binding: str, request: str):
        self.folder, self.binding, self.request = folder, binding, request
        self.files: dict[str, FileEntry] = {}

    def complete(self) -> Manifest | None:
        """Return the manifest if the export is complete; otherwise find out which files are complete.

        Deletes the files of the same request from another checkpoint, which the run may have removed.

        Raises:
            ConfigError: The folder holds something else.
        """
        with _written(self.folder.uri):
            if EXPORT in self.folder.names():
                manifest = read_manifest(self.folder.uri)
                if manifest.binding == self.binding:
                    return manifest
                raise self.folder.refused(f"this folder holds another export, {manifest.version}")
            names, before = self.folder.claim(UNFINISHED, ExportClaim)
            if before is None:
                return None
            if before.binding == self.binding:
                self.files = {name: entry for name, entry in before.files.items() if name in names}
            elif before.request != self.request:
                what = "an export of something else that was interrupted"
                raise self.folder.refused(f"this folder holds {what}")
            else:
                for name in before.files.keys() & names:
                    self.folder.delete(name)
        return None

    def _note(self) -> None:
        """Write the names of the complete files."""
        self.folder.write(UNFINISHED, document(ExportClaim(self.binding, self.files, self.request)))

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
            self.folder.write(EXPORT, document(manifest))
            with suppress(FileNotFoundError):  # the same export, at the same time, on a store without locks
                self.folder.delete(UNFINISHED)
            self.folder.remove(self.folder.partial)


def _written(where: str) -> AbstractContextManager[None]:
    do = "make room, and give the same command again: complete files stay"
    return os_errors("the export cannot be written", where=where, do=do)
