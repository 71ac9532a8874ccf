"""What a request may look like, and the exact field that is at fault when it may not."""

from __future__ import annotations

from typing import Any

import pytest

from miniserve.engine.input_processor import InputProcessor
from miniserve.errors import ContextLengthError, InvalidParameterError, RequestError
from miniserve.sampling_params import SamplingParams
from tests.engine.scripted import EOS, MAX_MODEL_LEN, TOKENIZER, make_input_processor, tokens

NUM_IDS = TOKENIZER.num_token_ids


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


def test_chat_is_rendered_with_its_special_tokens_once() -> None:
    request = make_input_processor().process_chat("r", [{"role": "user", "content": "hi<eos>"}], SamplingParams())
    assert TOKENIZER.decode(request.token_ids, skip_special_tokens=False) == "user: hi<eos>\n"
    assert request.token_ids[-2] == EOS


@pytest.mark.parametrize("prompt", ["", [], ()])
def test_empty_prompt(prompt: Any) -> None:
    """Bug: an empty prompt reached the engine and killed it."""
    error = refusal(prompt)
    assert isinstance(error, InvalidParameterError) and error.param == "prompt"
    assert "empty" in str(error)


@pytest.mark.parametrize("bad", [-1, NUM_IDS, 10**30, True, 1.0, "a", None])
def test_bad_token_id(bad: Any) -> None:
    error = refusal([1, bad, 2])
    assert isinstance(error, InvalidParameterError) and error.param == "prompt"
    assert repr(bad) in str(error) and str(NUM_IDS - 1) in str(error)


def test_the_models_vocabulary_bounds_the_ids() -> None:
    """Bug: an id that only the tokenizer knows reached the embedding, out of its range."""
    assert refusal([8], make_input_processor(num_token_ids=8)).param == "prompt"
    assert make_input_processor(num_token_ids=8).process_prompt("r", [7], SamplingParams()).token_ids == [7]


@pytest.mark.parametrize("bad", [NUM_IDS, 10**9])
def test_stop_token_id_out_of_range(bad: int) -> None:
    error = refusal("abc", stop_token_ids=(5, bad))
    assert isinstance(error, InvalidParameterError) and error.param == "stop_token_ids"


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
    assert "at most 12" in str(error)
    make_input_processor().process_prompt("r", "x" * 20, SamplingParams(max_tokens=MAX_MODEL_LEN - 20))


def test_chat_is_checked_as_well() -> None:
    processor = make_input_processor()
    with pytest.raises(ContextLengthError):
        processor.process_chat("r", [{"role": "user", "content": "x" * 40}], SamplingParams())
    with pytest.raises(InvalidParameterError) as caught:
        processor.process_chat("r", [], SamplingParams())
    assert caught.value.param == "messages"
