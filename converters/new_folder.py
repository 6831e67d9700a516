"""A folder that appears under its name once all of it is written."""

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from jaxllm.converters.errors import CheckpointError


def check_target(target: Path) -> None:
    """Raises CheckpointError if `target` is neither absent nor an empty folder."""
    if target.is_dir() and any(target.iterdir()):
        raise CheckpointError(f"{target} is not empty: delete it or give another folder.")
    if target.exists() and not target.is_dir():
        raise CheckpointError(f"{target} is a file: give the name of a new folder.")


@contextlib.contextmanager
def appearing_folder(target: Path) -> Iterator[Path]:
    """A temporary folder beside `target`, renamed to it at the end or deleted on an error."""
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        folder = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    except OSError as error:
        raise CheckpointError(f"cannot write {target}: {error.strerror or error}.") from error
    try:
        yield folder
        umask = os.umask(0)
        os.umask(umask)
        folder.chmod(0o777 & ~umask)  # mkdtemp's folders are closed to others
        _flush(folder)
        folder.rename(target)
    except OSError as error:
        shutil.rmtree(folder, ignore_errors=True)
        raise CheckpointError(f"cannot write {target}: {error.strerror or error}.") from error
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise


def _flush(folder: Path) -> None:
    """Puts all files on the disk: a rename may get there before what is in them."""
    for file in folder.rglob("*"):
        if file.is_file():
            with file.open("rb") as opened:
                os.fsync(opened.fileno())
