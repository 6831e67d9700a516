"""Chat templates render as in transformers."""

from typing import Any

import pytest

from jaxllm.engine.chat_template import render

TOOLS = [{"type": "function", "function": {"name": "f", "description": "a < b & 'c' 世"}}]
CONVERSATIONS = [
    [{"role": "user", "content": "Hi"}],
    [
        {"role": "system", "content": "Be <brief>.\n"},
        {"role": "user", "content": "  spaced  "},
        {"role": "assistant", "content": "Yes.  "},
    ],
    [
        {"role": "user", "content": [{"type": "text", "text": "part"}]},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"function": {"name": "f", "arguments": {"x": [1, None, "é"]}}}],
        },
        {"role": "tool", "content": "42", "name": "f"},
        {"role": "assistant", "content": "It is 42"},
    ],
]
TEMPLATES = {
    "blocks": """
    {%- for m in messages %}
        {% if m.role == 'system' %}
[{{ m.content | trim }}]
        {% continue %}
        {% endif %}
        {{ m['role'] + ': ' }}{{ m.content }}
        {% if loop.index > 9 %}{% break %}{% endif %}
    {% endfor %}
    {% if add_generation_prompt %}
assistant:{% endif %}
""",
    "tools": """{% if tools is not none %}{% for t in tools %}{{ t | tojson }}
{{ t | tojson(indent=2) }}{{ t | tojson(separators=(',', ':'), sort_keys=true) }}
{% endfor %}{% endif %}{% if documents %}{{ documents[0].title }}{% endif %}
{% for m in messages %}{% if m.tool_calls %}{% for c in m.tool_calls %}
{{ c.function.name }}{{ c.function.arguments | tojson }}{% endfor %}{% endif %}
{% if m.content is string %}{{ m.content }}{% else %}{{ m.content[0].text }}{% endif %}{% endfor %}
""",
    "state": """{% set ns = namespace(n=0, last='') %}{% macro say(x) -%}<{{ x }}>{%- endmacro %}
{{ bos_token }}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% set ns.last = m.role %}
{{ say(m.role) }}{% generation %}{{ m.content }}{% set ns.n = ns.n + 10 %}{% endgeneration %}
{% endfor %}{{ ns.n }}{{ ns.last }}{{ enable_thinking | default('unset') }}{{ strftime_now('%Y') }}
{{ messages[::-1][0].role }}{{ 'x' if messages[0].role == 'system' else undefined_name }}
{{ "a,b".split(",") | join("+") }}
{{ messages | selectattr('role', 'equalto', 'user') | list | length }}
""",
}  # fmt: skip


def both(template: str, messages: list[Any], options: dict[str, Any]) -> tuple[str, str]:
    """The text from us and from transformers."""
    from transformers.utils.chat_template_utils import render_jinja_template

    variables = {"tools": None, "documents": None, "bos_token": "<s>", **options}
    [wanted], _ = render_jinja_template([messages], chat_template=template, **variables)
    return render(template, messages, **variables), wanted


@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("messages", CONVERSATIONS, ids=["user", "system", "tools"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"add_generation_prompt": True},
        {"tools": TOOLS, "documents": [{"title": "T", "text": "t"}]},
        {"enable_thinking": False, "bos_token": "<other>"},
    ],
    ids=["plain", "prompt", "tools", "variables"],
)
def test_equal_to_transformers(template: str, messages: list[Any], options: dict[str, Any]) -> None:
    ours, wanted = both(TEMPLATES[template], messages, options)
    assert ours == wanted


@pytest.mark.parametrize("content", ["Sure", "Sure,  ", "  Sure", "line\n"])
@pytest.mark.parametrize("shown", ["m.content", "m.content | trim"])
def test_last_message_is_continued(shown: str, content: str) -> None:
    template = "{% for m in messages %}[{{ " + shown + " }}]</s>\n{% endfor %}"
    check_continued(template, content)


def test_last_part_is_continued() -> None:
    template = (
        "{% for m in messages %}{{ m.content if m.content is string else m.content[-1].text }}"
    )
    check_continued(template + "</s>{% endfor %}", [{"type": "text", "text": "Sure: "}])


def check_continued(template: str, content: Any) -> None:
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": content}]
    ours, wanted = both(template, messages, {"continue_final_message": True})
    assert ours == wanted
    assert not ours.endswith("</s>")


def test_messages_are_left_alone() -> None:
    messages = [{"role": "user", "content": [{"type": "text", "text": "Hi"}]}]
    render("{{ messages[0].content[0].text }}", messages, continue_final_message=True)
    assert messages == [{"role": "user", "content": [{"type": "text", "text": "Hi"}]}]


@pytest.mark.parametrize(
    ("template", "said"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{% if %}", "chat template"),
        ("{{ messages[0].content + none }}", "NoneType"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ messages.append(1) }}", "not callable|unsafe"),
        ("{{ nothing.at.all }}", "undefined"),
    ],
)
def test_a_template_that_fails_says_why(template: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        render(template, CONVERSATIONS[0])


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"add_generation_prompt": True}, "exclude each other"),
        ({}, "leaves the last message's text out"),
    ],
)
def test_what_cannot_be_continued(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        render("no messages", CONVERSATIONS[0], continue_final_message=True, **options)
    with pytest.raises(ValueError, match="no text to continue"):
        render("x", [{"role": "assistant", "content": None}], continue_final_message=True)
