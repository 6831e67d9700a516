"""PyTorch files (`pytorch_model.bin`): read without torch, mapped and never copied.

Since PyTorch 1.6 `torch.save` writes a zip archive of uncompressed records: data.pkl, a pickle that
says which tensor is where, and a record data/KEY for each storage
(https://docs.pytorch.org/docs/stable/notes/serialization.html). The records are mapped at their
offsets; strides, offsets and storages shared by several tensors stay as they are.
"""

import mmap
import struct
import zipfile
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from jaxllm.converters.errors import CheckpointError
from jaxllm.converters.file_kinds import HEAD_BYTES, what_it_is
from jaxllm.converters.safetensors_file import TensorInfo
from jaxllm.converters.torch_pickle import first_refused, read_state_dict
from jaxllm.converters.torch_tensors import PickleError, StoredTensor, readable

_LOCAL_HEADER = struct.Struct("<4s22xHH")  # signature, then the lengths of name and extra field
_SIGNATURE = b"PK\x03\x04"
_LEGACY_MAGIC = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."
_LEGACY_HEADER_BYTES = 2**24
_RESAVE = "Load it with torch and save its state_dict() again with torch.save, or as safetensors."


class TorchFile:
    """A checked PyTorch file.

    Attributes:
        tensors: name to TensorInfo, in the state dict's order; nbytes as if contiguous.

    Raises:
        CheckpointError: damaged, of another kind, or its pickle names a function or class that no
            tensor needs.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._open()
        except PickleError as error:
            raise CheckpointError(f"{path} {error}") from None
        except OSError as error:
            raise CheckpointError(f"cannot read {path}: {error.strerror or error}.") from error
        self.tensors: Mapping[str, TensorInfo] = {
            name: TensorInfo(
                tensor.shape, tensor.dtype, int(np.prod(tensor.shape)) * tensor.dtype.itemsize
            )
            for name, tensor in self._stored.items()
        }

    def read(self, name: str, index: tuple[slice, ...] | None = None) -> np.ndarray:
        """The tensor, or its part `index`, as a read-only view of the mapped file."""
        tensor = self._stored[name]
        if 0 in tensor.shape:
            return np.empty(tensor.shape, tensor.dtype)[index or ()]
        start, _ = self._records[f"data/{tensor.storage.key}"]
        view = np.ndarray(
            tensor.shape, tensor.dtype, self._map, start + tensor.offset, tensor.strides
        )
        return view[index] if index else view

    def _open(self) -> None:
        with self.path.open("rb") as file:
            head = file.read(HEAD_BYTES)
            if not head.startswith(_SIGNATURE):
                raise PickleError(_no_zip(head, self.path))
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        self._records = self._find_records()
        if "data.pkl" not in self._records:
            raise PickleError("is a zip archive, but no PyTorch file: it has no data.pkl.")
        order = self._record("byteorder") if "byteorder" in self._records else b"little"
        if order != b"little":
            raise PickleError(
                f"has the byte order {order[:20].decode('ascii', 'replace')!r}; only little-endian "
                f"files can be read. Save it again on a little-endian machine."
            )
        self._stored = read_state_dict(self._record("data.pkl"))
        for name, tensor in self._stored.items():
            self._check_storage(name, tensor)

    def _record(self, name: str) -> bytes:
        start, nbytes = self._records[name]
        return self._map[start : start + nbytes]

    def _find_records(self) -> dict[str, tuple[int, int]]:
        """Start and size of each record by its name within the archive's only folder."""
        try:
            with zipfile.ZipFile(self.path) as archive:
                entries = archive.infolist()
        except (zipfile.BadZipFile, NotImplementedError, ValueError, struct.error) as error:
            raise PickleError(
                f"is truncated or damaged: its zip directory, at the end, cannot be read "
                f"({error}). Download or copy it again."
            ) from None
        if any(entry.filename.endswith("/constants.pkl") for entry in entries):
            raise PickleError(f"is a TorchScript archive, which holds code. {_RESAVE}")
        records: dict[str, tuple[int, int]] = {}
        for entry in entries:
            name = entry.filename.partition("/")[2]
            if name in records:
                raise PickleError(f"is damaged: record {name[:60]!r} is there twice.")
            records[name] = self._locate(entry)
        return records

    def _locate(self, entry: zipfile.ZipInfo) -> tuple[int, int]:
        name = entry.filename[:60]
        if entry.compress_type != zipfile.ZIP_STORED or entry.flag_bits & 1:
            raise PickleError(
                f"is no file of torch.save's: record {name!r} is compressed or encrypted. {_RESAVE}"
            )
        start = entry.header_offset + _LOCAL_HEADER.size
        if start > len(self._map) or entry.header_offset < 0:
            raise PickleError(f"is damaged: record {name!r} begins beyond the file.")
        signature, name_bytes, extra_bytes = _LOCAL_HEADER.unpack_from(
            self._map, entry.header_offset
        )
        start += name_bytes + extra_bytes
        if signature != _SIGNATURE or start + entry.file_size > len(self._map):
            raise PickleError(f"is damaged: record {name!r} is not where the directory has it.")
        return start, entry.file_size

    def _check_storage(self, name: str, tensor: StoredTensor) -> None:
        record = self._records.get(f"data/{tensor.storage.key}")
        if record is None:
            raise PickleError(f"is damaged: the storage of tensor {name!r} is missing.")
        if record[1] != tensor.storage.nbytes:
            raise PickleError(
                f"is damaged: the storage of tensor {name!r} is {record[1]:,} bytes long, its "
                f"pickle says {tensor.storage.nbytes:,}."
            )


def _no_zip(head: bytes, path: Path) -> str:
    """What a file is that does not begin like a zip archive, and what to do."""
    if head[:1] in (b"\x80", b"c", b"("):
        with path.open("rb") as file:
            refused = first_refused(file.read(_LEGACY_HEADER_BYTES))
        if refused is not None:
            return (
                f"is refused: it is a pickle that calls {readable(refused)}, which no tensor needs "
                f"and which could run any code. Nothing was run."
            )
        if head.startswith(_LEGACY_MAGIC):
            return f"is a PyTorch file in the format before 1.6, which is not read. {_RESAVE}"
        if head[:1] == b"\x80":
            return f"is a bare pickle, no PyTorch file. {_RESAVE}"
    if head[8:9] == b"{":
        return "is a safetensors file (rename it to model.safetensors), not a PyTorch file."
    what = what_it_is(head) or f"of unknown kind: it begins with {head[:4]!r}"
    if what == "a tar archive":
        what = "a tar archive, as PyTorch wrote before 0.1.10"
    return f"is {what}, not a PyTorch file of 1.6 or later."
