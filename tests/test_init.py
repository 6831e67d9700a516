"""What `import jaxllm` gives, and what it does not load."""

import subprocess
import sys

import pytest

import jaxllm


def test_import_and_sampling_params_load_no_jax():
    script = (
        "import sys, jaxllm\n"
        "assert jaxllm.SamplingParams(max_tokens=3).max_tokens == 3\n"
        "assert jaxllm.EngineConfig().model == 'demo'\n"
        "loaded = {'jax', 'numpy', 'transformers', 'torch'} & set(sys.modules)\n"
        "assert not loaded, loaded"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_every_public_name_resolves_and_is_listed():
    for name in jaxllm.__all__:
        assert getattr(jaxllm, name) is not None
        assert name in dir(jaxllm)


def test_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match=r"jaxllm.*LLMM"):
        _ = jaxllm.LLMM  # pyright: ignore[reportAttributeAccessIssue]
