"""Chat templates in the forms of well-known models, and conversations to render with them."""

from typing import Any

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] "
    "+ '<|im_end|>' + '\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}"
    "{% endif %}"
)

TEMPLATES = {
    "chatml": CHATML,
    "smollm2": (
        "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
        "{{ '<|im_start|>system\nYou help.<|im_end|>\n' }}{% endif %}{{'<|im_start|>' + message['role'] "
        "+ '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    ),
    "llama2": """
{%- if messages[0]['role'] == 'system' %}
    {%- set system = '<<SYS>>\n' + messages[0]['content'] | trim + '\n<</SYS>>\n\n' %}
    {%- set turns = messages[1:] %}
{%- else %}
    {%- set system = '' %}
    {%- set turns = messages %}
{%- endif %}
{%- for message in turns %}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception('Roles alternate: user, assistant, user, ...') }}
    {%- endif %}
    {%- set content = system + message['content'] if loop.first else message['content'] %}
    {%- if message['role'] == 'user' %}
        {{- bos_token + '[INST] ' + content | trim + ' [/INST]' }}
    {%- elif message['role'] == 'assistant' %}
        {{- ' ' + content | trim + ' ' + eos_token }}
    {%- endif %}
{%- endfor %}
""",
    "llama3": """
{{- bos_token }}
{%- if tools is not none and tools %}
    {{- "<|start_header_id|>system<|end_header_id|>\n\nEnvironment: ipython\n" }}
    {{- "Today: " + (date_string if date_string is defined else strftime_now("%Y")) + "\n\n" }}
    {%- for t in tools %}
        {{- t | tojson(indent=4) }}
        {{- "\n\n" }}
    {%- endfor %}
    {{- "<|eot_id|>" }}
{%- endif %}
{%- for message in messages %}
    {%- if message.tool_calls is defined %}
        {{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}
        {{- '{"name": "' + message.tool_calls[0].function.name + '", "parameters": ' }}
        {{- message.tool_calls[0].function.arguments | tojson }}
        {{- "}<|eot_id|>" }}
    {%- else %}
        {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n' }}
        {{- message['content'] | trim + '<|eot_id|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}
{%- endif %}
""",
    "mistral": """
{%- if messages[0]["role"] == "system" %}
    {%- set system_message = messages[0]["content"] %}
    {%- set loop_messages = messages[1:] %}
{%- else %}
    {%- set loop_messages = messages %}
{%- endif %}
{%- set ns = namespace(index=0) %}
{{- bos_token }}
{%- for message in loop_messages %}
    {%- if message.role == "user" %}
        {%- if tools is defined and tools is not none and message == (loop_messages | last) %}
            {{- "[AVAILABLE_TOOLS] [" }}
            {%- for tool in tools %}
                {{- '{"type": "function", "function": ' + tool.function | tojson + "}" }}
                {{- ", " if not loop.last else "]" }}
            {%- endfor %}
            {{- "[/AVAILABLE_TOOLS]" }}
        {%- endif %}
        {{- "[INST] " }}
        {%- if loop.last and system_message is defined %}{{- system_message + "\n\n" }}{% endif %}
        {{- message["content"] + "[/INST]" }}
        {%- set ns.index = ns.index + 1 %}
    {%- elif message.role == "assistant" and message.content is defined %}
        {{- " " + message["content"] | trim + eos_token }}
    {%- endif %}
{%- endfor %}
{{- "[" ~ ns.index ~ "]" }}
""",
    "gemma": (
        "{{ bos_token }}{% if messages[0]['role'] == 'system' %}{{ raise_exception('No system role') }}"
        "{% endif %}{% for message in messages %}{% if (message['role'] == 'assistant') %}"
        "{% set role = 'model' %}{% else %}{% set role = message['role'] %}{% endif %}"
        "{{ '<start_of_turn>' + role + '\n' + message['content'] | trim + '<end_of_turn>\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"
    ),
    "phi3": (
        "{% for message in messages %}{% if message['role'] == 'system' and message['content'] %}"
        "{{'<|system|>\n' + message['content'] + '<|end|>\n'}}{% elif message['role'] == 'user' %}"
        "{{'<|user|>\n' + message['content'] + '<|end|>\n'}}{% elif message['role'] == 'assistant' %}"
        "{{'<|assistant|>\n' + message['content'] + '<|end|>\n'}}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% else %}{{ eos_token }}{% endif %}"
    ),
    "zephyr": """{% for message in messages %}
{% if message['role'] == 'user' %}
{{ '<|user|>\n' + message['content'] + eos_token }}
{% elif message['role'] == 'system' %}
{{ '<|system|>\n' + message['content'] + eos_token }}
{% elif message['role'] == 'assistant' %}
{{ '<|assistant|>\n'  + message['content'] + eos_token }}
{% endif %}
{% if loop.last and add_generation_prompt %}
{{ '<|assistant|>' }}
{% endif %}
{% endfor %}""",
    "vicuna": """
{% for message in messages %}
    {% if message.role == 'system' %}{{ message.content }}

{% continue %}
    {% endif %}
    {% if loop.index > 40 %}{% break %}{% endif %}
{{ {'user': 'USER', 'assistant': 'AI'}.get(message.role, message.role | upper) }}: {{ message.content }}
{% endfor %}
{% if add_generation_prompt %}ASSISTANT:{% endif %}""",
    "reasoning": """
{%- macro turn(role, content) -%}
    <|im_start|>{{ role }}
{{ content }}<|im_end|>
{% endmacro %}
{%- set ns = namespace(last=messages | length - 1) %}
{%- for message in messages %}
    {%- set content = message.content if message.content is string else '' %}
    {%- if message.role == 'assistant' and message.reasoning_content is defined and loop.index0 == ns.last %}
        {%- set content = '<think>\n' + message.reasoning_content.strip('\n') + '\n</think>\n' + content %}
    {%- endif %}
    {{- turn(message.role, content) }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
    {%- if enable_thinking is defined and not enable_thinking %}{{ '<think>\n\n</think>\n\n' }}{% endif %}
{%- endif %}
""",
    "hermes": """
{%- if tools %}
    {{- '<|im_start|>system\n# Tools\n<tools>' }}
    {%- for tool in tools %}{{ '\n' ~ (tool | tojson) }}{% endfor %}
    {{- '\n</tools><|im_end|>\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'tool' %}
        {{- '<|im_start|>user\n<tool_response>\n' + message.content + '\n</tool_response><|im_end|>\n' }}
    {%- else %}
        {{- '<|im_start|>' + message.role }}
        {%- if message.content %}{{ '\n' + message.content }}{% endif %}
        {%- for tool_call in message.tool_calls or [] %}
            {%- if tool_call.function %}{%- set tool_call = tool_call.function %}{%- endif %}
            {{- '\n<tool_call>\n{"name": "' ~ tool_call.name ~ '", "arguments": ' }}
            {{- tool_call.arguments | tojson(ensure_ascii=True, sort_keys=True) }}
            {{- '}\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}
""",
    "learned": (
        "{% for message in messages %}{% if message.role == 'assistant' %}{{ '<|im_start|>assistant\n' }}"
        "{% generation %}{{ message.content }}<|im_end|>{% endgeneration %}{{ '\n' }}{% else %}"
        "{{ '<|im_start|>' ~ message.role ~ '\n' ~ message.content ~ '<|im_end|>\n' }}{% endif %}"
        "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    ),
    "parts": (
        "{% for message in messages %}<|{{ message.role }}|>{% if message.content is string %}"
        "{{ message.content }}{% else %}{% for part in message.content %}{{ part.text }}{% endfor %}"
        "{% endif %}<|end|>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
    ),
}

SPECIAL = ("<|im_start|>", "<|im_end|>", "<|eot_id|>", "<|end|>", "<|user|>", "<|assistant|>", "[INST]")

WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather <now> & later, in °C",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}


def turn(role: str, content: Any, **more: Any) -> dict[str, Any]:
    """A message."""
    return {"role": role, "content": content, **more}


SYSTEM, USER = turn("system", "Be brief. "), turn("user", " What is 2 < 3 & 'so' on?\n")
ASSISTANT, AGAIN = turn("assistant", "It is true.  "), turn("user", "Ünïcode — 数 👍")
CALL = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Zürich", "at": None}}}

CONVERSATIONS: dict[str, tuple[list[dict[str, Any]], dict[str, Any]]] = {
    "user": ([USER], {}),
    "prompt": ([USER], {"add_generation_prompt": True}),
    "turns": ([SYSTEM, USER, ASSISTANT, AGAIN], {"add_generation_prompt": True}),
    "no system": ([USER, ASSISTANT, AGAIN, ASSISTANT], {}),
    "continued": ([USER, ASSISTANT], {"continue_final_message": True}),
    "tools": ([USER], {"tools": [WEATHER, WEATHER], "add_generation_prompt": True}),
    "called": (
        [USER, turn("assistant", None, tool_calls=[CALL]), turn("tool", "21 °C"), ASSISTANT],
        {"tools": [WEATHER]},
    ),
    "reasoned": ([USER, turn("assistant", "Yes.", thinking="2 is less.\n")], {"enable_thinking": False}),
    "no thoughts": ([USER], {"enable_thinking": False, "add_generation_prompt": True}),
    "dated": ([USER], {"tools": [WEATHER], "date_string": "26 July"}),
    "text parts": (
        [turn("user", [{"type": "text", "text": "Who"}, {"type": "text", "text": " am I?"}])],
        {"add_generation_prompt": True},
    ),
}
