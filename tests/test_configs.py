"""Tests of the variants of configs (configs/*.py): accepted values, and errors with the same wording in all
configs.
"""

from __future__ import annotations

import importlib

import pytest

from configs.variants import Option, parse_variant

# For each config an accepted head, an option, an accepted value, a wrong value, and the accepted values in words.
CONFIGS = {
    "lm": ("gla-tiny", "vocab_size", "300", "x", "a whole number from 1"),
    "fox": ("pro-760m", "tokens", "16b", "17b", "48b, 16b"),
    "mom": ("tiny", "shared", "0", "2", "0 and 1"),
    "linear_moe": ("tiny", "execution", "dense", "sparse", "grouped, dense"),
    "liger": ("smollm2-135m", "lr", "1e-3", "fast", "a number above 0"),
    "finetune": ("lora", "lr", "1e-3", "fast", "a number above 0"),
    "mqar": ("gla", "width", "32", "4", "a whole number from 8"),
    "tracking": ("deltanet", "task", "S3", "S4", "parity, S3, S5-swaps, S5, S5-mixed"),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_errors_have_the_same_wording_in_all_configs(name):
    config = importlib.import_module(f"configs.{name}")
    head, option, value, wrong, accepted = CONFIGS[name]
    config.get_config(f"{head},{option}={value}")
    for given, words in (
        ("colour=red", r"option 'colour'; accepted (is|are) "),
        (option, f"option {option!r} has no value; accepted is {option}=VALUE"),
        (f"{option}={value},{option}={value}", f"option {option} is given twice"),
        (f"{option}={wrong}", f"{option}='{wrong}'; accepted (is|are) {accepted}"),
    ):
        with pytest.raises(ValueError, match=f"^variant '{head},{given}': {words}"):
            config.get_config(f"{head},{given}")


@pytest.mark.parametrize(
    ("option", "values", "wrong"),
    [
        (Option(), {"a": "a", "": "", "a=b": "a=b"}, ()),
        (Option(choices=("a", "b")), {"b": "b"}, ("", "c")),
        (Option(kind=int), {"0": 0, "12": 12}, ("", "-1", "1.5", "x")),
        (Option(kind=float), {"0": 0.0, "2e-3": 0.002}, ("", "-1", "nan", "inf")),
        (Option(kind=float, positive=True), {"0.5": 0.5}, ("0", "0.0")),
        (Option(kind=bool), {"0": False, "1": True}, ("", "2", "True")),
    ],
)
def test_values_of_each_kind_of_option(option, values, wrong):
    for text, value in values.items():
        head, given = parse_variant(f"head,name={text}", dict(name=option))
        assert (head, given) == ("head", dict(name=value))
    for text in wrong:
        with pytest.raises(ValueError, match=f"name='{text}'; accepted "):
            parse_variant(f"head,name={text}", dict(name=option))
