"""Tokenizer folders in the style of published model families: their turns, special tokens and end
tokens.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

CORPUS = (
    "What is 17 + 25? The answer is 42. Be brief, think first, then say it: user, assistant, system, final.\n"
    * 3
)


@dataclass(frozen=True)
class ModelStyle:
    """One family.

    Attributes:
        template: Jinja source.
        special: special tokens; the first is the pad token.
        plain: added tokens that are not special, such as the tags of reasoning.
        bos, eos: of the tokenizer's configuration.
        ends: end tokens of generation_config.json.
    """

    template: str
    special: tuple[str, ...]
    eos: str
    plain: tuple[str, ...] = ()
    bos: str | None = None
    ends: tuple[str, ...] = ()
    config: dict[str, object] = field(default_factory=dict)


CHATML = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
THINK = ("<think>", "</think>")
TOOL_TAGS = ("<tool_call>", "</tool_call>")

# Reasoning of the turns after the last question is shown, of earlier ones it is not.
_QWEN3 = """
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{%- endif %}
    {{- '# Tools\\n' }}{%- for tool in tools %}{{- tool | tojson + '\\n' }}{%- endfor %}{{- '<|im_end|>\\n' }}
{%- elif messages[0].role == 'system' %}{{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- set ns = namespace(question=0) %}
{%- for message in messages %}{%- if message.role == 'user' %}{%- set ns.question = loop.index0 %}{%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.role == 'user' %}{{- '<|im_start|>user\\n' + message.content + '<|im_end|>\\n' }}
    {%- elif message.role == 'tool' %}
        {{- '<|im_start|>user\\n<tool_response>\\n' + message.content + '\\n</tool_response><|im_end|>\\n' }}
    {%- elif message.role == 'assistant' %}
        {%- set reasoning = '' %}{%- set content = message.content %}
        {%- if '</think>' in content %}
            {%- set reasoning = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {{- '<|im_start|>assistant\\n' }}
        {%- if loop.index0 > ns.question and (loop.last or reasoning) %}
            {{- '<think>\\n' + reasoning.strip('\\n') + '\\n</think>\\n\\n' }}
        {%- endif %}
        {{- content }}
        {%- for call in message.tool_calls or [] %}
            {{- '\\n' if content or not loop.first }}
            {{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
            {{- call.function.arguments | tojson + '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}
{%- endif %}
"""

# The same turns, but the prompt opens the reasoning, and calls are tags.
_QWEN35 = """
{%- if tools %}{{- '<|im_start|>system\\n# Tools\\n' }}{%- for tool in tools %}{{- tool | tojson + '\\n' }}{%- endfor %}
    {%- if messages[0].role == 'system' %}{{- '\\n' + messages[0].content | trim }}{%- endif %}{{- '<|im_end|>\\n' }}
{%- elif messages[0].role == 'system' %}{{- '<|im_start|>system\\n' + messages[0].content | trim + '<|im_end|>\\n' }}
{%- endif %}
{%- set ns = namespace(question=-1) %}
{%- for message in messages %}{%- if message.role == 'user' %}{%- set ns.question = loop.index0 %}{%- endif %}
{%- endfor %}
{%- if ns.question < 0 %}{{- raise_exception('No user query found in messages.') }}{%- endif %}
{%- for message in messages %}
    {%- set content = message.content | trim %}
    {%- if message.role == 'system' %}{{- '' if loop.first else raise_exception('System first.') }}
    {%- elif message.role == 'user' %}{{- '<|im_start|>user\\n' + content + '<|im_end|>\\n' }}
    {%- elif message.role == 'assistant' %}
        {%- set reasoning = '' %}
        {%- if '</think>' in content %}
            {%- set reasoning = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {%- if loop.index0 > ns.question %}
            {{- '<|im_start|>assistant\\n<think>\\n' + reasoning | trim + '\\n</think>\\n\\n' + content }}
        {%- else %}{{- '<|im_start|>assistant\\n' + content }}{%- endif %}
        {%- for call in message.tool_calls or [] %}
            {{- '\\n\\n<tool_call>\\n<function=' + call.function.name + '>\\n' }}
            {%- for key, value in call.function.arguments | items %}
                {{- '<parameter=' + key + '>\\n' + value + '\\n</parameter>\\n' }}
            {%- endfor %}{{- '</function>\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == 'tool' %}
        {{- '<|im_start|>user\\n<tool_response>\\n' + content + '\\n</tool_response><|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n<think>\\n' }}{%- endif %}
"""

# The prompt opens the reasoning, which finished turns do not show at all.
_R1_DISTILL = """
{%- set ns = namespace(system='') %}
{%- for message in messages %}{%- if message.role == 'system' %}{%- set ns.system = message.content %}{%- endif %}
{%- endfor %}
{{- bos_token + ns.system }}
{%- for message in messages %}
    {%- if message.role == 'user' %}{{- '<|User|>' + message.content }}
    {%- elif message.role == 'assistant' and message.content is not none %}
        {%- set content = message.content %}
        {%- if '</think>' in content %}{%- set content = content.split('</think>')[-1] %}{%- endif %}
        {{- '<|Assistant|>' + content + eos_token }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|Assistant|><think>\\n' }}{%- endif %}
"""

_LLAMA3 = """
{{- bos_token }}
{%- if messages[0]['role'] == 'system' %}
    {%- set system = messages[0]['content'] | trim %}{%- set messages = messages[1:] %}
{%- else %}{%- set system = '' %}{%- endif %}
{{- '<|start_header_id|>system<|end_header_id|>\\n\\nCutting Knowledge Date: December 2023\\n\\n' }}
{{- system + '<|eot_id|>' }}
{%- if tools %}
    {%- set question = messages[0]['content'] | trim %}{%- set messages = messages[1:] %}
    {{- '<|start_header_id|>user<|end_header_id|>\\n\\nUse one of these functions.\\n\\n' }}
    {%- for tool in tools %}{{- tool | tojson(indent=4) + '\\n\\n' }}{%- endfor %}{{- question + '<|eot_id|>' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'tool' %}
        {{- '<|start_header_id|>ipython<|end_header_id|>\\n\\n' + message.content | tojson + '<|eot_id|>' }}
    {%- elif message.tool_calls %}
        {%- if message.tool_calls | length != 1 %}{{- raise_exception('one call at a time') }}{%- endif %}
        {%- set call = message.tool_calls[0].function %}
        {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n{"name": "' + call.name + '", "parameters": ' }}
        {{- call.arguments | tojson + '}<|eot_id|>' }}
    {%- else %}
        {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' }}
        {{- message['content'] | trim + '<|eot_id|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif %}
"""

_GEMMA3 = """
{{- bos_token }}
{%- if messages[0]['role'] == 'system' %}
    {%- set first = messages[0]['content'] + '\\n\\n' %}{%- set messages = messages[1:] %}
{%- else %}{%- set first = '' %}{%- endif %}
{%- for message in messages %}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}
    {%- endif %}
    {%- set role = 'model' if message['role'] == 'assistant' else message['role'] %}
    {{- '<start_of_turn>' + role + '\\n' + (first if loop.first else '') + message['content'] | trim }}
    {{- '<end_of_turn>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<start_of_turn>model\\n' }}{%- endif %}
"""

# The system prompt joins the first question; an answer follows a space.
_MISTRAL_V1 = """
{%- if messages[0]['role'] == 'system' %}
    {%- set system = messages[0]['content'] %}{%- set messages = messages[1:] %}
{%- endif %}
{{- bos_token }}
{%- for message in messages %}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}{{- raise_exception('roles alternate') }}{%- endif %}
    {%- if message['role'] == 'user' %}
        {{- ' [INST] ' + (system + '\\n\\n' if loop.first and system is defined else '') + message['content'] }}
        {{- ' [/INST]' }}
    {%- else %}{{- ' ' + message['content'] + eos_token }}{%- endif %}
{%- endfor %}
"""

# The system prompt and the tools move to the newest question.
_MISTRAL_V3 = """
{%- if messages[0]['role'] == 'system' %}
    {%- set system = messages[0]['content'] %}{%- set loop_messages = messages[1:] %}
{%- else %}{%- set loop_messages = messages %}{%- endif %}
{%- set questions = loop_messages | selectattr('role', 'equalto', 'user') | list %}
{{- bos_token }}
{%- for message in loop_messages %}
    {%- if message['role'] == 'user' %}
        {%- if tools and message == questions[-1] %}
            {{- '[AVAILABLE_TOOLS] ' + tools | tojson + '[/AVAILABLE_TOOLS]' }}
        {%- endif %}
        {%- if loop.last and system is defined %}{{- '[INST] ' + system + '\\n\\n' + message['content'] + '[/INST]' }}
        {%- else %}{{- '[INST] ' + message['content'] + '[/INST]' }}{%- endif %}
    {%- elif message.tool_calls %}
        {{- '[TOOL_CALLS] [' }}
        {%- for call in message.tool_calls %}
            {%- if call.id | length != 9 %}{{- raise_exception('ids have nine characters') }}{%- endif %}
            {{- '{"name": "' + call.function.name + '", "arguments": ' + call.function.arguments | tojson }}
            {{- ', "id": "' + call.id + '"}' }}{{- ', ' if not loop.last }}
        {%- endfor %}
        {{- ']' + eos_token }}
    {%- elif message['role'] == 'assistant' %}{{- ' ' + message['content'] + eos_token }}
    {%- elif message['role'] == 'tool' %}
        {{- '[TOOL_RESULTS] {"content": ' + message.content + ', "call_id": "' + message.tool_call_id }}
        {{- '"}[/TOOL_RESULTS]' }}
    {%- endif %}
{%- endfor %}
"""

_MISTRAL_TEKKEN = """
{{- bos_token }}
{%- for message in messages %}
    {%- if message['role'] == 'system' %}{{- '[SYSTEM_PROMPT]' + message['content'] + '[/SYSTEM_PROMPT]' }}
    {%- elif message['role'] == 'user' %}{{- '[INST]' + message['content'] + '[/INST]' }}
    {%- elif message['role'] == 'assistant' %}{{- message['content'] + eos_token }}
    {%- else %}{{- raise_exception('Only user, system and assistant roles are supported!') }}{%- endif %}
{%- endfor %}
"""

# Without a generation prompt the whole text ends with another token.
_PHI3 = """
{%- for message in messages %}
    {{- '<|' + message['role'] + '|>\\n' + message['content'] + '<|end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|assistant|>\\n' }}{%- else %}{{- eos_token }}{%- endif %}
"""

# A turn names its channel before the message; the last turn ends with another token than earlier
# ones.
_HARMONY = """
{{- '<|start|>system<|message|>You are ChatGPT.\\n\\nReasoning: medium\\n\\n# Valid channels: analysis, final.' }}
{{- '<|end|>' }}
{%- if messages[0].role == 'system' %}
    {%- set developer = messages[0].content %}{%- set loop_messages = messages[1:] %}
{%- else %}{%- set developer = '' %}{%- set loop_messages = messages %}{%- endif %}
{%- if developer or tools %}
    {{- '<|start|>developer<|message|>' }}
    {%- if developer %}{{- '# Instructions\\n\\n' + developer + '\\n\\n' }}{%- endif %}
    {%- if tools %}{{- '# Tools\\n\\nnamespace functions {\\n' }}
        {%- for tool in tools %}{{- 'type ' + tool.function.name + ' = () => any;\\n' }}{%- endfor %}{{- '}' }}
    {%- endif %}
    {{- '<|end|>' }}
{%- endif %}
{%- for message in loop_messages %}
    {%- if message.role == 'assistant' and message.tool_calls %}
        {%- set call = message.tool_calls[0].function %}
        {{- '<|start|>assistant to=functions.' + call.name + '<|channel|>commentary json<|message|>' }}
        {{- call.arguments | tojson + '<|call|>' }}
    {%- elif message.role == 'assistant' %}
        {{- raise_exception('channels do not belong in content') if '<|channel|>' in message.content else '' }}
        {%- if message.thinking and loop.last %}
            {{- '<|start|>assistant<|channel|>analysis<|message|>' + message.thinking + '<|end|>' }}
        {%- endif %}
        {{- '<|start|>assistant<|channel|>final<|message|>' + message.content }}
        {{- '<|return|>' if loop.last and not add_generation_prompt else '<|end|>' }}
    {%- elif message.role == 'tool' %}
        {{- '<|start|>functions.' + message.name + ' to=assistant<|channel|>commentary<|message|>' }}
        {{- message.content | tojson + '<|end|>' }}
    {%- else %}{{- '<|start|>user<|message|>' + message.content + '<|end|>' }}{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start|>assistant' }}{%- endif %}
"""

# No token ends a turn: the next one's role does.
_GLM45 = """
{{- '[gMASK]<sop>' }}
{%- if tools %}
    {{- '<|system|>\\n# Tools\\n' }}{%- for tool in tools %}{{- tool | tojson + '\\n' }}{%- endfor %}
{%- endif %}
{%- set ns = namespace(question=-1) %}
{%- for message in messages %}{%- if message.role == 'user' %}{%- set ns.question = loop.index0 %}{%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.role == 'user' %}{{- '<|user|>\\n' + message.content }}
    {%- elif message.role == 'assistant' %}
        {{- '<|assistant|>' }}
        {%- set reasoning = '' %}{%- set content = message.content %}
        {%- if '</think>' in content %}
            {%- set reasoning = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {%- if loop.index0 > ns.question and reasoning %}{{- '\\n<think>' + reasoning.strip() + '</think>' }}
        {%- else %}{{- '\\n<think></think>' }}{%- endif %}
        {%- if content.strip() %}{{- '\\n' + content.strip() }}{%- endif %}
        {%- for call in message.tool_calls or [] %}
            {{- '\\n<tool_call>' + call.function.name }}
            {%- for key, value in call.function.arguments | items %}
                {{- '\\n<arg_key>' + key + '</arg_key>\\n<arg_value>' + value + '</arg_value>' }}
            {%- endfor %}{{- '\\n</tool_call>' }}
        {%- endfor %}
    {%- elif message.role == 'tool' %}
        {{- '<|observation|>\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
    {%- elif message.role == 'system' %}{{- '<|system|>\\n' + message.content }}{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|assistant|>' }}{%- endif %}
"""

# The system prompt decides about reasoning; without it the prompt has an empty block.
_SMOLLM3 = """
{%- set ns = namespace(mode='/think', said='') %}
{%- if messages[0].role == 'system' %}
    {%- if '/no_think' in messages[0].content %}{%- set ns.mode = '/no_think' %}{%- endif %}
    {%- set ns.said = messages[0].content.replace('/no_think', '').replace('/think', '').rstrip() %}
{%- endif %}
{{- '<|im_start|>system\\n## Metadata\\n\\nKnowledge Cutoff Date: June 2025\\nReasoning Mode: ' + ns.mode + '\\n\\n' }}
{{- '## Custom Instructions\\n\\n' + (ns.said if ns.said else 'You are a helpful AI assistant.') + '\\n\\n' }}
{%- if tools %}{{- '### Tools\\n\\n<tools>' }}{%- for tool in tools %}{{- tool | tojson + '\\n' }}{%- endfor %}
    {{- '</tools>\\n\\n' }}
{%- endif %}
{{- '<|im_end|>\\n' }}
{%- for message in messages %}
    {%- set content = message.content if message.content is string else '' %}
    {%- if message.role == 'user' %}{{- '<|im_start|>user\\n' + content + '<|im_end|>\\n' }}
    {%- elif message.role == 'assistant' %}
        {%- generation %}
        {{- '<|im_start|>assistant\\n' + ('<think>\\n\\n</think>\\n' if ns.mode == '/no_think' else '') }}
        {{- content.lstrip('\\n') }}
        {%- for call in message.tool_calls or [] %}
            {{- '<tool_call>' + {'name': call.function.name, 'arguments': call.function.arguments} | tojson }}
            {{- '</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
        {%- endgeneration %}
    {%- elif message.role == 'tool' %}{{- '<|im_start|>user\\n' + content + '<|im_end|>\\n' }}{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' + ('<think>\\n\\n</think>\\n' if ns.mode == '/no_think' else '') }}
{%- endif %}
"""

_DEEPSEEK_V3 = """
{%- set ns = namespace(system='', tool=false) %}
{%- for message in messages %}{%- if message.role == 'system' %}{%- set ns.system = message.content %}{%- endif %}
{%- endfor %}
{{- bos_token + ns.system }}
{%- for message in messages %}
    {%- if message.role == 'user' %}{{- '<|User|>' + message.content }}
    {%- elif message.role == 'tool' %}{{- '<|tool_output_begin|>' + message.content + '<|tool_output_end|>' }}
    {%- elif message.role == 'assistant' %}
        {{- '<|Assistant|>' }}
        {%- if message.tool_calls %}
            {%- for call in message.tool_calls %}
                {{- '<|tool_call_begin|>function<|tool_sep|>' + call.function.name + '\\n```json\\n' }}
                {{- call.function.arguments | tojson + '\\n```<|tool_call_end|>' }}
            {%- endfor %}
        {%- else %}{{- message.content }}{%- endif %}
        {{- eos_token }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|Assistant|>' }}{%- endif %}
"""

_COMMAND = """
{{- bos_token }}
{%- if messages[0]['role'] == 'system' %}
    {%- set system = messages[0]['content'] %}{%- set loop_messages = messages[1:] %}
{%- else %}{%- set system = 'You are Command.' %}{%- set loop_messages = messages %}{%- endif %}
{{- '<|START_OF_TURN_TOKEN|><|SYSTEM_TOKEN|>' + system + '<|END_OF_TURN_TOKEN|>' }}
{%- for message in loop_messages %}
    {%- if message['role'] == 'user' %}
        {{- '<|START_OF_TURN_TOKEN|><|USER_TOKEN|>' + message['content'].strip() + '<|END_OF_TURN_TOKEN|>' }}
    {%- elif message['role'] == 'assistant' %}
        {{- '<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|><|START_RESPONSE|>' + message['content'].strip() }}
        {{- '<|END_RESPONSE|><|END_OF_TURN_TOKEN|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|><|START_RESPONSE|>' }}{%- endif %}
"""

_TURNS = ("<|User|>", "<|Assistant|>")
_HEADERS = ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")
_INST = ("<unk>", "<s>", "</s>", "[INST]", "[/INST]")
_V3 = (
    *_INST,
    "[TOOL_CALLS]",
    "[AVAILABLE_TOOLS]",
    "[/AVAILABLE_TOOLS]",
    "[TOOL_RESULTS]",
    "[/TOOL_RESULTS]",
)
_CHANNELS = (
    "<|endoftext|>",
    "<|return|>",
    "<|call|>",
    "<|start|>",
    "<|end|>",
    "<|message|>",
    "<|channel|>",
)
_DEEPSEEK = (
    "<|tool_call_begin|>",
    "<|tool_sep|>",
    "<|tool_call_end|>",
    "<|tool_output_begin|>",
    "<|tool_output_end|>",
)
_TURN_TOKENS = tuple(
    f"<|{name}_TOKEN|>" for name in ("START_OF_TURN", "END_OF_TURN", "SYSTEM", "USER", "CHATBOT")
)

STYLES = {
    "qwen3": ModelStyle(_QWEN3, CHATML, "<|im_end|>", (*THINK, *TOOL_TAGS), ends=("<|im_end|>", "<|endoftext|>")),
    "qwen35": ModelStyle(_QWEN35, CHATML, "<|im_end|>", (*THINK, *TOOL_TAGS), ends=("<|im_end|>", "<|endoftext|>")),
    "r1-distill": ModelStyle(_R1_DISTILL, ("<|pad|>", "<|begin|>", "<|eos|>", *_TURNS), "<|eos|>", THINK, "<|begin|>"),
    "llama3": ModelStyle(
        _LLAMA3, ("<|pad|>", "<|begin_of_text|>", "<|end_of_text|>", *_HEADERS), "<|eot_id|>",
        bos="<|begin_of_text|>", ends=("<|end_of_text|>", "<|eot_id|>"),
    ),
    "gemma3": ModelStyle(
        _GEMMA3, ("<pad>", "<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>"), "<eos>",
        bos="<bos>", ends=("<eos>", "<end_of_turn>"),
    ),
    "mistral-v1": ModelStyle(_MISTRAL_V1, _INST[:3], "</s>", bos="<s>"),
    "mistral-v3": ModelStyle(_MISTRAL_V3, _V3, "</s>", bos="<s>"),
    "mistral-tekken": ModelStyle(_MISTRAL_TEKKEN, (*_INST, "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]"), "</s>", bos="<s>"),
    "phi3": ModelStyle(
        _PHI3, ("<|endoftext|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>"), "<|endoftext|>",
        ends=("<|endoftext|>", "<|assistant|>", "<|end|>"),
    ),
    "harmony": ModelStyle(_HARMONY, _CHANNELS, "<|return|>", ends=("<|return|>", "<|endoftext|>", "<|call|>")),
    "glm45": ModelStyle(
        _GLM45, ("<|endoftext|>", "[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>"),
        "<|endoftext|>", (*THINK, *TOOL_TAGS), ends=("<|endoftext|>", "<|user|>", "<|observation|>"),
    ),
    "smollm3": ModelStyle(_SMOLLM3, CHATML, "<|im_end|>", (*THINK, *TOOL_TAGS), ends=("<|im_end|>",)),
    "deepseek-v3": ModelStyle(
        _DEEPSEEK_V3, ("<|pad|>", "<|begin|>", "<|eos|>", *_TURNS, *_DEEPSEEK), "<|eos|>", THINK, "<|begin|>"
    ),
    "command": ModelStyle(
        _COMMAND, ("<PAD>", "<BOS>", *_TURN_TOKENS, "<|START_RESPONSE|>", "<|END_RESPONSE|>"), "<|END_OF_TURN_TOKEN|>",
        bos="<BOS>",
    ),
}  # fmt: skip


def make_style_folder(folder: Path, style: ModelStyle, template: str | None = None) -> Path:
    """Write a folder with a byte-level tokenizer and a chat template, that of the style by default."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    special = list(style.special)
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator([CORPUS], trainer)
    tokenizer.add_tokens(
        [tokenizers.AddedToken(text, normalized=False, special=False) for text in style.plain]
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    named = {"eos_token": style.eos, "pad_token": style.special[0]} | (
        {"bos_token": style.bos} if style.bos else {}
    )
    config = {"tokenizer_class": "PreTrainedTokenizerFast", **named, **style.config}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "chat_template.jinja").write_text(style.template if template is None else template)
    ends = [tokenizer.token_to_id(end) for end in style.ends or (style.eos,)]
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
    return folder
