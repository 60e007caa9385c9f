"""Templates in the style of published models: what is trained, sampled and read of a turn with each
of them.
"""

from __future__ import annotations

import json
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
from model_templates import CHATML, STYLES, ModelStyle, make_style_folder
from template_models import make_tokenizer_folder

from broker.contract import wire
from broker.errors import ConfigError
from broker.settings.schema.model import ModelSection
from learner.offline.preference_pairs import load_pairs
from rlearner_text.incremental_tokenization import Conversation
from rlearner_text.openai.answer_store import AnswerStore
from rlearner_text.openai.answers import AnswerChoice, AnswerWriter
from rlearner_text.openai.backends import ServedModel, SingleKeyBackend
from rlearner_text.openai.request_bodies import ChatBody
from rlearner_text.openai.sse_chunks import ChunkEvents
from rlearner_text.openai.token_events import TokenEvent
from rlearner_text.supervised_masks import encode_supervised
from rlearner_text.template_rules import TemplateRules, rules_for
from rlearner_text.thinking import without_thinking
from rlearner_text.tokenizer import Tokenizer

TOOLS = [
    {
        "type": "function",
        "function": {"name": "add", "parameters": {"type": "object", "properties": {}}},
    }
]
CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "2+2?"},
    {"role": "assistant", "content": "4"},
    {"role": "user", "content": "3+3?"},
    {"role": "assistant", "content": "6"},
]
REASONED = "<think>\nsix\n</think>\n\n6"

# The text of CHAT; what is trained stands in brackets.
CHATML_OPENING = "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\n"
TRAINED = {
    "qwen3": CHATML_OPENING
    + "⟦<think>\n\n</think>\n\n4<|im_end|>⟧\n<|im_start|>user\n3+3?<|im_end|>\n"
    "<|im_start|>assistant\n⟦<think>\n\n</think>\n\n6<|im_end|>⟧",
    "qwen35": CHATML_OPENING
    + "<think>\n⟦\n</think>\n\n4<|im_end|>⟧\n<|im_start|>user\n3+3?<|im_end|>\n"
    "<|im_start|>assistant\n<think>\n⟦\n</think>\n\n6<|im_end|>⟧",
    "r1-distill": "<|begin|>Be brief.<|User|>2+2?<|Assistant|><think>\n⟦\n</think>\n\n4<|eos|>⟧"
    "<|User|>3+3?<|Assistant|><think>\n⟦\n</think>\n\n6<|eos|>⟧",
    "llama3": "<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\nCutting Knowledge Date: December 2023\n\n"
    "Be brief.<|eot_id|><|start_header_id|>user<|end_header_id|>\n\n2+2?<|eot_id|>"
    "<|start_header_id|>assistant<|end_header_id|>\n\n⟦4<|eot_id|>⟧<|start_header_id|>user<|end_header_id|>\n\n3+3?"
    "<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n⟦6<|eot_id|>⟧",
    "gemma3": "<bos><start_of_turn>user\nBe brief.\n\n2+2?<end_of_turn>\n<start_of_turn>model\n⟦4<end_of_turn>⟧\n"
    "<start_of_turn>user\n3+3?<end_of_turn>\n<start_of_turn>model\n⟦6<end_of_turn>⟧",
    "mistral-v1": "<s> [INST] Be brief.\n\n2+2? [/INST]⟦ 4</s>⟧ [INST] 3+3? [/INST]⟦ 6</s>⟧",
    "mistral-v3": "<s>[INST] Be brief.\n\n2+2?[/INST]⟦ 4</s>⟧[INST] 3+3?[/INST]⟦ 6</s>⟧",
    "mistral-tekken": "<s>[SYSTEM_PROMPT]Be brief.[/SYSTEM_PROMPT][INST]2+2?[/INST]⟦4</s>⟧[INST]3+3?[/INST]⟦6</s>⟧",
    "phi3": "<|system|>\nBe brief.<|end|>\n<|user|>\n2+2?<|end|>\n<|assistant|>\n⟦4<|end|>⟧\n"
    "<|user|>\n3+3?<|end|>\n<|assistant|>\n⟦6<|end|>⟧",
    "harmony": "<|start|>system<|message|>You are ChatGPT.\n\nReasoning: medium\n\n# Valid channels: analysis, final."
    "<|end|><|start|>developer<|message|># Instructions\n\nBe brief.\n\n<|end|><|start|>user<|message|>2+2?<|end|>"
    "<|start|>assistant⟦<|channel|>final<|message|>4<|return|>⟧<|start|>user<|message|>3+3?<|end|>"
    "<|start|>assistant⟦<|channel|>final<|message|>6<|return|>⟧",
    "glm45": "[gMASK]<sop><|system|>\nBe brief.<|user|>\n2+2?<|assistant|>⟦\n<think></think>\n4<|user|>⟧\n3+3?"
    "<|assistant|>⟦\n<think></think>\n6<|user|>⟧",
    "smollm3": "<|im_start|>system\n## Metadata\n\nKnowledge Cutoff Date: June 2025\nReasoning Mode: /think\n\n"
    "## Custom Instructions\n\nBe brief.\n\n<|im_end|>\n<|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\n"
    "⟦4<|im_end|>⟧\n<|im_start|>user\n3+3?<|im_end|>\n<|im_start|>assistant\n⟦6<|im_end|>⟧",
    "deepseek-v3": "<|begin|>Be brief.<|User|>2+2?<|Assistant|>⟦4<|eos|>⟧<|User|>3+3?<|Assistant|>⟦6<|eos|>⟧",
    "command": "<BOS><|START_OF_TURN_TOKEN|><|SYSTEM_TOKEN|>Be brief.<|END_OF_TURN_TOKEN|><|START_OF_TURN_TOKEN|>"
    "<|USER_TOKEN|>2+2?<|END_OF_TURN_TOKEN|><|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|><|START_RESPONSE|>"
    "⟦4<|END_RESPONSE|><|END_OF_TURN_TOKEN|>⟧<|START_OF_TURN_TOKEN|><|USER_TOKEN|>3+3?<|END_OF_TURN_TOKEN|>"
    "<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|><|START_RESPONSE|>⟦6<|END_RESPONSE|><|END_OF_TURN_TOKEN|>⟧",
    "plain": "Be brief.\n\nUser: 2+2?\nAssistant:⟦ 4<|im_end|>⟧\nUser: 3+3?\nAssistant:⟦ 6<|im_end|>⟧",
}

# What is trained of the answer REASONED; the others train it as it is written.
REASONING = {
    "qwen35": "six\n</think>\n\n6<|im_end|>",
    "r1-distill": "six\n</think>\n\n6<|eos|>",
    "harmony": "<|channel|>analysis<|message|>six<|end|><|start|>assistant<|channel|>final<|message|>6<|return|>",
    "glm45": "\n<think>six</think>\n6<|user|>",
    "mistral-v1": f" {REASONED}</s>",
    "mistral-v3": f" {REASONED}</s>",
    "plain": f" {REASONED}<|im_end|>",
}
WITH_TOOLS = ("llama3", "mistral-v3", "qwen3", "smollm3")


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tokenizer]:
    root = tmp_path_factory.mktemp("styles")
    found = {
        name: Tokenizer.load(make_style_folder(root / name, style))
        for name, style in STYLES.items()
    }
    base = make_style_folder(root / "base", ModelStyle("", CHATML, "<|im_end|>"))
    (base / "chat_template.jinja").unlink()
    return found | {"plain": Tokenizer.load(base, chat_template="plain")}


def marked(tokenizer: Tokenizer, ids: list[int], mask: list[int]) -> str:
    """The text, with what is trained in brackets."""
    parts = [
        (trained, [token for token, _ in group])
        for trained, group in groupby(zip(ids, mask, strict=True), lambda pair: pair[1])
    ]
    texts = [
        (trained, tokenizer.decode(part, skip_special_tokens=False)) for trained, part in parts
    ]
    return "".join(f"⟦{text}⟧" if trained else text for trained, text in texts)


def trained_text(tokenizer: Tokenizer, ids: list[int], mask: list[int]) -> str:
    return tokenizer.decode(
        [token for token, own in zip(ids, mask, strict=True) if own], skip_special_tokens=False
    )


@pytest.mark.parametrize("name", TRAINED)
def test_supervised_text_and_mask(tokenizers: dict[str, Tokenizer], name: str) -> None:
    assert marked(tokenizers[name], *encode_supervised(tokenizers[name], CHAT)) == TRAINED[name]


@pytest.mark.parametrize("name", TRAINED)
def test_reasoning_is_trained_as_the_prompt_leads_to_it(
    tokenizers: dict[str, Tokenizer], name: str
) -> None:
    tokenizer = tokenizers[name]
    ids, mask = encode_supervised(tokenizer, [CHAT[3], {"role": "assistant", "content": REASONED}])
    end = tokenizer.decode(rules_for(tokenizer).closing, skip_special_tokens=False)
    assert trained_text(tokenizer, ids, mask) == REASONING.get(name, REASONED + end)


@pytest.mark.parametrize("name", TRAINED)
def test_prompt_and_trained_answer_are_the_whole_rendering(
    tokenizers: dict[str, Tokenizer], name: str
) -> None:
    tokenizer = tokenizers[name]
    question = [CHAT[0], CHAT[1]]
    text = trained_prompt(tokenizer, [*question, CHAT[2]])
    assert text == tokenizer.render_chat(question)
    whole = tokenizer.render_chat([*question, CHAT[2]], add_generation_prompt=False)
    # r1-distill does not show the reasoning that its prompt opens, mistral-v3 no system prompt
    # behind an answer
    if name not in ("r1-distill", "mistral-v3"):
        assert whole.startswith(
            TRAINED[name].partition("⟧")[0].replace("⟦", "").removesuffix("<|user|>")
        )


def trained_prompt(tokenizer: Tokenizer, messages: list[dict[str, str]]) -> str:
    ids, mask = encode_supervised(tokenizer, messages)
    return tokenizer.decode(ids[: mask.index(1)], skip_special_tokens=False)


@pytest.mark.parametrize("name", TRAINED)
def test_preference_pairs_train_what_supervised_rows_do(
    tokenizers: dict[str, Tokenizer], name: str, tmp_path: Path
) -> None:
    tokenizer = tokenizers[name]
    row = {"prompt": CHAT[:2], "chosen": "4", "rejected": REASONED}
    (tmp_path / "pairs.jsonl").write_text(json.dumps(row))
    pair = load_pairs(tmp_path / "pairs.jsonl", tokenizer, 1000)[0][0]
    for example, answer in ((pair.chosen, "4"), (pair.rejected, REASONED)):
        ids, mask = encode_supervised(
            tokenizer, [*CHAT[:2], {"role": "assistant", "content": answer}]
        )
        assert (example.token_ids, example.loss_mask) == (ids, mask)


@pytest.mark.parametrize("name", TRAINED)
@pytest.mark.parametrize("is_cut", [False, True])
def test_an_episode_grows_into_the_supervised_text(
    tokenizers: dict[str, Tokenizer], name: str, is_cut: bool
) -> None:
    tokenizer = tokenizers[name]
    conversation = Conversation(tokenizer, "Be brief.")
    closing = len(conversation.rules.closing) or 1
    for question, answer in (("2+2?", "4"), ("3+3?", "6")):
        conversation.observe(question)
        ids = conversation.rules.answer(answer)
        ids = ids[:-closing] if is_cut else ids  # an answer that ended because of its length
        conversation.sampled(ids, [-0.5] * len(ids), [1, len(ids)])
    text = tokenizer.decode(conversation.token_ids, skip_special_tokens=False)
    expected = TRAINED[name].replace("⟦", "").replace("⟧", "")
    if is_cut:  # the end comes from the template, not from the policy
        end = tokenizer.decode(conversation.rules.closing, skip_special_tokens=False)
        expected = expected.removesuffix(end).replace("<|return|>", "<|end|>")
    assert text == expected
    assert sum(conversation.loss_mask) == sum(end - start for start, end in conversation.spans)


@pytest.mark.parametrize("name", TRAINED)
def test_end_tokens(tokenizers: dict[str, Tokenizer], name: str) -> None:
    tokenizer, rules = tokenizers[name], rules_for(tokenizers[name])
    stops = {tokenizer.decode([token], skip_special_tokens=False) for token in rules.stop_token_ids}
    style = STYLES.get(name)
    assert stops == set(style.ends or (style.eos,) if style else ("<|im_end|>",)) | (
        {style.eos} if style else set()
    )
    assert rules.closing[-1] in rules.stop_token_ids


@pytest.mark.parametrize(
    "name", [*WITH_TOOLS, "harmony", "glm45", "deepseek-v3", "qwen35", "plain"]
)
def test_tools_work_or_are_refused(tokenizers: dict[str, Tokenizer], name: str) -> None:
    tokenizer = tokenizers[name]
    if name not in WITH_TOOLS:
        with pytest.raises(
            ConfigError, match="cannot be used with tools: it does not write tool calls as JSON"
        ):
            TemplateRules(tokenizer, "Be brief.", json.dumps(TOOLS))
        return
    function = {"name": "add", "arguments": {"to": 3}}
    call = {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"id": "a23456789", "function": function}],
    }
    question, result = CHAT[1], {"role": "tool", "content": "7", "tool_call_id": "a23456789"}
    rendered = tokenizer.render_chat([question, call, result], tools=TOOLS)
    conversation = Conversation(tokenizer, tools=json.dumps(TOOLS))
    conversation.observe("2+2?")
    prompt = tokenizer.render_chat([question], tools=TOOLS)
    assert tokenizer.decode(conversation.token_ids, skip_special_tokens=False) == prompt
    said = tokenizer.render_chat(
        [question, call], tools=TOOLS, add_generation_prompt=False
    ).removeprefix(prompt)
    said = said.removesuffix(conversation.rules.end_of_turn)
    assert [found.arguments for found in conversation.rules.calls(said)] == [{"to": 3}]
    ids = [*tokenizer.encode(said), *conversation.rules.closing]
    conversation.sampled(ids, [-0.5] * len(ids), [1, len(ids)])
    conversation.observe("7", "tool")
    text = tokenizer.decode(conversation.token_ids, skip_special_tokens=False)
    # Qwen 3 shows an empty block before the last call only, but what was sampled stays
    assert text.replace("<think>\n\n</think>\n\n", "").replace("probe0001", "a23456789") == rendered


@pytest.mark.parametrize(
    ("name", "sampled", "text", "answer"),
    [
        ("qwen3", "<think>\nsix\n</think>\n\n6<|im_end|>", "<think>\nsix\n</think>\n\n6", "6"),
        ("qwen35", "six\n</think>\n\n6<|im_end|>", "six\n</think>\n\n6", "6"),
        ("glm45", "\n<think>six</think>\n6<|user|>", "\n<think>six</think>\n6", "6"),
        ("harmony", REASONING["harmony"], "<think>\nsix\n</think>\n\n6", "6"),
        ("harmony", "<|channel|>final<|message|>6<|return|>", "6", "6"),
        ("harmony", "<|channel|>analysis<|message|>six or", "<think>\nsix or", ""),
        ("harmony", "6<|return|>", "6", "6"),
        ("llama3", "6<|eot_id|>", "6", "6"),
    ],
)
def test_reasoning_is_kept_or_dropped(
    tokenizers: dict[str, Tokenizer], name: str, sampled: str, text: str, answer: str
) -> None:
    tokenizer = tokenizers[name]
    read = rules_for(tokenizer).text(tokenizer.encode(sampled))
    assert (read, without_thinking(read)) == (text, answer)


def test_tags_that_are_special_tokens_stay_in_the_text(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(make_tokenizer_folder(tmp_path, "r1"))
    read = rules_for(tokenizer).text(tokenizer.encode("six</think>6<|end|>"))
    assert (read, without_thinking(read)) == ("six</think>6", "6")


@pytest.mark.parametrize("name", TRAINED)
async def test_the_http_endpoint_renders_the_template(
    tokenizers: dict[str, Tokenizer], name: str
) -> None:
    tokenizer = tokenizers[name]
    served = ServedModel("actor", "path", 1000, lambda: "serving", lambda: 0)

    async def unused(*_: object) -> Any:
        raise AssertionError

    backend = SingleKeyBackend(unused, tokenizer, served, AnswerStore())
    tools = TOOLS if name in WITH_TOOLS else []
    body = ChatBody.model_validate({"messages": CHAT[:4], **({"tools": tools} if tools else {})})
    (prompt,) = await backend.prompts(body)
    rendered = tokenizer.render_chat(CHAT[:4], tools=tools)
    assert tokenizer.decode(prompt, skip_special_tokens=False) == rendered
    assert rendered.count("Be brief.") == 1


@pytest.mark.parametrize(
    ("name", "text"), [("harmony", "<think>\nsix\n</think>\n\n6"), ("qwen35", "six\n</think>\n\n6")]
)
def test_the_http_endpoint_answers_with_reasoning_in_tags(
    tokenizers: dict[str, Tokenizer], name: str, text: str
) -> None:
    tokenizer = tokenizers[name]
    ids = tokenizer.encode(REASONING[name])
    zeros = [0.0] * len(ids)
    reply = wire.GenerateReply(
        request_id="r", server="s", token_ids=wire.column(ids, "<i4"), logprobs=wire.column(zeros, "<f4"),
        version_runs=wire.column([1, len(ids)], "<i4"), finish_reason="stop", policy_version=1,
    )  # fmt: skip
    choice = AnswerChoice(0, [1], reply)
    body = ChatBody.model_validate({"messages": CHAT[:2]})
    writer = AnswerWriter(body, tokenizer, "actor", "id")
    assert writer.said(choice) == (text, [])
    chunks = ChunkEvents(body, tokenizer, writer, 0, [1])
    events = [event for token in ids for event in chunks.of([TokenEvent([token], [0.0], 1, ())])]
    contents = [
        event["choices"][0]["delta"].get("content", "") for event in [*events, *chunks.last(choice)]
    ]
    assert "".join(contents) == text


@pytest.mark.parametrize("name", STYLES)
def test_renders_like_transformers(name: str, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    folder = make_style_folder(tmp_path, STYLES[name])
    ours, theirs = Tokenizer.load(folder), AutoTokenizer.from_pretrained(folder)
    for tools in ([], TOOLS):
        for prompt in (True, False):
            options = {"add_generation_prompt": prompt, "tools": tools}
            expected = theirs.apply_chat_template(
                CHAT[:4], tokenize=False, **{**options, "tools": tools or None}
            )
            assert ours.render_chat(CHAT[:4], **options) == expected


def test_plain_opens_with_the_token_that_the_tokenizer_puts_first(tmp_path: Path) -> None:
    folder = make_style_folder(tmp_path, STYLES["llama3"])
    question = [{"role": "user", "content": "2+2?"}]
    assert (
        Tokenizer.load(folder, chat_template="plain").render_chat(question)
        == "User: 2+2?\nAssistant:"
    )
    file = folder / "tokenizer.json"
    content = json.loads(file.read_text())
    bos = {"id": "<|begin_of_text|>", "ids": [1], "tokens": ["<|begin_of_text|>"]}
    single = [
        {"SpecialToken": {"id": bos["id"], "type_id": 0}},
        {"Sequence": {"id": "A", "type_id": 0}},
    ]
    pair = [*single, {"Sequence": {"id": "B", "type_id": 1}}]
    content["post_processor"] = {
        "type": "TemplateProcessing", "single": single, "pair": pair, "special_tokens": {bos["id"]: bos},
    }  # fmt: skip
    file.write_text(json.dumps(content))
    tokenizer = Tokenizer.load(folder, chat_template="plain")
    assert tokenizer.render_chat(question) == "<|begin_of_text|>User: 2+2?\nAssistant:"
    with pytest.raises(
        ConfigError, match=r"model\.chat_template: .*plain has the roles system, user and assistant"
    ):
        tokenizer.render_chat([{"role": "tool", "content": "7"}])


@pytest.mark.parametrize("setting", ["/etc/passwd", "template.jinja", ""])
def test_a_process_that_joins_opens_no_file(setting: str, tmp_path: Path) -> None:
    folder = make_style_folder(tmp_path, STYLES["qwen3"])
    with pytest.raises(ConfigError, match="only the process that starts a run reads the file"):
        Tokenizer.of_run(folder, ModelSection(chat_template=setting))


def test_pad_equal_to_end_trains_the_end(tmp_path: Path) -> None:
    style = ModelStyle(STYLES["qwen3"].template, ("<|im_end|>", "<|im_start|>"), "<|im_end|>")
    tokenizer = Tokenizer.load(make_style_folder(tmp_path, style))
    assert tokenizer.pad_token_id in tokenizer.eos_token_ids
    ids, mask = encode_supervised(tokenizer, CHAT)
    assert trained_text(tokenizer, ids, mask).count("<|im_end|>") == 2
