"""Models of timm by the name timm/NAME: timm's logits, its weights, its preparation of images, and what is refused."""

import json

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import zoo
from zoo import create_model, weights

import timm  # isort: skip  (after zoo, which makes it importable beside a CPU build of torch)

TINY = ("test_resnet", "test_vit", "test_efficientnet", "test_convnext")
FAMILIES = {  # a model of each, and the side of its images
    "resnet50": 224,
    "resnet10t": 64,
    "deit3_small_patch16_224": 384,
    "convnext_atto": 96,
    "swin_tiny_patch4_window7_224": 224,
    "efficientnet_b0": 100,
    "beit_base_patch16_224": 224,
    "mobilenetv3_small_050": 64,
    "regnetx_002": 64,
    "mixer_s32_224": 224,
    "poolformer_s12": 64,
    "eva02_tiny_patch14_224": 224,
}
NANO = {"img_size": 64, "num_classes": 7}


def on_meta(name: str, **options) -> torch.nn.Module:
    """A model without memory, which is tried."""
    with torch.device("meta"):
        return create_model(f"timm/{name}", **options)


@pytest.mark.parametrize("name", FAMILIES)
def test_each_family_is_built_and_tried(name):
    model = on_meta(name, img_size=FAMILIES[name], num_classes=7)
    assert model.default_cfg["input_size"] == (3, FAMILIES[name], FAMILIES[name])
    own = timm.get_pretrained_cfg(name)
    for value in ("mean", "std", "crop_pct", "interpolation"):
        assert model.default_cfg[value] == getattr(own, value)


@pytest.mark.parametrize("name", TINY)
def test_weights_and_logits_are_timms(name, tmp_path):
    """A file of timm's, also with a head for other classes."""
    torch.manual_seed(0)
    theirs = timm.create_model(name, num_classes=5).eval()
    save_file({key: tensor.contiguous() for key, tensor in theirs.state_dict().items()}, tmp_path / "w.safetensors")
    ours = create_model(f"timm/{name}", img_size=160, num_classes=5, weights=tmp_path / "w.safetensors").eval()
    images = torch.randn(2, 3, 160, 160)
    with torch.inference_mode():
        assert torch.equal(ours(images), theirs(images))
    assert weights.count_classes(ours, tmp_path / "w.safetensors") == 5
    other = create_model(f"timm/{name}", img_size=160, num_classes=3)
    weights.load_weights(other, tmp_path / "w.safetensors")
    with pytest.raises(ValueError, match="has a head of 5 classes, the model one of 3"):
        weights.load_weights(other, tmp_path / "w.safetensors", new_heads=False)
    kept = dict(ours.state_dict())
    assert sum(torch.equal(kept[key], tensor) for key, tensor in other.state_dict().items()) >= len(kept) - 2


def test_weights_of_another_size_are_resized_as_timm_does_it(tmp_path):
    """The position embedding of DeiT III has no place for its class token, unlike that of the zoo's ViTs."""
    torch.manual_seed(0)
    name, options = "deit3_small_patch16_224", {"num_classes": 4, "depth": 1}
    theirs = timm.create_model(name, **options)
    torch.nn.init.normal_(theirs.pos_embed)
    save_file(theirs.state_dict(), tmp_path / "w.safetensors")
    published = {"file": str(tmp_path / "w.safetensors"), "num_classes": 4}
    peer = timm.create_model(name, img_size=96, pretrained=True, pretrained_cfg_overlay=published, **options)
    ours = create_model(f"timm/{name}", img_size=96, num_classes=4)
    del ours.blocks[1:]
    weights.load_weights(ours, tmp_path / "w.safetensors")
    assert torch.equal(ours.pos_embed, peer.pos_embed) and ours.pos_embed.shape == (1, 36, 384)


def test_our_weights_go_back_into_timm(tmp_path):
    model = create_model("timm/test_resnet", **NANO)
    zoo.save_weights(model, tmp_path / "w.safetensors")
    theirs = timm.create_model("test_resnet", num_classes=7, checkpoint_path=str(tmp_path / "w.safetensors"))
    assert all(torch.equal(tensor, model.state_dict()[key]) for key, tensor in theirs.state_dict().items())


@pytest.mark.parametrize(
    "name, options, sentence",
    [
        ("resnet5O", {}, "there is no model 'timm/resnet5O': did you mean timm/resnet50"),
        ("resnet50.a1_in2k", {}, "did you mean timm/resnet50.a1_in1k"),
        ("vgg11", {"drop_path_rate": 0.1}, "drop_path_rate of timm/vgg11 is 0.1, and timm/vgg11 has no use for it"),
        ("resnet18", {"pos_drop_rate": 0.1}, "pos_drop_rate of timm/resnet18 is 0.1, and timm/resnet18 has no use"),
        ("resnet18", {"global_pool": "avg"}, "global_pool of timm/resnet18 is 'avg', and timm/resnet18 has no use for"),
        ("test_vit", {"img_size": 100}, "img_size 100 does not fit timm/test_vit: "),
        ("efficientformer_l1", {"img_size": 160}, "img_size 160 does not fit timm/efficientformer_l1: .* made for 224"),
    ],
)
def test_what_a_model_cannot_do_is_refused(name, options, sentence):
    with pytest.raises(ValueError, match=sentence):
        on_meta(name, **options)


class Own(nn.Module):
    """A model without any of timm's attributes."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.body, self.head = nn.Conv2d(3, 8, 8, 8), nn.Linear(8, num_classes)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(images).relu().mean((2, 3)))


@timm.models.register_model
def own_of_a_user(pretrained=False, num_classes=10, **options):
    return Own(num_classes)


def test_a_model_of_the_user_needs_no_attributes(tmp_path):
    model = on_meta("own_of_a_user", **NANO)
    assert model.default_cfg["input_size"] == (3, 64, 64) and model.num_classes == 7
    model, images = create_model("timm/own_of_a_user", **NANO), torch.randn(2, 3, 64, 64)
    zoo.save_weights(model, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(zoo.hub.describe("timm/own_of_a_user", model)))
    assert torch.equal(create_model(weights=tmp_path)(images), model(images))
    other = create_model("timm/own_of_a_user", img_size=32, num_classes=3, weights=tmp_path)
    assert torch.equal(other.body.weight, model.body.weight) and other.head.weight.shape == (3, 8)


class WithFc(nn.Module):
    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.body, self.fc = nn.Conv2d(3, 8, 8, 8), nn.Linear(8, num_classes)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.fc(self.body(images).relu().mean((2, 3)))


@timm.models.register_model
def own_with_fc(pretrained=False, num_classes=10, **options):
    return WithFc(num_classes)


def test_a_head_that_the_model_does_not_name_is_one_sentence(tmp_path, monkeypatch):
    """Other classes, or another order of them, need another head, or other rows."""
    model, names = create_model("timm/own_with_fc", **NANO), [*"abcdefg"]
    zoo.save_weights(model, tmp_path / "model.safetensors")
    content = zoo.hub.describe("timm/own_with_fc", model, label_names=names)
    (tmp_path / "config.json").write_text(json.dumps(content))
    sentence = "other classes than the model, whose head is not named head or aux_head: give the model its name, as in"
    for others in (names[::-1], [*"tuvwxyz"]):
        with pytest.raises(ValueError, match=sentence):
            create_model("timm/own_with_fc", weights=tmp_path, label_names=others)
    monkeypatch.setattr(WithFc, "pretrained_cfg", {"classifier": "fc"}, raising=False)
    turned = create_model("timm/own_with_fc", weights=tmp_path, label_names=names[::-1])
    assert torch.equal(turned.fc.weight, model.fc.weight.flip(0))
    assert create_model("timm/own_with_fc", weights=tmp_path, num_classes=3).fc.weight.shape == (3, 8)


@pytest.mark.parametrize("name, warned", [("timm/dm_nfnet_f0", True), ("timm/resnet18", False)])
def test_a_warning_says_where_timm_squeezes_images(name, warned, caplog):
    on_meta(name.removeprefix("timm/"))
    assert ("prepares its images by squash, and here the centre is cut out" in caplog.text) == warned


def test_a_model_of_the_user_that_is_not_registered_is_one_sentence(tmp_path):
    zoo.save_weights(create_model("timm/own_of_a_user", **NANO), tmp_path / "model.safetensors")
    content = zoo.hub.describe("timm/own_of_a_user", create_model("timm/own_of_a_user", **NANO))
    (tmp_path / "config.json").write_text(json.dumps(content | {"architecture": "own_of_another"}))
    sentence = "belongs to the model own_of_another, which timm does not have: run the file that registers it first, as"
    with pytest.raises(ValueError, match=sentence):
        create_model(weights=tmp_path)
    with pytest.raises(ValueError, match="no model 'timm/own_of_another': .*when the file that registers it has run"):
        create_model("timm/own_of_another")
