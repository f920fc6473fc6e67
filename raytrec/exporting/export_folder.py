"""Output folder of an export, which keeps complete files if the export is interrupted."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from pathlib import Path

from raytrec.common.documents import to_json_document
from raytrec.common.errors import convert_os_errors
from raytrec.common.output_folder import ClaimedFolder
from raytrec.common.storage import join_uri
from raytrec.scoring.load import open_export
from raytrec.scoring.manifest import MANIFEST_FILE, FileEntry, Manifest, read_manifest

CLAIM_FILE = "_export.json"  # file that reserves the folder for an export until the export is complete


@dataclass(frozen=True)
class ExportClaim:
    """Content of _export.json, which reserves a folder for one export until the export is complete.

    Attributes:
        binding: Hash of the inputs and options that determine the export's content.
        files: File name → entry, for complete files.
        request: Hash of the arguments of the command. Unlike `binding`, this hash does not depend on which checkpoint
            or delta is the newest.
    """

    binding: str
    files: dict[str, FileEntry]
    request: str = ""


class ExportFolder:
    """Output folder of an export. If the export is interrupted, complete files are kept.

    Args:
        out: Path or URI of the folder.
        command: Command that writes the export, such as "raytrec export".
        binding: See ExportClaim.
        request: See ExportClaim.

    Attributes:
        folder: Folder to write to.
        claim: Claim of this export, initially without files. Complete files are added to it.

    Raises:
        DataError: The path is not valid, or the store cannot be reached.
    """

    def __init__(self, out: str, command: str, binding: str, request: str):
        self.folder, self.claim = ClaimedFolder(out, command), ExportClaim(binding, {}, request)

    def complete(self) -> Manifest | None:
        """Return the manifest if the folder contains this export in full; else return None and prepare to continue.

        Complete files of the same interrupted export are added to the claim. Files of the same request from another
        checkpoint or delta are deleted, because an export must not mix their states.

        Raises:
            ConfigError: The folder contains another export or other files.
            RunError: The folder cannot be read or written.
        """
        with _report_write_errors(self.folder.uri):
            if MANIFEST_FILE in self.folder.list_names():
                manifest = read_manifest(self.folder.uri)
                if manifest.binding == self.claim.binding:
                    return manifest
                raise self.folder.make_refusal(f"the folder contains another export: {manifest.version}")
            names, previous = self.folder.claim(CLAIM_FILE, ExportClaim)
            if previous is None:
                return None
            if previous.binding == self.claim.binding:
                self.claim.files.update({n: entry for n, entry in previous.files.items() if n in names})
            elif previous.request != self.claim.request:
                what = "an interrupted export of another run or with other options"
                raise self.folder.make_refusal(f"the folder contains {what}")
            else:
                for name in previous.files.keys() & names:
                    self.folder.delete(name)
        return None

    def write(self, name: str, data: Iterable[bytes]) -> None:
        """Write a file unless the claim lists it as complete.

        Args:
            name: Name of the file, relative to the folder.
            data: Content of the file, in pieces; not consumed if the file is complete.

        Raises:
            RunError: The file cannot be written.
        """
        files = self.claim.files
        if name in files:
            return
        digest, size = hashlib.sha256(), 0
        with _report_write_errors(join_uri(self.folder.uri, name)):
            if not files:  # written before all other files, to claim the folder
                self.folder.write(CLAIM_FILE, to_json_document(self.claim))
            with self.folder.stream(name, f"{self.folder.partial}/{name.replace('/', '-')}") as stream:
                for piece in data:
                    stream.write(piece)
                    digest.update(piece)
                    size += len(piece)
            files[name] = FileEntry(bytes=size, sha256=digest.hexdigest())
            self.folder.write(CLAIM_FILE, to_json_document(self.claim))

    def commit(self, manifest: Manifest) -> None:
        """Add the files to the manifest, check the scores of a local export, write the manifest, and delete the claim.

        Raises:
            RunError: A file cannot be written, or scores of golden rows differ when the export is loaded.
        """
        manifest.files = dict(self.claim.files)
        if self.folder.is_local:
            open_export(Path(self.folder.uri), manifest).check()
        with _report_write_errors(join_uri(self.folder.uri, MANIFEST_FILE)):
            self.folder.write(MANIFEST_FILE, to_json_document(manifest))
            with suppress(FileNotFoundError):  # on stores without locks, the same export may run twice at the same time
                self.folder.delete(CLAIM_FILE)
            self.folder.remove(self.folder.partial)


def _report_write_errors(where: str) -> AbstractContextManager[None]:
    do = "fix the cause and repeat the command; complete files are kept"
    return convert_os_errors("the export cannot be written", where=where, do=do)
