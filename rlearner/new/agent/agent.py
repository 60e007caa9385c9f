"""An agent of your own: it talks to any endpoint of OpenAI's protocol and does not know rlearner.

It reads its task from stdin, plays, and prints the result in its last line:

    export OPENAI_BASE_URL=https://host/v1 OPENAI_API_KEY=… OPENAI_MODEL=NAME
    echo '{"seed": 7}' | python agent.py
"""

import json
import os
import random
import re
import sys
import urllib.request
from collections.abc import Callable

TRIES = 6
LARGEST = 9
Chat = list[dict[str, str]]


def ask(chat: Chat) -> str:
    """Return the policy's answer; any client of the protocol does, such as openai's."""
    body = {"model": os.environ["OPENAI_MODEL"], "messages": chat, "max_tokens": 4}
    request = urllib.request.Request(
        f"{os.environ['OPENAI_BASE_URL']}/chat/completions",
        json.dumps(body).encode(),
        {
            "Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}",
            "Content-Type": "application/json",
        },
    )
    with urllib.request.urlopen(request) as reply:
        return json.load(reply)["choices"][0]["message"]["content"] or ""


def play(seed: int, ask: Callable[[Chat], str]) -> dict[str, object]:
    """Let the policy guess a number; return the reward and what else is known."""
    secret = random.Random(seed).randint(0, LARGEST)
    chat = [{"role": "user", "content": f"A number from 0 to {LARGEST}?"}]
    for number in range(1, TRIES + 1):
        said = ask(chat)
        digits = re.search(r"\d+", said)
        guess = int(digits[0]) if digits else -1
        if guess == secret:
            reward = 1.0 - (number - 1) / TRIES
            return {"reward": reward, "success": True, "metrics": {"guesses": number}}
        chat.append({"role": "assistant", "content": said})
        chat.append({"role": "user", "content": "Higher." if guess < secret else "Lower."})
    return {"reward": 0.0, "success": False, "metrics": {"guesses": TRIES}}


if __name__ == "__main__":
    print(json.dumps(play(json.load(sys.stdin)["seed"], ask)))
