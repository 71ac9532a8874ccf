"""What a request may look like, and the exact field that is at fault when it may not."""

from __future__ import annotations

from typing import Any

import pytest

from miniserve.engine.input_processor import MAX_CUT_TEXT_LENGTH, InputProcessor
from miniserve.engine.options import ChatOptions, RequestOptions
from miniserve.errors import ContextLengthError, InvalidParameterError, RequestError
from miniserve.sampling_params import SamplingParams, StructuredOutput
from miniserve.text.chat_template import ChatTemplate
from miniserve.text.parsers.base import TextDelta, Tool
from tests.engine.scripted import EOS, MAX_MODEL_LEN, PIECES, TOKENIZER, make_input_processor, tokens

NUM_IDS = TOKENIZER.num_token_ids


class Grammars:
    """A grammar is what was asked for."""

    def compile(self, asked: StructuredOutput) -> StructuredOutput:
        return asked


def make_processor(*, kv_capacity_tokens: int = 10_000, priorities: bool = False) -> InputProcessor:
    return InputProcessor(
        TOKENIZER,
        num_token_ids=NUM_IDS,
        max_model_len=MAX_MODEL_LEN,
        kv_capacity_tokens=kv_capacity_tokens,
        eos_token_ids=frozenset({EOS}),
        grammars=Grammars(),
        priorities=priorities,
    )


def refusal(prompt: Any, processor: InputProcessor | None = None, **sampling: Any) -> RequestError:
    with pytest.raises(RequestError) as caught:
        (processor or make_input_processor()).process_prompt("r", prompt, SamplingParams(**sampling))
    return caught.value


def test_text() -> None:
    sampling = SamplingParams(max_tokens=5)
    request = make_input_processor().process_prompt("r", "Hello you", sampling)
    assert request.request_id == "r"
    assert request.token_ids == tokens("Hello you")
    assert request.num_prompt_tokens == 5
    assert request.sampling is sampling
    assert request.eos_token_ids == {EOS}


def test_token_ids_are_taken_as_they_are() -> None:
    prompt = (0, NUM_IDS - 1, 7)
    request = make_input_processor().process_prompt("r", prompt, SamplingParams())
    assert request.token_ids == [0, NUM_IDS - 1, 7]


def test_the_callers_list_is_not_the_requests() -> None:
    """Bug: output tokens were appended to the list that the caller had passed as the prompt."""
    prompt = [1, 2, 3]
    make_input_processor().process_prompt("r", prompt, SamplingParams()).token_ids.append(4)
    assert prompt == [1, 2, 3]


MESSAGES = [{"role": "user", "content": "hi<eos>"}]


def test_special_tokens_that_a_message_spells_are_text() -> None:
    """Bug: a user who wrote the end token into a message ended the message there."""
    request = make_input_processor().process_chat("r", MESSAGES, SamplingParams())
    assert TOKENIZER.decode(request.token_ids, skip_special_tokens=False) == "user: hi<eos>\n"
    assert EOS not in request.token_ids


def test_special_tokens_of_the_template_are_tokens_once() -> None:
    """Bug: a chat template that writes BOS gave two of them."""
    template = ChatTemplate("{{ bos_token }}{{ messages[0].content }}{{ eos_token }}", TOKENIZER.special_tokens)
    request = make_input_processor(chat_template=template).process_chat("r", MESSAGES, SamplingParams())
    assert request.token_ids == [TOKENIZER.bos_token_id, *tokens("hi<"), *tokens("eos>"), EOS]


def test_template_variables() -> None:
    template = ChatTemplate("{{ word }}{% if add_generation_prompt %}?{% endif %}", {})
    processor = make_input_processor(chat_template=template)
    request = processor.process_chat("r", MESSAGES, SamplingParams(), ChatOptions(template_kwargs={"word": "abc"}))
    assert request.token_ids == tokens("abc?")
    assert processor.tokenize_chat(MESSAGES, ChatOptions(add_generation_prompt=False)) == []


def test_tokenize() -> None:
    processor = make_input_processor()
    assert processor.tokenize_prompt("Hello") == tokens("Hello")
    assert processor.tokenize_prompt([3, 1]) == [3, 1]
    assert processor.tokenize_chat(MESSAGES) == processor.process_chat("r", MESSAGES, SamplingParams()).token_ids


def test_stop_strings_that_are_special_tokens_match_by_id() -> None:
    bos = TOKENIZER.special_id("<bos>")
    request = make_input_processor().process_prompt("r", "a", SamplingParams(stop=("x", "<bos>"), stop_token_ids=(5,)))
    assert request.sampling.stop_token_ids == (5, bos) and request.sampling.stop == ("x", "<bos>")


def test_choices() -> None:
    processor = make_input_processor()
    request = processor.process_prompt("r", "abc", SamplingParams(seed=7, prompt_logprobs=1, logprobs=2))
    first, *forks = processor.choices(request, 3)
    assert first is request and first.sampling.prompt_logprobs == 1 and not first.is_fork
    assert [fork.request_id for fork in forks] == ["r-1", "r-2"]
    assert [fork.sampling for fork in forks] == [SamplingParams(seed=seed, logprobs=2) for seed in (8, 9)]
    assert all(fork.is_fork and fork.token_ids == tokens("abc") and fork.eos_token_ids == {EOS} for fork in forks)
    forks[0].token_ids.append(1)
    assert request.token_ids == forks[1].token_ids == tokens("abc")
    assert processor.choices(request, 1) == [request]


def test_choices_share_what_is_not_of_the_sampler() -> None:
    """Bug kind: a fork without its parent's salt asked the prefix cache of everybody."""
    processor = make_processor(priorities=True)
    options = RequestOptions(cache_salt="tenant", priority=-3)
    sampling = SamplingParams(structured_outputs=StructuredOutput("regex", "a"))
    request, fork = processor.choices(processor.process_prompt("r", "abc", sampling, options=options), 2)
    assert (fork.cache_salt, fork.priority) == (b"tenant", -3)
    assert fork.output_format is request.output_format and fork.output_format.grammar == sampling.structured_outputs


def test_seeds_of_choices_wrap_around() -> None:
    processor = make_input_processor()
    _, fork = processor.choices(processor.process_prompt("r", "a", SamplingParams(seed=2**63 - 1)), 2)
    assert fork.sampling.seed == -(2**63)
    _, fork = processor.choices(processor.process_prompt("r", "a", SamplingParams()), 2)
    assert fork.sampling.seed is None


@pytest.mark.parametrize("prompt", ["", [], ()])
def test_empty_prompt(prompt: Any) -> None:
    """Bug: an empty prompt reached the engine and killed it."""
    error = refusal(prompt)
    assert isinstance(error, InvalidParameterError) and error.param == "prompt"
    assert "empty" in str(error)


@pytest.mark.parametrize(
    ("bad", "shown"),
    [
        (-1, "-1"),
        (NUM_IDS, str(NUM_IDS)),
        (10**30, str(10**30)),
        (True, "true"),
        (1.0, "1.0"),
        ("a", "'a'"),
        (None, "null"),
    ],
)
def test_bad_token_id(bad: Any, shown: str) -> None:
    error = refusal([1, bad, 2])
    assert isinstance(error, InvalidParameterError) and error.param == "prompt"
    assert f"has the token id {shown};" in str(error) and str(NUM_IDS - 1) in str(error)


@pytest.mark.parametrize("bad", [10**5000, "x" * 100_000, [[]] * 1000], ids=["integer", "string", "list"])
def test_a_huge_token_id_is_not_repeated(bad: Any) -> None:
    """Bug: Python refuses to print an integer of thousands of digits, and the error about it was a 500."""
    assert len(str(refusal([bad]))) < 300


def test_the_models_vocabulary_bounds_the_ids() -> None:
    """Bug: an id that only the tokenizer knows reached the embedding, out of its range."""
    assert refusal([8], make_input_processor(num_token_ids=8)).param == "prompt"
    assert make_input_processor(num_token_ids=8).process_prompt("r", [7], SamplingParams()).token_ids == [7]


@pytest.mark.parametrize("bad", [NUM_IDS, 10**9])
def test_stop_token_id_out_of_range(bad: int) -> None:
    error = refusal("abc", stop_token_ids=(5, bad))
    assert isinstance(error, InvalidParameterError) and error.param == "stop_token_ids"


def test_logit_bias_beyond_the_vocabulary() -> None:
    """Bug: such an id crashed the engine, or was ignored."""
    error = refusal("abc", logit_bias={5: 1.0, NUM_IDS: -100.0})
    assert isinstance(error, InvalidParameterError) and error.param == "logit_bias" and str(NUM_IDS) in str(error)
    make_input_processor().process_prompt("r", "abc", SamplingParams(logit_bias={NUM_IDS - 1: -100.0}))


def test_half_a_surrogate_pair() -> None:
    """Bug: "\\udcf0" in a prompt was a 500."""
    error = refusal("emoji \ud83d")
    assert isinstance(error, InvalidParameterError) and error.param == "prompt"


@pytest.mark.parametrize("length", [MAX_MODEL_LEN, MAX_MODEL_LEN + 1, 1000])
@pytest.mark.parametrize("max_tokens", [None, 1, 16])
def test_prompt_as_long_as_the_context(length: int, max_tokens: int | None) -> None:
    """Bug: a prompt that fills the context was accepted here and refused there: there is no room for an answer."""
    error = refusal("x" * length, max_tokens=max_tokens)
    assert isinstance(error, ContextLengthError) and error.param == "prompt"
    assert error.code == "context_length_exceeded" and error.status == 400
    assert str(length) in str(error) and str(MAX_MODEL_LEN) in str(error)


@pytest.mark.parametrize("max_tokens", [None, 1])
def test_one_token_less_is_accepted(max_tokens: int | None) -> None:
    prompt = "x" * (MAX_MODEL_LEN - 1)
    request = make_input_processor().process_prompt("r", prompt, SamplingParams(max_tokens=max_tokens))
    assert request.num_prompt_tokens == MAX_MODEL_LEN - 1


def test_prompt_and_max_tokens_beyond_the_context() -> None:
    error = refusal("x" * 20, max_tokens=MAX_MODEL_LEN - 19)
    assert isinstance(error, ContextLengthError) and error.param == "max_tokens"
    assert all(number in str(error) for number in ("20 tokens", "13 more", "holds 32", "at most 12"))
    make_input_processor().process_prompt("r", "x" * 20, SamplingParams(max_tokens=MAX_MODEL_LEN - 20))


@pytest.mark.parametrize("max_tokens", [0, 1, None])
def test_a_prompt_beyond_the_kv_cache(max_tokens: int | None) -> None:
    """Bug: a prompt that could never fit waited for ever, and all others behind it."""
    processor = make_input_processor(kv_capacity_tokens=12)
    error = refusal("x" * 12, processor, max_tokens=max_tokens)
    assert isinstance(error, ContextLengthError) and error.param == "prompt"
    assert "12 tokens" in str(error) and "holds 12" in str(error)
    processor.process_prompt("r", "x" * 11, SamplingParams(max_tokens=max_tokens))


def test_a_prompt_alone_needs_room_for_a_token() -> None:
    assert refusal("x" * MAX_MODEL_LEN, max_tokens=0).param == "prompt"
    make_input_processor().process_prompt("r", "x" * (MAX_MODEL_LEN - 1), SamplingParams(max_tokens=0))


def test_chat_is_checked_as_well() -> None:
    processor = make_input_processor()
    with pytest.raises(ContextLengthError) as too_long:
        processor.process_chat("r", [{"role": "user", "content": "x" * 40}], SamplingParams())
    assert too_long.value.param == "messages"
    with pytest.raises(InvalidParameterError) as caught:
        processor.process_chat("r", [], SamplingParams())
    assert caught.value.param == "messages"


def test_a_text_that_can_never_fit_is_refused_before_it_is_tokenised(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug kind: a body of megabytes took a core for half a minute to find out that it is too long."""
    processor = make_input_processor()
    text = "a" * 10_000

    def encode(*_: Any, **__: Any) -> list[int]:
        pytest.fail("the text is tokenised")

    monkeypatch.setattr(processor.tokenizer, "encode", encode)
    monkeypatch.setattr(processor.tokenizer, "encode_pieces", encode)
    with pytest.raises(ContextLengthError, match=r"more than \d+ tokens; the context holds 32") as caught:
        processor.process_prompt("a", text, SamplingParams())
    assert caught.value.param == "prompt"
    with pytest.raises(ContextLengthError) as caught:
        processor.process_chat("a", [{"role": "user", "content": text}], SamplingParams())
    assert caught.value.param == "messages"


def test_the_bound_on_the_length_of_a_text_never_exceeds_its_tokens() -> None:
    tokenizer = make_input_processor().tokenizer
    longest = max(PIECES, key=len)
    for text in (longest * 50, "a" * 100, longest):
        assert tokenizer.min_num_tokens(len(text)) <= len(tokenizer.encode(text, add_special_tokens=False))


# Options of a request


def test_a_salt_is_bytes_and_none_is_the_empty_one() -> None:
    processor = make_input_processor()
    for salt, expected in ((None, b""), ("é", b"\xc3\xa9")):
        options = RequestOptions(cache_salt=salt)
        assert processor.process_prompt("r", "abc", SamplingParams(), options=options).cache_salt == expected
        assert processor.process_chat("r", MESSAGES, SamplingParams(), options=options).cache_salt == expected


def test_a_priority_where_nobody_goes_by_it() -> None:
    """Bug kind: a priority that was ignored let a client believe that it is served first."""
    with pytest.raises(InvalidParameterError, match="--scheduling-policy priority") as caught:
        make_processor().process_prompt("r", "abc", SamplingParams(), options=RequestOptions(priority=-1))
    assert caught.value.param == "priority"
    options = RequestOptions(priority=-1)
    request = make_processor(priorities=True).process_chat("r", MESSAGES, SamplingParams(), options=options)
    assert request.priority == -1
    assert make_processor().process_prompt("r", "abc", SamplingParams(), options=RequestOptions(priority=0))


LETTERS = "abcdefghijklmnopqrstuvwxyz" * 4


@pytest.mark.parametrize(
    ("kept", "max_tokens", "capacity", "length"),
    [
        (1, 4, 99, 1),
        (7, None, 99, 7),
        (-1, None, 99, 24),
        (-1, None, 20, 15),
        (-1, 4, 99, 28),
        (-1, 0, 99, 31),
        (-1, 4, 20, 19),
    ],
)
def test_the_last_tokens_are_kept(kept: int, max_tokens: int | None, capacity: int, length: int) -> None:
    """Bug: -1 without max_tokens filled the context with the prompt, and the answer was one token."""
    processor = make_processor(kv_capacity_tokens=capacity)
    sampling, options = SamplingParams(max_tokens=max_tokens), RequestOptions(truncate_prompt_tokens=kept)
    expected = tokens(LETTERS[-length:])
    assert processor.process_prompt("r", LETTERS, sampling, options=options).token_ids == expected
    assert processor.process_prompt("r", tokens(LETTERS), sampling, options=options).token_ids == expected
    assert processor.process_prompt("r", LETTERS[-1:], sampling, options=options).token_ids == expected[-1:]
    conversation = [{"role": "user", "content": LETTERS}]
    chat = processor.process_chat("r", conversation, sampling, options=options)
    assert chat.token_ids == processor.tokenize_chat(conversation)[-length:]


def test_what_does_not_fit_when_it_is_cut_is_refused() -> None:
    for kept, max_tokens, param in ((40, None, "prompt"), (30, 4, "max_tokens"), (-1, 50, "prompt")):
        options = RequestOptions(truncate_prompt_tokens=kept)
        with pytest.raises(ContextLengthError) as caught:
            make_processor().process_prompt("r", LETTERS, SamplingParams(max_tokens=max_tokens), options=options)
        assert caught.value.param == param


def test_a_text_to_be_cut_may_be_long_but_not_without_end() -> None:
    processor, options = make_processor(), RequestOptions(truncate_prompt_tokens=3)
    assert processor.process_prompt("r", "x" * 50_000, SamplingParams(max_tokens=4), options=options).num_tokens == 3
    text = "x" * (MAX_CUT_TEXT_LENGTH + 1)
    with pytest.raises(ContextLengthError, match=f"{len(text)} characters.*at most {MAX_CUT_TEXT_LENGTH}") as caught:
        processor.process_prompt("r", text, SamplingParams(), options=options)
    assert caught.value.param == "prompt"


def test_a_long_context_takes_a_long_text() -> None:
    """The bound is for what need not fit: /tokenize, and texts to be cut."""
    text = "x" * (MAX_CUT_TEXT_LENGTH + 1)
    room = len(text) + 1
    processor = make_input_processor(max_model_len=room, kv_capacity_tokens=room)
    assert processor.process_prompt("r", text, SamplingParams(max_tokens=1)).num_tokens == len(text)
    with pytest.raises(ContextLengthError, match="to be shown"):
        processor.tokenize_prompt(text)


def test_a_continued_message_ends_the_prompt() -> None:
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "a <eos> "}]
    chat = ChatOptions(add_generation_prompt=False, continue_final_message=True)
    request = make_input_processor().process_chat("r", messages, SamplingParams(max_tokens=1), chat)
    assert TOKENIZER.decode(request.token_ids) == "user: hi\nassistant: a <eos> " and EOS not in request.token_ids
    assert make_input_processor().tokenize_chat(messages, chat) == request.token_ids


def test_min_tokens_beyond_the_context() -> None:
    """Without max_tokens, a request for more tokens than fit was taken, and ran to the context's end."""
    error = refusal([1] * 4, min_tokens=MAX_MODEL_LEN - 3, max_tokens=None)
    assert isinstance(error, InvalidParameterError) and error.param == "min_tokens"
    assert f"room for {MAX_MODEL_LEN - 4}" in str(error)
    make_processor().process_prompt("r", [1] * 4, SamplingParams(min_tokens=MAX_MODEL_LEN - 4, max_tokens=None))


def test_an_answer_that_has_to_call_has_no_text() -> None:
    """Bug: a call that was cut before its name was known was shown as text."""
    tools = (Tool("f"),)
    processor = make_processor()
    request = processor.process_prompt("r", "a", SamplingParams())
    for options, shown in (
        (ChatOptions(tools=tools, tool_choice="required"), []),
        (ChatOptions(tools=tools, tool_choice="required", tool_name="f"), []),
        (ChatOptions(tools=tools), [TextDelta("<tool_call>")]),
    ):
        parser = processor.tool_parser(options, request)
        assert parser is not None and parser.push("<tool_call>") + parser.flush() == shown
