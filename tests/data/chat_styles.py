"""Chat templates in the styles of published models, written for these tests, with `generation`
around the answers.
"""

import json
import re
from pathlib import Path

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

from jaxlc.data.tokens.chat_templates import TEMPLATES

# ChatML with tools, as Qwen and SmolLM.
CHATML = """\
{%- if tools %}<|im_start|>system
Functions: {{ tools | tojson }}<|im_end|>
{% endif %}
{%- for message in messages %}
{%- if message.role == 'assistant' %}
{{- '<|im_start|>assistant\\n' }}
{%- generation %}
{{- message.content or '' }}
{%- for call in message.tool_calls or [] %}
{{- '\\n<tool_call>\\n' }}{{ call.function | tojson }}{{ '\\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>' }}
{%- endgeneration %}
{{- '\\n' }}
{%- else %}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""

# Headers around roles, as Llama 3; content is stripped.
HEADERS = """\
{{- bos_token }}
{%- for message in messages %}
    {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' }}
    {%- if message['role'] == 'assistant' %}
        {%- generation %}{{ message['content'] | trim }}<|eot_id|>{%- endgeneration %}
    {%- else %}
        {{- message['content'] | trim + '<|eot_id|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
"""

# Instructions in brackets, as Mistral: the prompt of an answer ends with the user's message.
BRACKETS = """\
{{- bos_token }}
{%- for message in messages %}
{%- if message.role == 'user' %}[INST] {{ message.content }} [/INST]
{%- elif message.role == 'system' %}[SYS]{{ message.content }}[/SYS]
{%- elif message.role == 'assistant' %}{% generation %} {{ message.content }}{{ eos_token }}{% endgeneration %}
{%- else %}{{ raise_exception('unknown role ' + message.role) }}
{%- endif %}
{%- endfor %}"""

# Reasoning is removed from all answers before the last user message, as in Qwen 3.
REASONING = """\
{%- set last = namespace(user=0) %}
{%- for message in messages %}{% if message.role == 'user' %}{% set last.user = loop.index0 %}{% endif %}{% endfor %}
{%- for message in messages %}
{%- if message.role == 'assistant' %}
{%- set content = message.content if loop.index0 > last.user else message.content.split('</think>')[-1].lstrip('\\n') %}
{{- '<|im_start|>assistant\\n' }}{% generation %}{{ content }}<|im_end|>{% endgeneration %}{{ '\\n' }}
{%- else %}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""

STYLES = dict(chatml=CHATML, headers=HEADERS, brackets=BRACKETS, reasoning=REASONING)
SPECIAL_TOKENS = [
    "<s>",
    "</s>",
    "<|im_start|>",
    "<|im_end|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eot_id|>",
]
VARIABLES = dict(bos_token="<s>", eos_token="</s>")

_CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": [2, "née"]}}}
_TOOLS = [
    {
        "type": "function",
        "function": {"name": "add", "description": "Adds — numbers", "parameters": {}},
    }
]


def _message(role: str, content: str, **more) -> dict:
    return {"role": role, "content": content, **more}


CHATS = [
    dict(messages=[_message("user", "Hello there"), _message("assistant", "General Kenobi!")]),
    dict(
        messages=[
            _message("system", "Be brief."),
            _message("user", "What is 1 + 1?"),
            _message("assistant", "<think>\nOne more than one.\n</think>\n\nTwo."),
            _message("user", "née 中文 𝄞?"),
            _message("assistant", "<think>\nHm 𝄞\n</think>\n\nné 中 𝄞, and\nmore lines"),
            _message("user", "Last question"),
            _message("assistant", "<think>\n\n</think>\n\nThe end."),
        ]
    ),
]
# Only for CHATML.
TOOL_CHAT = dict(
    messages=[
        _message("user", "Add 1 and 2"),
        _message("assistant", "I call a tool.", tool_calls=[_CALL]),
        _message("tool", "3"),
        _message("assistant", "It is 3."),
    ],
    tools=_TOOLS,
)


# A record in the form of OpenAI's API, and the same chat in the form that transformers takes.
OPENAI_CHAT = dict(
    messages=[
        _message("system", "Be brief."),
        {
            "role": "user",
            "content": [{"type": "text", "text": "Add 1 "}, {"type": "text", "text": "and 2"}],
        },
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [
                {
                    "id": "x",
                    "type": "function",
                    "function": {"name": "add", "arguments": '{"a": 1, "b": "née"}'},
                }
            ],
        },
        {"role": "tool", "tool_call_id": "x", "content": "3"},
        _message("assistant", "It is 3.", refusal=None, tool_calls=[]),
    ],
    tools=json.dumps(_TOOLS),
)
TRANSFORMERS_CHAT = dict(
    messages=[
        _message("system", "Be brief."),
        _message("user", "Add 1 and 2"),
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [
                {
                    "id": "x",
                    "type": "function",
                    "function": {"name": "add", "arguments": {"a": 1, "b": "née"}},
                }
            ],
        },
        {"role": "tool", "tool_call_id": "x", "content": "3"},
        _message("assistant", "It is 3."),
    ],
    tools=_TOOLS,
)


def cases() -> dict[str, tuple[str, dict]]:
    """Name -> template and chat."""
    plain = {
        f"{style}-{i}": (STYLES[style], chat) for style in STYLES for i, chat in enumerate(CHATS)
    }
    built_in = {
        f"built-in-{name}-tools": (template, TRANSFORMERS_CHAT)
        for name, template in TEMPLATES.items()
    }
    return plain | built_in | {"chatml-tools": (CHATML, TOOL_CHAT)}


def without_markers(template: str) -> str:
    return re.sub(r"\{%(-?) *(?:end)?generation *(-?)%\}", r"{#\1 \2#}", template)


def write_tokenizer(
    directory: Path, template: str = "", normalizer: normalizers.Normalizer | None = None
) -> Path:
    """Writes a small byte-level BPE tokenizer.json with the special tokens of all styles, and its
    configuration.
    """
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    texts = [message["content"] for chat in CHATS for message in chat["messages"]] * 3
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    config = dict(VARIABLES, tokenizer_class="PreTrainedTokenizerFast")
    if template:
        config["chat_template"] = template
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    return directory
