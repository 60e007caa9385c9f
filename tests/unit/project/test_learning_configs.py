"""The shipped configurations of small models that learn: their demonstrations fit, and leave
something to learn.
"""

from __future__ import annotations

import pytest

from broker.settings.run_settings import RunSettings
from broker.settings.runspec import load, validate
from envhub.demos import demonstrations
from envhub.domain import load_domains
from rlearner_text.tiny import _character_tokenizer

EPISODES = 80


@pytest.mark.parametrize(
    ("name", "solved"),
    [("quickstart", (0.3, 0.8)), ("sokoban", (0.2, 0.7)), ("webshop", (0.3, 0.6))],
)
def test_demonstrations_fit_and_are_imperfect(name: str, solved: tuple[float, float]) -> None:
    config = validate(load(f"configs/{name}.yaml", ["run.name=x"]))
    (domain,) = load_domains(RunSettings.of_config(config)).values()
    perfect = [
        success for _, success in demonstrations(domain, episodes=EPISODES, noise=0.0, seed=0)
    ]
    assert all(perfect)
    told = list(
        demonstrations(domain, episodes=EPISODES, noise=config["warm_start"]["noise"], seed=0)
    )
    assert solved[0] <= sum(success for _, success in told) / EPISODES <= solved[1]
    tokenizer = _character_tokenizer(config["model"]["tiny"]["words"])
    longest = max(
        sum(len(tokenizer.encode(message["content"]).ids) + 2 for message in messages)
        for conversations, _ in told
        for messages in conversations
    )
    assert longest <= domain.section.max_context_tokens
