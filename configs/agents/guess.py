"""An agent that guesses a number between two bounds; it uses only the openai client and does not
know the training.

It plays its game, keeps its conversation as any chat program does, and prints the result in its
last line. Against any endpoint:

    export OPENAI_BASE_URL=https://host/v1 OPENAI_API_KEY=… OPENAI_MODEL=NAME
    echo '{"seed": 7}' | python configs/agents/guess.py
"""

import json
import os
import random
import re
import sys

from openai import OpenAI

TRIES = 6
LARGEST = 15


def main() -> None:
    """Play one game and print what it was worth."""
    secret = random.Random(json.load(sys.stdin)["seed"]).randint(0, LARGEST)
    client = OpenAI()  # OPENAI_BASE_URL and OPENAI_API_KEY
    chat = [{"role": "user", "content": f"guess 0-{LARGEST}"}]
    low = 0
    high = LARGEST
    for number in range(1, TRIES + 1):
        answer = client.chat.completions.create(
            model=os.environ["OPENAI_MODEL"], messages=chat, max_tokens=4
        )
        said = answer.choices[0].message.content or ""
        chat.append({"role": "assistant", "content": said})
        found = re.search(r"\d+", said)
        guess = int(found[0]) if found else -1
        if guess == secret:
            print(
                json.dumps(
                    {
                        "reward": 1.0 - (number - 1) / TRIES,
                        "success": True,
                        "metrics": {"guesses": number},
                    }
                )
            )
            return
        if low <= guess <= high:
            low, high = (guess + 1, high) if guess < secret else (low, guess - 1)
        chat.append({"role": "user", "content": f"no, {low}-{high}"})
    print(json.dumps({"reward": 0.0, "success": False, "metrics": {"guesses": TRIES}}))


if __name__ == "__main__":
    main()
