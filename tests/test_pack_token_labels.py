"""Adding label maps to shards: the published files come back bit for bit, a teacher's are its own logits."""

import io
import json
import shutil

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

import zoo
from largebatch import pack
from largebatch.data import label_maps, records, sources
from largebatch.pack import token_labels
from largebatch.pack.processes import World
from zoo import teacher
from zoo.teacher import build_teacher, dense_logits, input_size
from zoo.volo import VOLO, Structure

import timm  # isort: skip
from timm.data import create_transform  # isort: skip

CLASSES = ("n01", "n02", "n05")
SHAPE = (5, 3, 4)
SIZES = {"train": 5, "val": 2}


@pytest.fixture(autouse=True)
def cache_home(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))


@pytest.fixture
def shards(tmp_path):
    """Fifteen smooth pictures of several shapes, and six held out, packed in four shards."""
    rng = np.random.default_rng(0)
    for split, count in SIZES.items():
        for name in CLASSES:
            (tmp_path / "images" / split / name).mkdir(parents=True)
            for k in range(count):
                coarse = Image.fromarray(rng.integers(0, 256, (4, 5, 3), dtype=np.uint8))
                image = coarse.resize(tuple(rng.integers(150, 300, 2)), Image.Resampling.BICUBIC)
                image.save(tmp_path / "images" / split / name / f"{name}_{k}.JPEG", quality=95)
    assert pack.run([str(tmp_path / "images"), str(tmp_path / "shards"), "--shards", "4"]) == 0
    return tmp_path / "shards"


@pytest.fixture
def tree(tmp_path):
    """Label files as published."""
    rng, maps = np.random.default_rng(1), {}
    for name in CLASSES:
        (tmp_path / "labels" / name).mkdir(parents=True)
        for k in range(SIZES["train"]):
            one = np.stack([rng.normal(5, 3, SHAPE), rng.integers(0, 2049, SHAPE)]).astype(np.float16)
            torch.save(torch.from_numpy(one), tmp_path / "labels" / name / f"{name}_{k}.pt")
            maps[f"{name}_{k}.JPEG"] = one
    return tmp_path / "labels", maps


def features_of(folder, split="train"):
    """The features of all records, in order."""
    files = sorted(folder.glob(f"{split}-*"))
    return [records.decode_example(payload) for file in files for _, payload, _ in records.scan_records(str(file))]


def maps_of(folder):
    """Scores and classes of all training records, read through the index."""
    index = sources.open_source(str(folder), split="train")
    index.check_maps(2049)
    starts, size = index.map_offset.tolist(), label_maps.map_bytes(index.map_shape[0].tolist())
    paths = [index.files[number] for number in index.file]
    encoded = [np.frombuffer(records.read_span(path, at, size), np.uint8) for path, at in zip(paths, starts)]
    ids, scores = label_maps.decode_maps(encoded, index.map_shape[0].tolist())
    return scores, ids


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def add(source, out, *options):
    return pack.run(["token-labels", str(source), str(out), *map(str, options)])


# -- the published files ---------------------------------------------------------------------------------------------


def test_published_files_come_back_bit_for_bit(tmp_path, shards, tree, capsys):
    root, published = tree
    assert add(shards, tmp_path / "out", "--labels", root) == 0
    assert capsys.readouterr().out.endswith("train: 15 images with label maps\n")
    before, after = features_of(shards), features_of(tmp_path / "out")
    scores, ids = maps_of(tmp_path / "out")
    for k, features in enumerate(after):
        expected = published[features[records.FILENAME][0].decode()]
        assert scores[k].tobytes() == expected[0].tobytes() and np.array_equal(ids[k], expected[1])
        del features[label_maps.MAP], features[label_maps.SHAPE]
        assert features == before[k]
    assert features_of(tmp_path / "out", "validation") == features_of(shards, "validation")


def test_it_goes_on_where_it_was_interrupted_and_shares_the_work(tmp_path, shards, tree):
    root, _ = tree
    add(shards, tmp_path / "out", "--labels", root)
    whole = contents(tmp_path / "out")
    kept = tmp_path / "out" / "train-00001-of-00004"
    (tmp_path / "out" / "train-00002-of-00004").unlink()
    (tmp_path / "out" / ".train-00003-of-00004.killed").touch()
    status = kept.stat()
    add(shards, tmp_path / "out", "--labels", root)
    assert contents(tmp_path / "out") == whole and kept.stat() == status
    for rank in (0, 1, 0):  # the last one finishes, as after a barrier
        maps, made_by = token_labels.converted(str(root)), {"labels": str(root)}
        token_labels.add_maps(str(shards), str(tmp_path / "two"), maps, made_by=made_by, world=World(rank, 2))
        written = {path.name for path in (tmp_path / "two").glob("train-*")}
        assert len(written) == 2 + 2 * (rank == 1 or len(written) == 4)
    assert contents(tmp_path / "two") == whole
    shutil.move(root, tmp_path / "others")
    with pytest.raises(ValueError, match="already has shards that were .* .labels .*now .*others.: choose"):
        add(shards, tmp_path / "out", "--labels", tmp_path / "others")
    with pytest.raises(ValueError, match="already has shards that .* .there is no token_labels.json.: choose"):
        add(shards, shards, "--labels", tmp_path / "others")


def test_maps_are_replaced_and_bad_images_left_out(tmp_path, shards, tree):
    root, published = tree
    add(shards, tmp_path / "first", "--labels", root)
    index = sources.open_source(str(tmp_path / "first"), split="train")
    path, offset = index.files[index.file[6]], int(index.offset[6])
    data = bytearray(open(path, "rb").read())
    data[offset + 50] ^= 1  # in the record of image 6: its CRC is wrong
    open(path, "wb").write(data)
    assert pack.run(["check", str(tmp_path / "first")]) == 1
    for file in root.rglob("*.pt"):
        one = torch.load(file)
        one[0] += 1
        torch.save(one, file)
    add(tmp_path / "first", tmp_path / "second", "--labels", root)
    scores, _ = maps_of(tmp_path / "second")
    names = [features[records.FILENAME][0].decode() for features in features_of(shards)]
    expected = np.stack([published[name][0] + np.float16(1) for k, name in enumerate(names) if k != 6])
    assert np.array_equal(scores, expected)
    assert sum(map(len, contents(tmp_path / "second").values())) < sum(map(len, contents(tmp_path / "first").values()))


def test_what_is_no_label_file_is_named(tmp_path, shards, tree):
    root, _ = tree
    file = root / "n02" / "n02_3.pt"
    broken = [torch.zeros(5, 3, 4), torch.full((2, *SHAPE), 2050.0), torch.full((2, *SHAPE), float("inf"))]
    words = ["n02_3.pt is not a label file", "n02_3.pt has classes that half", "n02_3.pt has classes|not finite"]
    for tensor, word in zip(broken, words):
        torch.save(tensor.half(), file)
        with pytest.raises(ValueError, match=word):
            add(shards, tmp_path / "out", "--labels", root)
    file.unlink()
    with pytest.raises(ValueError, match="n02_3.pt cannot be read: .*No such file"):
        add(shards, tmp_path / "out", "--labels", root)
    shutil.rmtree(root / "n02")
    with pytest.raises(ValueError, match="2 class folders, expected 3, one per class"):
        add(shards, tmp_path / "out", "--labels", root)


def test_sources_that_cannot_be_labelled(tmp_path, shards, tree):
    root, _ = tree
    with pytest.raises(ValueError, match="has no TFRecords train-.: pack the images"):
        add(tmp_path / "images", tmp_path / "out", "--labels", root)
    with pytest.raises(ValueError, match="There is no folder .*nowhere"):
        add(shards, tmp_path / "out", "--labels", tmp_path / "nowhere")
    for file in shards.glob("train-*"):  # records without names
        payloads = [records.decode_example(payload) for _, payload, _ in records.scan_records(str(file))]
        [features.pop(records.FILENAME) for features in payloads]
        records.write_records(file, [records.encode_example(features) for features in payloads])
    with pytest.raises(ValueError, match="record 0 .*has no image/filename"):
        add(shards, tmp_path / "out", "--labels", root)


# -- teachers --------------------------------------------------------------------------------------------------------


def tiny(name, **options):
    torch.manual_seed(0)
    return timm.create_model(name, num_classes=7, **options).eval()


@pytest.mark.parametrize("name", ["test_resnet", "test_efficientnet", "test_nfnet", "test_byobnet", "test_vit2"])
@torch.inference_mode()
def test_the_mean_over_places_is_the_models_own_output(name):
    """Of models whose head is linear; ViT's is, without its norm."""
    model = tiny(name, **({"fc_norm": False} if name == "test_vit2" else {})).double()
    images = torch.randn(2, 3, 160, 160, dtype=torch.float64)
    dense = dense_logits(model, images)
    assert dense.shape[1] == 7 and dense.shape[2] == dense.shape[3] > 1 and dense.std(dim=(2, 3)).min() > 0
    torch.testing.assert_close(dense.mean(dim=(2, 3)), model(images), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("name, channels", [("test_convnext", 1), ("test_mambaout", 3), ("test_resnet", 1)])
@torch.inference_mode()
def test_each_place_is_an_image_of_its_own(name, channels):
    """Also for heads with a norm; rows and columns are where they were."""
    model, images = tiny(name), torch.randn(2, 3, 160, 128)
    features, dense = model.forward_features(images), dense_logits(model, images)
    rows, columns = (2, 3) if channels == 1 else (1, 2)
    assert (dense.shape[2], dense.shape[3]) == (features.shape[rows], features.shape[columns]) == (5, 4)
    alone = model.forward_head(features.narrow(rows, 3, 1).narrow(columns, 1, 1))
    torch.testing.assert_close(dense[:, :, 3, 1], alone, rtol=1e-5, atol=1e-6)


@torch.inference_mode()
def test_places_of_volo_are_its_auxiliary_heads():
    small = Structure((1, 1, 1, 1), (12, 24), (2, 4), mlp_ratio=1.0, stem_dim=8, timm_name="")
    model = VOLO(small, img_size=32, num_classes=5).eval()
    images = torch.randn(2, 3, 32, 32)
    dense, cells = dense_logits(model, images), model.aux_head(model.forward_features(images)[:, 1:])
    assert dense.shape == (2, 5, 2, 2)
    torch.testing.assert_close(dense[:, :, 1, 0], cells[:, 2])


@pytest.mark.parametrize(
    "name, options, words",
    [
        ("test_vit", {}, "test_vit cannot label places: its head does not act on a mean over them"),
        ("vit_ti16", {}, "vit_ti16 cannot label places"),
        ("vit_ti16", {"weights": None}, "has no weights to label with"),
        ("test_resnt", {}, "did you mean test_resnet"),
        ("test_resnet", {"img_size": 64}, "has a size of its own"),
        ("test_resnet", {"num_classes": 6}, "does not fit"),
        ("vit_ti16", {"num_classes": 6}, "has a head of 7 classes, the model one of 6"),
    ],
)
def test_models_that_cannot_teach(tmp_path, name, options, words):
    model = zoo.create_model(name, num_classes=7) if name in zoo.MODELS else tiny(name.replace("resnt", "resnet"))
    torch.save(model.state_dict(), tmp_path / "weights.pt")
    with pytest.raises(ValueError, match=words):
        build_teacher(name, **{"num_classes": 7, "weights": tmp_path / "weights.pt"} | options)


@torch.inference_mode()
def test_a_vit_of_the_zoo_that_pools_teaches(tmp_path):
    """Whether it does is seen from its weights; each place is the norm and the head of its token."""
    model = zoo.create_model("vit_ti16", img_size=48, num_classes=7, global_pool="avg").eval()
    zoo.save_weights(model, tmp_path / "weights.pt")
    again = build_teacher("vit_ti16", num_classes=7, weights=tmp_path / "weights.pt", img_size=48)
    images = torch.randn(2, 3, 48, 48)
    token = model.forward_features(images)[:, 1 + 5]
    dense = dense_logits(again, images)
    torch.testing.assert_close(dense[:, :, 1, 2], model.head(model.fc_norm(token)), rtol=1e-5, atol=1e-6)


def test_another_pool_cannot_teach():
    class Maximum(nn.Module):
        num_features, default_cfg = 3, {"input_size": (3, 8, 8)}

        def forward_features(self, images):
            return images

        def forward_head(self, features):
            return features.amax(dim=(2, 3))

    with pytest.raises(ValueError, match="or another pool"):
        teacher._check(Maximum(), "maximum")


@torch.inference_mode()
def test_the_folder_of_a_model_teaches_with_its_own_size_and_classes(tmp_path):
    names = ["cat", "dog", "élan"]
    model = zoo.create_model("vit_ti16", img_size=48, num_classes=3, global_pool="avg").eval()
    zoo.save_weights(model, tmp_path / "model.safetensors")
    content = zoo.hub.describe("vit_ti16", model, label_names=names)
    (tmp_path / "config.json").write_text(json.dumps(content))
    images = torch.randn(2, 3, 48, 48)
    expected = dense_logits(model, images)
    for known in ((), names):
        again = build_teacher(str(tmp_path), label_names=known)
        assert input_size(again) == 48
        torch.testing.assert_close(dense_logits(again, images), expected)
    turned = build_teacher(str(tmp_path), label_names=names[::-1])
    torch.testing.assert_close(dense_logits(turned, images), expected.flip(1))
    with pytest.raises(ValueError, match="knows the classes cat, dog, élan, and the images have cat, cow: take"):
        build_teacher(str(tmp_path), label_names=["cat", "cow"])
    with pytest.raises(ValueError, match="is a folder with weights of its own: leave other weights out"):
        build_teacher(str(tmp_path), weights=tmp_path / "model.safetensors")


@torch.inference_mode()
def test_a_teachers_maps_are_its_logits_of_the_centre_square(tmp_path, shards):
    model = tiny("test_resnet")
    torch.save(model.state_dict(), tmp_path / "weights.pt")
    options = ["--teacher", "test_resnet", "--weights", tmp_path / "weights.pt", "--num-classes", 7, "--batch-size", 4]
    add(shards, tmp_path / "out", *options)
    scores, ids = maps_of(tmp_path / "out")
    assert scores.shape == (15, 5, 5, 5) and (np.diff(scores.astype(float), axis=1) <= 0).all()
    cfg = model.default_cfg
    transform = create_transform(
        (3, 160, 160), crop_pct=1.0, interpolation=cfg["interpolation"], mean=cfg["mean"], std=cfg["std"]
    )
    assert input_size(model) == 160
    for k, features in enumerate(features_of(shards)):
        image = Image.open(io.BytesIO(features[records.IMAGE][0])).convert("RGB")
        dense = dense_logits(model, transform(image)[None])[0]
        found = dense.gather(0, torch.from_numpy(ids[k]).long())
        torch.testing.assert_close(found, torch.from_numpy(scores[k]).float(), rtol=0, atol=0.02 * float(dense.std()))
        assert dense.std(dim=(1, 2)).mean() > 0.1 * dense.std()


def test_maps_of_another_image_size_are_made_differently(tmp_path, shards):
    zoo.save_weights(zoo.create_model("volo_nano", img_size=64, num_classes=7), tmp_path / "w.safetensors")
    options = ["--teacher", "volo_nano", "--weights", tmp_path / "w.safetensors", "--num-classes", 7]
    add(shards, tmp_path / "out", *options, "--img-size", 64)
    with pytest.raises(ValueError, match="already has shards that were made differently .img_size 64, now 96.: choose"):
        add(shards, tmp_path / "out", *options, "--img-size", 96)
