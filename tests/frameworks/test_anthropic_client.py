"""Anthropic's own client plays an episode whose policy answers by a script: what was sampled is
what is recorded. By ``make test-frameworks``.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from agent_kit import Policy, play_agent, sampled_spans
from template_models import make_tokenizer_folder

from rlearner_text.tokenizer import Tokenizer

PYTHON = os.environ.get("RL_FRAMEWORKS_PYTHON")
CALL = '<think>2 and\n3</think> Let me add.\n<tool_call>\n{"arguments":  {"of": [2,3.0]}, "name": "add"}\n</tool_call>'
PROGRAM = """
import json
from anthropic import Anthropic

client = Anthropic()
tool = {"name": "add", "input_schema": {"type": "object"}}
messages = [{"role": "user", "content": "what is 2 + 3?"}]
fields = {"model": "any", "max_tokens": 2048, "tools": [tool], "messages": messages}
if THINKS:
    fields["thinking"] = {"type": "enabled", "budget_tokens": 1024}
kinds = []
for _ in range(3):
    if STREAMS:
        with client.messages.stream(**fields) as stream:
            message = stream.get_final_message()
    else:
        message = client.messages.create(**fields)
    kinds.append([block.type for block in message.content])
    messages.append({"role": "assistant", "content": message.content})
    uses = [block for block in message.content if block.type == "tool_use"]
    if not uses:
        break
    results = [
        {"type": "tool_result", "tool_use_id": use.id, "content": str(sum(use.input["of"]))}
        for use in uses
    ]
    messages.append({"role": "user", "content": results})
said = {"reward": float(message.content[-1].text == "5"), "response": json.dumps(kinds)}
print(json.dumps(said))
"""

pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.skipif(not PYTHON, reason="needs other frameworks: make test-frameworks"),
]


@pytest.mark.parametrize("streams", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("thinks", [False, True], ids=["hidden", "shown"])
async def test_an_episode_of_the_client_is_one_sample(
    tmp_path: Path, thinks: bool, streams: bool
) -> None:
    assert PYTHON is not None
    tokenizer = Tokenizer.load(make_tokenizer_folder(tmp_path / "model", "hermes"))
    script = tmp_path / "agent.py"
    script.write_text(f"THINKS = {thinks}\nSTREAMS = {streams}\n{PROGRAM}")
    policy = Policy(tokenizer, lambda text: "5" if "<tool_response>" in text else CALL)
    args = {"command": [PYTHON, str(script)]}
    episode = await play_agent(tokenizer, policy, args)
    assert episode.trajectory.reward == 1.0
    shown = ["thinking"] if thinks else []
    kinds = [[*shown, "text", "tool_use"], ["text"]]
    assert episode.trajectory.response == str(kinds).replace("'", '"')
    end = tokenizer.token_id("<|im_end|>")
    expected = [[*tokenizer.encode(text), end] for text in (CALL, "5")]
    assert sampled_spans(episode) == [expected] == [policy.sampled]
