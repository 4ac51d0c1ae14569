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

from megazero.config import ConfigError, RunConfig, load_config, resolve
from megazero.config.derive import cache_directory, complete_batch
from megazero.config.document import reference, save_config, to_toml
from megazero.config.schema import DataConfig, DataSource, keys, sections
from megazero.models.config import RopeScaling
from megazero.models.registry import FAMILIES
from megazero.models.stages import head_cost_in_layers
from megazero.optim.config import LrScheduleConfig
from megazero.optim.registry import BUILT_IN_KEYS, LR_SCHEDULE_KEYS, LR_SCHEDULES, OPTIMIZERS
from megazero.registry import keywords_of
from megazero.schedules.registry import SCHEDULES
from megazero.settings import ActsWhere, Problem

CASES = tomllib.loads((Path(__file__).parent / "run_file_cases.toml").read_text())


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


@pytest.mark.parametrize(("scaling", "told"), [line.split(" -> ") for line in CASES["scalings"].strip().splitlines()])
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
        'parallel.schedule = "1f2b": must be "gpipe", "1f1b", "interleaved", "interleaved-pairs", "zb-h1", "zbv" or '
        '"dualpipev"; write "1f1b"',
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


def _told(table: str) -> list[tuple[str, str, str]]:
    rows = [line.split(" -> ") for line in table.splitlines() if line]
    return [(left, *told.split(": ", 1)) for left, told in rows]


@pytest.mark.parametrize(("override", "key", "rule"), _told(CASES["unknown"] + CASES["wrong"]))
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


@pytest.mark.parametrize(("run", "key", "rule"), _told(CASES["broken"]))
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


def _lines(table: str) -> list[list[str]]:
    return [line.split() for line in table.splitlines() if line]


@pytest.mark.parametrize("overrides", _lines(CASES["refused"]), ids=" ".join)
def test_a_key_that_another_choice_does_not_read_is_refused(write, overrides):
    key = overrides[0].split("=")[0]
    told = problems(write(""), *overrides, world_size=1)
    idle = [problem for problem in told if problem.startswith(f"{key} = ") and " where " in problem]
    assert len(idle) == 1, told
    assert any(override.split("=")[0] in idle[0] for override in overrides[1:])


@pytest.mark.parametrize("overrides", _lines(CASES["noted"] + CASES["exceeding"]), ids=" ".join)
def test_a_key_that_a_number_or_a_switch_makes_idle_is_told(write, overrides):
    key = overrides[0].split("=")[0]
    told = [notice for notice in load_config(write(""), overrides, 1).notices if notice.startswith(f"{key} = ")]
    assert told
    assert all("has no effect where" in notice or "exceeds" in notice for notice in told)


def test_a_key_of_another_family_is_refused_and_the_resolved_run_loads_again(write, tmp_path):
    """Otherwise another model than the file asks for would be trained."""
    assert set(CASES["family_keys"]) == {key for name in FAMILIES for key in FAMILIES[name].reads}
    for key, value in CASES["family_keys"].items():
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
    assert declared == {overrides[0].split("=")[0] for overrides in _lines(CASES["refused"] + CASES["noted"])}


def test_a_key_is_taken_where_it_acts(write):
    """The same keys beside choices that read them, in one run and its written-out file; then nothing is told either."""
    run = load_config(write(""), CASES["taken"].split(), 4)
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
    for wrong in (3, "llama", type("Mine", (), {}) if registry._base else None):
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
