"""SHA-256 sums of weight files: checked before the files are read, written by `jaxllm.convert`.

The sums are in a file SHA256SUMS as `sha256sum` writes it, or in the names of the hub cache's
blobs, which are the sums of what lies in them.
"""

import hashlib
import os
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from jaxllm.converters.errors import CheckpointError

SUMS_FILE = "SHA256SUMS"

_LINE = re.compile(r"(?P<sum>[0-9a-fA-F]{64}) [ *](?P<name>.+)")
_SUM = re.compile(r"[0-9a-f]{64}")


def verify_files(files: list[Path]) -> None:
    """Compares each file with its sum.

    Raises:
        CheckpointError: sums that differ, all named, or a file that has none.
    """
    expected = {file: _expected(file) for file in files}
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        actual = list(pool.map(sha256_of, files))
    wrong = [
        f"{file} has the SHA-256 {found}, but {origin} says {wanted}"
        for (file, (wanted, origin)), found in zip(expected.items(), actual, strict=True)
        if found != wanted
    ]
    if wrong:
        raise CheckpointError(
            f"{len(wrong)} of {len(files)} files are not what they should be: {'; '.join(wrong)}. "
            f"Download or copy them again."
        )


def write_sums(folder: Path) -> None:
    """Writes SHA256SUMS for all files in `folder` and below."""
    files = sorted(file for file in folder.rglob("*") if file.is_file())
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        sums = pool.map(sha256_of, files)
        lines = [
            f"{digest}  {file.relative_to(folder).as_posix()}\n"
            for file, digest in zip(files, sums, strict=True)
        ]
    (folder / SUMS_FILE).write_text("".join(lines), encoding="utf-8")


def sha256_of(file: Path) -> str:
    """The file's SHA-256 in hexadecimal digits.

    Raises:
        CheckpointError: the file cannot be read.
    """
    try:
        with file.open("rb") as opened:
            return hashlib.file_digest(opened, "sha256").hexdigest()
    except OSError as error:
        raise CheckpointError(f"cannot read {file}: {error.strerror or error}.") from error


def _expected(file: Path) -> tuple[str, str]:
    """The sum that `file` should have, and who says so."""
    sums = _sums_above(file)
    if sums is not None:
        name = file.relative_to(sums.parent).as_posix()
        listed = _read_sums(sums)
        if name not in listed:
            raise CheckpointError(
                f"cannot verify {file}: {sums} does not list {name!r}. Add its sum with "
                f"`sha256sum`, or start without --verify-weights sha256."
            )
        return listed[name], str(sums)
    if file.is_symlink():
        blob = file.resolve()
        if blob.parent.name == "blobs" and _SUM.fullmatch(blob.name):
            return blob.name, "the name of its blob in the hub's cache"
    raise CheckpointError(
        f"cannot verify {file}: there is no {SUMS_FILE} beside it, and it is no blob of the hub's "
        f"cache. Write one in its folder with `sha256sum * > {SUMS_FILE}` while you trust the "
        f"files, or start without --verify-weights sha256."
    )


def _sums_above(file: Path) -> Path | None:
    """SHA256SUMS beside the file, or above it as far as the checkpoint's folder."""
    for folder in file.parents:
        if (folder / SUMS_FILE).is_file():
            return folder / SUMS_FILE
        if (folder / "config.json").is_file() or file.suffix == ".gguf":
            return None
    return None


def _read_sums(path: Path) -> dict[str, str]:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"cannot read {path}: {error}.") from error
    sums: dict[str, str] = {}
    for number, line in enumerate(lines, 1):
        if not line.strip() or line.startswith("#"):
            continue
        match = _LINE.fullmatch(line)
        if match is None:
            raise CheckpointError(
                f"{path}, line {number}: {line[:80]!r} is no line of `sha256sum` (64 hexadecimal "
                f"digits, two spaces, a name)."
            )
        sums[match["name"].removeprefix("./")] = match["sum"].lower()
    return sums
