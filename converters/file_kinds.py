"""What a file is by its first bytes, for messages about files that are not what they should be."""

_BEGINNINGS = (
    (b"PK\x03\x04", "a zip archive, probably a renamed PyTorch .bin"),
    (b"\x80\x02", "a Python pickle, probably a renamed PyTorch .bin"),
    (b"GGUF", "a GGUF file (rename it to .gguf)"),
    (b"\x1f\x8b", "a gzip archive"),
    (b"\xfd7zXZ", "an xz archive"),
    (b"\x28\xb5\x2f\xfd", "a zstd archive"),
    (b"7z\xbc\xaf", "a 7z archive"),
    (b"\x89HDF", "an HDF5 file"),
)
_TAR = slice(257, 262)
HEAD_BYTES = 512
"""What `what_it_is` looks at."""


def what_it_is(head: bytes) -> str | None:
    """The kind of a file that begins with `head`; None if nothing is known of it.

    Args:
        head: the first HEAD_BYTES, or all there are.
    """
    if not head:
        return "an empty file"
    if head.startswith(b"version https://git-lfs"):
        size = head.partition(b"\nsize ")[2].partition(b"\n")[0].decode("ascii", "replace")
        return f"a Git LFS pointer to {size or 'a number of'} bytes (run `git lfs pull`)"
    if not head.strip(b"\0"):
        return "full of zeros"
    for beginning, kind in _BEGINNINGS:
        if head.startswith(beginning):
            return kind
    if head[_TAR] == b"ustar":
        return "a tar archive"
    text = head.lstrip().lower()
    if text.startswith((b"<!doctype", b"<html", b"<?xml")):
        return "a web page (a failed download?)"
    if text.startswith(b'{"'):
        return "a JSON text"
    line = head.splitlines()[0][:40]
    if len(head) < HEAD_BYTES and head.isascii() and line.decode("ascii").isprintable():
        return f"a text that begins with {line.decode('ascii')!r}"
    return None
