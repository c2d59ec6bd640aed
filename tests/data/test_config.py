import pytest
from absl import flags
from ml_collections import config_flags

from lsm_jax.data import DataConfig


def parse(*arguments):
    values = flags.FlagValues()
    config_flags.DEFINE_config_dataclass(
        "data", DataConfig(), flag_values=values, sys_argv=["x", *arguments]
    )
    values(["x", *arguments])
    return values.data


def test_every_field_can_be_overridden_and_is_checked():
    config = parse(
        "--data.bos_id=7",
        "--data.shuffle=False",
        "--data.path=/x",
        "--data.heldout_fraction=0.5",
        "--data.sequence_length=16",
    )
    assert config == DataConfig(
        bos_id=7, shuffle=False, path="/x", heldout_fraction=0.5, sequence_length=16
    )
    with pytest.raises(flags.IllegalFlagValueError):
        parse("--data.sequence_length=long")
    DataConfig().validate()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("sequence_length", 0),
        ("align_documents", 0),
        ("align_documents", 3),
        ("shuffle_blocks", 0),
        ("num_threads", -1),
        ("prefetch", -1),
        ("heldout_fraction", 1.0),
        ("packing", "best"),
        ("bos_id", -1),
        ("tokenizer", ""),
        ("text_key", ""),
    ],
)
def test_errors_name_the_field(field, value):
    with pytest.raises(ValueError, match=f"data.{field}"):
        DataConfig(**{field: value}).validate()
