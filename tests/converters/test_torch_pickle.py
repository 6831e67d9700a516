"""A pickle may rebuild tensors and nothing else; hostile and damaged ones end in an error."""

import os
import pickle
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from jaxllm.converters.torch_file import TorchFile
from tests.converters.torch_files import error_of


class Call:
    """Unpickling this makes a call."""

    def __init__(self, function: Any, *arguments: Any, state: Any = None) -> None:
        self.result = function, arguments, *([state] if state else [])

    def __reduce__(self) -> Any:
        return self.result


MARKER = "JAXLLM_WAS_HERE"
EVIL: list[tuple[Any, str]] = [
    (Call(os.system, f"touch {MARKER}"), "posix.system"),
    (Call(eval, f"open('{MARKER}', 'w')"), "builtins.eval"),
    (Call(getattr, 1, "real"), "builtins.getattr"),
    (Call(__import__, "os"), "builtins.__import__"),
    (Call(torch.hub.load, "a/b", "c"), "torch.hub.load"),
    (Call(torch.load, "x.bin"), "torch.serialization.load"),
    (torch.nn.Linear(2, 2), "torch.nn.modules.linear.Linear"),
    (torch.eye(3).to_sparse(), "torch._utils._rebuild_sparse_tensor"),
    (torch.empty(2, device="meta"), "torch._utils._rebuild_meta_tensor_no_storage"),
    (np.float64(1.0), "numpy"),
]


@pytest.mark.parametrize(("evil", "name"), EVIL, ids=[name for _, name in EVIL])
@pytest.mark.parametrize("protocol", [2, 4])
def test_other_globals_are_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, evil: Any, name: str, protocol: int
) -> None:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "pytorch_model.bin"
    torch.save({"good": torch.ones(2), "bad": evil}, path, pickle_protocol=protocol)
    message = error_of(path)
    assert message.startswith(f"is refused: its pickle calls {name}")
    assert "Nothing was run" in message
    assert not (tmp_path / MARKER).exists()


@pytest.mark.parametrize("protocol", [0, 1, 2, 4])
def test_a_bare_pickle_is_refused_by_what_it_calls(tmp_path: Path, protocol: int) -> None:
    path = tmp_path / "pytorch_model.bin"
    path.write_bytes(pickle.dumps(Call(os.system, "true"), protocol))
    assert "it is a pickle that calls posix.system" in error_of(path)


def with_pickle(path: Path, pickled: bytes) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/data.pkl", pickled)
        archive.writestr("archive/data/0", bytes(16))
    return path


@pytest.mark.parametrize(
    ("pickled", "message"),
    [
        (b"(S'true'\nios\nsystem\n.", "calls os.system"),
        (b"cos\nsystem\n(S'true'\no.", "calls os.system"),
        (b"ccollections\nOrderedDict\n)\x81.", "uses NEWOBJ"),
        (b"\x80\x02\x82\x01.", "uses EXT1"),
        (b"}(I1\nI2\nu.", "under 1"),
        (b"}\x94}\x94s.", "cannot be read"),
        (b"](h\x07e.", "cannot be read"),
        (b"(((((.", "cannot be read"),
        (b"}", "cannot be read"),
        (b"}r\xff\xff\xff\xff.", None),
        (b"\x96" + b"\xff" * 7 + b"\x00.", "cannot be read"),
        (b"\x8d" + b"\xff" * 7 + b"\x00.", "cannot be read"),
        (b"I" + b"9" * 5000 + b"\n.", "cannot be read"),
        (b")" + b"\x85" * 50_000 + b".", "holds no dict"),
        # Tuples of themselves, which would be hashed 2**60 times as a dict's key.
        (b"})" + b"q\x00h\x00\x86" * 60 + b"K\x01s.", "cannot be read"),
    ],
)
def test_hostile_pickles_end_in_an_error(
    tmp_path: Path, pickled: bytes, message: str | None
) -> None:
    path = with_pickle(tmp_path / "x.bin", pickled)
    if message is None:
        assert not TorchFile(path).tensors
    else:
        assert message in error_of(path)


def storage(count: int = 4, kind: str = "torch\nFloatStorage", key: str = "0") -> bytes:
    return f"(S'storage'\nc{kind}\nS'{key}'\nS'cpu'\nI{count}\ntQ".encode()


def rebuild(arguments: bytes) -> bytes:
    return b"}S'x'\nctorch._utils\n_rebuild_tensor_v2\n(" + arguments + b"tRs."


REST = b"I00\nccollections\nOrderedDict\n)R"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (storage() + b"I0\n(I4\nt(I1\nt" + REST, None),
        (storage() + b"I1\n(I4\nt(I1\nt" + REST, "reaches beyond its storage of 4 values"),
        (storage() + b"I0\n(I5\nt(I1\nt" + REST, "reaches beyond"),
        (storage() + b"I0\n(I2\nt(I4\nt" + REST, "reaches beyond"),
        (storage() + b"I-1\n(I2\nt(I1\nt" + REST, "impossible"),
        (storage() + b"I3\n(I2\nt(I-1\nt" + REST, "impossible"),
        (storage() + b"I0\n(I-2\nt(I1\nt" + REST, "impossible"),
        (storage() + b"I0\n(I9999999999999999\nt(I0\nt" + REST, "impossible"),
        (storage() + b"I0\n(I2\nI2\nt(I1\nt" + REST, "do not match"),
        (storage() + b"I0\nI4\n(I1\nt" + REST, "that it does not take"),
        (b"I3\nI0\n(I4\nt(I1\nt" + REST, "that it does not take"),
        (storage() + REST, "that it does not take"),
        (storage(5) + b"I0\n(I4\nt(I1\nt" + REST, "is 16 bytes long, its pickle says 20"),
        (storage(3) + b"I0\n(I3\nt(I1\nt" + REST, "is 16 bytes long, its pickle says 12"),
        (storage(key="1") + b"I0\n(I4\nt(I1\nt" + REST, "storage of tensor 'x' is missing"),
        (storage(kind="torch\nQInt8Storage") + b"I0\n(I4\nt(I1\nt" + REST, "torch.QInt8Storage"),
    ],
)
def test_sizes_that_do_not_fit(tmp_path: Path, arguments: bytes, message: str | None) -> None:
    path = with_pickle(tmp_path / "x.bin", rebuild(arguments))
    if message is None:
        assert TorchFile(path).read("x").tolist() == [0.0] * 4
    else:
        assert message in error_of(path)
