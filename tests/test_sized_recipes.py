"""Recipes that follow from the images: their number chooses batch and length, and their labels the classes."""

import math
import pickle
import sys
from dataclasses import replace

import pytest

import zoo
from largebatch import assembly
from largebatch import config as configs
from largebatch import recipes, train
from largebatch.config import TrainConfig, Unsized, check, dump, parse
from largebatch.data.order import Plan
from largebatch.recipes import sized

IMAGENET = 1_281_167


def chosen(*argv: str, images: int | None = None) -> TrainConfig:
    """The config of a command line for so many training images."""
    return parse(argv, choose_recipe=lambda given: recipes.choose(given, images, argv=argv))


def test_the_recipes_know_the_models_of_the_zoo():
    structures = zoo.vit.STRUCTURES | zoo.volo.STRUCTURES
    assert recipes.MODELS == {name: structures[name].timm_name for name in zoo.MODELS}


@pytest.mark.parametrize(
    "images, scratch, finetune",  # batch and micro-batch
    [
        (1, (1, 1), (1, 1)),
        (12, (8, 2), (8, 2)),
        (60, (32, 8), (32, 8)),
        (600, (64, 16), (64, 16)),
        (1_437, (64, 16), (64, 16)),
        (5_000, (128, 16), (128, 16)),
        (10_000, (256, 32), (256, 32)),
        (50_000, (1024, 64), (512, 64)),
        (900_000, (4096, 64), (512, 64)),
    ],
)
def test_batches_follow_from_the_number_of_images(images, scratch, finetune):
    for more, expected in (((), scratch), (("--init-from", "w.pt"), finetune)):
        config = chosen("--model", "vit_s16", "--data", "/own", *more, images=images)
        assert (config.data.global_batch_size, config.data.micro_batch_size) == expected
        assert config.data.global_batch_size <= images


def test_which_recipe_by_the_number_of_images():
    data, weights = ("--data", "/own"), ("--init-from", "w.pt")
    for images in (recipes.MANY, IMAGENET):
        assert chosen(*data, images=images).data.global_batch_size == 32768
        assert chosen(*data, "--model", "volo_d1", *weights, images=images).recipe == "volo_d1"
    assert chosen(*data, images=recipes.MANY - 1).recipe == "scratch"
    assert chosen(*data, *weights, images=recipes.MANY - 1).recipe == "finetune"
    assert chosen("--data", "synthetic", images=4000).recipe == "vit_b32"  # it stands for ImageNet
    assert chosen(*data, "--model", "timm/resnet50", images=IMAGENET).recipe == "scratch"  # nobody has published one
    assert chosen(*data, "--recipe", "vit_b32", images=12).data.global_batch_size == 32768
    for argv, expected in ((data, True), ((*data, "--recipe", "vit_b32"), False), (("--model", "vit_b16"), False)):
        assert recipes.depends_on_data(argv) == expected
    assert recipes.depends_on_data([*data, "--recipe", "finetune", *weights])
    assert recipes.depends_on_data(["--data", "synthetic", "--model", "vit_ti16"])


def test_the_run_folder_does_not_depend_on_the_number_of_images():
    """It is made before the images are counted."""
    for model in ("vit_b32", "vit_s16", "volo_d1"):
        folders = {chosen("--data", "/own", "--model", model, images=images).folder for images in (None, 12, IMAGENET)}
        assert folders == {f"runs/{model}"}
    assert chosen("--data", "/own", "--model", "timm/resnet50").folder == "runs/timm_resnet50"


def test_a_given_batch_gets_a_micro_batch_that_divides_it():
    for batch in (7, 100, 4096, 96):
        data = chosen("--data", "/own", "--data.global_batch_size", str(batch), images=5000).data
        assert data.global_batch_size == batch and batch % data.micro_batch_size == 0
    assert chosen("--data", "/own", "--data.global_batch_size", "100", images=5000).data.micro_batch_size == 10


@pytest.mark.parametrize("images, epochs, batch", [(IMAGENET, 8, 512), (80_000, 32, 512), (3_680, 40, 128)])
def test_fine_tuning_is_the_vit_papers(images, epochs, batch):
    """SGD, momentum 0.9, no decay, clip 1, a cosine from 0.03 at a batch of 512; 20,000 steps on ImageNet."""
    config = chosen("--recipe", "finetune", "--init-from", "w.pt", "--data", "/own", images=images)
    check(config)
    o = config.optim
    assert (o.name, o.lr, o.weight_decay, o.clip_norm) == ("sgd", 0.03, 0.0, 1.0)  # sgd has a momentum of 0.9
    assert (config.run.duration, config.data.global_batch_size) == (f"{epochs} epochs", batch)
    assert assembly.peak_lr(config) == pytest.approx(0.03 * batch / 512)
    plan = Plan(images, batch, config.data.micro_batch_size, epochs * images, seed=0)
    schedule, steps = assembly.build_schedule(config, plan), plan.num_steps
    assert steps == pytest.approx(20_000, rel=1e-3) or images < IMAGENET
    warmup = steps // 40  # 500 steps on ImageNet
    middle = warmup + (steps - warmup) // 2
    assert schedule(middle) == pytest.approx(0.5, abs=2e-3) and schedule(steps - 1) < 1e-5


def test_training_from_scratch_is_deit_iiis():
    config = chosen("--data", "/own", "--model", "vit_s16", images=50_000)
    check(config)
    assert (config.optim.name, config.optim.preset, config.optim.weight_decay) == ("lamb", "paper", 0.02)
    assert assembly.peak_lr(config) == pytest.approx(3e-3 * math.sqrt(1024 / 2048))
    assert (config.augment.mixup_alpha, config.augment.cutmix_alpha) == (0.8, 1.0)
    assert math.floor(IMAGENET / 32768) == sized.UPDATES


def test_a_fine_tuning_continues_the_model_of_its_run(tmp_path):
    """Also if a weights file of the run is named; what is given counts."""
    model = replace(TrainConfig().model, name="vit_nano32", img_size=64, num_classes=10)
    (tmp_path / "config.yaml").write_text(dump(replace(TrainConfig(recipe="quickstart"), model=model)))
    weights = tmp_path / "checkpoints" / "00000057" / "model.safetensors"
    for place in (tmp_path, weights):
        config = chosen("--data", "/own", "--init-from", str(place), images=1000)
        assert (config.model.name, config.model.img_size, config.recipe) == ("vit_nano32", 64, "finetune")
        assert config.model.num_classes == 0 and config.folder == "runs/vit_nano32_finetuned"
    config = chosen("--data", "/own", "--init-from", str(tmp_path), "--img-size", "96", "--model", "vit_b16", images=9)
    assert (config.model.name, config.model.img_size) == ("vit_b16", 96)
    with pytest.raises(ValueError, match="Recipe finetune is a fine-tuning: give the weights .* with --init-from"):
        chosen("--recipe", "finetune", "--data", "/own")


@pytest.mark.parametrize(
    "argv, sentence",
    [
        ("--data /own --model vit_b31", "There is no model 'vit_b31': did you mean vit_b32?"),
        ("--model vit_b_32", "There is no model 'vit_b_32': did you mean vit_b32?"),
        ("--recipe vit_b32 --model vit_base_patch16_384", "did you mean vit_b16, or timm/vit_base_patch16_384?"),
        ("--model resnet50", "no model 'resnet50': if it is timm's, give timm/resnet50. --model takes vit_b32"),
        ("--data /own --model vit_ti61", "There is no model 'vit_ti61': did you mean vit_ti16?"),
        ("--data /own --recipe finetun", "There is no recipe 'finetun': did you mean finetune?"),
        ("--data /own --model timm/resnet18 --parallel.tensor.size 2", "only the zoo's own models can be cut"),
        ("--data /own --model timm/volo_d1_224 --loss.dense_weight 1", "--loss.dense_weight is 1.0 and --model timm/v"),
        ("--data /own --model timm/resnet18 --data.token_labels", "--data.token_labels is True and --model timm/resn"),
    ],
)
def test_mistakes_are_refused_before_torch_is_needed(argv, sentence):
    with pytest.raises(ValueError) as error:
        chosen(*argv.split())
    assert sentence in str(error.value)


# -- recipes from a file -----------------------------------------------------------------------------------------

RECIPE = """
from largebatch.config import DataConfig, OptimConfig, TrainConfig


def mine():
    return TrainConfig(data=DataConfig(path="/own"), optim=OptimConfig(lr=0.5))
"""


def test_a_recipe_from_a_file(tmp_path):
    file = tmp_path / "my.py"
    file.write_text(RECIPE)
    config = chosen("--recipe", f"{file}:mine", "--optim.lr", "0.25")
    assert (config.data.path, config.optim.lr, config.recipe, config.folder) == (
        "/own", 0.25, f"{file}:mine", "runs/mine",
    )  # fmt: skip
    (tmp_path / "config.yaml").write_text(dump(config))
    file.unlink()  # the run goes on without it
    assert chosen("--config", str(tmp_path / "config.yaml")) == config
    with pytest.raises(ValueError, match="there is no file .*my.py"):
        chosen("--recipe", f"{file}:mine")


def test_a_file_is_a_module_and_runs_once_until_it_changes(tmp_path):
    """dataclasses, pickle and timm look up the module of a class or a function by its name."""
    file = tmp_path / "my.py"
    text = "import dataclasses, largebatch.config as c\nRUNS = []\n@dataclasses.dataclass\nclass A:\n    x: int = {}\n"
    text += "def mine():\n    RUNS.append(1)\n    assert len(RUNS) == {}\n    return c.TrainConfig()\n"
    for value, runs in ((1, 1), (1, 2), (2, 1)):
        file.write_text(text.format(value, "len(RUNS)" if value == 1 else 1))
        chosen("--recipe", f"{file}:mine")
        module = sys.modules["recipe_my"]
        assert pickle.loads(pickle.dumps(module.A())) == module.A(value) and len(module.RUNS) == runs


@pytest.mark.parametrize(
    "text, function, sentence",
    [
        ("def f(:\n", "f", "my.py, line 1: SyntaxError"),
        ("\n\nx = 1 / 0\n", "f", "my.py, line 3: ZeroDivisionError: division by zero"),
        ("import largebatch.config as c\ndef f():\n    return c.TrainConfig(a=1)\n", "f", "my.py, line 3: TypeError"),
        ("import largebatch.recipes as r\n\n\ndef f():\n    r.check_model('x')\n", "f", "my.py, line 5: ValueError"),
        ("def f():\n    return 3\n", "f", "it returns int, expected a TrainConfig"),
        ("def f():\n    return 3\n", "g", "my.py has no function g"),
        ("def f():\n    return 3\n", "", "expected {file}:FUNCTION"),
    ],
)
def test_a_mistake_in_a_file_is_one_sentence_with_its_line(tmp_path, text, function, sentence):
    file = tmp_path / "my.py"
    file.write_text(text)
    with pytest.raises(ValueError) as error:
        chosen("--recipe", f"{file}:{function}" if function else str(file))
    assert sentence.format(file=file) in str(error.value) and "\n" not in str(error.value)


WEIGHTS = ("--init-from", "w.pt", "--recipe", "finetune")


@pytest.mark.parametrize("images", [12, 600, 50_000, IMAGENET])
@pytest.mark.parametrize(
    "given",
    [
        (),
        ("--model", "vit_s16"),
        WEIGHTS,
        WEIGHTS[:2],
        ("--model", "volo_d1", "--img-size", "384", *WEIGHTS[:2]),
        ("--model=timm/resnet18",),
        ("--data.global_batch_size=96",),
    ],
)
def test_a_program_gets_the_config_of_the_command_line_and_keeps_what_it_changed(images, given):
    argv = ("--data", "/own", "--run.seed=3", *given)
    config = train.read(argv)
    assert isinstance(config, Unsized) and train.sized(config, images) == train.read(argv, images)
    assert config.folder == train.read(argv, images).folder  # it is open before the images are counted
    changed = replace(config, run=replace(config.run, seed=7, max_steps=2))
    expected = train.read(argv, images)
    assert train.sized(changed, images) == replace(expected, run=replace(expected.run, seed=7, max_steps=2))
    with pytest.raises(ValueError, match="--run.max_steps is -1: expected at least 0"):
        train.sized(replace(config, run=replace(config.run, max_steps=-1)), images)


def test_a_config_that_does_not_depend_on_the_images_and_its_texts(tmp_path):
    for argv in ((), ("--recipe", "vit_b32", "--data", "/own"), ("--data", "synthetic")):
        assert type(train.read(argv)) is TrainConfig
    config = train.read(["--data", "/own"])
    assert "argv" not in dump(config) and "argv" not in configs.options(config)
