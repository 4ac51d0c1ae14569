"""The run file: what it accepts, what it derives, and what it says when it is wrong."""

import re
import subprocess
import sys
import tomllib
from dataclasses import FrozenInstanceError
from operator import attrgetter
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from key_page import to_markdown
from pydantic import ValidationError

from megazero.config import ConfigError, RunConfig, load_config, resolve, save_config, to_toml
from megazero.config.derive import cache_directory, complete_batch
from megazero.config.document import reference
from megazero.config.schema import DataConfig, DataSource, keys, sections
from megazero.models.config import RopeScaling
from megazero.models.registry import FAMILIES
from megazero.models.stages import head_cost_in_layers
from megazero.optim.config import LrScheduleConfig
from megazero.optim.registry import BUILT_IN_KEYS, LR_SCHEDULE_KEYS, LR_SCHEDULES, OPTIMIZERS
from megazero.registry import keywords_of
from megazero.schedules.registry import SCHEDULES
from megazero.settings import ActsWhere, Problem


@pytest.fixture
def write(tmp_path):
    def write_file(text: str) -> Path:
        path = tmp_path / "run.toml"
        path.write_text(text, encoding="utf-8")
        return path

    return write_file


def problems(path: Path, *overrides: str, world_size: int | None = None) -> list[str]:
    with pytest.raises(ConfigError) as raised:
        load_config(path, overrides, world_size)
    return [str(problem) for problem in raised.value.problems]


# What a file gives


@pytest.mark.parametrize("family", ["llama", "gpt2"])
@pytest.mark.parametrize("tp", [1, 2, 4, 8, 16])
def test_an_empty_file_is_a_run_at_every_degree(family, tp):
    for pp in range(1, 25):
        for dp in (1, 3):
            parallel = {"tp": tp, "pp": pp, "sequence_parallel": True}
            config = RunConfig.model_validate({"model": {"family": family}, "parallel": parallel})
            run = resolve(config, tp * pp * dp)
            assert (run.dp, run.micro_batch_size, run.accumulation) == (dp, 1, pp)
            assert run.global_batch_size == dp * pp


def test_the_world_is_what_the_command_starts_unless_told(write):
    path = write("[launch]\nnproc_per_node = 4\n[parallel]\ntp = 2")
    assert load_config(path, [], None).dp == 2
    assert load_config(path, [], 16).dp == 8
    assert load_config(path, ["launch.nproc_per_node=6"]).world_size == 6
    assert load_config(path, [], 4).notices == load_config(path).notices == ()
    (told,) = load_config(path, [], 16).notices
    assert told == "launch.nproc_per_node = 4 has no effect where a launcher has started 16 ranks"


@pytest.mark.parametrize(
    ("family", "hidden", "ffn", "ties"),
    # 8/3 * 768 = 2048 is a multiple of 256 already; 8/3 * 1024 = 2730.7 -> 11*256; Llama 7B: 4096 -> 11008 = 43*256.
    [
        ("llama", 768, 2048, False),
        ("llama", 1024, 2816, False),
        ("llama", 4096, 11008, False),
        ("gpt2", 768, 3072, True),
    ],
)
def test_open_model_sizes_come_from_the_family(family, hidden, ffn, ties):
    config = RunConfig.model_validate({"model": {"family": family, "hidden_size": hidden}})
    model = resolve(config, 1).config.model
    assert (model.ffn_hidden_size, model.tie_embeddings, model.num_kv_heads) == (ffn, ties, 16)


def test_heads_of_a_free_size_count_in_products_and_need_not_split_the_hidden_size():
    """16 heads of 80 at a hidden size of 1000, 4 of them for keys and values: q and out 1280 x 1000, k and v 320 x 1000."""
    written = {
        "family": "mistral",
        "num_heads": 16,
        "num_kv_heads": 4,
        "head_dim": 80,
        "hidden_size": 1000,
        "ffn_hidden_size": 8,
        "seq_len": 6,
    }
    model = resolve(RunConfig.model_validate({"model": written | {"num_layers": 2, "vocab_size": 7}}), 1).config.model
    family, layer = FAMILIES[model.family], 2 * 1280 * 1000 + 2 * 320 * 1000 + 3 * 8 * 1000
    assert family.layer_weights(model) == layer
    assert family.flops_per_token(model) == 6 * (2 * layer + 7 * 1000) + 6 * 2 * 6 * 1280
    assert head_cost_in_layers(model) == 7 * 1000 / (layer + 6 * 1280)
    same = {"hidden_size": 1024, "num_heads": 16, "head_dim": 64}
    assert resolve(RunConfig.model_validate({"model": same}), 1).config.model.head_dim is None, "the size it has anyway"


SCALINGS = """
{ type = "dynamic", factor = 2.0 } -> model.rope_scaling.type = "dynamic": must be "linear", "yarn" or "llama3"
{ type = "linear", factor = 2.0, beta_fast = 3.0 } -> must not have beta_fast, which type = "linear" does not
{ type = "yarn", factor = 2.0, beta_fats = 3.0 } -> beta_fats = 3.0: unknown key; did you mean beta_fast?
{ type = "llama3", factor = 2.0, original_seq_len = 8, low_freq_factor = 4.0 } -> must have low_freq_factor < high
8.0 -> model.rope_scaling = 8.0: must be a table
"""


@pytest.mark.parametrize(("scaling", "told"), [line.split(" -> ") for line in SCALINGS.strip().splitlines()])
def test_a_wrong_rope_scaling_is_told_in_its_words(write, scaling, told):
    (problem,) = problems(write(f"[model]\nrope_scaling = {scaling}"))
    assert told in problem


def test_a_rope_scaling_is_written_and_read_again(write):
    text = '[model]\nrope_scaling = { type = "yarn", factor = 4.0, original_seq_len = 4096 }'
    run = load_config(write(text), ["model.rope_scaling.beta_fast=24.0"])
    assert run.config.model.rope_scaling == RopeScaling(type="yarn", factor=4.0, original_seq_len=4096, beta_fast=24.0)
    assert load_config(write(to_toml(run))) == run


@pytest.mark.parametrize(
    ("written", "dp", "pp", "expected"),
    [
        (("auto", "auto", "auto"), 3, 4, (12, 1, 4)),
        ((64, "auto", "auto"), 2, 4, (64, 8, 4)),
        ((60, "auto", "auto"), 2, 4, (60, 6, 5)),  # 30 per replica: the least divisor that is >= 4 is 5
        ((6, "auto", "auto"), 2, 4, (6, 1, 3)),  # 3 per replica cannot fill 4 stages
        (("auto", 4, "auto"), 2, 3, (24, 4, 3)),
        (("auto", "auto", 5), 2, 3, (10, 1, 5)),
        (("auto", 4, 5), 2, 1, (40, 4, 5)),
        ((40, 4, 5), 2, 1, (40, 4, 5)),
    ],
)
def test_batch_sizes_complete_each_other(written, dp, pp, expected):
    batch = complete_batch(*written, dp=dp, pp=pp)
    assert (batch.global_batch_size, batch.micro_batch_size, batch.accumulation) == expected


def test_overrides_are_toml_values_and_bare_words_are_strings(write):
    path = write("[training]\nsteps = 5\nrun_dir = 'a'\n[optimizer]\nlr = 1\n")
    overrides = ["training.steps=7", "training.steps = 0x10", "training.run_dir=2024-05-01", "model.family=gpt2"]
    overrides += ["optimizer.betas=[0.8, 0.9]", "logging.tensorboard=false", 'data.tokenizer="x=y.json"']
    config = load_config(path, overrides).config
    assert (config.training.steps, config.training.run_dir, config.model.family) == (16, "2024-05-01", "gpt2")
    assert (config.optimizer.betas, config.optimizer.lr) == ((0.8, 0.9), 1.0)
    assert (config.logging.tensorboard, config.data.tokenizer) == (False, "x=y.json")


@pytest.mark.parametrize(
    "text", ["[zero.offload]\noptimizer = 'nvme'", "[zero]\noffload.optimizer = 'nvme'", "zero = { offload = {} }", ""]
)
def test_a_section_within_a_section_takes_keys_from_file_and_overrides(write, text):
    overrides = ["zero.offload.optimizer=cpu", "zero.offload.ratio=0.5", "zero.stage=2"]
    zero = load_config(write(text), overrides).config.zero
    assert (zero.stage, zero.offload.optimizer, zero.offload.ratio) == (2, "cpu", 0.5)


def test_sources_are_strings_or_weighted_tables(write):
    path = write('[data]\nsources = ["python-stdlib", { path = "/books", weight = 3 }]')
    books = DataSource(path="/books", weight=3.0)
    assert load_config(path).config.data.sources == (DataSource(path="python-stdlib"), books)


def test_a_config_cannot_change():
    run = resolve(RunConfig(), 1)
    with pytest.raises(FrozenInstanceError):
        run.dp = 2
    with pytest.raises(ValidationError, match="frozen"):
        run.config.model.hidden_size = 2
    assert hash(run) == hash(resolve(RunConfig(), 1))


def test_the_cache_is_found_when_asked_for():
    assert cache_directory(DataConfig(cache_dir="/x"), {"XDG_CACHE_HOME": "/y"}) == Path("/x")
    assert cache_directory(DataConfig(), {"XDG_CACHE_HOME": "/y"}) == Path("/y/megazero")
    assert cache_directory(DataConfig(), {}) == Path.home() / ".cache" / "megazero"


# What a wrong file is told


def test_five_mistakes_give_five_messages_with_place_value_and_fix(write):
    path = write("""
        [model]
        num_head = 8
        hidden_size = 1000
        lr = 3e-4
        [training]
        steps = "8"
        global_batch_size = 30
        micro_batch_size = 4
        [parallel]
        schedule = "1f2b"
    """)
    told = problems(path, world_size=2)
    # hidden_size is not judged: num_heads, which it must be divisible by, is what num_head probably meant
    assert told == [
        "model.num_head = 8: unknown key; did you mean model.num_heads?",
        "model.lr = 0.0003: unknown key in [model]; did you mean optimizer.lr?",
        'parallel.schedule = "1f2b": must be "gpipe", "1f1b", "interleaved", "zb-h1", "zbv" or "dualpipev"; write "1f1b"',
        'training.steps = "8": must be an integer; write 8',
        "training.global_batch_size = 30: must be divisible by micro_batch_size*dp=8; the nearest are 24 and 32",
    ]
    assert "model.hidden_size = 1000: must be divisible by 2*num_heads=32" in problems(path, "model.num_heads=16")[-2]


def test_the_message_is_a_numbered_list(write):
    path = write("[zero]\nstage = 5\nbucket_bytes = 3")
    with pytest.raises(ConfigError) as raised:
        load_config(path)
    assert str(raised.value) == (
        f"2 problems in {path}:\n"
        "  1. zero.stage = 5: must be 0, 1, 2 or 3; write 3\n"
        '  2. zero.bucket_bytes = 3: must be >= 1024 or "auto"; write 1024'
    )


# Overrides, and the key and the beginning of what is told about it.
UNKNOWN = """
model.zq=8 -> model.zq: unknown key; the keys of [model] are preset, family, hidden_size, num_layers, num_heads,
model.lr=3 -> model.lr: unknown key in [model]; did you mean optimizer.lr?
training.zero_stage=3 -> training.zero_stage: unknown key in [training]; did you mean zero.stage?
modle.num_heads=3 -> modle.num_heads: unknown section [modle]; did you mean model.num_heads?
batch.steps=3 -> batch.steps: unknown section [batch]; did you mean training.steps?
tp=3 -> tp: a key outside any section; did you mean parallel.tp?
zero.offload.xyz=3 -> zero.offload.xyz: unknown key; the keys of [zero.offload] are optimizer, parameters, ratio, nvme_pat
zero.optimizer=cpu -> zero.optimizer: unknown key in [zero]; did you mean zero.offload.optimizer?
parallel.nccl_max_ctas.zq=4 -> parallel.nccl_max_ctas.zq: unknown key; the keys of [parallel.nccl_max_ctas]
zero.ofload.pin_memry=true -> zero.ofload.pin_memry: unknown section [zero.ofload]; did you mean zero.offload.pin_memory?
zero.ofload={} -> zero.ofload: unknown section; did you mean [zero.offload]?
zero.offload.disk.ratio=1 -> zero.offload.disk.ratio: unknown section [zero.offload.disk]; did you mean zero.offload.ratio
data.sources=[{pth='a', path='b'}] -> data.sources[0].pth: unknown key; did you mean path?
optimizer.learning_rate=1 -> optimizer.learning_rate: unknown key; did you mean optimizer.lr?
parallel.pipeline_parallel_size=2 -> parallel.pipeline_parallel_size: unknown key; did you mean parallel.pp?
"""
WRONG = """
training.steps='8' -> training.steps: must be an integer; write 8
model.num_heads=9999999999999999 -> model.num_heads: must be <= 1099511627776; write 1099511627776
optimizer.lr=1e38 -> optimizer.lr: must be <= 1e+30; write 1e+30
model.rope_scaling={} -> model.rope_scaling: must have a type and have a factor
training.run_dir=3 -> training.run_dir: must be a string; write "3"
training.run_dir= -> training.run_dir: must not be empty; the default is "runs/default"
training.accumulation=0 -> training.accumulation: must be >= 1 or "auto"; write 1
training.accumulation=Auto -> training.accumulation: must be an integer or "auto"; write "auto"
zero.stage=true -> zero.stage: must be an integer; the default is 1
model.family=lama -> model.family: must be "llama", "gpt2", "qwen2", "qwen3", "olmo2", "mistral", "mixtral",
model.dropout=1 -> model.dropout: must be < 1; the default is 0.0
optimizer.lr=nan -> optimizer.lr: must be a finite number; the default is 0.0003
optimizer.betas=[0.9] -> optimizer.betas: must have 2 values; the default is [0.9, 0.95]
optimizer.betas=[0.9, 2] -> optimizer.betas[1]: must be < 1
logging.tensorboard=yes -> logging.tensorboard: must be true or false; the default is true
data.sources=abc -> data.sources: must be a list; write ["abc"]
data.sources=[] -> data.sources: must not be empty; the default is ["python-stdlib"]
data.sources=[{path='a', weight=0}] -> data.sources[0].weight: must be > 0
data.sources=[{weight=1}] -> data.sources[0]: must have a path
activations.recompute=selectiv -> activations.recompute: must be "none", "selective", "full" or a list of norms, activatio
activations.offload=cpu -> activations.offload: must be "none" or "host"; write "host"
activations.layers=-1 -> activations.layers: must be "all", a number of layers from 0 or a list of layers such as [0, 1, 5
activations.recompute=['norm'] -> activations.recompute: must list regions of a layer, which are norms, activation, residu
activations.recompute=['mlp', 'mlp'] -> activations.recompute: must name each region once; write ["mlp"]
activations.stages=[{stage=0, contiguous=true}] -> activations.stages[0].contiguous: unknown key; it is a key of [activati
launch.device=gpu -> launch.device: must be "auto", "cpu" or "cuda"; write "cuda"
precision.dtype=float32 -> precision.dtype: must be "fp32", "bf16" or "fp16"; write "fp32"
data.sources=[3] -> data.sources[0]: must be a string or a table { path, weight }
"""


def _told(table: str) -> list[tuple[str, str, str]]:
    rows = [line.split(" -> ") for line in table.splitlines() if line]
    return [(left, *told.split(": ", 1)) for left, told in rows]


@pytest.mark.parametrize(("override", "key", "rule"), _told(UNKNOWN + WRONG))
def test_a_wrong_key_or_value_is_told_what_to_write(write, override, key, rule):
    (problem,) = problems(write(""), override)
    assert problem.startswith(key)
    assert f": {rule}" in problem


@pytest.mark.parametrize("text", ["9" * 5000, "[" * 5000], ids=["digits", "brackets"])
def test_a_text_of_thousands_of_letters_is_cut(write, text):
    told = f'training.steps = "{text[:79]}…: must be an integer; the default is 1000'
    assert problems(write(""), f"training.steps={text}") == [told]


@pytest.mark.parametrize("order", ["tp-dp-pp", "tp-tp-dp-pp", "tp_cp_dp_pp", "dp"])
def test_the_order_names_every_axis_once(write, order):
    assert "must be tp, cp, dp and pp, each once and joined by -" in problems(write(""), f"parallel.order={order}")[0]
    assert load_config(write(""), ["parallel.order=pp-dp-cp-tp"]).config.parallel.order == "pp-dp-cp-tp"


# After the number of ranks, or - for what the file says.
BROKEN = """
1 model.hidden_size=1000 -> model.hidden_size: must be divisible by 2*num_heads=32
1 model.head_dim=63 -> model.head_dim: must be even: rotary positions turn pairs; the nearest are 62 and
1 model.family=gpt2 model.hidden_size=1000 -> model.hidden_size: must be divisible by num_heads=16
3 parallel.tp=3 model.ffn_hidden_size=3 -> model.num_heads: must be divisible by parallel.tp=3
1 model.num_kv_heads=5 -> model.num_kv_heads: must divide num_heads=16; the nearest are 4 and 8
1 model.family=olmoe model.num_experts=4 model.experts_per_token=5 -> model.experts_per_token: must be at most num_experts=4
1 model.family=mixtral model.renormalize_gates=false -> model.renormalize_gates: must be true for mixtral, which
4 model.num_kv_heads=1 model.head_dim=6 parallel.tp=4 -> model.num_kv_heads: must divide num_heads=16 and be a multiple of
1 model.family=gpt2 model.num_kv_heads=4 -> model.num_kv_heads: must be num_heads=16: gpt2 has no
1 model.family=gpt2 model.tie_embeddings=false -> model.tie_embeddings: must be true for gpt2
2 model.ffn_hidden_size=1001 parallel.tp=2 -> model.ffn_hidden_size: must be divisible by parallel.tp=2
2 model.seq_len=1001 parallel.tp=2 parallel.sequence_parallel=true -> model.seq_len: must be divisible by parallel.tp=2 (s
4 model.num_layers=2 parallel.pp=4 -> model.num_layers: must be >= parallel.pp=4
1 parallel.schedule=interleaved -> parallel.virtual_stages: interleaved needs at least 2 chunks per rank
2 parallel.schedule=interleaved parallel.virtual_stages=2 parallel.pp=2 training.accumulation=3 -> training: interleaved
2 parallel.schedule=zbv parallel.pp=2 model.num_layers=3 -> model.num_layers: must be >= parallel.pp*chunks=2*2=4
1 parallel.virtual_stages=2 -> parallel.virtual_stages: the schedule 1f1b has one chunk per rank
1 checkpoint.directory=s4://bucket/run -> checkpoint.directory: must be the URL of a file system that fsspec knows and who
1 activations.recompute=full activations.layers=[0,24] -> activations.layers: must name layers below model.num_layers=24,
1 activations.offload=host activations.offload_layers=25 -> activations.offload_layers: must be <= model.num_layers=24; wr
1 activations.stages=[{stage=1,recompute='full'}] -> activations.stages[0].stage: must be below parallel.pp=1, a rank of t
1 activations.recompute=['residual'] activations.partition=true -> activations.partition: must be false where residual is
1 activations.stages=[{stage=0,layers=1},{stage=0,layers=2}] activations.recompute=full -> activations.stages[1].stage: mu
1 elastic.enabled=true -> training.global_batch_size: must be a number where elastic.enabled = true: it stays while dp
1 elastic.enabled=true training.global_batch_size=8 checkpoint.resume=never -> checkpoint.resume: must not be never where
1 training.batch_ramp={start=4,increment=5,samples=9} training.global_batch_size=32 -> training.batch_ramp.increment: must
12 zero.shard_group_size=5 -> zero.shard_group_size: must divide dp=12; the nearest are 4 and 6
12 zero.stage=3 zero.secondary_shard_size=12 -> zero.secondary_shard_size: must divide the 12 ranks that share the state i
2 zero.shard_group_size=2 zero.stage=0 -> zero.shard_group_size: must be 0 where zero.stage = 0: it has no effect where no
1 zero.persistent_elements=9 zero.stage=2 -> zero.persistent_elements: must be 0 where zero.stage = 2: only stage 3 gather
1 zero.offload.parameters=cpu -> zero.offload.parameters: must be "none" where zero.stage = 1: only stage 3 shards paramet
1 zero.offload.ratio=0.5 -> zero.offload.ratio: must be 1.0 where zero.offload.optimizer = "none": no state is offloaded
1 zero.offload.optimizer=nvme -> zero.offload.nvme_path: must be set where zero.offload.optimizer = "nvme"; name a directo
1 zero.offload.parameters=nvme zero.stage=3 -> zero.offload.nvme_path: must be set where zero.offload.parameters = "nvme";
1 precision.dtype=fp32 precision.accumulate_dtype=bf16 -> precision.accumulate_dtype: must be "fp32" where precision.dtype
1 precision.dtype=fp32 precision.reduce_dtype=fp16 -> precision.reduce_dtype: must be "fp32" where precision.dtype = "fp32
1 precision.loss_scale=128 -> precision.loss_scale: must be 0.0 where precision.dtype = "bf16": only fp16 scales the loss;
1 training.logits_chunk_bytes=1 model.vocab_size=1000 model.seq_len=4096 -> training.logits_chunk_bytes: must be >= 256000:
2 training.logits_chunk_bytes=63999 model.vocab_size=1000 parallel.tp=2 -> training.logits_chunk_bytes: must be >= 64000:
1 precision.dtype=fp16 precision.min_loss_scale=9 precision.initial_scale_power=3 -> precision.min_loss_scale: must be <=
1 optimizer.momentum=0.9 -> optimizer.momentum: must be 0.0 where optimizer.name = "adamw": it does not read this key; lea
8 parallel.tp=2 parallel.pp=3 -> world_size: must be divisible by tp*pp=6; the nearest are 6 and 12
- parallel.tp=4 -> launch.nproc_per_node: must be divisible by tp*pp=4; the nearest is 4; on several machines start torchru
- parallel.tp=8 parallel.pp=4 -> launch.nproc_per_node: must be divisible by tp*pp=32; the nearest is 32; on several machine
- parallel.tp=2 parallel.dp=32 -> parallel.dp: tp*pp*dp=2*1*32=64 must be the world size, 1; start 64 ranks; on several ma
8 parallel.tp=2 parallel.dp=3 -> parallel.dp: tp*pp*dp=2*1*3=6 must be the world size, 8; write 4 or "auto"
7 parallel.tp=2 parallel.dp=3 -> parallel.dp: tp*pp*dp=2*1*3=6 must be the world size, 7; start 6 ranks
4 training.global_batch_size=30 -> training.global_batch_size: must be divisible by dp=4; the nearest are 28 and 32
2 training.global_batch_size=30 training.accumulation=4 -> training.global_batch_size: must be divisible by accumulation*d
2 training.global_batch_size=30 training.accumulation=4 training.micro_batch_size=2 -> training.global_batch_size: must be
"""


@pytest.mark.parametrize(("run", "key", "rule"), _told(BROKEN))
def test_keys_that_do_not_fit_each_other_are_told_with_their_numbers(write, run, key, rule):
    ranks, *overrides = run.split()
    (problem,) = problems(write(""), *overrides, world_size=None if ranks == "-" else int(ranks))
    assert problem.startswith(key)
    assert f": {rule}" in problem


@pytest.mark.parametrize(
    ("overrides", "world_size"),
    [
        ("zero.shard_group_size=4", 12),
        ("zero.stage=3 zero.shard_group_size=4 zero.secondary_shard_size=2 zero.prefetch_bytes=0", 12),
        ("zero.stage=3 zero.quantized_weights=true zero.quantized_gradients=4 precision.dtype=fp16", 2),
        ("zero.shard_group_size=2 zero.stage=3 zero.persistent_elements=9 zero.offload.parameters=cpu", 2),
        ("zero.offload.optimizer=nvme zero.offload.nvme_path=/x zero.offload.ratio=0.5", 1),
        ("precision.accumulate_dtype=bf16 precision.reduce_dtype=fp16", 1),
        ("precision.dtype=fp16 precision.loss_scale=128", 1),
        ("activations.recompute=[]", 1),
        ("activations.recompute=['block','mlp'] activations.keep_attention=true activations.layers=[0,23]", 1),
        ("activations.stages=[{stage=0,offload='host'}] activations.offload_layers=2", 1),
        ("precision.dtype=fp16 precision.min_loss_scale=65536", 1),
        ("optimizer.name=sgd optimizer.momentum=0.9", 1),
    ],
)
def test_keys_that_fit_each_other_make_a_run(write, overrides, world_size):
    load_config(write(""), overrides.split(), world_size)


# Keys without effect

# A value other than the default, and what makes it idle.  By hand: the declarations in the schema are what is tested.
REFUSED = """
average.decay=0.5              average.kind=saves checkpoint.save_every_steps=5
average.last=2                 average.kind=ema
logging.memory_snapshot=2      launch.device=cpu
lr_schedule.decay_fraction=0.5 lr_schedule.name=cosine
lr_schedule.decay_shape=cosine lr_schedule.name=cosine
lr_schedule.end_step=9         lr_schedule.name=constant
lr_schedule.min_lr_ratio=0.5   lr_schedule.name=constant
optimizer.betas=[0.8,0.9]      optimizer.name=sgd
optimizer.eps=1e-5             optimizer.name=lion
optimizer.momentum=0.9         optimizer.name=adagrad
optimizer.matrix_momentum=0.9   optimizer.name=lion
optimizer.adamw_lr=0.001        optimizer.name=lion
optimizer.qk_clip=100          optimizer.name=adamw
precision.initial_scale_power=9  precision.dtype=bf16
precision.loss_scale_window=7  precision.dtype=fp32
precision.hysteresis=4         precision.dtype=bf16
precision.consecutive_hysteresis=true precision.dtype=bf16
precision.min_loss_scale=2     precision.dtype=bf16
precision.loss_scale_window=8  precision.dtype=fp16 precision.loss_scale=8
precision.loss_scale=8         precision.dtype=bf16
precision.accumulate_dtype=bf16 precision.dtype=fp32
precision.reduce_dtype=bf16    precision.dtype=fp32
precision.fp8=rowwise          precision.dtype=fp16
model.mup_base_width=64        optimizer.name=muon
model.mup_base_head_dim=16     model.family=gpt2 model.mup_base_width=64
model.rope_theta=5e5           model.family=gpt2
model.head_dim=96              model.family=gpt2
model.sliding_window=96        model.family=qwen2
model.num_experts=4            model.family=mistral
model.full_attention_every=2   model.family=mistral
model.rope_local_theta=2e4     model.family=llama
model.no_rope_every=4          model.family=llama
model.attention_bias=true      model.family=qwen2
model.mlp_bias=true            model.family=glm4
model.embedding_multiplier=12.0 model.family=llama
model.residual_multiplier=0.2  model.family=llama
model.attention_multiplier=0.1 model.family=llama
model.logits_scaling=8.0       model.family=llama
model.experts_per_token=4      model.family=mistral
model.expert_hidden_size=4     model.family=mixtral
model.renormalize_gates=true   model.family=qwen3
model.router_aux_coef=0.01     model.family=qwen3
model.router_z_coef=0.001      model.family=qwen3
model.rope_scaling={type="linear",factor=2.0} model.family=gpt2
zero.gather_policy=step        zero.stage=1
zero.reduce=step               zero.stage=0
zero.shard_group_size=1        zero.stage=0
zero.persistent_elements=9     zero.stage=2
zero.prefetch_bytes=9          zero.stage=2
zero.secondary_shard_size=2    zero.stage=2
zero.secondary_shard_size=2    zero.stage=3 zero.gather_policy=step
zero.quantized_weights=true    zero.stage=2
zero.quantized_gradients=4     zero.stage=0
precision.reduce_dtype=bf16    zero.quantized_gradients=8
zero.offload.parameters=cpu    zero.stage=2
zero.offload.ratio=0.5         zero.offload.optimizer=none
zero.offload.pin_memory=false  zero.offload.optimizer=none
parallel.schedule=gpipe        parallel.schedule_file=x.csv
parallel.virtual_stages=2      parallel.schedule_file=x.csv
training.batch_ramp={start=2,increment=2,samples=9} parallel.schedule_file=x.csv
parallel.schedule_file=x.csv   elastic.enabled=true training.global_batch_size=8
training.non_finite_limit=9    training.on_non_finite=stop
training.accumulation=1        elastic.enabled=true training.global_batch_size=8
elastic.shapes=[{world_size=8}] elastic.enabled=false
parallel.tp_overlap=pieces     precision.fp8=rowwise parallel.sequence_parallel=true
"""
TOLD = """
zero.offload.optimizer=cpu      zero.offload.ratio=0
parallel.order=pp-dp-cp-tp
precision.fp8_layers=all       precision.fp8=none
parallel.sequence_parallel=true parallel.tp=1
parallel.tp_overlap=pieces     parallel.sequence_parallel=false
parallel.cp_method=ring        parallel.cp=1
parallel.cp_ulysses=2          parallel.cp_method=hybrid
parallel.layout=cost           parallel.pp=1
parallel.schedule_placement=v
zero.quantized_weights=true    zero.stage=3
zero.quantized_gradients=8
zero.offload.nvme_path=/x      zero.offload.optimizer=cpu
training.eval_samples=3        training.eval_every_steps=0
checkpoint.host_memory_bytes=5 checkpoint.asynchronous=false
checkpoint.keep_every_steps=7  checkpoint.keep_last=0
checkpoint.keep_best=7         checkpoint.keep_last=0
checkpoint.keep_best=7         checkpoint.keep_last=1 training.eval_every_steps=0
training.eval_every_steps=5    data.validation_fraction=0
activations.partition=true     activations.recompute=full
activations.keep_attention=true activations.recompute=["mlp"]
activations.layers=3
activations.offload_layers=3
activations.contiguous=true    activations.offload=host
logging.straggler_every_steps=5
logging.straggler_ratio=2.0    logging.straggler_every_steps=0
logging.project=mine
logging.sample_every_steps=2
logging.sample_tokens=2
evaluation.every_steps=2
evaluation.include_path=/x
evaluation.limit=2
"""
# Those that are too large for training.steps.
EXCEEDING = """
lr_schedule.warmup_steps=2000  training.steps=10
logging.pipeline_trace_step=20 training.steps=10
logging.memory_snapshot=20     training.steps=10
"""


def _lines(table: str) -> list[list[str]]:
    return [line.split() for line in table.splitlines() if line]


@pytest.mark.parametrize("overrides", _lines(REFUSED), ids=" ".join)
def test_a_key_that_another_choice_does_not_read_is_refused(write, overrides):
    key = overrides[0].split("=")[0]
    told = problems(write(""), *overrides, world_size=1)
    idle = [problem for problem in told if problem.startswith(f"{key} = ") and " where " in problem]
    assert len(idle) == 1, told
    assert any(override.split("=")[0] in idle[0] for override in overrides[1:])


@pytest.mark.parametrize("overrides", _lines(TOLD + EXCEEDING), ids=" ".join)
def test_a_key_that_a_number_or_a_switch_makes_idle_is_told(write, overrides):
    key = overrides[0].split("=")[0]
    told = [notice for notice in load_config(write(""), overrides, 1).notices if notice.startswith(f"{key} = ")]
    assert told
    assert all("has no effect where" in notice or "exceeds" in notice for notice in told)


FAMILY_KEYS = {
    "rope_theta": "5e5",
    "rope_scaling": '{ type = "linear", factor = 2.0 }',
    "head_dim": "96",
    "sliding_window": "96",
    "full_attention_every": "2\nsliding_window = 96",
    "rope_local_theta": "3e4",
    "no_rope_every": "4",
    "attention_bias": "true",
    "mlp_bias": "true",
    "embedding_multiplier": "12.0",
    "residual_multiplier": "0.2",
    "attention_multiplier": "0.01",
    "logits_scaling": "8.0",
    "num_experts": "6",
    "experts_per_token": "2",
    "expert_hidden_size": "96",
    "renormalize_gates": "true",
    "router_aux_coef": "0.01",
    "router_z_coef": "0.001",
}


def test_a_key_of_another_family_is_refused_and_the_resolved_run_loads_again(write, tmp_path):
    """Otherwise another model than the file asks for would be trained."""
    assert set(FAMILY_KEYS) == {key for name in FAMILIES for key in FAMILIES[name].reads}
    for key, value in FAMILY_KEYS.items():
        readers = {name for name in FAMILIES if key in FAMILIES[name].reads}
        for name in FAMILIES:
            file = write(f"[model]\nfamily = '{name}'\n{key} = {value}")
            if name in readers:
                run = load_config(file, (), 1)
                assert getattr(run.config.model, key)
                save_config(run.config, tmp_path / "written.toml")
                assert load_config(tmp_path / "written.toml", (), 1).config == run.config
            else:
                (told,) = [problem for problem in problems(file, world_size=1) if problem.startswith(f"model.{key} =")]
                assert f'where model.family = "{name}"' in told
                assert "leave it out" in told
                assert all(f'"{reader}"' in told for reader in readers)


def test_every_declaration_is_in_one_of_the_two_tables():
    declared = {
        f"{section}.{key}"
        for section, fields in keys().items()
        for key, field in fields.items()
        if any(isinstance(one, ActsWhere) for one in field.metadata)
    }
    assert declared == {overrides[0].split("=")[0] for overrides in _lines(REFUSED + TOLD)}


# Keys beside choices that read them.
TAKEN = """
lr_schedule.name=wsd lr_schedule.decay_fraction=0.5 lr_schedule.min_lr_ratio=0.5 lr_schedule.warmup_steps=10
optimizer.betas=[0.8,0.9] optimizer.eps=1e-05 precision.dtype=fp16 precision.initial_scale_power=9
precision.loss_scale_window=7 precision.hysteresis=4 precision.consecutive_hysteresis=true precision.min_loss_scale=2.0
precision.accumulate_dtype=bf16 precision.reduce_dtype=bf16 model.rope_theta=500000.0
model.rope_scaling={type='linear',factor=2.0} model.head_dim=32 zero.stage=3 zero.gather_policy=step zero.reduce=step
zero.shard_group_size=1 zero.persistent_elements=9 zero.offload.optimizer=nvme zero.offload.parameters=cpu
zero.offload.ratio=0.5 zero.offload.pin_memory=false zero.offload.nvme_path=/x parallel.tp=2 parallel.pp=2
parallel.sequence_parallel=true parallel.layout=cost parallel.schedule=interleaved parallel.virtual_stages=2
activations.recompute=full activations.keep_attention=true activations.layers=1 activations.offload=host
activations.offload_layers=[0,1] training.eval_every_steps=5 training.eval_samples=3 training.on_non_finite=skip
training.non_finite_limit=9 checkpoint.host_memory_bytes=5 checkpoint.keep_last=2 checkpoint.keep_every_steps=7
checkpoint.keep_best=3 logging.straggler_every_steps=5 logging.straggler_ratio=2.0 logging.pipeline_trace_step=20
logging.loggers=['wandb'] logging.project=mine
"""


def test_a_key_is_taken_where_it_acts(write):
    """The same keys beside choices that read them, in one run and its written-out file; then nothing is told either."""
    run = load_config(write(""), TAKEN.split(), 4)
    assert run.notices == ()
    assert load_config(write(to_toml(run)), [], 4) == run


@pytest.mark.parametrize("name", list(OPTIMIZERS))
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_a_written_out_file_takes_every_other_choice(write, name, family):
    """A default is not set: a file with every key in it stays a run when its choices change."""
    written = write(to_toml(RunConfig.model_validate({"model": {"family": family}})))
    for schedule in LR_SCHEDULES:
        for stage in range(4):
            overrides = [f"optimizer.name={name}", f"lr_schedule.name={schedule}", f"zero.stage={stage}"]
            assert load_config(written, [*overrides, f"precision.dtype={('fp32', 'bf16', 'fp16')[stage % 3]}"], 1)


@pytest.mark.parametrize("name", [name for name in BUILT_IN_KEYS if name != "muon"])
def test_the_keys_of_an_optimizer_are_what_its_class_takes(name):
    takes = keywords_of(OPTIMIZERS[name].cls, positional=1)
    assert set(BUILT_IN_KEYS[name]) == {"betas", "momentum", "eps"} & set(takes)


@pytest.mark.parametrize("name", list(LR_SCHEDULE_KEYS))
def test_the_keys_of_a_schedule_are_what_its_shape_reads(name):
    read, section = set(), LrScheduleConfig()

    class Watched:
        def __getattr__(self, key):
            read.add(key)
            return getattr(section, key)

    for step in range(64):
        LR_SCHEDULES[name](step, 64, Watched())
    assert read - {"warmup_steps"} == set(LR_SCHEDULE_KEYS[name]) - {"end_step"}  # which stands for the run's steps


def test_a_registered_schedule_may_read_every_key(write):
    """When it reads one, nobody knows: this one after 2,000 steps."""
    LR_SCHEDULES.register("hold", lambda step, steps, own: own.decay_fraction if step >= 2000 else 1.0)
    try:
        for key in ("lr_schedule.decay_fraction=0.5", "lr_schedule.min_lr_ratio=0.5"):
            assert load_config(write(""), ["lr_schedule.name=hold", key], 1)
    finally:
        LR_SCHEDULES._registered.pop("hold")


def test_what_varies_makes_no_key_idle(write):
    path = write("[zero]\nstage = 3\ngather_policy = 'step'\n[optimizer]\nname = 'sgd'")
    run = load_config(path, ["zero.stage=1"], 1, varied=["zero.stage"])
    assert run.config.zero.gather_policy == "step"
    with pytest.raises(ConfigError, match=r"optimizer\.eps"):
        load_config(path, ["zero.stage=1", "optimizer.eps=1"], 1, varied=["zero.stage"])


@pytest.mark.parametrize(
    "key",
    [
        *("training.run_dir", "checkpoint.directory", "checkpoint.resume", "data.tokenizer", "data.cache_dir"),
        *("parallel.schedule_file", "zero.offload.nvme_path"),
    ],
)
def test_a_path_in_the_home_directory_is_written_as_in_a_shell(write, key, monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    more = ["zero.offload.optimizer=nvme"] if key == "zero.offload.nvme_path" else []
    run = load_config(write(""), [f"{key}=~/x", *more], 1)
    assert attrgetter(key)(run.config) == "/home/me/x"
    lists = load_config(write(""), ["data.sources=['~/a', {path='~/b', weight=2}]"], 1).config
    assert [source.path for source in lists.data.sources] == ["/home/me/a", "/home/me/b"]


@given(
    model=st.fixed_dictionaries(
        {"hidden_size": st.integers(1, 300), "num_heads": st.integers(1, 12)},
        optional={key: st.integers(1, 12) for key in ("num_kv_heads", "head_dim")}
        | {"ffn_hidden_size": st.integers(1, 300)},
    ),
    training=st.fixed_dictionaries({"global_batch_size": st.integers(1, 60), "micro_batch_size": st.integers(1, 6)}),
    tp=st.integers(1, 6),
)
def test_every_nearest_value_ends_the_problem_that_named_it(model, training, tp):
    tables = {"model": model, "parallel": {"tp": tp}, "training": training}
    for problem in broken(tables, 3 * tp):
        section, key = problem.key.split(".")
        nearest = re.search(r"the nearest(?: \w+)? (?:is|are) (\d+)(?: and (\d+))?", problem.hint)
        for value in filter(None, nearest.groups()):
            fixed = {**tables, section: {**tables[section], key: int(value)}}
            assert problem.rule not in [other.rule for other in broken(fixed, 3 * tp) if other.key == problem.key]


def broken(tables, world_size):
    try:
        resolve(RunConfig.model_validate(tables), world_size)
    except ConfigError as error:
        return error.problems
    return []


def test_a_rule_is_silent_about_keys_that_are_wrong_by_themselves(write):
    path = write('[model]\nhidden_size = "1000"\nnum_layers = 2\n[parallel]\npp = 3\n[launch]\nnproc_per_node = 0')
    places = [problem.partition(" = ")[0] for problem in problems(path)]
    assert places == ["model.hidden_size", "launch.nproc_per_node", "model.num_layers"]


def test_a_rule_is_silent_where_a_misspelt_or_wrong_section_holds_its_keys(write):
    told = problems(write("[zero]\noffload = 3"), "zero.stage=9")
    assert [line.partition(" = ")[0] for line in told] == ["zero.stage", "zero.offload"]
    told = problems(write("[zero.offload]\nratio = 0.5\noptimiser = 'cpu'"))
    assert [line.partition(" = ")[0] for line in told] == ["zero.offload.optimiser"]


def test_a_renamed_key_is_taken_by_its_old_name(write):
    old = write("[zero]\nstage = 3\nresident_elements = 9")
    assert load_config(old).config.zero.persistent_elements == 9
    assert load_config(write("[zero]\nstage = 3"), ["zero.resident_elements=8"]).config.zero.persistent_elements == 8
    both = "[zero]\nstage = 3\nresident_elements = 9\npersistent_elements = 8"
    (told,) = problems(write(both))
    assert told == "zero.resident_elements = 9: unknown key; did you mean zero.persistent_elements?"
    assert problems(write("[zero]\nresident_elements = 'many'"))[0].startswith("zero.resident_elements = ")
    assert problems(write("zero = 3"))[0].startswith("zero = 3: must be a table")


def test_a_broken_override_is_told_with_the_rest(write):
    told = problems(
        write("[zero]\nstage = 9"), "steps", "model=3", "zero.offload=3", "=3", "zero..stage=3", "zero.stage.x=3"
    )
    assert [line.partition(":")[0] for line in told] == [
        'override = "steps"',
        'override = "model=3"',
        'override = "zero.offload=3"',
        'override = "=3"',
        'override = "zero..stage=3"',
        'override = "zero.stage.x=3"',
        "zero.stage = 9",
    ]


@pytest.mark.parametrize(
    ("text", "line", "told"),
    [
        ("[model]\nnum_layers = = 3\n", 2, "num_layers = = 3"),
        ("[model]\n[model]\n", 2, "[model]"),
        ("[model]\nnum_heads = [1,", 2, "num_heads = [1,"),
    ],
)
def test_broken_toml_is_told_with_its_file_and_line(write, text, line, told):
    path = write(text)
    (problem,) = problems(path)
    assert problem.startswith(f"{path}:{line}: is not TOML: ")
    assert problem.endswith(f"the line reads: {told}")


def test_a_file_that_cannot_be_read_is_told_why(write, tmp_path):
    path = write("")
    assert problems(tmp_path / "rnu.toml") == [f"{tmp_path / 'rnu.toml'}: no such file; did you mean {path}?"]
    assert problems(tmp_path / "a" / "b.toml")[0].endswith(f"there is no directory {tmp_path / 'a'} either")
    assert "cannot be read" in problems(tmp_path)[0]
    url = "s3://b/run.toml"
    assert problems(Path(url)) == [f"{url}: must be on a disk; copy it here"]
    for key in ("training.run_dir", "data.tokenizer", "data.cache_dir"):
        assert f'"{url}": must be a path of a disk, not a URL' in problems(path, f"{key}={url}")[0]
    path.write_bytes(b"a = '\xff'")
    assert "is not UTF-8 at byte 5" in problems(path)[0]


def test_a_byte_order_mark_and_line_ends_of_windows_change_nothing(write):
    path = write("[training]\nsteps = 7\n[model]\nnum_layers = 3\n")
    plain = load_config(path, [], 1)
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes().replace(b"\n", b"\r\n"))
    assert load_config(path, [], 1).config == plain.config


_ANSWERS = {
    "nan": ("float('nan')", "must return a finite factor from 0 on, and has returned nan for step 0"),
    "nothing": ("None", "has returned None for step 0"),
    "a text": ("'1'", "has returned '1' for step 0"),
    "an error": ("1 / (10 - 1 - step)", "its function fails for step 10 of 10: ZeroDivisionError: division by zero"),
}


@pytest.mark.parametrize(("returned", "told"), _ANSWERS.values(), ids=list(_ANSWERS))
def test_a_learning_rate_schedule_of_a_script_that_gives_no_rate_is_refused(write, monkeypatch, returned, told):
    monkeypatch.setitem(LR_SCHEDULES._registered, "mine", eval(f"lambda step, steps, section: {returned}"))
    (problem,) = problems(write('[lr_schedule]\nname = "mine"\n[training]\nsteps = 10\n'))
    assert problem.startswith('lr_schedule.name = "mine": its function fails for step')
    assert told in problem


@pytest.mark.parametrize("steps", [1, 2, 2**40])
def test_a_learning_rate_schedule_of_a_script_is_asked_for_steps_of_the_run(write, monkeypatch, steps):
    asked: list[int] = []
    monkeypatch.setitem(LR_SCHEDULES._registered, "mine", lambda step, *_: asked.append(step) or 1.0)
    load_config(write(f'[lr_schedule]\nname = "mine"\n[training]\nsteps = {steps}\n'), [], 1)
    assert {0, steps - 1} <= set(asked) <= set(range(min(steps, 2))) | {steps // 2, steps - 1}


@pytest.mark.parametrize("registry", [FAMILIES, SCHEDULES, OPTIMIZERS, LR_SCHEDULES], ids=lambda one: one.what)
def test_registries_refuse_another_kind_of_thing_at_once(registry):
    for wrong in (3, "llama", type("Mine", (), {}) if registry._kind else None):
        with pytest.raises(TypeError, match=f"{registry.what} 'mine' must be an? ") as caught:
            registry.register("mine", wrong)
        assert repr(wrong) in str(caught.value)
    assert "mine" not in registry


@pytest.mark.parametrize("section", list(sections()))
def test_every_section_is_a_table(write, section):
    for text in (f"{section} = 3", f"{section} = []", f"[[{section}]]"):
        told = f"must be a table; write [{section}] and its keys below it"
        assert any(problem.endswith(told) for problem in problems(write(text), world_size=1)), text


# Writing back


names = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), min_size=1, max_size=20)
shares = st.floats(0, 1, exclude_max=True)
configs = st.fixed_dictionaries(
    {
        "model": st.fixed_dictionaries(
            {"dropout": shares, "norm_eps": st.floats(1e-30, 1e30)},
            optional={"num_kv_heads": st.sampled_from([1, 2, 4, 8, 16]), "tie_embeddings": st.booleans()},
        ),
        "optimizer": st.fixed_dictionaries({"betas": st.tuples(shares, shares)}),
        "zero": st.fixed_dictionaries(
            {"bucket_bytes": st.integers(1024, 9999)},
            optional={"offload": st.fixed_dictionaries({"optimizer": st.just("nvme"), "nvme_path": names})},
        ),
        "data": st.fixed_dictionaries(
            {"sources": st.lists(names | st.builds(dict, path=names, weight=st.floats(1e-9, 1e9)), min_size=1)},
            optional={"cache_dir": names},
        ),
        "training": st.fixed_dictionaries(
            {"run_dir": names, "seed": st.integers(0, 2**63 - 1)},
            optional={"micro_batch_size": st.integers(1, 9), "accumulation": st.integers(1, 9)},
        ),
    }
)


@settings(deadline=None)  # it waits for a disk
@given(tables=configs, world_size=st.integers(1, 9))
def test_what_is_written_reads_back_equal(tmp_path_factory, tables, world_size):
    config = RunConfig.model_validate(tables)
    assert RunConfig.model_validate(tomllib.loads(to_toml(config))) == config
    run = resolve(config, world_size)
    path = tmp_path_factory.getbasetemp() / "written.toml"
    for written in (config, run):
        save_config(written, path)
        assert load_config(path, [], world_size) == run
    assert resolve(run.config, world_size) == run


def test_saving_replaces_the_file_whole_and_leaves_nothing_beside_it(tmp_path):
    path = tmp_path / "deep" / "run.toml"
    save_config(RunConfig(), path)
    save_config(resolve(RunConfig(), 2), path)
    assert load_config(path, [], 2) == resolve(RunConfig(), 2)
    assert [file.name for file in path.parent.iterdir()] == ["run.toml"]


def test_saving_keeps_a_file_that_no_run_has_written(tmp_path):
    path = tmp_path / "config.toml"
    for number, text in enumerate(["# my notes\n[model]\nnum_layers = 2\n", ""], 1):
        path.write_text(text)
        aside = save_config(RunConfig(), path)
        assert aside == tmp_path / f"config.toml.before-{number}"
        assert aside.read_text() == text
        assert save_config(RunConfig(), path) is None
    assert len(list(tmp_path.iterdir())) == 3


# The schema itself


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ('https://h/run?token=s3"c ret', "https://h/run?token=***"),
        ('ftp://u:s3"c\\ret@h/run', "ftp://u:***@h/run"),
        ("s3://u:2024/s3c@h/run", "s3://u:***@h/run"),
    ],
)
def test_a_password_of_any_characters_leaves_a_run_file_valid_and_is_not_in_it(url, shown):
    read = tomllib.loads(to_toml(RunConfig.model_validate({"checkpoint": {"directory": url, "resume": url}})))
    assert read["checkpoint"] | {"directory": shown, "resume": shown} == read["checkpoint"]
    assert "s3c" not in str(Problem("checkpoint.directory", [url], "must be shorter"))


def test_a_preset_lies_below_the_keys_of_the_run_and_the_resolved_run_has_its_keys(write):
    path = write('[model]\npreset = "mistral-7b-v0.1"\nnum_layers = 4\n')
    run = load_config(path, ["model.sliding_window=unset", "model.seq_len=2048"])
    model = run.config.model
    assert (model.hidden_size, model.num_layers, model.seq_len) == (4096, 4, 2048)
    assert (model.sliding_window, model.preset) == (None, None)
    assert load_config(path).config.model.sliding_window == 4096
    assert "preset" not in to_toml(run)
    other = load_config(path, ["model.seq_len=512", "model.preset=gpt2"]).config.model
    assert (other.family, other.num_layers, other.seq_len) == ("gpt2", 12, 512)
    assert load_config(write(to_toml(run))) == run
    (problem,) = problems(path, "model.preset=mistral-7b")
    assert 'model.preset = "mistral-7b": must be a name that `megazero models` lists; write "mistral-7b-v0.' in problem


def test_the_reference_is_a_run_file_with_every_key_at_its_default():
    assert RunConfig.model_validate(tomllib.loads(reference())) == RunConfig()
    assert re.findall(r"^(?:# )?(\w+) (?:=|is unset)", reference(), re.MULTILINE) == [
        k for f in keys().values() for k in f
    ]
    assert re.findall(r"^\[(.*)\]$", reference("zero"), re.MULTILINE) == ["zero", "zero.offload"]
    assert reference("training.steps").endswith("# Optimizer steps.\n# integer >= 1\nsteps = 1000\n")


def test_every_key_is_documented_and_every_default_stands():
    assert re.findall(r"## \[(.*)\]", to_markdown()) == list(sections())
    for text, (section, fields) in zip(to_markdown().split("## [")[1:], keys().items(), strict=True):
        rows = re.findall(r"^\| `(\w+)` \| .* \| `(.*)` \| (.*) \|$", text, re.MULTILINE)
        assert [key for key, _, _ in rows] == list(fields)
        for key, default, meaning in rows:
            assert meaning.endswith("."), key
            if default != "unset":
                table = tomllib.loads(f"[{section}]\n{key} = {default}")
                assert RunConfig.model_validate(table) == RunConfig(), key
    assert "| `tp` | integer >= 1 | `1` | Tensor-parallel degree" in to_markdown()
    assert '| `resume` | string | `"auto"` |' in to_markdown()


def test_reading_a_config_needs_no_torch():
    code = "import sys, megazero.config; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
