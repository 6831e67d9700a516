"""A checkpoint as a folder in Hugging Face form whose weights are PyTorch files."""

from pathlib import Path
from typing import Literal

from jaxllm.converters.safetensors_folder import Check, Layout, WeightsFolder
from jaxllm.converters.torch_file import TorchFile

PYTORCH = Layout(
    "pytorch_model.bin", "pytorch_model.bin.index.json", "pytorch_model*.bin", TorchFile
)


class TorchFolder(WeightsFolder):
    """A folder of pytorch_model.bin, or of several with their index."""

    source: Literal["pt"] = "pt"

    def __init__(self, path: Path, check: Check | None = None) -> None:
        super().__init__(path, PYTORCH, check)
