"""Config, recipes and the command line."""

import re
from dataclasses import fields, replace
from types import SimpleNamespace, UnionType
from typing import Any, Literal, Union, get_args, get_origin

import pytest
import torch

from largebatch import assembly
from largebatch import config as c
from largebatch.config.cli import read_text
from largebatch.config.help import all_options
from largebatch.config.horovod import HorovodConfig, told_the_longest
from largebatch.config.values import types_of, with_value
from largebatch.config.words import GONE
from largebatch.recipes import RECIPES, choose
from largebatch.start import doubtful
from largebatch.train import OPTIONS as TRAINING
from largebatch.train import read as read_training
from largebatch.validate import FLAGS
from largebatch.validate import OPTIONS as VALIDATION
from largebatch.validate import Flags
from largebatch.validate import read as read_validation


def parse(*argv: str) -> c.TrainConfig:
    return c.parse(argv, choose_recipe=choose)


@pytest.mark.parametrize(
    "argv, recipe, model, data",
    [
        ([], "quickstart", "vit_b32", "digits"),
        (["--model", "vit_l32"], "quickstart", "vit_l32", "digits"),
        (["--model", "vit_l32", "--data", "/imagenet"], "vit_l32", "vit_l32", "/imagenet"),
        (["--data=/imagenet"], "vit_b32", "vit_b32", "/imagenet"),
        (["--recipe", "vit_b16", "--data", "synthetic"], "vit_b16", "vit_b16", "synthetic"),
        (["--recipe", "quickstart", "--data", "/folder"], "quickstart", "vit_b32", "/folder"),
    ],
)
def test_which_recipe(argv, recipe, model, data):
    config = parse(*argv)
    assert (config.recipe, config.model.name, config.data.path) == (recipe, model, data)


@pytest.mark.parametrize("name", sorted(RECIPES))
def test_every_recipe_is_sound_and_comes_back_from_yaml(tmp_path, name):
    config = RECIPES[name]()
    c.check(config)
    assert not c.without_effect(config)
    assert config.recipe == name and RECIPES[name].__doc__
    file = tmp_path / "config.yaml"
    file.write_text(c.dump(config))
    assert c.load(str(file)) == config


def test_none_survives_yaml(tmp_path):
    config = replace(RECIPES["vit_b16"](), optim=c.OptimConfig(name="adamw", preset=None, clip_norm=None))
    file = tmp_path / "config.yaml"
    file.write_text(c.dump(config))
    assert c.load(str(file)) == config


def test_the_32k_recipe_is_the_published_one():
    config = parse("--model", "vit_b16", "--data", "/imagenet")
    assert (config.data.global_batch_size, config.optim.lr, config.optim.weight_decay) == (32768, 1.8e-2, 0.1)
    assert (config.optim.preset, config.optim.clip_norm, config.augment.mixup_alpha) == ("colossal", 1.0, 0.2)
    assert (config.run.duration, config.schedule.warmup, config.schedule.name) == ("300 epochs", "150 epochs", "linear")
    images = c.duration_images(config.run.duration, option="run.duration", num_samples=1281167, batch_size=32768)
    assert -(-images // 32768) == 11730
    assert c.accumulation_passes(global_batch_size=32768, micro_batch_size=256, num_ranks=4) == 32


def test_yaml_then_options(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text("recipe: quickstart\noptim:\n  lr: 0.5\n  weight_decay: 0.25\n")
    config = parse("--config", str(file), "--optim.lr", "2")
    assert (config.recipe, config.optim.lr, config.optim.weight_decay) == ("quickstart", 2.0, 0.25)


def test_another_optimizer_by_one_field():
    """What the recipe says for its own is left out; what is said beside the name is not, and is refused if it must."""
    recipe = ("--model", "vit_b16", "--data", "/imagenet")
    for name, options, preset in (
        ("adamw", (), None),
        ("sgd", (), None),
        ("lamb", (), "colossal"),
        ("lars", ("--optim.preset", "paper"), "paper"),
    ):
        optim = parse(*recipe, "--optim.name", name, *options).optim
        assert (optim.name, optim.preset, optim.lr, optim.weight_decay) == (name, preset, 1.8e-2, 0.1)


def test_betas_of_an_earlier_version(tmp_path):
    """They were written out into every config.yaml; now null stands for each optimizer's own."""
    file = tmp_path / "run.yaml"
    file.write_text("optim:\n  name: lamb\n  betas:\n  - 0.9\n  - 0.999\n")
    config = parse("--config", str(file))
    assert config.optim.betas == (0.9, 0.999) and parse().optim.betas is None
    file.write_text(c.dump(config))
    assert c.load(str(file)) == config


@pytest.mark.parametrize(
    "text, images",
    [
        ("2 epochs", 200),
        ("1 epoch", 100),
        ("3 steps", 96),
        ("1e3 images", 1000),
        ("50 %", 320),
        ("0.5 epochs", 50),
        ("0.333 epochs", 34),  # begun images count
        ("0.01 steps", 1),
        ("33.3 %", 214),
        ("0.07 epochs", 7),  # 7.000000000000001 in binary
        ("0 epochs", 0),
    ],
)
def test_durations(text, images):
    assert c.duration_images(text, option="x", num_samples=100, batch_size=32, run_images=640) == images


@pytest.mark.parametrize("text", ["5", "epochs", "five epochs", "3 weeks", "1 epoch 2 steps", "e epochs"])
def test_a_duration_without_number_or_unit(text):
    with pytest.raises(ValueError, match="schedule.warmup is .*expected a number and a unit"):
        c.duration_images(text, option="schedule.warmup", num_samples=100, batch_size=32)


DURATIONS = "run.duration schedule.warmup schedule.cooldown optim.ema_half_life run.eval_every run.check_replicas"


@pytest.mark.parametrize("option", [*DURATIONS.split(), "run.recompute", "log.every", "checkpoint.every"])
def test_a_duration_without_a_unit_is_refused_with_the_command_line(option):
    with pytest.raises(ValueError, match=f"^--{option} is '10': expected a number and a unit "):
        parse(f"--{option}", "10")
    for text in ["3 epochs", *["never"] * option.endswith("eval_every"), *["9 minutes"] * option.startswith("check")]:
        parse(f"--{option}", text)


@pytest.mark.parametrize(
    "ranks, batch, micro, words",
    [
        (
            200,
            32768,
            256,
            ["32000 = 200 ranks × 160 micro-batch × 1 passes", "32800 = 200 ranks × 164 micro-batch × 1 passes"],
        ),
        (3, 250, 32, ["216 = 3 ranks × 24 micro-batch × 3 passes", "252 = 3 ranks × 28 micro-batch × 3 passes"]),
        (64, 32, 1, ["256 = 64 ranks × 4 micro-batch × 1 passes"]),
        (4, 32768, 300, ["exact: 32768 = 4 ranks × 256 micro-batch × 32 passes."]),
        (8, 4096, 96, ["exact: 4096 = 8 ranks × 64 micro-batch × 8 passes."]),
        (4, 1000, 256, ["exact: 1000 = 4 ranks × 250 micro-batch × 1 passes."]),
        (1, 100, 32, ["exact: 100 = 1 ranks × 25 micro-batch × 4 passes."]),
        (4, 8, 256, ["exact: 8 = 4 ranks × 2 micro-batch × 1 passes."]),
        (2, 1994, 256, ["exact: 1994 = 2 ranks × 1 micro-batch × 997 passes, or 1984 = 2 ranks × 248 micro-batch × 4"]),
    ],
)
def test_a_batch_that_does_not_divide_names_the_nearest(ranks, batch, micro, words):
    with pytest.raises(ValueError) as error:
        c.accumulation_passes(global_batch_size=batch, micro_batch_size=micro, num_ranks=ranks)
    for word in [*words, str(batch), "--data.global_batch_size"]:
        assert word in str(error.value)


def test_a_batch_larger_than_the_data_is_reported(caplog):
    assembly.warn_of_large_batch(1437, 1437)
    assert not caplog.messages
    assembly.warn_of_large_batch(32768, 1437)
    assert "there are 1437 training images: a step sees each image 22.8 times. For an update" in caplog.messages[0]


def test_passes_that_do_not_come_out_even():
    """A rank may have one fewer than others; a rank that would have none is a mistake, unless the run goes on."""
    batch = {"global_batch_size": 16, "micro_batch_size": 4}
    assert [c.accumulation_passes(**batch, num_ranks=ranks) for ranks in (1, 2, 3, 4)] == [4, 2, 2, 1]
    with pytest.raises(ValueError, match="a whole number of passes of 5 ranks"):
        c.accumulation_passes(**batch, num_ranks=5)
    assert c.accumulation_passes(**batch, num_ranks=5, resuming=True) == 1
    with pytest.raises(ValueError, match="nearest exact"):
        c.accumulation_passes(global_batch_size=18, micro_batch_size=4, num_ranks=2, resuming=True)


@pytest.mark.parametrize(
    "text, seconds", [("90 seconds", 90), (" 10 minutes", 600), ("1.5 hour", 5400), ("5 epochs", None), ("hours", None)]
)
def test_times(text, seconds):
    assert c.duration_seconds(text) == seconds


IDLE = [
    (
        ["--schedule.stairs", "timm", "--schedule.warmup", "0 epochs"],
        "--schedule.stairs is timm and --schedule.warmup '0 epochs': without a warm-up",
    ),
    *[
        (["--parallel.tensor.mode", mode], f"--parallel.tensor.mode is {mode} and --parallel.tensor.size 1, so no matr")
        for mode in ("2d", "2.5d", "3d")
    ],
]


@pytest.mark.parametrize(
    "argv, sentence",
    [
        (["--optim.lrr", "3"], "There is no option optim.lrr; did you mean --optim.lr?"),
        (["--optm.lr", "3"], "There is no option optm.lr; did you mean --optim.lr?"),
        (["--optim.lr", "abc"], "optim.lr"),
        (["--optim.name", "sgdd"], "optim.name"),
        (["--config", "/nowhere.yaml"], "/nowhere.yaml"),
        (["--recipe", "vit_b31"], "There is no recipe 'vit_b31': did you mean vit_b"),
        (["--data.scale", "[0.5, 2]"], "--data.scale is [0.5, 2.0]: expected 0 < low <= high <= 1."),
        (["--schedule.scaling", "sqrt"], "linear and sqrt need a reference batch"),
        (["--model.drop_rate", "1"], "--model.drop_rate is 1.0: expected 0 <= rate < 1."),
        (["--optim.clip_norm", "0"], "--optim.clip_norm is 0.0: expected a positive norm, or null for no clip."),
        (["--horovod.start_limit_s", "-1"], "--horovod.start_limit_s is -1.0: expected at least 0."),
        (["--horovod.stall_limit_s", "-1"], "--horovod.stall_limit_s is -1.0: expected at least 0."),
        (["--horovod.hang_limit_s", "-1"], "--horovod.hang_limit_s is -1.0: expected at least 0."),
        (["--run.compression", "adasum"], "run.compression"),
        (["--parallel.zero", "1", "--optim.name", "adamw"], "ZeRO divides lamb's state only"),
        (["--parallel.zero", "2"], "parallel.zero"),
        (["--parallel.cuts", "[3]"], "--parallel.cuts is [3], which only a pipeline uses"),
        (["--parallel.micro_batches", "4"], "--parallel.micro_batches is 4, which only a pipeline uses"),
        (["--parallel.tensor.size", "2", "--optim.name", "lars"], "needs whole tensors on every rank"),
        (["--parallel.zero", "1", "--optim.preset", "cautious"], "is cautious, which needs whole tensors on every r"),
        (["--parallel.pipeline", "2", "--optim.preset", "cautious"], "is cautious, which needs whole tensors on every"),
        (["--parallel.pipeline", "2", "--run.precision", "fp16"], "would choose different loss scales; choose bf16"),
        (["--parallel.sequence", "2", "--run.compile", "true"], "torch.compile cannot compile the messages"),
        (["--parallel.sequence", "2", "--run.compile", "blocks"], "--run.compile is blocks and --parallel sequence 2"),
        (["--parallel.tensor.size", "2", "--optim.ema_half_life", "1 epochs"], "is no average of divided weights"),
        (["--parallel.sequence", "2", "--run.recompute", "5 steps"], "it needs a whole model on each rank"),
        (["--parallel.tensor.mode", "2d", "--parallel.tensor.size", "6"], "expects a square of ranks, such as 4 or 9"),
        (["--data.crop_padding", "-1"], "--data.crop_padding is -1: expected at least 0."),
        (["--data.crop_padding", "4", "--data.scale", "[0.5, 1]"], "does not use --data.scale [0.5, 1.0]"),
        (["--data.interpolation", "nearest"], "data.interpolation"),
        (["--augment.reprob", "1.5"], "--augment.reprob is 1.5: expected a probability, 0 to 1."),
        (["--augment.cutmix_alpha", "-1"], "--augment.cutmix_alpha is -1.0: expected at least 0."),
        (["--augment.repeats", "0"], "--augment.repeats is 0: expected at least 1."),
        (["--loss.name", "bce", "--augment.label_smoothing", "0.1"], "counts as right, so all would; set 0, or choose"),
        (["--loss.name", "bce", "--data.token_labels", "true"], "a teacher gives many a share; set false, or choose"),
        (["--loss.name", "bce", "--loss.dense_weight", "1"], "token logits have a cross entropy; set 0, or choose"),
        (["--loss.name", "bce", "--parallel.pipeline", "2"], "ranks that share a model compute a cross entropy"),
        (["--data.crop_pct", "0"], "--data.crop_pct is 0.0: expected a fraction above 0, or null."),
        (["--data.crop_pct", "-1"], "--data.crop_pct is -1.0: expected a fraction above 0, or null."),
        (["--data.crop_pct", "nan"], "--data.crop_pct is 'nan': expected a number or null."),
        (["--data.std", "[0, 0, 0]"], "--data.std is [0.0, 0.0, 0.0]: expected three numbers above 0"),
        (["--data.std", "[0.2, -0.2, 0.2]"], "--data.std is [0.2, -0.2, 0.2]: expected three numbers above 0"),
        (["--data.mean", "[0.2, inf, 0.2]"], "--data.mean is '[0.2, inf, 0.2]': expected [a number, a"),
        *IDLE,
        (["--model", "volo_d1", "--data", "/imagenet", "--schedule.warmup", "0 epochs"],
         "--schedule.stairs is timm and --schedule.warmup '0 epochs'"),
    ],
)
def test_a_mistake_is_one_sentence(argv, sentence):
    with pytest.raises(ValueError) as error:
        parse(*argv)
    assert sentence in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    "line, sentence",
    [
        # words that people bring along, and misspelt ones
        ("--modle vit_b32", "There is no option modle; did you mean --model?"),
        ("--optim.learning_rate 1", "There is no option optim.learning_rate; did you mean --optim.lr?"),
        ("--lr 0.1", "There is no option lr; did you mean --optim.lr?"),
        ("--batch-size 64", "; --data.global_batch_size is the batch of a step on all ranks, --data.micro_batch_size "),
        ("--epochs 10", "There is no option epochs; did you mean --run.duration '10 epochs'?"),
        ("--workers 4", "did you mean --data.num_threads?"),
        ("--amp", "did you mean --run.precision?"),
        ("--gpus 4", "the launcher starts the ranks: horovodrun -np 4"),
        ("--resume runs/mine", "the same command goes on with the run in --run.folder"),
        ("--output runs/mine", "did you mean --run.folder?"),
        ("--pretrained", "did you mean --init-from?"),
        ("--run.epochs 3", "did you mean --run.duration '10 epochs'?"),
        ("--optimizer lamb", "did you mean --optim.name?"),
        ("--version", "largebatch --version prints the versions."),
        ("--weight-decay 0.1", "did you mean --optim.weight_decay?"),
        ("--num-classes 10", "did you mean --model.num_classes?"),
        ("--img_size 64", "did you mean --img-size?"),
        ("--run.max_step 3", "There is no option run.max_step; did you mean --run.max_steps?"),
        ("--xyz 3", "There is no option xyz; --help lists the options."),
        ("vit_b32", "'vit_b32' stands alone on the command line: expected --option value, such as --model vit_b32; a "),
        ("config.yaml", "such as --model vit_b32; a file of options is --config config.yaml."),
        ("--data my projects/shapes", "'projects/shapes' stands alone on the command line: expected "),
        ("--data my projects/shapes", "; a value with a space stands in quotes."),
        ("--parallel.tensor 2", "parallel.tensor is a section of options, such as --parallel.tensor.size;"),
        ("--checkpoint x", "checkpoint is a section of options, such as --checkpoint.every"),
        # values
        ("--optim.lr abc", "--optim.lr is 'abc': expected a number."),
        ("--data.micro_batch_size 2.5", "--data.micro_batch_size is '2.5': expected a whole number."),
        ("--optim.name adam", "--optim.name is 'adam': expected lamb, adamw, nadamw, schedule_free_adamw, sgd, lars"),
        ("--run.compile maybe", "--run.compile is 'maybe': expected true or false or blocks."),
        ("--optim.betas 0.9", "--optim.betas is '0.9': expected [a number, a number] or null."),
        ("--optim.betas 0.9 0.95 1", "--optim.betas is '0.9 0.95 1': expected [a number, a number] or null."),
        ("--optim.lr", "--optim.lr stands alone on the command line: expected --optim.lr and a value."),
        ("--config /no/such.yaml", "--config is /no/such.yaml, which cannot be read: No such file or directory."),
        ("--config /dev/zero", "--config is /dev/zero, which cannot be read: it is a FIFO or a device."),
    ],
)
def test_a_mistake_on_the_command_line_is_one_sentence(line, sentence):
    with pytest.raises(ValueError) as error:
        parse(*line.split())
    assert sentence in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    "content, sentence",
    [
        ("optim: 3\n", "There is no option optim: optim is a section of options, such as --optim.name"),
        ("optim:\n  lr: [\n", "is not YAML: "),
        ("just a text\n", "holds no options: expected lines such as 'run:' and, indented below, 'seed: 1'."),
        ("modle:\n  name: vit_b32\n", "There is no option modle.name; did you mean --model.name?"),
        ("optim:\n  lr: abc\n", "optim.lr is 'abc': expected a number."),
        ("optim:\n  betas: 0.9\n", "optim.betas is '0.9': expected [a number, a number] or null."),
        ("run:\n  compile: [true]\n", "run.compile is ['true']: expected true or false or blocks."),
        (b"\x89PNG\r\n", "which is not a text: expected a YAML file of options."),
        ("run: " + "[" * 20_000, "is nested too deeply for a config: expected lines such as 'run:'"),
        ('{"run": ' * 20_000, "is nested too deeply for a config: expected lines such as 'run:'"),
        ("run: &again {seed: 1, more: *again}", "There is no option run.more.seed; did you mean --run.seed?"),
        ("optim:\n  betas: &b [*b, 0.9]\n", "line 2: there is a value within a value: expected a number, a text, or "),
        ("run:\n  folder: {a: b}\n", "There is no option run.folder.a"),
        ("run: {seed: 1}\noptim: {lr: 1}\nrun:\n  seed: 2\n", "line 4: run.seed stands there for the second time"),
        ("run: !!python/object:os.Any {seed: 1}\n", "line 1: tag:yaml.org,2002:python/object:os.Any would make an ob"),
        ("run: {seed: !mine 1}\n", "line 1: !mine would make an object: expected a value without a tag."),
        ("? [run]\n: 1\n", "There is no option ?; --help lists the options."),
        ("optim: {lr: .nan}\n", "optim.lr is '.nan': expected a number."),
        ("optim: {lr: nan}\n", "optim.lr is 'nan': expected a number."),
        ("optim: {lr: -inf}\n", "optim.lr is '-inf': expected a number."),
        (f"run: {{seed: {'9' * 9000}}}\n", f"run.seed is '{'9' * 79}: expected a whole number."),
        ("run: {seed: 1e300}\n", "run.seed is '1e300': expected a whole number."),
        ("run: {seed: 9223372036854775808}\n", "run.seed is '9223372036854775808': expected a whole number."),
        ("run: {seed: 0x10}\n", "run.seed is '0x10': expected a whole number."),
        ("run: {seed: ~}\n", "run.seed is '': expected a whole number."),
    ],
)
def test_a_mistake_in_a_file_is_one_sentence_with_its_name(tmp_path, content, sentence):
    file = tmp_path / "mine.yaml"
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ValueError) as error:
        parse("--config", str(file))
    assert sentence in str(error.value) and str(file) in str(error.value) and "\n" not in str(error.value)


def test_values_in_the_forms_that_people_write(tmp_path):
    config = parse(*"--optim.name LAMB --optim.betas 0.9 0.95 --optim.clip_norm none --run.compile".split())
    assert (config.optim.name, config.optim.betas, config.optim.clip_norm) == ("lamb", (0.9, 0.95), None)
    assert config.run.compile is True
    config = parse(*"--optim.betas 0.8,0.9 --run.precision bfloat16 --run.max_steps 1e2 --run.deterministic=1".split())
    assert (config.optim.betas, config.run.precision, config.run.max_steps) == ((0.8, 0.9), "bf16", 100)
    assert config.run.deterministic is True
    file = tmp_path / "mine.yaml"
    file.write_text("run:\n  max_steps: 1e2\n  end_time: 2026-11-21T18:00:00\noptim: {lr: 1e-3, clip_norm: null}\n")
    config = parse("--config", str(file), "--run.seed", "3")
    assert (config.run.max_steps, config.run.end_time, config.run.seed) == (100, "2026-11-21T18:00:00", 3)
    assert (config.optim.lr, config.optim.clip_norm) == (1e-3, None)


@pytest.mark.parametrize(
    "text", ["0123", "20:15", "1:1:1", "10:13", "0x1F", "0b11", "1_000", "1e3", "yes", "No", "on", "off", "TRUE", "y",
             "=", "2026-11-21", "2026-11-21 18:00:00", ".5", "+1", "-.inf", "nan", "a b", "a, b", "it's"],
)  # fmt: skip
def test_a_scalar_of_a_file_is_the_text_that_stands_there(tmp_path, text):
    for quote in ("", "'", '"') if text not in ("a, b", "it's") else ('"',):
        content = f"run: {{folder: {quote}{text}{quote}}}\ndata:\n  path: {quote}{text}{quote}  # no number\n"
        (tmp_path / "mine.yaml").write_text(content)
        config = parse("--config", str(tmp_path / "mine.yaml"))
        assert (config.run.folder, config.data.path) == (text, text)
        (tmp_path / "config.yaml").write_text(c.dump(config))
        assert parse("--config", str(tmp_path / "config.yaml")) == config
        assert parse("--run.folder", text, "--data", text) == replace(config, recipe=config.recipe)


def test_no_value_in_a_file(tmp_path):
    file = tmp_path / "mine.yaml"
    for none in ("null", "NULL", "~", "", "none"):
        file.write_text(f"optim: {{clip_norm: {none}}}\nrun: {{profile_steps: 10:13, end_time: {none}}}\n")
        config = parse("--config", str(file))
        assert (config.optim.clip_norm, config.run.profile_steps, config.run.end_time) == (None, "10:13", None)
    file.write_text("run:\n  folder: ~\ndata: {quarantine: 'null', path: null}\n")  # a text has no value if it is empty
    config = parse("--config", str(file))
    assert (config.run.folder, config.data.quarantine, config.data.path) == ("", "null", "")


VALUES = {  # of each type of an option
    bool: [True, False], int: [0, 7, 2**40], float: [0.1, 1e-5, 1e22, 3.0, 1 / 3],
    str: ["", "0123", "null", "a: b", "ü"],
}  # fmt: skip


def values_of(kind: Any) -> list[Any]:
    if get_origin(kind) in (Union, UnionType):
        return [value for part in get_args(kind) for value in values_of(part)]
    if get_origin(kind) is Literal:
        return list(get_args(kind))
    if get_origin(kind) is tuple:
        return [tuple(values_of(part)[0] for part in get_args(kind) if part is not ...)]
    if get_origin(kind) is list:
        return [[], values_of(get_args(kind)[0])]
    return [None] if kind is type(None) else VALUES[kind]


@pytest.mark.parametrize("name, kind", types_of(c.TrainConfig).items())
def test_every_value_of_every_option_survives_yaml(name, kind):
    for value in values_of(kind):
        if name in ("run.end_time", "log.to") and value in ("null", "0123"):  # no value, and a number
            continue
        found = read_text(c.dump(with_value(c.TrainConfig(), name, value)), place="config.yaml")[name]
        assert (found, type(found)) == (value, type(value))


def answered(*argv: str) -> str:
    """The text that a command line of training gets."""
    with pytest.raises(c.Answer) as answer:
        read_training(argv)
    return str(answer.value)


def test_the_help_is_short_and_names_what_people_search_for():
    said = answered("--help")
    shown = [line.split()[0] for line in said.splitlines() if line.startswith("  --")]
    assert 20 <= len(shown) <= 26 and {"--model", "--data", "--img-size", "--init-from", "--config"} <= {*shown}
    assert said.count("largebatch train ") >= 3 and "[--model" in said
    for words in ("gradient accumulation", "activation checkpointing", "'5 epochs'", "Sections: model, data, augment"):
        assert words in " ".join(said.split()), words
    assert "CONFIG" not in said and "typing" not in said and "NoneType" not in said


def test_the_help_has_every_option_with_the_value_that_the_command_line_gives():
    said = answered("--model", "vit_b16", "--data", "/imagenet", "--optim.eps", "1e-5", "--help", "all")
    options = c.options(c.TrainConfig())
    assert [name for name in options if f"--{name} " not in said] == []
    assert all(f"{name}: " in said for name in ("horovod", "parallel"))
    for entry in ("--optim.lr X ", "[0.018]", "--img-size, --model.img_size N", "[1e-05]", "[300 epochs]"):
        assert entry in said, entry
    assert answered("--help=all", "--model", "vit_b16", "--data", "/imagenet", "--optim.eps", "1e-5") == said


def test_help_on_a_section_and_on_a_word():
    said = answered("--help", "optim")
    assert "--optim.betas X,X " in said and "--optim.name lamb|adamw|nadamw|schedule_free_adamw|sgd|lars" in said
    assert "--model" not in said and "--schedule" not in said
    said = answered("-h", "accumulation")
    assert "--data.micro_batch_size N" in said and said.count("--data.") == 1
    with pytest.raises(ValueError, match="--help teapot: no option says this word; expected all, a word, or a section"):
        read_training(["--help", "teapot"])


def test_every_option_of_a_short_help_exists():
    for options in (TRAINING, VALIDATION):
        assert [name for names in options.values() for name in names if name not in c.options(c.TrainConfig())] == []
    assert [usage.split()[0][2:].replace("-", "_") for usage in FLAGS] == [one.name for one in fields(Flags)]


def test_the_resolved_config_is_printed_and_comes_back(tmp_path):
    argv = ("--model", "vit_b16", "--data", "/imagenet", "--optim.lr", "0.5")
    printed = answered(*argv, "--print_config")
    assert c.options(c.load_text(printed, place="x")) == c.options(read_training(argv))
    (tmp_path / "config.yaml").write_text(printed)
    with pytest.raises(c.Answer) as answer:
        read_validation([str(tmp_path), "--print-config", "--data", "/other"])
    again = c.load_text(str(answer.value), place="x")
    assert (again.data.path, again.optim.lr, again.run.folder) == ("/other", 0.5, str(tmp_path))
    with pytest.raises(ValueError, match="--optim.lr is -1.0: expected at least 0"):
        read_training(["--print_config", "--optim.lr=-1"])


@pytest.mark.parametrize("argv, sentence", IDLE)
def test_an_option_without_effect_in_the_file_of_an_older_run_is_only_reported(tmp_path, argv, sentence):
    """The run resumes and can be validated."""
    (tmp_path / "short.yaml").write_text("recipe: quickstart\n")
    config = parse("--config", str(tmp_path / "short.yaml"), *argv, "--run.precision", "fp32")
    (tmp_path / "config.yaml").write_text(c.dump(config))
    assert parse("--config", str(tmp_path / "config.yaml")) == config
    (said,) = doubtful(config, torch.device("cpu"), data_size=2)
    assert sentence in said
    assert [*doubtful(parse("--run.precision", "fp32"), torch.device("cpu"), data_size=1)] == []
    validated, _ = read_validation([str(tmp_path)])
    assert (validated.model, validated.schedule) == (config.model, config.schedule)


def test_zero_on_one_data_rank_is_reported():
    config = parse("--parallel.zero", "1", "--run.precision", "fp32")
    assert [*doubtful(config, torch.device("cpu"), data_size=2)] == []
    (said,) = doubtful(config, torch.device("cpu"), data_size=1)
    assert said.startswith("--parallel.zero is 1, and there is 1 data rank") and "start more ranks" in said
    in_host_memory = parse("--parallel.zero", "offload", "--run.precision", "fp32")
    assert [*doubtful(in_host_memory, torch.device("cpu"), data_size=1)] == []  # offload needs it


CUTS = ("--parallel.pipeline 2", "--parallel.sequence 2", "--parallel.tensor.mode 1d --parallel.tensor.size 2")


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("option", ["drop_path_rate", "proj_drop_rate", "pos_drop_rate", "drop_rate"])
def test_ranks_that_share_a_model_are_said_to_draw_other_masks(cut, option):
    small = ["--run.precision", "fp32", f"--model.{option}", "0.1"]
    (said,) = doubtful(parse(*small, *cut.split()), torch.device("cpu"), data_size=1)
    assert said.startswith(f"--model.{option} 0.1 and --parallel ") and "may draw other masks" in said
    assert [*doubtful(parse(*small), torch.device("cpu"), data_size=2)] == []
    assert [*doubtful(parse("--run.precision", "fp32", *cut.split()), torch.device("cpu"), data_size=2)] == []


def test_every_option_of_augmentation_arrives():
    section = c.AugmentConfig(
        reprob=0.25, mixup_alpha=0.2, cutmix_alpha=0.3, label_smoothing=0.1
    )
    loss = c.LossConfig(dense_weight=0.5, ground_truth="intended")
    model = c.ModelConfig(num_classes=7, img_size=64)
    augment = assembly.build_augment(c.TrainConfig(model=model, augment=section, loss=loss))
    assert vars(augment) == {
        "num_classes": 7,
        "mixup_alpha": 0.2,
        "cutmix_alpha": 0.3,
        "label_smoothing": 0.1,
        "erase_prob": 0.25,
        "grid": 4,
        "ground_truth": "intended",
        "mix_token": False,
    }


@pytest.mark.parametrize(
    "name, options",
    [
        ("lamb", {"betas": (0.8, 0.9), "eps": 1e-3}),
        ("adamw", {"betas": (0.8, 0.9), "eps": 1e-3}),
        ("sgd", {}),
        ("lars", {"eps": 1e-3}),
    ],
)
def test_every_option_of_the_optimizer_arrives(name, options):
    section = c.OptimConfig(name=name, lr=0.5, weight_decay=0.25, **options)
    optimizer = assembly.build_optimizer(c.TrainConfig(optim=section), torch.nn.Linear(2, 2), impl=None)
    assert optimizer.param_groups[0].items() >= ({"lr": 0.5, "weight_decay": 0.25} | options).items()


def told(*, deterministic: bool = False, on_gpus: bool = False, limit_s: float | None = None, **present: str):
    """The variables that Horovod reads; present: those that are set before."""
    environment = {f"HOROVOD_{name}": value for name, value in present.items()}
    HorovodConfig(stall_limit_s=limit_s).apply(environment, deterministic=deterministic, on_gpus=on_gpus)
    return {name.removeprefix("HOROVOD_"): value for name, value in environment.items()}


def test_what_horovod_is_told():
    limit = {"STALL_SHUTDOWN_TIME_SECONDS": "600"}
    assert told() == limit | {"CYCLE_TIME": "5", "FUSION_THRESHOLD": str(2**20)} and told(on_gpus=True) == limit
    assert told(AUTOTUNE="1") == limit | {"AUTOTUNE": "1"}
    assert told(deterministic=True, on_gpus=True) == limit | {"FUSION_THRESHOLD": "0"}
    assert told(FUSION_THRESHOLD="64", CYCLE_TIME="2") == limit | {"FUSION_THRESHOLD": "64", "CYCLE_TIME": "2"}
    assert told(AUTOTUNE="1", on_gpus=True) == limit | {"AUTOTUNE": "1", "HIERARCHICAL_ALLREDUCE": "0"}
    assert told(limit_s=30, on_gpus=True) == {
        "STALL_SHUTDOWN_TIME_SECONDS": "30",
        "STALL_CHECK_TIME_SECONDS": "15",
    }


def test_how_long_ranks_wait_at_the_start():
    """A limit that was chosen holds from the start on, unless the start has its own."""
    variable = "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS"
    assert HorovodConfig().start_limit({}) == 1800
    assert HorovodConfig().start_limit({variable: "40"}) == 40
    assert HorovodConfig(stall_limit_s=30).start_limit({variable: "30"}) == 30
    assert HorovodConfig(stall_limit_s=30, start_limit_s=90).start_limit({variable: "30"}) == 90
    for limits, told in ([1800, 600], "1800"), ([4, 4.5], "5"), ([0, 600], "0"), ([600, 0], "0"):
        environment = {variable: "600"}
        with told_the_longest(environment, limits):
            assert environment == {variable: told}
        assert environment == {variable: "600"}


@pytest.mark.parametrize(
    "name, sentence",
    [("HOROVOD_HIERARCHICAL_ALLREDUCE", "is set, which copies gradients to the host"),  # MPI reduces it there
     ("HOROVOD_ENABLE_ASYNC_COMPLETION", "is set, with which the backward pass waits for each reduction")],
)  # fmt: skip
def test_variables_that_make_gpus_slow_are_refused(name, sentence):
    with pytest.raises(ValueError, match=f"^{name} {sentence}"):
        HorovodConfig().apply({name: "1"}, deterministic=False, on_gpus=True)
    HorovodConfig().apply({name: "0"}, deterministic=False, on_gpus=True)
    HorovodConfig().apply({name: "1"}, deterministic=False, on_gpus=False)


@pytest.mark.parametrize("option", GONE)
def test_an_option_of_an_older_version_loads_with_its_default(tmp_path, option):
    """Another value is refused in one sentence that says what to use."""
    section, name = option.split(".")
    default, instead = GONE[option]
    whole = c.dump(c.TrainConfig())
    for given, expected in ((default, None), ("else", instead)):
        file = tmp_path / "config.yaml"
        file.write_text(whole.replace(f"{section}:\n", f"{section}:\n  {name}: '{given}'\n", 1))
        if expected is None:
            assert c.load(str(file)) == c.TrainConfig()
        else:
            with pytest.raises(ValueError, match=f"no option {option}; {re.escape(expected)}, and of an older run --"):
                c.load(str(file))


OLDER = {
    "data: {ratio: [0.75, 1.3333333333333333]}": c.TrainConfig(),
    "log: {tensorboard: true, wandb: false}": c.TrainConfig(),
    "log: {tensorboard: false}": c.TrainConfig(log=c.LogConfig(to=None)),
    "log: {tensorboard: true, wandb: true}": c.TrainConfig(log=c.LogConfig(to="tensorboard,wandb")),
    "log: {tensorboard: false, wandb: true}": c.TrainConfig(log=c.LogConfig(to="wandb")),
    "parallel: {zero: 1, offload: true}": c.TrainConfig(parallel=c.ParallelConfig(zero="offload")),
    "parallel: {zero: 1, offload: false}": c.TrainConfig(parallel=c.ParallelConfig(zero=1)),
}


def test_the_options_of_older_recipes_mean_the_same():
    """Published recipes gave these values to options that went."""
    old = c.dump(c.TrainConfig()).replace("crop_padding: null", "crop_padding: 0\n  train_crop: random_resized")
    assert c.load_text(old, place="old") == c.TrainConfig()
    padded = "data: {train_crop: pad, crop_padding: 4}\n"
    assert c.load_text(padded, place="old").data == c.DataConfig(crop_padding=4)
    drawn = "data: {interpolation: null, train_interpolation: random}\nschedule: {prefix: false, stairs: true}\n"
    config = c.load_text(drawn, place="old")
    for text, expected in OLDER.items():
        assert c.load_text(text, place="old") == expected
    assert (config.data.interpolation, config.schedule.stairs) == ("random", "timm")
    for text, sentence in (
        ("data: {interpolation: bilinear, train_interpolation: bicubic}", "--data.interpolation has the filter"),
        ("schedule: {prefix: false, stairs: false}", "--schedule.stairs timm lets the decay begin with the run"),
    ):
        with pytest.raises(ValueError, match=sentence):
            c.load_text(text, place="old")


@pytest.mark.parametrize("option", GONE)
def test_the_command_of_an_older_run_still_resumes_it(option):
    default, instead = GONE[option]
    assert parse(f"--{option}={default}") == parse()
    with pytest.raises(ValueError, match=f"no option {option}; {re.escape(instead)}, and of an older run --"):
        parse(f"--{option}=else")


@pytest.mark.parametrize(
    "line, same",
    [
        ("--log.tensorboard false", "--log.to none"),
        ("--log.tensorboard true --log.wandb true", "--log.to tensorboard,wandb"),
        ("--log.wandb true --log.tensorboard false", "--log.to wandb"),
        ("--log.wandb", "--log.to tensorboard,wandb"),
        ("--parallel.offload true --parallel.zero 1", "--parallel.zero offload"),
        ("--schedule.stairs true --schedule.prefix false", "--schedule.stairs timm"),
    ],
)
def test_options_that_were_merged_mean_the_same_on_a_command_line(line, same):
    assert parse(*line.split()) == parse(*same.split())


def test_an_option_that_went_is_refused_beside_the_one_that_took_its_place():
    with pytest.raises(ValueError, match="no option log.tensorboard; --log.to names where the numbers go, or none"):
        parse("--log.to", "wandb", "--log.tensorboard", "false")


def test_no_option_is_offered_that_was_not_measured():
    assert [name for name, one in all_options(c.TrainConfig()).items() if "not yet measured" in one.text.lower()] == []


@pytest.mark.parametrize("able, impl", [([True, True], "compile"), ([True, False], "eager"), ([False, True], "eager")])
def test_lamb_is_compiled_on_all_ranks_or_on_none(able, impl):
    comm = SimpleNamespace(rank=0, allgather_object=lambda value, *, name: able)
    assert assembly.lamb_impl(comm, torch.device("cpu")) == impl


def test_unknown_key_in_yaml(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text("optim:\n  lrr: 0.5\n")
    with pytest.raises(ValueError, match="There is no option optim.lrr; did you mean --optim.lr?"):
        parse("--config", str(file))


def test_differences():
    one = RECIPES["vit_b16"]()
    other = replace(one, optim=replace(one.optim, lr=1.0))
    assert c.differences(one, one) == {}
    assert c.differences(one, other) == {"optim.lr": (1.8e-2, 1.0)}


def test_numbers_go_to_several_trackers_in_any_order():
    assert parse("--log.to", "mlflow,tensorboard").log.to == "mlflow,tensorboard"
    assert parse("--log.to", "none").log.to is None
    for text in ("mlfow", "tensorboard, wandb", ""):
        with pytest.raises(ValueError, match="^--log.to is .*: expected some of tensorboard,wandb,mlflow, or null.$"):
            parse("--log.to", text)
