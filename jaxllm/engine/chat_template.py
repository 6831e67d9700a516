"""Chat templates: where they come from, which one is taken, and their rendering.

Templates are Jinja programs from the checkpoint. They run in a sandbox with the settings and
helpers that transformers gives them (utils/chat_template_utils.py), so that a prompt is the same
text here as there.
"""

import datetime
import functools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
import jinja2.ext
import jinja2.sandbox
from jinja2 import nodes

TEMPLATE_FILE = "chat_template.jinja"
TEMPLATE_FOLDER = "additional_chat_templates"
LEGACY_TEMPLATE_FILE = "chat_template.json"

# Appended to the message that is to be continued, to find its end in the rendered text. The
# space shows whether the template trims what it is given.
_MARK = "\ue000JAXLLM_END_OF_MESSAGE\ue000"


def read_templates(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """A checkpoint's templates by name; the main one is "default".

    A chat_template.jinja file (with others in additional_chat_templates/) goes before
    tokenizer_config.json, whose entry is a text or a list of named ones.

    Args:
        config: tokenizer_config.json's content.
    """
    files = {}
    if (folder / TEMPLATE_FILE).is_file():
        files["default"] = (folder / TEMPLATE_FILE).read_text(encoding="utf-8")
    for file in sorted((folder / TEMPLATE_FOLDER).glob("*.jinja")):
        files[file.stem] = file.read_text(encoding="utf-8")
    if files:
        return files
    entry = config.get("chat_template")
    if entry is None and (folder / LEGACY_TEMPLATE_FILE).is_file():
        text = (folder / LEGACY_TEMPLATE_FILE).read_text(encoding="utf-8")
        entry = json.loads(text).get("chat_template")
    return named_templates(entry, str(folder))


def named_templates(entry: Any, where: str) -> dict[str, str]:
    """Templates by name out of the forms that tokenizer_config.json has for them."""
    if entry is None:
        return {}
    if isinstance(entry, str):
        return {"default": entry}
    if not isinstance(entry, Mapping):
        try:
            entry = {item["name"]: item["template"] for item in entry}
        except (TypeError, KeyError):
            entry = {"default": None}
    if not all(isinstance(template, str) for template in entry.values()):
        raise ValueError(f"{where}: chat_template is neither a text nor a list of named ones.")
    return dict(entry)


def template_from_option(option: str) -> str:
    """The template that --chat-template names: a file, or the template itself.

    Raises:
        ValueError: no such file, and it does not look like a template.
    """
    if any(mark in option for mark in ("{{", "{%", "\n")):
        return option
    try:
        return Path(option).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(
            f"--chat-template {option!r} is neither a readable file ({error}) nor a template: it "
            f"has no {{{{ or {{% in it."
        ) from None


def choose_template(
    templates: Mapping[str, str], wanted: str | None, tools: Sequence[Any] | None
) -> str:
    """The template called `wanted`, or `wanted` itself; by default tool_use if there are tools.

    Raises:
        ValueError: there is none, or none is the default.
    """
    if wanted is not None:
        return templates.get(wanted, wanted)
    if tools is not None and "tool_use" in templates:
        return templates["tool_use"]
    if "default" in templates:
        return templates["default"]
    if templates:
        raise ValueError(
            f"the model has several chat templates and no default: name one of "
            f"{', '.join(sorted(templates))} with --chat-template."
        )
    raise ValueError(
        "the model has no chat template (is it a base model?): give one with --chat-template FILE, "
        "or use completions instead of chat."
    )


def render(
    template: str,
    messages: Sequence[Mapping[str, Any]],
    *,
    add_generation_prompt: bool = False,
    continue_final_message: bool = False,
    **variables: Any,
) -> str:
    """The prompt's text.

    Args:
        variables: what else the template may use: tools, documents, bos_token and the like.

    Raises:
        ValueError: the template is broken or refuses the messages; the message says why.
    """
    if continue_final_message:
        if add_generation_prompt:
            raise ValueError(
                "continue_final_message and add_generation_prompt exclude each other: the one "
                "goes on with the last message, the other begins a new one."
            )
        messages = _mark_end(messages)
    text = _run(
        template,
        {**variables, "messages": messages, "add_generation_prompt": add_generation_prompt},
    )
    return _cut_at_mark(text) if continue_final_message else text


def _run(template: str, variables: Mapping[str, Any]) -> str:
    try:
        return _compile(template).render(variables)
    except Exception as error:
        # A template can raise anything: it adds texts to None, calls what is not there …
        reason = str(error) or type(error).__name__
        raise ValueError(f"the chat template does not accept these messages: {reason}") from error


def _mark_end(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    *before, last = messages
    content = last.get("content")
    if isinstance(content, str):
        marked: Any = content + _MARK + " "
    else:
        marked = [dict(part) for part in content or ()]
        texts = [part for part in marked if isinstance(part.get("text"), str)]
        if not texts:
            raise ValueError("continue_final_message: the last message has no text to continue.")
        texts[-1]["text"] += _MARK + " "
    return [*map(dict, before), {**last, "content": marked}]


def _cut_at_mark(text: str) -> str:
    before, mark, after = text.rpartition(_MARK)
    if not mark:
        raise ValueError(
            "continue_final_message: the chat template leaves the last message's text out."
        )
    return before if after.startswith(" ") else before.rstrip()


@functools.lru_cache(maxsize=64)
def _compile(template: str) -> jinja2.Template:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals.update(
        raise_exception=_raise_exception,
        strftime_now=lambda form: datetime.datetime.now().strftime(form),
    )
    return environment.from_string(template)


class _Generation(jinja2.ext.Extension):
    """{% generation %} … {% endgeneration %} marks the assistant's text for training: no effect.

    Its body is a scope of its own, as in transformers.
    """

    tags = {"generation"}  # noqa: RUF012 (jinja2's own declaration)

    def parse(self, parser: Any) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_body"), [], [], body).set_lineno(line)

    def _body(self, caller: Any) -> str:
        return caller()


def _to_json(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
    """JSON without the escapes that jinja2's own filter adds for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, **options)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)
