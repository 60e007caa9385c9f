"""Stitching: the tokens of a call are those of the sample that it goes on from, whatever tokenising
its text would give.
"""

from __future__ import annotations

from array import array
from typing import cast

from hypothesis import given
from hypothesis import strategies as st

from envhub.agents.record import EpisodeRecord, RecordedSample
from envhub.servers.turn import SampledTurn
from rlearner_text.tokenizer import Tokenizer

END = 0  # closes an answer; its text is "."
VOCABULARY = [".", "a", "b", "ab", "?"]


class Greedy:
    """A tokenizer that always takes the longest token, so that what was sampled as "a", "b" comes
    back as "ab".
    """

    def encode(self, text: str) -> list[int]:
        ids = []
        while text:
            token = max((one for one in VOCABULARY if text.startswith(one)), key=len)
            ids.append(VOCABULARY.index(token))
            text = text[len(token) :]
        return ids

    def decode(self, ids: list[int], *, skip_special_tokens: bool = True) -> str:
        return "".join(VOCABULARY[one] for one in ids if not (skip_special_tokens and one == END))


TOKENIZER = Greedy()


def record(closing: tuple[int, ...] = (END,)) -> EpisodeRecord:
    return EpisodeRecord(cast(Tokenizer, TOKENIZER), closing, [END])


def call(of: EpisodeRecord, prompt: list[int], *said: int, version: int = 1) -> RecordedSample:
    answer = SampledTurn.of(said, [-1.0] * len(said), [version, len(said)], "stop", "s")
    return of.add_turn(array("i", prompt), answer)


def test_what_was_sampled_stays_as_it_was_sampled() -> None:
    one = record()
    first = one.encode_prompt("?")
    assert first == [4]
    call(one, first, 1, 2, END)  # "a", "b": tokenised again this would be "ab"
    assert TOKENIZER.encode("?ab.b?") == [4, 3, 0, 2, 4]
    second = one.encode_prompt("?ab.b?")
    assert second == [4, 1, 2, END, 2, 4]
    sample = call(one, second, 3, END, version=2)
    assert one.samples == [sample]
    assert sample.token_ids.tolist() == [4, 1, 2, 0, 2, 4, 3, 0]
    assert list(sample.loss_mask) == [0, 1, 1, 1, 0, 0, 1, 1]
    assert sample.logprobs.tolist() == [0, -1, -1, -1, 0, 0, -1, -1]
    assert sample.version_runs == [1, 3, 2, 2]
    assert [(turn.start, turn.end) for turn in sample.turns] == [(1, 4), (6, 8)]


def test_an_answer_that_was_cut_off_gets_its_closing_from_the_template() -> None:
    one = record()
    call(one, one.encode_prompt("?"), 1, 2)
    assert one.encode_prompt("?ab.b?") == [4, 1, 2, END, 2, 4]
    assert one.encode_prompt("?abb") == [4, 1, 2, 2]  # an unfinished answer may go on


def test_a_closed_answer_does_not_go_on() -> None:
    one = record()
    call(one, one.encode_prompt("?"), 1, END)
    assert one.encode_prompt("?ab") == TOKENIZER.encode("?ab")


def test_a_changed_history_begins_a_new_sample() -> None:
    one = record()
    call(one, one.encode_prompt("?"), 1, 2, END)
    other = call(one, one.encode_prompt("?a.b?"), 1, END)  # the agent dropped a word of the answer
    assert len(one.samples) == 2
    assert list(other.loss_mask) == [0, 0, 0, 0, 0, 1, 1]
    assert one.samples[-1] is other
    assert one.last_response == "a"


def test_the_longest_beginning_counts() -> None:
    one = record()
    call(one, one.encode_prompt("?"), 1, END)
    call(one, one.encode_prompt("?a.?"), 2, END)
    call(one, one.encode_prompt("?b"), 1, END)  # begins again
    assert [len(sample.turns) for sample in one.samples] == [2, 1]
    longest = call(one, one.encode_prompt("?a.?b.b?"), 2, END)
    assert len(longest.turns) == 3
    assert one.samples[-1] is longest


@given(
    st.lists(
        st.tuples(
            st.text("ab?", min_size=1, max_size=4),
            st.lists(st.integers(1, 4), max_size=5),
            st.booleans(),
        ),
        max_size=6,
    )
)
def test_a_growing_conversation_is_one_sample_of_exactly_its_tokens(
    turns: list[tuple[str, list[int], bool]],
) -> None:
    one, text, said, asked = record(), "", [], 0
    for number, (user, answer, closed) in enumerate(turns, start=1):
        text += user
        prompt = one.encode_prompt(text)
        assert TOKENIZER.decode(prompt, skip_special_tokens=False) == text
        ids = [*answer, END] if closed or not answer else answer
        sample = call(one, prompt, *ids, version=number)
        said += ids
        asked = len(sample.token_ids)
        text += TOKENIZER.decode(ids) + "."
    if turns:
        (sample,) = one.samples
        assert len(sample.token_ids) == len(sample.loss_mask) == len(sample.logprobs) == asked
        assert [
            token for token, mask in zip(sample.token_ids, sample.loss_mask, strict=True) if mask
        ] == said
        assert sum(sample.version_runs[1::2]) == len(said)
        assert len(sample.turns) == len(turns)


def test_the_text_that_a_call_adds_is_its_anchor() -> None:
    """Equal first prompts are equal states, and so are equal answers of a tool."""
    tokenizer = cast(Tokenizer, TOKENIZER)
    episode = EpisodeRecord(tokenizer, [END], [END], shows_anchors=True)
    first = call(episode, [0, 1], 2, END)
    second = call(episode, [0, 1, 2, END, 1], 0, END)
    assert second is first
    assert [turn.anchor for turn in first.turns] == [
        TOKENIZER.decode([0, 1]),
        TOKENIZER.decode([1]),
    ]
    plain = record()
    assert [turn.anchor for turn in call(plain, [0, 1], 2, END).turns] == [""]
