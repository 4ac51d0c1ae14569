"""The DeepSpeed file: which keys there are, what they become, and what is said of those that are wrong."""

import json
import os
import re
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import ClassVar

import pytest
from harness import run_world
from hypothesis import given
from hypothesis import strategies as st

from megazero.config import ConfigError, RunConfig
from megazero.config.document import type_text
from megazero.deepspeed.config import NO_EFFECT, REFUSED, UNCHECKED, load_deepspeed_config
from megazero.deepspeed.config_schema import NamedBlock, honoured_keys

PAGE = Path(__file__).parent.parent / "docs" / "deepspeed_config.md"
HONOURED = honoured_keys()
KNOWN = [*HONOURED, *NO_EFFECT, *REFUSED]


def load(*, dp: int = 1, **config):
    if not {"train_batch_size", "train_micro_batch_size_per_gpu"} & set(config):
        config["train_micro_batch_size_per_gpu"] = 1
    return load_deepspeed_config(config, dp)


def problems(*, dp: int = 1, **config) -> list[str]:
    with pytest.raises(ConfigError) as raised:
        load(dp=dp, **config)
    return [str(problem) for problem in raised.value.problems]


def nested(path: str, value: object) -> dict:
    """{"a": {"b": value}} from "a.b"; a name of the user's own for *, one item for []."""
    first, _, rest = path.partition(".")
    inner = nested(rest, value) if rest else value
    return {first.replace("*", "mine").removesuffix("[]"): [inner] if first.endswith("[]") else inner}


def only(path: str, value: object) -> dict:
    """A configuration with one key, and the device that its block must name."""
    config = nested(path, value)
    if path.startswith("zero_optimization.offload_"):
        config["zero_optimization"][path.split(".")[1]].setdefault("device", "none")
    return config


# ---------------------------------------------------------------------------------------------------------------------
# Every key


def test_no_key_is_known_twice():
    assert len(set(KNOWN)) == len(KNOWN)
    for block in UNCHECKED:  # each has a key of its own that says what becomes of the others
        assert any(path.startswith(f"{block}.") for path in KNOWN)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        *((path, info.default) for path, info in HONOURED.items() if info.default is not None),
        *((path, value) for path, harmless in REFUSED.items() for value in harmless),
        *((path, {}) for path in REFUSED),
        *((path, None) for path in KNOWN if path not in HONOURED),
    ],
)
def test_a_key_takes_its_own_default_and_asks_for_nothing_refused(path, value):
    notes = load(**only(path, value)).notes
    # whose stage is 0 and whose device is none; and what is not enabled
    assert not notes or path.startswith(("zero_optimization", "fp16", "tensorboard"))


@pytest.mark.parametrize("path", list(REFUSED))
@pytest.mark.parametrize("asked", [True, False, 2])
def test_a_refused_key_is_an_error(path, asked):
    if not any(type(asked) is type(value) and asked == value for value in REFUSED[path]):
        (told,) = problems(**nested(path, asked))
        assert told.startswith(f"{path} = {json.dumps(asked)}: is not supported")


@pytest.mark.parametrize("path", list(NO_EFFECT))
@pytest.mark.parametrize("value", [True, False])
def test_a_key_without_effect_changes_nothing_but_the_notes(path, value):
    read, plain = load(**only(path, value)), load()
    if not path.endswith("enabled"):
        assert read.notes[0].endswith(f": {path}")
    assert (read.zero, read.precision, read.json.gradient_clipping) == (
        plain.zero,
        plain.precision,
        plain.json.gradient_clipping,
    )


@pytest.mark.parametrize("block", UNCHECKED)
def test_a_block_is_refused_by_its_name_alone(block):
    assert load(**{block: {"anything": {"of": ["DeepSpeed's"]}}}).notes == ()


def test_the_page_has_every_key_in_the_table_of_what_becomes_of_it():
    honoured, idle, refused = re.split(r"\n## No effect|\n## Refused", PAGE.read_text(encoding="utf-8"))
    for table, keys in ((honoured, HONOURED), (idle, NO_EFFECT), (refused, REFUSED)):
        assert sorted(re.findall(r"^\| `([^`]+)` \|", table, re.MULTILINE)) == sorted(keys)
    for path, info in HONOURED.items():
        assert f"\n| `{path}` | {type_text(info)}" in honoured, path


# ---------------------------------------------------------------------------------------------------------------------
# Batch sizes: train_batch_size = micro * accumulation * dp


@given(st.integers(1, 64), st.integers(1, 64), st.integers(1, 64), st.sets(st.integers(0, 2), max_size=2))
def test_any_two_of_a_triple_give_the_triple(micro, accumulation, dp, left_out):
    names = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    sizes = (micro * accumulation * dp, micro, accumulation)
    written = {name: size for i, (name, size) in enumerate(zip(names, sizes, strict=True)) if i not in left_out}
    if "train_batch_size" in written or "train_micro_batch_size_per_gpu" in written:
        read = load_deepspeed_config(written, dp)
        assert read.train_batch_size == read.micro_batch_size * read.accumulation * dp
        if len(left_out) < 2:
            assert (read.train_batch_size, read.micro_batch_size, read.accumulation) == sizes


# ---------------------------------------------------------------------------------------------------------------------
# What the settings become


def test_nothing_but_a_batch_size_gives_the_documented_defaults():
    read = load_deepspeed_config({"train_batch_size": 4}, 2)
    assert (read.zero.stage, read.precision.dtype, read.json.gradient_clipping, read.json.steps_per_print) == (
        0,
        "fp32",
        1.0,
        10,
    )
    assert read.json.optimizer == read.json.scheduler == NamedBlock()
    assert read.seed is read.casts_inputs is None
    assert read.notes == ()


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_the_zero_block_becomes_the_zero_section(stage):
    block = {
        "stage": stage,
        "reduce_bucket_size": 5e6,
        "stage3_param_persistence_threshold": 1000,
        "stage3_prefetch_bucket_size": 1e6,
        "mics_shard_size": 4,
        "zero_hpz_partition_size": 2,
        "zero_quantized_weights": True,
        "zero_quantized_gradients": True,
    }
    zero = load(dp=8, zero_optimization=block).zero
    assert (zero.stage, zero.reduce, zero.gather_policy, zero.bucket_bytes) == (
        stage,
        "micro_batch",
        "action",
        20_000_000,
    )
    assert zero.persistent_elements == (1000 if stage == 3 else 0)
    assert zero.shard_group_size == (4 if stage else 0)
    assert zero.secondary_shard_size == (2 if stage == 3 else 0)
    assert (zero.quantized_weights, zero.quantized_gradients) == (stage == 3, 4 if stage else 0)
    assert zero.prefetch_bytes == (4_000_000 if stage == 3 else RunConfig().zero.prefetch_bytes)


def test_what_is_offloaded_and_where():
    both = {
        "stage": 3,
        "offload_optimizer": {"device": "nvme", "nvme_path": "/disk", "ratio": 0.5, "pin_memory": False},
        "offload_param": {"device": "cpu"},
    }
    offload = load(zero_optimization=both).zero.offload
    assert (offload.optimizer, offload.parameters, offload.ratio) == ("nvme", "cpu", 0.5)
    assert (offload.nvme_path, offload.pin_memory) == ("/disk", False)
    legacy = load(zero_optimization={"stage": 2, "cpu_offload": True}).zero.offload
    assert (legacy.optimizer, legacy.parameters, legacy.pin_memory) == ("cpu", "none", True)
    for one in ({"cpu_offload": True}, {"cpu_offload_param": True}, both):
        keys = load(zero_optimization={"stage": 3} | one).json.zero_optimization
        assert (keys.offload_optimizer.if_on is None) == ("cpu_offload_param" in one), (
            "as engine.zero_offload_...() says"
        )
        assert (keys.offload_param.if_on is None) == ("cpu_offload" in one)
    for off in ({"device": "none"}, None, False):
        assert load(zero_optimization={"stage": 0, "offload_optimizer": off}).zero.offload.optimizer == "none"


def test_offload_that_cannot_be_is_refused():
    zero = "zero_optimization"
    (told,) = problems(zero_optimization={"stage": 2, "offload_param": {"device": "cpu"}})
    assert told.startswith(f'{zero}.offload_param.device = "cpu": must be "none" where {zero}.stage = 2')
    (told,) = problems(zero_optimization={"stage": 1, "offload_optimizer": {"device": "nvme"}})
    assert told.startswith(f"{zero}.offload_optimizer.nvme_path: must be given")
    (told,) = problems(zero_optimization={"stage": 1, "offload_optimizer": {"pin_memory": True}})
    assert told == f'{zero}.offload_optimizer.device: must be given; write "cpu", "nvme" or "none"'
    (told,) = problems(zero_optimization={"stage": 1, "cpu_offload": True, "offload_optimizer": {"device": "cpu"}})
    assert told.startswith(f"{zero}.cpu_offload = true: is another name of offload_optimizer")
    paths = {f"offload_{key}": {"device": "nvme", "nvme_path": f"/{key}"} for key in ("optimizer", "param")}
    assert "one directory" in problems(zero_optimization={"stage": 3, **paths})[0]
    (told,) = problems(dp=8, zero_optimization={"stage": 3, "zero_hpz_partition_size": 8})
    assert "zero_hpz_partition_size = 8: must divide the 8 ranks" in told
    (told,) = problems(dp=8, zero_optimization={"stage": 3, "mics_shard_size": 3})
    assert told.endswith("must divide dp=8; the nearest are 2 and 4")


def test_fp16_becomes_the_precision_section():
    fp16 = {"enabled": True, "loss_scale": 128, "initial_scale_power": 20, "hysteresis": 3, "auto_cast": True}
    read = load(fp16=fp16, communication_data_type="FP16", data_types={"grad_accum_dtype": "fp16"})
    precision = read.precision
    assert (precision.dtype, precision.reduce_dtype, precision.accumulate_dtype) == ("fp16", "fp16", "fp16")
    assert (precision.loss_scale, precision.initial_scale_power, precision.hysteresis) == (128.0, 20, 3)
    assert (precision.loss_scale_window, precision.consecutive_hysteresis, precision.min_loss_scale) == (
        1000,
        False,
        1.0,
    )
    assert read.casts_inputs is True
    assert load(fp16={"enabled": False, "hysteresis": 3}).precision.hysteresis == 2


@pytest.mark.parametrize("name", ["bf16", "bfloat16"])
def test_bf16_goes_by_two_names(name):
    precision = load(**{name: {"enabled": True}}).precision
    assert (precision.dtype, precision.reduce_dtype, precision.accumulate_dtype) == ("bf16", "fp32", "fp32")


@pytest.mark.parametrize(("written", "steps"), [(7, 7), (None, None), (float("inf"), None), (2**41, None)])
def test_reports_come_every_so_many_steps_or_never(written, steps):
    assert load(steps_per_print=written).json.steps_per_print == steps


# ---------------------------------------------------------------------------------------------------------------------
# What is wrong


@pytest.mark.parametrize(
    ("config", "told"),
    [
        ({"overlap_comm": True}, "overlap_comm = true: unknown key; did you mean zero_optimization.overlap_comm?"),
        ({"aio": {"zzz": 1}}, "aio.zzz = 1: unknown key; the keys of aio are block_size, queue_depth, thread_count, "),
        ({"train_batch_size": "8"}, 'train_batch_size = "8": must be an integer >= 1; write 8'),
        ({"train_batch_size": 1.5}, "train_batch_size = 1.5: must be an integer >= 1; write 1 or 2"),
        ({"dump_state": "False"}, 'dump_state = "False": must be true or false; write false'),
        ({"zero_optimization": {"stage": 4}}, "zero_optimization.stage = 4: must be 0 or 1 or 2 or 3; write 3"),
        ({"communication_data_type": "fp61"}, 'communication_data_type = "fp61": must be "fp32" or "fp16" or "bf16"; '),
    ],
)
def test_a_wrong_key_says_what_to_write(config, told):
    (found,) = problems(**config)
    assert found.startswith(told)


def test_auto_is_an_error_that_says_what_it_stands_for_where_a_key_has_an_effect():
    (told,) = problems(train_micro_batch_size_per_gpu="auto")
    assert "Hugging Face" in told
    assert "write the value itself: integer >= 1" in told
    (told,) = problems(optimizer={"type": "AdamW", "params": {"lr": "auto"}})
    assert told.startswith('optimizer.params.lr = "auto": is a placeholder')
    assert load(pipeline={"stages": "auto"}, expert_parallel={"top_k": "auto"}).notes[0].endswith(" pipeline.stages")


def test_a_file_is_json_with_each_key_once(tmp_path):
    path = tmp_path / "ds.json"
    path.write_text(json.dumps({"train_batch_size": 8, "steps_per_print": float("inf")}))
    assert load_deepspeed_config(path, 2).micro_batch_size == 4
    assert load_deepspeed_config(str(path), 2).json.steps_per_print is None
    for text, told in [
        ('{"train_batch_size": 8,\n "fp16": }', "is not JSON: Expecting value: line 2"),
        ('{"fp16": {}, "fp16": {}}', "fp16 is written twice"),
        ("[]", "must be a JSON object"),
        (f'{{"fp16": {"[" * 800 + "]" * 800}}}', "fp16"),  # to be shown, where it can be read
    ]:
        path.write_text(text)
        with pytest.raises(ConfigError, match=re.escape(told)):
            load_deepspeed_config(path, 2)
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        load_deepspeed_config(tmp_path / "none.json", 2)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4) | st.just("auto"),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=4), inner, max_size=2),
    max_leaves=4,
)


@given(st.sampled_from(KNOWN), JSON)
def test_any_value_of_any_key_is_read_or_is_a_config_error(path, value):
    for config in (nested(path, value), nested(path.rpartition(".")[0] or path, value)):
        with suppress(ConfigError):
            load_deepspeed_config({"train_batch_size": 4, **config}, 2)


# ---------------------------------------------------------------------------------------------------------------------
# Beside DeepSpeed's own classes


class _Recorder(dict):
    """A configuration that notes which keys are asked for."""

    seen: ClassVar[set[str]] = set()

    def __contains__(self, key: object) -> bool:
        self.seen.add(str(key))
        return super().__contains__(key)

    def get(self, key, default=None):
        return super().get(key, default) if key in self else default

    def keys(self):
        return self


def _keys_of_deepspeed(rank: int) -> tuple[set[str], dict[str, tuple[str | None, object]]]:
    """The top keys that DeepSpeed's reader asks for, and the fields of its ZeRO class: name -> (other name, default)."""
    os.environ["DS_ACCELERATOR"] = "cpu"
    import_module("deepspeed.runtime.config").DeepSpeedConfig(_Recorder(train_batch_size=1))
    fields = import_module("deepspeed.runtime.zero.config").DeepSpeedZeroConfig.model_fields
    blocks = ("offload_param", "offload_optimizer", "leaf_module", "zenflow")
    return _Recorder.seen, {name: (one.alias, one.default) for name, one in fields.items() if name not in blocks}


def test_every_key_that_deepspeed_reads_is_known_under_each_of_its_names():
    ((seen, fields),) = run_world(1, _keys_of_deepspeed)
    assert len(seen) > 50
    assert not {key for key in seen - {"bfloat16"} if not any(f"{known}.".startswith(f"{key}.") for known in KNOWN)}
    for name, (other, theirs) in fields.items():
        default = theirs if theirs is None or isinstance(theirs, bool) else int(theirs)  # of a subclass
        notes = load(zero_optimization={name: default}).notes
        if other:
            assert notes == load(zero_optimization={other: default}).notes
            assert "keep one of them" in problems(zero_optimization={name: default, other: default})[0]
