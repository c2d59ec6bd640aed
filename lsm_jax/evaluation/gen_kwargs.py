"""Read the options of text generation in lm-evaluation-harness's tasks: every name for an option is
honoured, or refused by name."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from lsm_jax.files import unique_keys

_TOKENS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
_STOPS = ("until", "stop", "stop_strings", "stop_sequences")
# Options that change nothing at this value, and are refused at any other one.
_NEUTRAL: dict[str, Any] = {
    "num_beams": 1,
    "num_return_sequences": 1,
    "n": 1,
    "best_of": 1,
    "min_p": 0,
    "typical_p": 1,
    "epsilon_cutoff": 0,
    "repetition_penalty": 1,
    "length_penalty": 1,
    "presence_penalty": 0,
    "frequency_penalty": 0,
    "no_repeat_ngram_size": 0,
    "min_new_tokens": 0,
    "min_length": 0,
    "use_cache": True,
    "early_stopping": False,
    "skip_special_tokens": True,
    "add_generation_prompt": False,
}
_SAMPLING = ("do_sample", "temperature", "top_k", "top_p")
ACCEPTED = (*_STOPS, *_TOKENS, *_SAMPLING)


class Generation(NamedTuple):
    """The options of one request of the harness to generate text: when to end it, and how to sample.

    Attributes:
        until: strings that end the text.
        num_tokens: number of tokens at most; None if the request does not set it.
        temperature: 0 is greedy.
        top_k: sample from the k most likely tokens only; None for all.
        top_p: sample from the smallest set of tokens of this probability; None for all.
    """

    until: tuple[str, ...] = ()
    num_tokens: int | None = None
    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None


def parse_generation(options: Mapping[str, Any]) -> Generation:
    """Return the options of text generation that a request of the harness names.

    A temperature above 0 without `do_sample` samples, and `do_sample=False` is greedy at any temperature, as
    in the harness. `top_k` of 0 or -1, and `top_p` of 1, are all tokens.

    Raises:
        ValueError: an option is unknown or out of range, or two names for one option have two values.
    """
    options = {name: value for name, value in options.items() if value is not None}
    for name, value in options.items():
        if name in _NEUTRAL and value != _NEUTRAL[name]:
            raise ValueError(
                f"generation options: {name}={value!r}; accepted is {_NEUTRAL[name]!r}"
            )
        if name == "max_length":
            raise ValueError(
                f"generation options: max_length={value!r} counts the prompt's tokens too; give max_gen_toks, the "
                "number of generated tokens, and --lm_eval.max_length, the model's window"
            )
        if name not in ACCEPTED and name not in _NEUTRAL:
            raise ValueError(
                f"generation options: {name}={value!r} is not an option; accepted are {', '.join(ACCEPTED)}"
            )
    until = _single(options, _STOPS) or ()
    until = [until] if isinstance(until, str) else until
    if not isinstance(until, (list, tuple)) or not all(isinstance(text, str) for text in until):
        raise ValueError(f"generation options: until={until!r}; accepted are strings")
    number = _single(options, _TOKENS)
    if number is not None and (number := _number("max_gen_toks", number, whole=True)) < 1:
        raise ValueError(f"generation options: max_gen_toks={number:g}; accepted is at least 1")
    if options.get("do_sample", False) not in (True, False):
        given = options["do_sample"]
        raise ValueError(f"generation options: do_sample={given!r}; accepted are true and false")
    temperature = _number(
        "temperature", options.get("temperature", 1.0 if options.get("do_sample") else 0.0)
    )
    if not options.get("do_sample", temperature > 0):
        temperature = 0.0
    top_k = int(_number("top_k", options.get("top_k", 0), whole=True))
    top_p = _number("top_p", options.get("top_p", 1.0))
    if temperature < 0 or top_k < -1 or not 0 < top_p <= 1:
        raise ValueError(
            f"generation options: temperature={temperature}, top_k={top_k}, top_p={top_p}; accepted are a temperature "
            "of at least 0, a top_k of at least -1 and a top_p in (0, 1]"
        )
    return Generation(
        tuple(text for text in until if text),
        None if number is None else int(number),
        temperature,
        top_k if top_k > 0 else None,
        top_p if top_p < 1 else None,
    )


def _number(name: str, value: Any, *, whole: bool = False) -> float:
    """Return the number that an option of text generation has; a text that is a number is accepted, as the harness does.

    Raises:
        ValueError: the value is no finite number, or with `whole` no whole one.
    """
    try:
        number = math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError):
        number = math.nan
    if not math.isfinite(number) or whole and number != int(number):
        kind = "whole number" if whole else "number"
        raise ValueError(f"generation options: {name}={value!r}; accepted is a {kind}")
    return number


def replace_options(options: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return a task's options of text generation, changed by those of the flag `lm_eval.gen_kwargs`: an
    option of the flag also removes the task's options that are other names of it.

    If the flag sets `temperature` or `do_sample`, both of these options of the task are removed, so that a
    task's `do_sample=False` does not undo a temperature of the flag.
    """
    replaced = {*changes}
    for names in (_STOPS, _TOKENS, ("do_sample", "temperature")):
        if not replaced.isdisjoint(names):
            replaced |= {*names}
    return {**{k: v for k, v in options.items() if k not in replaced}, **changes}


def _single(options: Mapping[str, Any], names: tuple[str, ...]) -> Any:
    """Return the value of an option of text generation that the options give under any of `names`, all of
    which mean that option; None if they give none."""
    values = {name: options[name] for name in names if name in options}
    if any(value != next(iter(values.values())) for value in values.values()):
        given = ", ".join(f"{name}={value!r}" for name, value in values.items())
        raise ValueError(f"generation options: {given} are names of one option; give one of them")
    return next(iter(values.values()), None)


def parse_flag(text: str) -> dict[str, Any]:
    """Return the options of text generation in the flag `lm_eval.gen_kwargs`: a JSON object, or
    `name=value` separated by commas.

    A value is read as JSON if it is JSON, otherwise as text: `temperature=0.7,do_sample=true,until=END`.

    Raises:
        ValueError: the text is neither, or has an option that `parse_generation` refuses.
    """
    if text.lstrip().startswith("{"):
        try:
            options = json.loads(text, object_pairs_hook=unique_keys)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"lm_eval.gen_kwargs={text!r}: not JSON: {error}") from error
    else:
        options = {}
        for part in filter(None, text.split(",")):
            name, equals, value = part.partition("=")
            if not equals:
                raise ValueError(f"lm_eval.gen_kwargs={text!r}: accepted is name=value,... or JSON")
            if name.strip() in options:
                raise ValueError(f"lm_eval.gen_kwargs={text!r}: {name.strip()!r} occurs twice")
            options[name.strip()] = _value(value)
    try:
        parse_generation(options)
    except ValueError as error:
        raise ValueError(f"lm_eval.gen_kwargs={text!r}: {error}") from None
    return options


def _value(text: str) -> Any:
    try:
        return json.loads(text.lower() if text in ("True", "False") else text)
    except json.JSONDecodeError:
        return text
