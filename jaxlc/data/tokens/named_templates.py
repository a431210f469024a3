"""The chat templates that data.chat_template can name."""

from jaxlc.config.data_schema import CHAT_TEMPLATES

# Tools have the markup of Hermes and Qwen in chatml, and that of Llama 3.1 in llama3, which has one call in an answer.
_CHATML = (
    "{% if tools %}<|im_start|>system\n"
    "{% if messages[0]['role'] == 'system' %}{{ messages[0]['content'] + '\n\n' }}{% endif %}"
    "# Tools\n\nYou can call these functions:\n<tools>\n{% for tool in tools %}{{ (tool | tojson) + '\n' }}{% endfor %}"
    "</tools>\n\nA call is a JSON object:\n<tool_call>\n"
    '{"name": "NAME OF THE FUNCTION", "arguments": {"NAME": "VALUE"}}'
    "\n</tool_call><|im_end|>{{ '\n' }}{% endif %}"
    "{% for message in messages %}"
    "{% if message['role'] == 'tool' %}"
    "{% if loop.first or messages[loop.index0 - 1]['role'] != 'tool' %}<|im_start|>user{% endif %}"
    "{{ '\n<tool_response>\n' + message['content'] + '\n</tool_response>' }}"
    "{% if loop.last or messages[loop.index0 + 1]['role'] != 'tool' %}<|im_end|>{{ '\n' }}{% endif %}"
    "{% elif message['role'] == 'assistant' %}<|im_start|>assistant\n"
    "{% generation %}{{ message['content'] or '' }}{% for call in message['tool_calls'] or [] %}"
    "{% if message['content'] or not loop.first %}{{ '\n' }}{% endif %}"
    "{{ '<tool_call>\n{\"name\": ' + (call['function']['name'] | tojson) + ', \"arguments\": ' }}"
    "{{ (call['function']['arguments'] | tojson) + '}\n</tool_call>' }}"
    "{% endfor %}<|im_end|>{% endgeneration %}{{ '\n' }}"
    "{% elif not (tools and loop.first and message['role'] == 'system') %}"
    "<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>{{ '\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_LLAMA3 = (
    "{{ bos_token }}"
    "{% if tools %}<|start_header_id|>system<|end_header_id|>\n\n"
    "{% if messages[0]['role'] == 'system' %}{{ messages[0]['content'] + '\n\n' }}{% endif %}"
    "You can call these functions:\n\n{% for tool in tools %}{{ (tool | tojson(indent=4)) + '\n\n' }}{% endfor %}"
    'A call is a JSON object: {"name": "NAME OF THE FUNCTION", "parameters": {"NAME": "VALUE"}}<|eot_id|>{% endif %}'
    "{% for message in messages %}"
    "{% if message['role'] == 'tool' %}"
    "<|start_header_id|>ipython<|end_header_id|>{{ '\n\n' + message['content'] }}<|eot_id|>"
    "{% elif message['role'] == 'assistant' %}<|start_header_id|>assistant<|end_header_id|>\n\n{% generation %}"
    "{% if message['tool_calls'] %}{% if message['content'] or message['tool_calls'] | length > 1 %}"
    "{{ raise_exception('an answer of llama3 is text or one call') }}{% endif %}"
    "{% set call = message['tool_calls'][0]['function'] %}"
    "{{ '{\"name\": ' + (call['name'] | tojson) + ', \"parameters\": ' + (call['arguments'] | tojson) + '}' }}"
    "{% else %}{{ message['content'] }}{% endif %}<|eot_id|>{% endgeneration %}"
    "{% elif not (tools and loop.first and message['role'] == 'system') %}"
    "<|start_header_id|>{{ message['role'] }}<|end_header_id|>\n\n{{ message['content'] }}<|eot_id|>"
    "{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
TEMPLATES = dict(zip(CHAT_TEMPLATES, (_CHATML, _LLAMA3), strict=True))
