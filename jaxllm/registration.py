"""`jaxllm.register_model` and plug-ins: architectures that are not part of this package."""

import importlib.metadata
import logging
from collections.abc import Mapping

from jaxllm.converters import architectures
from jaxllm.converters.architectures import Architecture, PostLoad
from jaxllm.converters.name_map import NameMap
from jaxllm.models import registry
from jaxllm.models.causal_lm import CausalLM

ENTRY_POINTS = "jaxllm.models"

logger = logging.getLogger(__name__)

_loaded: dict[str, str] = {}
"""Entry points that were called: name and value -> "" or why it failed."""


def register_model(
    name: str,
    *,
    model: type[CausalLM] | str,
    name_map: NameMap | str | None = None,
    rename: Mapping[str, str] | None = None,
    post_load: PostLoad | str | None = None,
) -> None:
    """Makes checkpoints of architecture `name` (as config.json has it) loadable.

    To be called before the engine starts, in the process that runs it. The server's engine has
    a process of its own, so for the server it belongs in an entry point of the group
    "jaxllm.models": a function without arguments that calls this one.

    >>> register_model("FinForCausalLM", model="Qwen2ForCausalLM", rename={"query": "q_proj"})

    Args:
        model: a supported architecture's name, a model class (see models/causal_lm.py), or
            "module:Class", imported when it is needed.
        name_map: from checkpoint names to parameters; by default that of the architecture that
            `model` names. A NameMap or "module:NAME_MAP".
        rename: dotted parts of the checkpoint's tensor names -> what they become before the map.
        post_load: (dotted name -> parameter, config) -> the parameters, called when all are
            loaded; it may not change names, shapes or dtypes. A function or "module:function".

    Raises:
        ValueError: an argument cannot be used; it is named.
    """
    if not name:
        raise ValueError("register_model: the architecture's name is empty.")
    if isinstance(model, str) and ":" not in model:
        target, base = registry.target_of(model), architectures.find_architecture([model])
        if target is None or base is None:
            known = ", ".join(registry.supported_architectures())
            raise ValueError(
                f"register_model({name!r}): model={model!r} is no supported architecture "
                f"({known}) and has not the form 'module:Class'."
            )
    else:
        target, base = model, None
    if base is None and name_map is None:
        raise ValueError(
            f"register_model({name!r}): a class of one's own needs name_map= as well (see "
            f"jaxllm.converters.name_map)."
        )
    for what, value in (("name_map", name_map), ("post_load", post_load)):
        if isinstance(value, str) and ":" not in value:
            raise ValueError(f"register_model({name!r}): {what}={value!r} is not 'module:name'.")
    if rename is not None and not all(map(str, rename)):
        raise ValueError(f"register_model({name!r}): rename has an empty name.")
    renames = ((dict(rename),) if rename else ()) + (base.renames if base else ())
    own_map = name_map if name_map is not None else base.name_map if base else ""
    hook = post_load if post_load is not None else base.post_load if base else None
    registry.register(name, target)
    architectures.register(name, Architecture(own_map, renames, hook))


def load_plugins() -> None:
    """Calls the entry points of the group "jaxllm.models", each once a process.

    A broken one is logged with its traceback and stops nothing: the model at hand may not need it.
    """
    for entry in importlib.metadata.entry_points(group=ENTRY_POINTS):
        key = f"{entry.name} = {entry.value}"
        if key in _loaded:
            continue
        _loaded[key] = ""
        try:
            entry.load()()
        except Exception as error:
            _loaded[key] = f"{type(error).__name__}: {error}"
            logger.exception("plug-in %s of %s failed", key, _owner(entry))


def resolve(names: list[str]) -> type[CausalLM]:
    """The model class of the first known of config.json's architectures, plug-ins included.

    Raises:
        ValueError: none is known; says how to register one, and which plug-ins failed.
        ImportError: the class's module cannot be imported.
    """
    load_plugins()
    try:
        return registry.resolve(names)
    except ValueError as error:
        failed = [f"{key} ({why})" for key, why in _loaded.items() if why]
        if not failed:
            raise
        raise ValueError(f"{error} Plug-ins that failed: {', '.join(failed)}.") from None


def _owner(entry: importlib.metadata.EntryPoint) -> str:
    return entry.dist.name if entry.dist is not None else "an unknown package"
