"""Pins, which protect checkpoints of a running run from removal (`files.keep`, `files.remove_oldest`)."""

from __future__ import annotations

from raytrec.common.storage import join_uri, open_filesystem, query_file_info

PIN = "pinned"  # file in the folder of a pinned checkpoint


def pin(folder: str) -> None:
    """Protect a checkpoint from removal.

    Raises:
        OSError: The folder of the checkpoint does not exist or cannot be written.
    """
    filesystem, path = open_filesystem(join_uri(folder, PIN))
    filesystem.open_output_stream(path).close()


def unpin(folder: str) -> None:
    """End the protection of a checkpoint, if any. OSError is raised as in `pin`."""
    if is_pinned(folder):
        filesystem, path = open_filesystem(join_uri(folder, PIN))
        filesystem.delete_file(path)


def is_pinned(folder: str) -> bool:
    """Return True if a checkpoint is protected from removal."""
    return query_file_info(join_uri(folder, PIN)).is_file
