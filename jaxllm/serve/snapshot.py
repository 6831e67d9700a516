"""Every effective setting with its origin, as a file that --config takes back."""

import dataclasses
import difflib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import yaml

from jaxllm.config import EngineConfig
from jaxllm.serve.options import ServeConfig

Origin = Literal["default", "file", "flag", "checkpoint"]
Origins = Mapping[str, Origin]

SECRET = frozenset({"api_key"})
_FROM_CHECKPOINT = frozenset({"max_model_len"})
"""What the checkpoint decides where nobody else does."""


@dataclass(frozen=True)
class Setting:
    value: Any
    origin: Origin


def effective_settings(configs: Iterable[Any], origins: Origins) -> dict[str, Setting]:
    """The fields of resolved configs, sorted by name.

    Args:
        origins: of the fields that a file or a flag has set.
    """
    found = {}
    for config in configs:
        for item in dataclasses.fields(config):
            derived: Origin = "checkpoint" if item.name in _FROM_CHECKPOINT else "default"
            value = getattr(config, item.name)
            if item.name in SECRET and value is not None:
                value = "(not shown)"
            found[item.name] = Setting(value, origins.get(item.name, derived))
    return dict(sorted(found.items()))


def as_json(settings: Mapping[str, Setting]) -> dict[str, dict[str, Any]]:
    """The settings as GET /server_info gives them."""
    return {name: dataclasses.asdict(setting) for name, setting in settings.items()}


def as_yaml(settings: Mapping[str, Setting], sampling_defaults: Mapping[str, Any]) -> str:
    """The settings a line each, the origin as a comment; sampling defaults as comments."""
    lines = []
    for name, setting in settings.items():
        # JSON's one-line forms are YAML as well.
        value = json.dumps(setting.value, ensure_ascii=False)
        secret = "# " if name in SECRET and setting.value is not None else ""
        lines.append(f"{secret}{name.replace('_', '-')}: {value}  # {setting.origin}")
    lines += [
        f"# sampling default {name}: {json.dumps(value)}  # checkpoint"
        for name, value in sorted(sampling_defaults.items())
    ]
    return "\n".join(lines) + "\n"


def write_snapshot(
    path: str, configs: Iterable[Any], origins: Origins, sampling_defaults: Mapping[str, Any]
) -> None:
    """Writes what --dump-config asks for."""
    text = as_yaml(effective_settings(configs, origins), sampling_defaults)
    Path(path).expanduser().write_text(text, encoding="utf-8")


def read_config_file(path: str) -> dict[str, Any]:
    """The settings of a YAML file by field name; null counts as absent.

    Raises:
        ValueError: unreadable, no mapping of names to values, or an unknown or repeated name.
    """
    try:
        text = Path(path).expanduser().read_text(encoding="utf-8")
        node = yaml.compose(text, Loader=yaml.SafeLoader)
        content = yaml.safe_load(text)
    except OSError as error:
        raise ValueError(f"--config {path}: {error.strerror or error}.") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"--config {path} is no valid YAML: {' '.join(str(error).split())}.")  # noqa: B904
    if node is None or content is None:
        return {}
    if not isinstance(node, yaml.MappingNode):
        raise ValueError(f"--config {path} holds no 'name: value' lines.")
    names = [str(key.value).replace("-", "_") for key, _ in node.value]
    known = [f.name for config in (EngineConfig, ServeConfig) for f in dataclasses.fields(config)]
    for name in names:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=3, cutoff=0.6)
            hint = f"; did you mean {', '.join(n.replace('_', '-') for n in near)}?" if near else ""
            raise ValueError(f"--config {path}: unknown setting {name.replace('_', '-')}{hint}")
        if names.count(name) > 1:
            raise ValueError(f"--config {path}: {name.replace('_', '-')} is set twice.")
    values = {str(key).replace("-", "_"): value for key, value in content.items()}
    return {name: value for name, value in values.items() if value is not None}
