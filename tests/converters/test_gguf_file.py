"""GGUF files: every damage is an error that says so, every type is read as gguf-py reads it."""

import contextlib
import struct
from pathlib import Path

import gguf
import numpy as np
import pytest
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from jaxllm.converters.errors import CheckpointError
from jaxllm.converters.gguf_file import GgufFile
from jaxllm.converters.gguf_types import can_dequantize, dequantize_rows, supported_types
from tests.converters.gguf_files import bpe_metadata, model_metadata, model_tensors, write_gguf

QUANTIZED = [t for t in GGMLQuantizationType if can_dequantize(t)]


@pytest.fixture(scope="module")
def good_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Q8_0 model with a vocabulary. Read only."""
    path = tmp_path_factory.mktemp("gguf") / "good.gguf"
    metadata = model_metadata() | bpe_metadata()
    return write_gguf(path, metadata, model_tensors(kind=GGMLQuantizationType.Q8_0))


def damaged(path: Path, content: bytes) -> str:
    """The message with which `content` is refused."""
    path.write_bytes(content)
    with pytest.raises(CheckpointError) as error:
        GgufFile(path)
    assert path.name in str(error.value)
    return str(error.value)


def random_blocks(kind: GGMLQuantizationType, rows: int, blocks: int) -> np.ndarray:
    """u8[rows, bytes]: random bits wherever they give finite numbers."""
    random = np.random.default_rng(int(kind))
    nbytes = GGML_QUANT_SIZES[kind][1]
    flat = random.integers(0, 256, size=(rows * blocks * 4, nbytes), dtype=np.uint8)
    with np.errstate(all="ignore"):
        values = gguf.quants.dequantize(flat, kind)
    finite = flat[np.isfinite(values).all(axis=1) & (np.abs(values) < 1e30).all(axis=1)]
    assert len(finite) >= rows * blocks
    return finite[: rows * blocks].reshape(rows, -1)


@pytest.mark.parametrize("kind", QUANTIZED, ids=lambda t: t.name)
def test_every_type_equals_the_reference(kind: GGMLQuantizationType, tmp_path: Path) -> None:
    # Odd numbers of rows and blocks, so that no regrouping fits by chance.
    raw = random_blocks(kind, rows=7, blocks=37)
    data = raw.view(np.float32) if kind == GGMLQuantizationType.F32 else raw
    data = raw.view(np.float16) if kind == GGMLQuantizationType.F16 else data
    path = write_gguf(tmp_path / "t.gguf", {}, {"x": (data, kind)})
    file = GgufFile(path)
    tensor = file.tensors["x"]
    values = dequantize_rows(file.rows(tensor), kind)
    assert values.shape == tensor.shape == (7, 37 * GGML_QUANT_SIZES[kind][0])
    np.testing.assert_array_equal(values.astype(np.float32), gguf.quants.dequantize(raw, kind))


def test_metadata_equals_the_reference_reader(good_file: Path) -> None:
    reader = gguf.GGUFReader(good_file)
    wanted = {k: f.contents() for k, f in reader.fields.items() if not k.startswith("GGUF.")}
    assert GgufFile(good_file).metadata == wanted


def test_unsupported_types_are_listed_before_reading(tmp_path: Path) -> None:
    q8_1, q8_k = GGMLQuantizationType.Q8_1, GGMLQuantizationType.Q8_K
    tensors = {
        f"blk.{i}.ffn_up.weight": (np.zeros((2, GGML_QUANT_SIZES[kind][1]), np.uint8), kind)
        for i, kind in enumerate((q8_1, q8_1, q8_k))
    }
    path = write_gguf(tmp_path / "t.gguf", {}, tensors)
    with pytest.raises(CheckpointError) as error:
        GgufFile(path)
    message = str(error.value)
    assert "2 of Q8_1, 1 of Q8_K" in message
    assert "blk.0.ffn_up.weight, blk.1.ffn_up.weight, blk.2.ffn_up.weight" in message
    assert all(name in message for name in supported_types())
    assert {"F32", "F16", "BF16", "Q4_1", "Q4_K", "IQ4_XS", "MXFP4"} <= set(supported_types())


def test_unknown_type_number_is_named(tmp_path: Path) -> None:
    path = write_gguf(
        tmp_path / "t.gguf", {}, {"x": (np.zeros(4, np.float32), GGMLQuantizationType.F32)}
    )
    content = bytearray(path.read_bytes())
    at = content.index(struct.pack("<QIQ", 4, 0, 0)) + 8
    content[at : at + 4] = struct.pack("<I", 999)
    assert "1 of type 999 (x)" in damaged(path, bytes(content))


@pytest.mark.parametrize(
    ("head", "said"),
    [
        (b"", "empty file"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n", "Git LFS pointer"),
        (b"\0" * 100, "full of zeros"),
        (b"GGML" + b"\1" * 60, "begins with b'GGML'"),
        (b"GGUF", "truncated or damaged"),
        (struct.pack("<4sIQQ", b"GGUF", 1, 0, 0), "version 1"),
        (struct.pack("<4sIQQ", b"GGUF", 99, 0, 0), "version 99"),
        (struct.pack(">4sIQQ", b"GGUF", 3, 0, 0), "big-endian"),
        (struct.pack("<4sIQQ", b"GGUF", 3, 2**60, 0), f"claims {2**60} tensors"),
        (struct.pack("<4sIQQ", b"GGUF", 3, 0, 2**60), f"claims {2**60} key-value pairs"),
    ],
)
def test_what_is_no_gguf_file(head: bytes, said: str, tmp_path: Path) -> None:
    assert said in damaged(tmp_path / "bad.gguf", head)


@pytest.mark.parametrize("share", [0.001, 0.02, 0.3, 0.6, 0.9, 0.999])
def test_truncated_anywhere(share: float, good_file: Path, tmp_path: Path) -> None:
    content = good_file.read_bytes()
    assert "truncated" in damaged(tmp_path / "cut.gguf", content[: int(len(content) * share)])


def test_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"cannot read .*absent\.gguf: No such file"):
        GgufFile(tmp_path / "absent.gguf")


def test_overlapping_tensors(good_file: Path, tmp_path: Path) -> None:
    # Tensors differ in offset; the second gets the first one's.
    file = GgufFile(good_file)
    first, second = list(file.tensors.values())[:2]
    start = min(t.start for t in file.tensors.values())
    content = good_file.read_bytes()
    old = struct.pack("<IQ", int(second.type), second.start - start)
    new = struct.pack("<IQ", int(second.type), first.start - start)
    assert "overlap" in damaged(tmp_path / "bad.gguf", content.replace(old, new, 1))


@given(data=st.data())
@settings(
    max_examples=400, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_a_flipped_bit_never_crashes(data: st.DataObject, good_file: Path, tmp_path: Path) -> None:
    content = bytearray(good_file.read_bytes())
    header = min(t.start for t in GgufFile(good_file).tensors.values())
    for _ in range(data.draw(st.integers(1, 3))):
        content[data.draw(st.integers(0, header - 1))] ^= 1 << data.draw(st.integers(0, 7))
    path = tmp_path / "flipped.gguf"
    path.write_bytes(content)
    with contextlib.suppress(CheckpointError):
        file = GgufFile(path)
        for tensor in file.tensors.values():
            file.rows(tensor)
