"""Ring attention and a ViT on it against the whole: values, gradients, masks, messages, memory; on real gloo ranks."""

import pytest
import torch
from gloo import on_ranks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from largebatch.config.parallel import ParallelConfig, TensorConfig
from largebatch.losses import soft_target_cross_entropy
from largebatch.parallel import collectives, vit
from largebatch.parallel.collectives import all_gather
from largebatch.parallel.cuts import cuts_of, local, sum_partial_gradients
from largebatch.parallel.mesh import Mesh
from largebatch.parallel.pipeline import Pipeline
from largebatch.parallel.sequence import check, parallelize, ring_attention, tokens_per_rank
from zoo.vit import VisionTransformer

SIZES = [2, 3, 4]


def sequence_axis(size):
    return Mesh(ParallelConfig(sequence=size).shape()).axis("sequence")


# -- the ring -----------------------------------------------------------------------------------------------------


def tensors(length, dtype):
    """q, k, v and the gradient of the output, whole: (2, 3, length, 8)."""
    generator = torch.Generator().manual_seed(length)
    return torch.randn(4, 2, 3, length, 8, dtype=torch.float64, generator=generator).to(dtype)


def own(whole, axis):
    """This rank's tokens, padded with what would do much harm if it counted, but for the gradient."""
    number = tokens_per_rank(whole.shape[-2], axis)
    padded = torch.full((*whole.shape[:-2], number * axis.size, whole.shape[-1]), 30.0, dtype=whole.dtype)
    padded[-1] = 0
    padded[..., : whole.shape[-2], :] = whole
    return padded.narrow(-2, axis.index * number, number).contiguous()


def together(parts, axis, length):
    return all_gather(parts.detach(), axis, parts.ndim - 2)[..., :length, :]


def _ring(size, length, dtype):
    axis = sequence_axis(size)
    *inputs, grad = own(tensors(length, dtype), axis)
    inputs = [tensor.clone().requires_grad_() for tensor in inputs]
    out = ring_attention(*inputs, axis, length=length)
    out.backward(grad)
    return [together(tensor, axis, length) for tensor in (out, *(tensor.grad for tensor in inputs))]


def full_attention(length, dtype):
    q, k, v, grad = tensors(length, dtype)
    q, k, v = (tensor.requires_grad_() for tensor in (q.clone(), k.clone(), v.clone()))
    out = ((q @ k.transpose(-2, -1)) / 8**0.5).softmax(dim=-1) @ v
    out.backward(grad)
    return [out.detach(), q.grad, k.grad, v.grad]


def _rings(size, cases):
    return [_ring(size, length, dtype) for length, dtype in cases]


@pytest.mark.parametrize("size", SIZES)
def test_ring_attention_equals_full_attention_forward_and_backward(size):
    cases = [(length, dtype) for length in (197, 50, 5) for dtype in (torch.float64, torch.float32)]
    for found in on_ranks(_rings, size, size, cases):
        for (length, dtype), tensors_found in zip(cases, found):
            tolerance = 1e-12 if dtype == torch.float64 else 1e-5
            for name, tensor, expected in zip(("out", "q", "k", "v"), tensors_found, full_attention(length, dtype)):
                torch.testing.assert_close(
                    tensor, expected, rtol=tolerance, atol=tolerance, msg=lambda text: f"{length} {name}: {text}"
                )


class Watch(TorchDispatchMode):
    """Largest tensor, most bytes alive at once, and bytes sent, of what runs inside."""

    def __init__(self):
        super().__init__()
        self.alive, self.peak, self.largest, self.sent = {}, 0, 0, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func._schema.name == "c10d::send":
            self.sent += sum(tensor.nbytes for tensor in args[0])
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                self.largest = max(self.largest, tensor.numel())
                storage = tensor.untyped_storage()
                self.alive[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        self.alive = {key: entry for key, entry in self.alive.items() if not entry[0].expired()}
        self.peak = max(self.peak, sum(nbytes for _, nbytes in self.alive.values()))
        return result


def _watched(size, per_rank):
    axis, length = sequence_axis(size), size * per_rank
    *inputs, grad = own(tensors(length, torch.float64), axis)
    inputs = [tensor.clone().requires_grad_() for tensor in inputs]
    with Watch() as forward:
        out = ring_attention(*inputs, axis, length=length)
    with Watch() as backward:
        out.backward(grad)
    return [(watch.largest, watch.peak, watch.sent) for watch in (forward, backward)]


def test_no_rank_holds_all_keys_or_a_map_of_all_tokens_and_sends_what_it_should():
    """With as many tokens per rank, what a rank holds does not grow with the number of ranks."""
    per_rank = 24
    block = 2 * 3 * per_rank * 8  # numbers of q, k or v of a rank
    found = {size: on_ranks(_watched, size, size, per_rank) for size in SIZES}
    for size, ranks in found.items():
        for forward, backward in ranks:
            assert max(forward[0], backward[0]) == max(2 * block, 2 * 3 * per_rank**2)
            assert forward[2] == 8 * 2 * (size - 1) * block
            assert backward[2] == 8 * (2 * (size - 1) + 2 * size) * block
    assert [peak for _, peak, _ in found[3][0]] == [peak for _, peak, _ in found[4][0]]


# -- a ViT ----------------------------------------------------------------------------------------------------------


def build(*, pool="token", grad_checkpointing=False, **rates):
    """50 tokens."""
    torch.manual_seed(1)
    options = {"img_size": 112, "patch_size": 16, "num_classes": 6, "embed_dim": 24, "depth": 3, "num_heads": 4}
    model = VisionTransformer(**options, global_pool=pool, **rates).double()
    model.set_grad_checkpointing(grad_checkpointing)
    return model


def batch():
    generator = torch.Generator().manual_seed(9)
    images = torch.randn(4, 3, 112, 112, dtype=torch.float64, generator=generator)
    return images, torch.rand(4, 6, dtype=torch.float64, generator=generator).softmax(dim=1)


def gradients(model):
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


def train(model, images, targets):
    """Logits; gradients are in the model."""
    torch.manual_seed(3)
    logits = model(images)
    soft_target_cross_entropy(logits, targets).backward()
    return logits.detach()


RATES = {"drop_path_rate": 0.3, "pos_drop_rate": 0.1, "drop_rate": 0.1}  # drawn alike, so as the whole model draws


def _on_ring(size, pool):
    mesh = Mesh(ParallelConfig(sequence=size).shape())
    model = build(pool=pool, **RATES)
    parallelize(model, mesh)
    logits = train(model, *batch())
    sum_partial_gradients(model, cuts_of(model), mesh)
    return logits, gradients(model)


@pytest.mark.parametrize("pool", ["token", "avg"])
@pytest.mark.parametrize("size", SIZES)
def test_logits_and_gradients_are_those_of_the_whole_model(size, pool):
    model = build(pool=pool, **RATES)
    expected = train(model, *batch())
    for logits, found in on_ranks(_on_ring, size, size, pool):
        torch.testing.assert_close(logits, expected, rtol=1e-10, atol=1e-10)
        assert list(found) == [name for name, _ in model.named_parameters()]
        for name, gradient in gradients(model).items():
            torch.testing.assert_close(found[name], gradient, rtol=1e-10, atol=1e-10, msg=lambda t: f"{name}: {t}")


def _drawn(size):
    mesh = Mesh(ParallelConfig(sequence=size).shape())
    found = []
    for grad_checkpointing in (False, True):
        model = build(proj_drop_rate=0.2, drop_path_rate=0.3, grad_checkpointing=grad_checkpointing)
        parallelize(model, mesh)
        masks = []
        model.blocks[1].mlp.drop1.register_forward_hook(lambda module, inputs, output: masks.append(output == 0))
        logits = train(model, *batch())
        after = int(torch.randint(2**62, ()))
        evaluated = model.eval()(batch()[0]).detach()
        found.append((logits, gradients(model), masks[0], after, evaluated))
    return found


def test_ranks_draw_masks_of_their_own_and_the_same_when_recomputing():
    expected = build().eval()(batch()[0]).detach()
    first, second = on_ranks(_drawn, 2, 2)
    for plain, checkpointed in (first, second):
        assert torch.equal(plain[0], checkpointed[0]) and plain[3] == checkpointed[3]
        assert all(torch.equal(checkpointed[1][name], gradient) for name, gradient in plain[1].items())
        torch.testing.assert_close(plain[4], expected, rtol=1e-10, atol=1e-10)
    assert torch.equal(first[0][0], second[0][0]) and first[0][3] == second[0][3]
    assert not torch.equal(first[0][2], second[0][2])
    for rank in (first, second):
        assert 0.15 < rank[0][2].double().mean() < 0.25


def _staged(config):
    mesh = Mesh(config.shape())
    model = build()
    parallelize(model, mesh)
    pipeline = Pipeline(model, mesh, config, soft_target_cross_entropy)
    loss = float(pipeline.run(*batch(), 0.5))
    sum_partial_gradients(model, cuts_of(model), mesh)
    return mesh.place["pipeline"], loss, gradients(model), pipeline.predict(batch()[0])


def test_a_pipeline_of_rings_equals_the_whole_model():
    model = build()
    logits = train(model, *batch())
    expected = {name: gradient / 2 for name, gradient in gradients(model).items()}
    names: list = [set(), set()]
    for stage, loss, found, predicted in on_ranks(_staged, 4, ParallelConfig(pipeline=2, sequence=2)):
        assert loss == pytest.approx(0.5 * float(soft_target_cross_entropy(logits, batch()[1])), rel=1e-12)
        torch.testing.assert_close(predicted, logits, rtol=1e-10, atol=1e-10)
        names[stage] |= set(found)
        for name, gradient in found.items():
            torch.testing.assert_close(gradient, expected[name], rtol=1e-10, atol=1e-10, msg=lambda t: f"{name}: {t}")
    assert not names[0] & names[1] and names[0] | names[1] == set(expected)


def _cut_matrices(config):
    mesh = Mesh(config.shape())
    model, whole = build(), build()
    vit.parallelize(model, mesh)
    parallelize(model, mesh)
    logits = train(model, *batch())
    cuts = cuts_of(model)
    collectives.BUCKET_BYTES = 8 * 100  # several messages, and tensors that are larger
    sum_partial_gradients(model, cuts, mesh)
    expected = train(whole, *batch())
    torch.testing.assert_close(logits, expected, rtol=1e-10, atol=1e-10)
    for name, gradient in gradients(whole).items():
        found = model.get_parameter(name).grad
        own = local(gradient, cuts[name], mesh).view_as(found)
        torch.testing.assert_close(found, own, rtol=1e-10, atol=1e-10, msg=lambda text: f"{name}: {text}")


@pytest.mark.parametrize("mode, size", [("1d", 2), ("2d", 4)])
def test_rings_of_a_model_whose_matrices_are_cut_equal_the_whole_model(mode, size):
    config = ParallelConfig(sequence=2, tensor=TensorConfig(mode=mode, size=size))
    on_ranks(_cut_matrices, 2 * size, config)


def test_autocast_takes_half_precision_around_the_ring():
    model = build().float()
    images = batch()[0].float()
    with torch.autocast("cpu", torch.bfloat16):
        expected = model(images)
    for found in on_ranks(_half, 2, images):
        torch.testing.assert_close(found, expected.detach(), rtol=0.05, atol=0.05)


def _half(images):
    model = build().float()
    parallelize(model, Mesh(ParallelConfig(sequence=2).shape()))
    with torch.autocast("cpu", torch.bfloat16):
        logits = model(images)
    logits.float().sum().backward()
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters())
    return logits.detach()


# -- what cannot be -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "make, size, sentence",
    [
        (lambda: build(attn_drop_rate=0.1), 2, "is 2, and the ring has no dropout .* without attn_drop_rate"),
        (lambda: build(pool="max"), 2, "pools by token or avg, and it has max"),
        (lambda: build(pool="avg", fc_norm=False), 2, "has a norm before the mean of its tokens, not behind it: set 1"),
        (lambda: build(), 51, "sequence is 51, and the model has 50 tokens"),
        (lambda: torch.nn.Linear(1, 1), 2, "sequence is 2, and Linear is not a ViT"),
    ],
)
def test_what_the_ring_cannot_do_is_refused(make, size, sentence):
    with pytest.raises(ValueError, match=sentence):
        check(make(), size)
