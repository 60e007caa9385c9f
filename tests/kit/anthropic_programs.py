"""Agents on Anthropic's protocol, on the standard library alone: what they do is their first
argument.
"""

from __future__ import annotations

import json
import os
import sys
import urllib.error
import urllib.request
from collections.abc import Callable
from typing import Any

THINKS = {"thinking": {"type": "enabled", "budget_tokens": 1024}}
ADD = {"name": "add", "description": "adds", "input_schema": {"type": "object"}}
CACHED = {"cache_control": {"type": "ephemeral"}}


def send(path: str, body: dict[str, Any], **headers: str) -> bytes:
    own = {"x-api-key": os.environ["ANTHROPIC_API_KEY"], "anthropic-version": "2023-06-01"}
    request = urllib.request.Request(
        f"{os.environ['ANTHROPIC_BASE_URL']}/v1{path}",
        json.dumps(body).encode(),
        {**(headers or own), "Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=30) as response:
        data: bytes = response.read()
        return data


def create(messages: list[dict[str, Any]], **fields: Any) -> dict[str, Any]:
    """The message that answers a conversation, put together from its events if it is a stream."""
    body = {"model": "m", "max_tokens": 300, "messages": messages, **fields}
    data = send("/messages?beta=true", body)
    if not fields.get("stream"):
        message: dict[str, Any] = json.loads(data)
        return message
    content: list[dict[str, Any]] = []
    message = {"content": content}
    for block in data.decode().strip().split("\n\n"):
        name, line = block.split("\n")
        event = json.loads(line.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        if event["type"] == "content_block_start":
            content.append(event["content_block"] | {"arguments": ""})
        elif event["type"] == "content_block_delta":
            for key, value in event["delta"].items():
                place = "arguments" if key == "partial_json" else key
                if key != "type":
                    content[event["index"]][place] += value
        elif event["type"] == "message_delta":
            message |= event["delta"]
    for part in content:
        if arguments := part.pop("arguments"):
            part["input"] = json.loads(arguments)
    return message


def calls_tools(task: dict[str, Any]) -> Any:
    """Runs what is called and sends answers back as JavaScript would write them, keys sorted."""
    fields = json.loads(os.environ.get("FIELDS", "{}"))
    system = [{"type": "text", "text": "be brief", **CACHED}]
    messages: list[dict[str, Any]] = [{"role": "user", "content": "what is 2 + 3?"}]
    for _ in range(3):
        message = create(messages, tools=[ADD], system=system, **fields)
        spelled = json.dumps(message["content"], sort_keys=True)
        answer = json.loads(spelled, parse_float=lambda digits: int(float(digits)))
        messages.append({"role": "assistant", "content": answer})
        if message["stop_reason"] != "tool_use":
            text = message["content"][-1]["text"]
            kinds = "".join(part["type"][:2] for part in messages[1]["content"])
            return {"reward": float(text == "5"), "response": kinds}
        results = [
            {
                "type": "tool_result",
                "tool_use_id": part["id"],
                "content": [{"type": "text", "text": str(sum(part["input"]["of"]))}],
                **CACHED,
            }
            for part in answer
            if part["type"] == "tool_use"
        ]
        messages.append({"role": "user", "content": results})
    raise RuntimeError("no answer")


def converses(task: dict[str, Any]) -> Any:
    """Three turns of words; what is sent again is written differently."""
    fields = json.loads(os.environ.get("FIELDS", "{}"))
    messages: list[dict[str, Any]] = []
    for question in ("one", "two", "three"):
        messages.append({"role": "user", "content": [{"type": "text", "text": question, **CACHED}]})
        content = create(messages, **fields)["content"]
        messages[-1]["content"] = question
        messages.append({"role": "assistant", "content": content})
    return {"reward": 1, "response": str(content[-1]["text"])}


def changes(task: dict[str, Any]) -> Any:
    """Sends an answer back with another reasoning than was sampled."""
    messages: list[dict[str, Any]] = [{"role": "user", "content": "one"}]
    content = create(messages, **THINKS)["content"]
    content[0]["thinking"] = "another"
    messages += [{"role": "assistant", "content": content}, {"role": "user", "content": "two"}]
    create(messages, **THINKS)
    return 1


def counts(task: dict[str, Any]) -> Any:
    """Counts the tokens of a prompt before it asks."""
    messages = [{"role": "user", "content": "how long is this?"}]
    counted = json.loads(send("/messages/count_tokens", {"model": "m", "messages": messages}))
    usage = create(messages)["usage"]
    difference = counted["input_tokens"] - usage["input_tokens"]
    try:
        send("/messages/count_tokens", {"messages": [{"role": "user", "content": "x" * 9000}]})
    except urllib.error.HTTPError as error:
        return {"reward": 1, "metrics": {"difference": difference, "status": error.code}}


def too_long(task: dict[str, Any]) -> Any:
    """Asks more and more, until it is refused."""
    messages: list[dict[str, Any]] = []
    while True:
        messages.append({"role": "user", "content": "x" * 300})
        messages.append({"role": "assistant", "content": create(messages)["content"]})


def sends_image(task: dict[str, Any]) -> Any:
    source = {"type": "base64", "media_type": "image/png", "data": "AA"}
    create([{"role": "user", "content": [{"type": "image", "source": source}]}])


def says_bearer(task: dict[str, Any]) -> Any:
    """Sends its key as OpenAI's clients do, and asks what there is."""
    key = {"Authorization": f"Bearer {os.environ['ANTHROPIC_API_KEY']}"}
    body = {"model": "m", "max_tokens": 9, "messages": [{"role": "user", "content": "hello"}]}
    message = json.loads(send("/messages", body, **key))
    head = urllib.request.Request(os.environ["ANTHROPIC_BASE_URL"], method="HEAD")
    with urllib.request.urlopen(head, timeout=30) as response:
        status = response.status
    return {"reward": 1, "response": message["role"], "metrics": {"status": status}}


def main() -> None:
    act: Callable[[dict[str, Any]], Any] = globals()[sys.argv[1]]
    try:
        print(json.dumps(act(json.load(sys.stdin))))
    except urllib.error.HTTPError as error:
        print(error.code, error.read().decode(), file=sys.stderr)
        raise SystemExit(3) from None


if __name__ == "__main__":
    main()
