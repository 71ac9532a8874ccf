"""The prompt set is the same in every run, and its prompts differ."""

from __future__ import annotations

from miniserve.benchmarks.prompts import SYSTEM, conversations


def test_the_same_in_every_run_and_a_prefix_of_a_longer_set() -> None:
    assert conversations(16) == conversations(16) == conversations(40)[:16]


def test_one_system_prompt_and_no_user_message_twice() -> None:
    batch = conversations(64)
    assert {messages[0]["content"] for messages in batch} == {SYSTEM}
    assert len({messages[1]["content"] for messages in batch}) == 64


def test_short_and_long() -> None:
    lengths = [len(messages[1]["content"]) for messages in conversations(16)]
    assert max(lengths) > 5 * min(lengths)
