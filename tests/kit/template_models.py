"""Tokenizer folders with chat templates of the families in use, made on the spot."""

from __future__ import annotations

import json
from pathlib import Path

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

CORPUS = (
    "You stand on a frozen lake; the goal is at row 3, column 2. What is 17 + 25? The answer is 42. Let us think, then "
    "say it.\n" * 3
)

TEMPLATES = {
    # Words of the last answer get an empty thinking block, those of earlier ones do not.
    "qwen3": """
{%- set ns = namespace(last=-1) %}
{%- for m in messages %}{%- if m.role == 'user' %}{%- set ns.last = loop.index0 %}{%- endif %}{%- endfor %}
{%- if tools %}{{- '<|im_start|>system\\n' + tools | tojson + '<|im_end|>\\n' }}{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'assistant' and loop.index0 > ns.last %}
        {{- '<|im_start|>assistant\\n<think>\\n\\n</think>\\n\\n' + message.content.lstrip('\\n') + '<|im_end|>\\n' }}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
""",
    "qwen2": """
{%- if messages[0]['role'] != 'system' %}{{- '<|im_start|>system\\nYou are a model.<|im_end|>\\n' }}{%- endif %}
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
""",
    "llama3": """
{{- bos_token }}
{%- set day = strftime_now('%d %b %Y') if strftime_now is defined else '26 Jul 2024' %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system = messages[0]['content'] | trim %}{%- set messages = messages[1:] %}
{%- else %}{%- set system = '' %}{%- endif %}
{{- '<|start_header_id|>system<|end_header_id|>\\n\\nToday: ' + day + '\\n' + system + '<|eot_id|>' }}
{%- for message in messages %}
    {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' }}
    {{- message['content'] | trim + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif %}
""",
    # The system message stands in the last user message, wherever that is.
    "mistral": """
{%- if messages[0].role == 'system' %}{%- set system = messages[0].content %}{%- set rest = messages[1:] %}
{%- else %}{%- set rest = messages %}{%- endif %}
{{- bos_token }}
{%- for message in rest %}
    {%- if message.role == 'user' %}
        {{- '[INST] ' + (system + '\\n\\n' if loop.last and system is defined else '') + message.content + '[/INST]' }}
    {%- else %}{{- ' ' + message.content + eos_token }}{%- endif %}
{%- endfor %}
""",
    "gemma": """
{{- bos_token }}
{%- if messages[0].role == 'system' %}{{ raise_exception('no system messages') }}{%- endif %}
{%- for message in messages %}
    {%- set role = 'model' if message.role == 'assistant' else message.role %}
    {{- '<start_of_turn>' + role + '\\n' + message.content | trim + '<end_of_turn>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<start_of_turn>model\\n' }}{%- endif %}
""",
    # The prompt opens a thinking block that finished turns do not show.
    "r1": """
{{- bos_token }}
{%- for message in messages %}
    {%- if message.role == 'system' %}{{ message.content }}
    {%- elif message.role == 'user' %}{{ '<|User|>' + message.content }}
    {%- else %}{{ '<|Assistant|>' + message.content.split('</think>')[-1] + eos_token }}{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|Assistant|><think>\\n' }}{%- endif %}
""",
    "marked": """
{%- for message in messages %}
    {%- if message.role == 'assistant' %}
        {%- generation %}{{ '<|im_start|>assistant\\n' + message.content + '<|im_end|>\\n' }}{%- endgeneration %}
    {%- else %}{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}{%- endif %}
    {%- if message.role == 'stop' %}{%- break %}{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
""",
    "plain": """
{%- for message in messages %}{{ message.role + ': ' + message.content + '\\n' }}{%- endfor %}
{%- if add_generation_prompt %}{{ 'assistant: ' }}{%- endif %}
""",
    # Each call between two tags, as Hermes and Qwen have it; what tools answer is said by the user.
    "hermes": """
{%- if tools %}{{- '<|im_start|>system\\nTools: ' + tools | tojson + '<|im_end|>\\n' }}{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'tool' %}
        {{- '<|im_start|>user\\n<tool_response>\\n' + message.content + '\\n</tool_response><|im_end|>\\n' }}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content }}
        {%- for call in message.tool_calls or [] %}
            {{- '\\n<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
            {{- call.function.arguments | tojson + '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
""",
    # Nothing but the object, whose arguments are called parameters.
    "bare": """
{%- for message in messages %}
    {%- if message.tool_calls %}
        {{- '<|im_start|>assistant\\n{"name": "' + message.tool_calls[0].function.name + '", ' }}
        {{- '"parameters": ' + message.tool_calls[0].function.arguments | tojson + '}<|im_end|>\\n' }}
    {%- else %}{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
""",
    # A list behind a special token; ids must have nine characters.
    "listed": """
{%- for message in messages %}
    {%- if message.role == 'user' %}{{ '[INST]' + message.content + '[/INST]' }}
    {%- elif message.role == 'tool' %}{{ '[TOOL_RESULTS]' + {'content': message.content} | tojson + '[/TOOL_RESULTS]' }}
    {%- elif message.tool_calls %}
        {{- '[TOOL_CALLS][' }}
        {%- for call in message.tool_calls %}
            {%- if call.id | length != 9 %}{{ raise_exception('ids have nine characters') }}{%- endif %}
            {{- {'name': call.function.name, 'arguments': call.function.arguments} | tojson }}
            {{- ', ' if not loop.last }}
        {%- endfor %}
        {{- ']' + eos_token }}
    {%- else %}{{ message.content + eos_token }}{%- endif %}
{%- endfor %}
""",
    # Numbers the turns from the end, so nothing about it is stable.
    "countdown": """
{%- for message in messages %}{{ loop.revindex ~ message.role + ': ' + message.content + '\\n' }}{%- endfor %}
{%- if add_generation_prompt %}{{ 'assistant: ' }}{%- endif %}
""",
    # Forgets everything but the newest message.
    "amnesia": "{{ messages[-1].role + messages[-1].content + '\\n' }}{%- if add_generation_prompt %}{{ 'assistant' "
    "}}{%- endif %}",
}

SPECIALS = {
    "qwen3": ("<|endoftext|>", "<|im_start|>", "<|im_end|>"),
    "qwen2": ("<|endoftext|>", "<|im_start|>", "<|im_end|>"),
    "llama3": (
        "<|begin_of_text|>",
        "<|end_of_text|>",
        "<|start_header_id|>",
        "<|end_header_id|>",
        "<|eot_id|>",
    ),
    "mistral": ("<s>", "</s>", "[INST]", "[/INST]"),
    "gemma": ("<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>"),
    "r1": ("<|begin|>", "<|end|>", "<|User|>", "<|Assistant|>", "<think>", "</think>"),
    "marked": ("<|endoftext|>", "<|im_start|>", "<|im_end|>"),
    "hermes": ("<|endoftext|>", "<|im_start|>", "<|im_end|>"),
    "bare": ("<|endoftext|>", "<|im_start|>", "<|im_end|>"),
    "listed": (
        "<s>",
        "</s>",
        "[INST]",
        "[/INST]",
        "[TOOL_CALLS]",
        "[TOOL_RESULTS]",
        "[/TOOL_RESULTS]",
    ),
    "plain": ("<|endoftext|>",),
    "countdown": ("<|endoftext|>",),
    "amnesia": ("<|endoftext|>",),
}
BOS_EOS = {
    "llama3": (0, 1),
    "mistral": (0, 1),
    "gemma": (0, 1),
    "r1": (0, 1),
    "qwen3": (None, 2),
    "qwen2": (None, 2),
    "marked": (None, 2),
    "hermes": (None, 2),
    "bare": (None, 2),
    "listed": (0, 1),
}


def make_tokenizer_folder(folder: Path, family: str) -> Path:
    """A folder with a byte-level tokenizer and the family's template, written where that family
    keeps it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    specials = SPECIALS[family]
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=list(specials),
        initial_alphabet=alphabet,
        show_progress=False,
    )
    tokenizer.train_from_iterator([CORPUS], trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    bos, eos = BOS_EOS.get(family, (None, 0))
    config: dict[str, object] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": specials[eos],
        "pad_token": specials[0],
    }
    if bos is not None:
        flags = {"lstrip": False, "rstrip": False, "normalized": False, "single_word": False}
        config["bos_token"] = {"__type": "AddedToken", "content": specials[bos], **flags}
    if family in ("qwen2", "mistral"):
        config["chat_template"] = TEMPLATES[family]
    else:
        (folder / "chat_template.jinja").write_text(TEMPLATES[family])
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder
