"""The half-life of the second moment: beta2 by the images of each step, its exact bias correction, and mistakes."""

import copy
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from test_engine import make_trainer
from test_optim import COMPILE, Reference, make_params, relative, set_grads
from test_ramp import RAMP, config_of, plan_of
from torch import nn

from largebatch import assembly
from largebatch import config as configs
from largebatch.config import TrainConfig
from largebatch.config.cli import for_optimizer
from largebatch.engine import Hook
from largebatch.optim import Lamb, build_optimizer, follow_half_life
from largebatch.optim.muon import hidden_matrices
from largebatch.rate_search import ramped
from largebatch.recipes import choose

SIZES, HALF_LIFE = [8, 8, 8, 20, 20, 36, 36, 5], 60  # images of the steps; the last is short


class Changing(Reference):
    """LAMB in float64, whose beta2 changes; the product of all of them corrects the bias."""

    def __init__(self, x, **options):
        super().__init__(x, **options)
        self.power, self.x = 1.0, self.x.copy()

    def step(self, g, lr, *, images):
        self.b2 = 2 ** (-images / HALF_LIFE)
        self.power *= self.b2
        m_bias, self.t = 1 - self.b1 ** (self.t + 1), self.t + 1
        self.m, self.v = self.b1 * self.m + (1 - self.b1) * g, self.b2 * self.v + (1 - self.b2) * g**2
        m, v = (self.m / m_bias, self.v / (1 - self.power)) if self.debias else (self.m, self.v)
        u = m / (np.sqrt(v) + self.eps) + self.wd * self.x
        ratio = np.linalg.norm(self.x) / np.linalg.norm(u) if self.adapt else 1.0
        self.x = self.x - lr * min(ratio, self.cap) * u


def train(optimizer, params, references, *, sizes=SIZES, lr=0.02):
    for group in optimizer.param_groups:
        group.update({"lr": lr} | ({"half_life": HALF_LIFE} if "betas" in group else {}))
    for step, images in enumerate(sizes):
        set_grads(params, step)
        for group in optimizer.param_groups:
            follow_half_life(group, images, before=sum(sizes[:step]))
        for p, reference in zip(params, references):
            reference.step(p.grad.numpy().copy(), lr, images=images)
        optimizer.step()


@pytest.mark.parametrize("impl", ["plain", "eager", COMPILE])
@pytest.mark.parametrize("debias", [True, False])
def test_lambs_trajectory_is_that_of_a_plain_loop(impl, debias):
    params = make_params()
    references = [Changing(p.detach().numpy(), wd=0.1, debias=debias) for p in params]
    train(Lamb(params, weight_decay=0.1, bias_correction=debias, impl=impl), params, references)
    assert max(relative(p, reference.x) for p, reference in zip(params, references)) <= 1e-12


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_adamw_has_the_same_exact_correction(name):
    """Its arithmetic is then that of this project: torch's corrects as if the newest beta2 had been there always."""
    model = nn.Sequential(nn.Linear(5, 6), nn.LayerNorm(6), nn.Linear(6, 3)).double()
    optimizer = build_optimizer(model, name=name, lr=0.02, weight_decay=0.1, impl="eager")
    matrices = hidden_matrices(model) if name == "muon" else set()
    params = [p for group in optimizer.param_groups for p in group["params"] if p not in matrices]
    decays = {p: group["weight_decay"] for group in optimizer.param_groups for p in group["params"]}
    references = [Changing(p.detach().numpy(), wd=decays[p], eps=1e-8, adapt=False) for p in params]
    train(optimizer, params, references)
    assert max(relative(p, reference.x) for p, reference in zip(params, references)) <= 1e-12


@pytest.mark.parametrize("before", [60_000, 3_000_000_000])  # images; the second power underflows
def test_one_that_is_unfrozen_late_has_the_correction_of_its_own_steps(before):
    """Its first step of Adam is the learning rate, as any other's; also after a skipped step, and resumed."""
    early, late = (nn.Parameter(torch.zeros(3)) for _ in range(2))
    optimizer = Lamb([early, late], lr=1.0, eps=0.0, adapt=False)
    optimizer.param_groups[0]["half_life"] = 1_280_000
    early.grad = torch.ones(3)
    follow_half_life(optimizer.param_groups[0], 1024, before=before)
    optimizer.step()
    follow_half_life(optimizer.param_groups[0], 1024, before=before + 1024)
    late.grad = torch.tensor([1.0, -2.0, 3.0])
    optimizer.step()
    torch.testing.assert_close(late.detach(), -late.grad.sign(), rtol=1e-5, atol=0)
    twin = Lamb([nn.Parameter(p.detach().clone()) for p in (early, late)], lr=1.0, eps=0.0, adapt=False)
    twin.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for one in (optimizer, twin):
        for p in one.param_groups[0]["params"]:
            p.grad = torch.full((3,), 0.5)
        follow_half_life(one.param_groups[0], 1024, before=before + 2048)
        one.step()
    assert all(map(torch.equal, optimizer.param_groups[0]["params"], twin.param_groups[0]["params"]))


def test_adamw_of_this_project_is_torchs_while_beta2_stays():
    ours, theirs = make_params(), make_params()
    options = dict(lr=0.02, weight_decay=0.1, betas=(0.9, 0.99), eps=1e-8)
    optimizers = Lamb(ours, **options, adapt=False, impl="eager"), torch.optim.AdamW(theirs, **options)
    for step in range(8):
        for params, optimizer in zip((ours, theirs), optimizers):
            set_grads(params, step)
            optimizer.step()
    assert max(relative(p, q.detach()) for p, q in zip(ours, theirs)) <= 1e-12


def test_a_state_goes_on_without_the_half_life():
    """In a loop of one's own, which does not set beta2_power."""
    params = make_params()
    saved = Lamb(params, impl="eager")
    train(saved, params, [])
    fresh = Lamb(make_params(), impl="eager")
    fresh.load_state_dict(saved.state_dict())
    assert "beta2_power" not in fresh.param_groups[0]


def half_lives(config: TrainConfig, num_samples: int = 1_281_167) -> list[int]:
    optimizer = Lamb(make_params())
    assembly.set_half_life(config, optimizer, plan_of(config, num_samples))
    return [group.get("half_life", 0) for group in optimizer.param_groups]


def test_beta2_at_each_step_of_a_ramp():
    """Beside float64: 2^(-images / half-life), and the product of all so far; also in the last step, which is short."""
    config = config_of(RAMP, optim_second_moment_half_life="0.5 epochs")
    (half_life,), plan = half_lives(config), plan_of(config)
    assert half_life == math.ceil(1_281_167 / 2)
    group, product, seen = {"betas": (0.9, 0.999), "half_life": half_life}, 0.0, 0
    for step in range(plan.num_steps):
        images = plan.window_images(step)
        follow_half_life(group, images, before=seen)
        seen += images
        beta2 = np.exp2(np.float64(-images) / half_life)
        product += np.log2(beta2)
        assert group["betas"] == (0.9, pytest.approx(beta2, rel=1e-15))
        assert math.log2(group["beta2_power"]) == pytest.approx(product, rel=1e-9)
    assert seen == plan.num_images and images < plan.batch_size(plan.num_steps - 1)


def test_the_engine_counts_the_images_of_the_steps_that_it_has_taken():
    """A ramp of 8, 8, 16 and 4 images; the gradient of the second step is not finite, so its beta2 was never there."""
    seen = Betas()
    trainer = make_trainer(36, eval_images=0, hooks=(seen,))
    trainer.change_phases(((0, 8), (16, 16)))
    trainer.optimizer.param_groups[0].update(betas=(0.9, 0.999), half_life=10)  # SGD does not read them
    trainer.objective = lambda model, batch: model(batch.images).sum() * (1 if trainer.state.step != 1 else math.nan)
    trainer.fit()
    assert trainer.state.skipped == 1 and trainer.state.images - trainer.state.applied_images == 8
    assert [found for found, _ in seen.found] == [(0.9, 2 ** (-images / 10)) for images in (8, 8, 16, 4)]
    assert [power for _, power in seen.found] == [2 ** (-images / 10) for images in (8, 16, 24, 28)]


class Betas(Hook):
    def __init__(self) -> None:
        self.found = []

    def after_train_step(self, trainer, output) -> None:
        (group,) = trainer.optimizer.param_groups
        self.found.append((group["betas"], group["beta2_power"]))


def test_twice_the_batch_has_the_square_of_beta2():
    rates = []
    for batch in (2048, 4096):
        config = config_of("", data_global_batch_size=batch, optim_second_moment_half_life="1 epoch")
        group = {"betas": (0.9, 0.999), "half_life": half_lives(config)[0]}
        follow_half_life(group, plan_of(config).window_images(0), before=0)
        rates.append(group["betas"][1])
    assert rates[0] ** 2 == pytest.approx(rates[1], rel=1e-15) and rates[1] == 2 ** (-4096 / 1_281_167)


def test_without_the_option_nothing_changes():
    group = {"betas": (0.9, 0.999)}
    follow_half_life(group, 8, before=0)
    assert group == {"betas": (0.9, 0.999)} and half_lives(config_of("")) == [0]


def test_the_log_says_beta2_of_each_batch(caplog):
    caplog.set_level("INFO")
    half_lives(config_of(RAMP, optim_second_moment_half_life="1 epoch"))
    assert caplog.messages == [
        "second moment: a half-life of 1281167 images, so beta2 is 0.999446 at a global batch of 1024, 0.997786 at a "
        "global batch of 4096, 0.982428 at a global batch of 32768"
    ]


GIVEN = "--optim.second_moment_half_life is '1 epoch' and "
MISTAKES = {
    "--optim.name=sgd --optim.preset=null": f"{GIVEN}--optim.name sgd, which has no second moment: choose lamb or ",
    "--optim.name=lars --optim.preset=null": f"{GIVEN}--optim.name lars, which has no second moment: choose lamb or ",
    "--optim.betas=0.9,0.99": f"{GIVEN}--optim.betas [0.9, 0.99]: both give the decay rate of the second moment, so ",
    "--optim.second_moment_half_life=-1": "half_life is '-1': expected a number and a unit (epochs, steps or images ",
    "--optim.second_moment_half_life=soon": "half_life is 'soon': expected a number and a unit (epochs, steps or ",
    "--optim.second_moment_half_life=9__steps --schedule.batch_ramp=1024@0,32768@1__epoch":
        "half_life is '9 steps' and --schedule.batch_ramp '1024@0,32768@1 epoch': the steps of a ramp differ in length",
}  # fmt: skip


@pytest.mark.parametrize("entrance", ["command line", "file"])
@pytest.mark.parametrize("options", MISTAKES)
def test_a_mistake_is_one_sentence(options, entrance, tmp_path):
    argv = ["--model=vit_b32", "--data=synthetic", "--optim.second_moment_half_life=1 epoch"]
    given = [part.replace("__", " ") for part in options.split()]
    argv = [one for one in argv if one.split("=")[0] not in options] + given
    if entrance == "file":
        sections: dict[str, list[str]] = {"optim": [], "schedule": []}
        for one in argv[2:]:
            name, _, value = one[2:].partition("=")
            section, _, option = name.partition(".")
            sections[section].append(f"  {option}: {f'[{value}]' if option == 'betas' else repr(value)}")
        file = Path(tmp_path, "run.yaml")
        file.write_text("".join(f"{name}:\n" + "\n".join(lines) + "\n" for name, lines in sections.items() if lines))
        argv = [*argv[:2], f"--config={file}"]
    with pytest.raises(ValueError) as error:
        configs.parse(argv, choose_recipe=choose)
    said = str(error.value)
    assert MISTAKES[options] in said and said.count(". ") == 0 and "\n" not in said


@pytest.mark.parametrize("text, remedy", [("0 images", ""), ("260 images", "261"), ("1e15 images", "549755813888")])
def test_a_half_life_of_which_beta2_would_be_0_or_1_is_one_sentence(text, remedy):
    config = config_of("", optim_second_moment_half_life=text)
    with pytest.raises(ValueError) as error:
        half_lives(config)
    said = str(error.value)
    assert f"--optim.second_moment_half_life is '{text}'" in said and said.count(". ") == 0 and remedy in said
    if remedy:
        config = config_of("", optim_second_moment_half_life=f"{remedy} images")
        beta2 = np.float32(0.5 ** (32768 / half_lives(config)[0]))
        assert np.finfo(np.float32).tiny <= beta2 < 1


def test_a_search_of_the_rate_has_the_half_life_of_the_run():
    config = config_of("", optim_second_moment_half_life="10 %", run_duration="5 epochs")
    assert ramped(config, 1000).optim.second_moment_half_life == "500 images"


def test_a_search_of_the_rate_decays_as_at_the_peak_of_the_run():
    config = config_of("", optim_name="lamb", optim_preset="corrected")
    assert ramped(config, 1000).optim.preset == "decoupled"


def test_another_optimizer_than_the_recipes_leaves_its_half_life():
    optim = config_of("", optim_second_moment_half_life="1 epoch").optim
    assert for_optimizer(optim, "sgd").second_moment_half_life == "" and for_optimizer(optim, "lamb") == optim
