"""A chat template as reasoning models with tools have it, small enough to be read in a test's prompt."""

from __future__ import annotations

# Hermes' syntax of calls. `enable_thinking` as Qwen's: false closes the reasoning in the prompt; true opens it here.
THINKING_WITH_TOOLS = """\
{%- if tools %}{{ 'tools: ' }}{% for tool in tools %}{{ tool.function.name + ' ' }}{% endfor %}{{ '\\n' }}{% endif %}
{%- for m in messages %}
{{- m.role + ': ' }}
{%- if m.reasoning_content %}{{ '<think>' + m.reasoning_content + '</think>' }}{% endif %}
{{- m.content }}
{%- for call in m.tool_calls or [] %}
{{- '<tool_call>{"name": "' + call.function.name + '", "arguments": ' + (call.function.arguments | tojson) }}
{{- '}</tool_call>' }}
{%- endfor %}
{{- '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
{{- 'assistant: ' }}
{%- if enable_thinking is defined %}{{ '<think>\\n' if enable_thinking else '<think>\\n\\n</think>\\n\\n' }}{% endif %}
{%- endif %}
"""
