"""Taps: what they give is what the forward made, and the model does not notice them."""

import shutil

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from tests.trainables.models.small_families import SMALL, small, unchanged
from trainables.distributed.group import Group
from trainables.distributed.rank_pool import RankPool
from trainables.errors import ModelError
from trainables.models.forward import logits_and_aux, seeded
from trainables.models.model_input import ModelInput
from trainables.models.pixels import take_pixels
from trainables.models.registry import construct
from trainables.models.tap_names import TapNames, classifier, list_taps
from trainables.models.taps import Taps


def build(name: str, image_size: int, *, dtype: torch.dtype = torch.float32) -> nn.Module:
    if name in SMALL:
        return small(name, image_size).to(dtype)
    return construct(name, num_classes=10, image_size=image_size, seed=0).to(dtype)


def images(image_size: int, *, num: int = 4, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.rand(num, 3, image_size, image_size, dtype=dtype, generator=torch.Generator().manual_seed(1))


def results(name: str, image_size: int, taps: list[str]) -> list[Tensor]:
    """Logits, gradients and batch statistics of forward and backward, in eval and then in training mode."""
    model, found = build(name, image_size), []
    tapped = Taps(model, taps, name=name, image_size=image_size)
    torch.manual_seed(0)  # dropout
    for training in (False, True):
        model.train(training).zero_grad(set_to_none=True)
        with tapped.capture():
            logits_BK, aux = logits_and_aux(model(images(image_size)))
            assert tuple(tuple(tensor.shape[1:]) for tensor in tapped.pop()) == tapped.shapes
        (logits_BK.square().sum() + sum(head_BK.sum() for _, head_BK in aux)).backward()
        found += [logits_BK.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]
    return [*found, *model.buffers()]


@pytest.mark.parametrize(
    ("name", "image_size", "taps"),
    [
        ("resnet8", 32, ["stem", "stages", "stages.preact", "pooled"]),
        ("wrn_16_1", 32, ["stem", "stages", "stages.preact", "pooled"]),
        ("shufflenetv2_cifar", 32, ["stages", "stages.preact", "pooled"]),
        ("convnet_large", 8, ["stem", "stages", "stages.preact", "pooled"]),
        ("mlp_large", 8, ["hidden.0", "hidden.1:in", "pooled"]),
        ("resnet", 32, ["stem", "stages", "stages.preact", "pooled"]),
        pytest.param("vgg11_bn", 32, ["stages", "stages.preact", "pooled"], marks=pytest.mark.slow),  # 129 million parameters
        ("mobilenet_v2", 32, ["stages", "stages.preact", "pooled"]),
        ("densenet", 32, ["stages", "features.transition1.norm"]),
        ("shufflenet_v2_x0_5", 32, ["stages", "pooled"]),
        pytest.param("googlenet", 32, ["stages", "pooled"], marks=pytest.mark.slow),
        ("swin", 32, ["stem", "stages", "pooled"]),
        ("vit", 32, ["encoder.layers.encoder_layer_1", "pooled"]),
    ],
)
def test_outputs_gradients_and_batch_statistics_are_bit_equal_to_those_without_taps(
    name: str, image_size: int, taps: list[str]
) -> None:
    with_taps, without = results(name, image_size, taps), results(name, image_size, [])
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(with_taps, without, strict=True))


def test_a_tap_gives_what_the_layers_up_to_it_give() -> None:
    model = build("convnet_small", 8).eval()
    layers, head = model.get_submodule("features"), model.get_submodule("head")
    assert isinstance(layers, nn.Sequential)
    by_hand = {
        "stem": layers[:3](images(8)),
        "stage1": layers[:3](images(8)),
        "stage2": layers[:7](images(8)),
        "stage2.preact": layers[:6](images(8)).clone(),
        "stage3": layers(images(8)),
        "pooled": layers(images(8)).mean((2, 3)),
        "features.4": layers[:5](images(8)),
        "features.4:in": layers[:4](images(8)),
        "head": head(layers(images(8)).mean((2, 3))),
    }
    taps = Taps(model, list(by_hand), name="convnet_small", image_size=8)
    with taps.capture():
        model(images(8))
        found = taps.pop()
    assert taps.names == tuple(by_hand)
    for tensor, expected in zip(found, by_hand.values(), strict=True):
        torch.testing.assert_close(tensor, expected)


def test_a_pre_activation_keeps_its_negative_values_though_the_activation_behind_it_was_in_place() -> None:
    model = build("resnet", 32)
    taps = Taps(model, ["stages.preact", "stages"], name="resnet", image_size=32)
    assert taps.names == tuple(f"stage{n}.preact" for n in (1, 2, 3, 4)) + tuple(f"stage{n}" for n in (1, 2, 3, 4))
    with taps.capture():
        model(images(32))
        found = taps.pop()
    for before, after in zip(found[:4], found[4:], strict=True):
        assert before.min() < 0
        assert torch.equal(before.relu(), after)


def test_no_activation_of_a_tapped_model_overwrites_what_a_module_before_it_made() -> None:
    hooked, tapped = build("resnet", 32), build("resnet", 32)
    seen: list[Tensor] = []
    hooked.get_submodule("layer1.0.bn1").register_forward_hook(lambda module, args, output: seen.append(output))
    hooked(images(32))
    assert seen[0].min() == 0  # by a plain hook: what the ReLU behind it made
    taps = Taps(tapped, ["layer1.0.bn1"], name="resnet", image_size=32)
    for training in (False, True):
        with taps.capture():
            tapped.train(training)(images(32))
            (before,) = taps.pop()
        assert before.min() < 0
    assert not any(getattr(module, "inplace", False) for module in tapped.modules())


def test_names_that_count_from_the_end_or_mean_all_stages_are_resolved() -> None:
    model = build("resnet", 32)
    assert Taps(model, ["stage-1", "stage-2.preact", "layer1"], name="resnet", image_size=32).names == (
        "stage4",
        "stage3.preact",
        "layer1",
    )
    taps = Taps(model, ["stages"], name="resnet", image_size=32)
    assert taps.names == ("stage1", "stage2", "stage3", "stage4")
    assert taps.shapes == ((64, 8, 8), (128, 4, 4), (256, 2, 2), (512, 1, 1))


def test_gradients_of_a_loss_on_taps_reach_the_layers_before_them() -> None:
    model = build("convnet_small", 8, dtype=torch.float64)
    taps = Taps(model, ["stage1.preact", "stage2"], name="convnet_small", image_size=8)
    with taps.capture():
        model(images(8, dtype=torch.float64))
        before, second = taps.pop()
    (before.square().sum() + second.pow(3).sum()).backward()
    ours = [p.grad for p in model.parameters()]
    other = build("convnet_small", 8, dtype=torch.float64)
    layers = other.get_submodule("features")
    assert isinstance(layers, nn.Sequential)
    layers[2].inplace = False
    before = layers[:2](images(8, dtype=torch.float64))
    (before.square().sum() + layers[2:7](before).pow(3).sum()).backward()
    assert any(gradient is not None for gradient in ours)
    for one, theirs in zip(ours, [p.grad for p in other.parameters()], strict=True):
        assert (one is None) == (theirs is None)
        if one is not None:
            assert torch.equal(one, theirs)


def test_only_forward_passes_within_capture_are_captured_and_each_is_popped_once() -> None:
    model = build("convnet_small", 8)
    taps = Taps(model, ["stage1", "pooled"], name="convnet_small", image_size=8)
    model(images(8))
    with taps.capture():
        with pytest.raises(RuntimeError, match="stage1, pooled captured no forward"):
            taps.pop()
        parts = []
        for part in images(8).split(2):
            model(part)
            parts.append(taps.pop()[0])
            with pytest.raises(RuntimeError, match=r"since capture\(\) or the last pop\(\)"):
                taps.pop()
        model(images(8))
    with pytest.raises(RuntimeError, match="captured no forward"):
        taps.pop()
    assert [len(part) for part in parts] == [2, 2]
    assert not torch.equal(parts[0], parts[1])


def test_taps_of_several_models_and_several_taps_of_one_model_do_not_meet() -> None:
    teacher, student = build("resnet", 32), build("resnet8", 32)
    of_teacher = Taps(teacher, ["stage1"], name="resnet", image_size=32)
    also = Taps(teacher, ["stage1.preact"], name="resnet", image_size=32)
    of_student = Taps(student, ["stage1"], name="resnet8", image_size=32)
    with of_teacher.capture(), of_student.capture(), torch.inference_mode():
        teacher(images(32))
        with also.capture():
            teacher(images(32))
            (before,) = also.pop()
        (after,) = of_teacher.pop()
        with pytest.raises(RuntimeError, match="stage1 captured no forward"):
            of_student.pop()
        student(images(32))
        assert of_student.pop()[0].shape == (4, 16, 32, 32)
    assert torch.equal(before.relu(), after)


def test_a_method_without_taps_installs_nothing() -> None:
    model = build("resnet", 32)
    taps = Taps(model, [], name="resnet", image_size=32)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    with taps.capture():
        model(images(32))
        assert taps.pop() == ()


def test_looking_for_points_moves_neither_generator_nor_statistics_nor_modes() -> None:
    model = build("mobilenet_v2", 32)
    model.get_submodule("features.3").eval()
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    modes = [module.training for module in model.modules()]
    generator = torch.get_rng_state()
    list_taps(model, 32, every=True)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    Taps(model, ["stages", "pooled"], name="mobilenet_v2", image_size=32)
    assert torch.equal(generator, torch.get_rng_state())
    assert modes == [module.training for module in model.modules()]
    assert all(torch.equal(state[name], tensor) for name, tensor in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())


def test_the_names_and_shapes_of_points_are_those_that_taps_take() -> None:
    for name, image_size in (("resnet", 64), ("swin", 64), ("vit", 64), ("mlp_small", 8)):
        model = build(name, image_size)
        found = list_taps(model, image_size)
        taps = Taps(model, [point.name for point in found], name=name, image_size=image_size)
        assert taps.names == tuple(point.name for point in found)
        assert taps.shapes == tuple(point.shape for point in found)


def test_a_stage_and_its_module_are_the_same_tensor_and_swins_module_gives_it_as_it_is() -> None:
    for name, layout in (("resnet", (0, 1, 2, 3)), ("swin", (0, 3, 1, 2))):
        model = build(name, 64)
        point = next(point for point in list_taps(model, 64) if point.name == "stage2")
        taps = Taps(model, ["stage2", point.aliases[-1]], name=name, image_size=64)
        with taps.capture():
            model(images(64))
            stage, module = taps.pop()
        assert torch.equal(stage, module.permute(layout))
        assert stage.data_ptr() == module.data_ptr()


def test_every_modules_output_that_is_a_tensor_of_samples_is_a_point() -> None:
    found = {point.name: point.shape for point in list_taps(build("resnet8", 32), 32, every=True)}
    assert found["conv1"] == (16, 32, 32)
    assert found["layer2.0.bn2"] == (32, 16, 16)
    assert found["fc"] == (10,)
    assert found["stage3"] == (64, 8, 8)


# What is refused


class Twice(nn.Module):
    """One ReLU, called twice; then its result is changed in place by a function."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.relu = nn.Linear(12, 4), nn.Linear(4, 4), nn.ReLU()
        self.norm, self.head = nn.LayerNorm(4), nn.Linear(4, 3)

    def forward(self, images_BCHW: Tensor) -> Tensor:
        x_BD = self.relu(self.first(images_BCHW.flatten(1)))
        x_BD = self.norm(self.relu(self.second(x_BD)))
        x_BD += 1
        return self.head(F.dropout(x_BD, training=self.training))


def test_of_a_module_that_is_called_several_times_the_last_call_counts() -> None:
    model = Twice()
    taps = Taps(model, ["relu", "relu:in"], name="twice", image_size=2)
    with taps.capture():
        model(images(2))
        after, before = taps.pop()
    by_hand = model.second(model.first(images(2).flatten(1)).relu())
    assert torch.equal(before, by_hand)
    assert torch.equal(after, by_hand.relu())


@pytest.mark.parametrize(
    ("name", "tap", "says"),
    [
        ("resnet", "layer9", "has no tap 'layer9': did you mean layer4 or layer3 or layer2?"),
        ("resnet", "stage5", "has no tap 'stage5': did you mean stage"),
        ("resnet", "stage-5", "has no tap 'stage-5'"),
        ("resnet", "stage0", "has no tap 'stage0'"),
        ("resnet", "fc:out", "has no tap 'fc:out'"),
        ("resnet", "", "has no tap ''"),
        ("resnet", "layer1.0.bn2", "layer1.0.bn2 is overwritten in place after it is read"),
        ("densenet", "stage4.preact", "has no stage4.preact: its last activation is not declared; it has stem"),
        ("densenet", "features.denseblock1.denselayer2:in", "denselayer2:in is a list, not a tensor"),
        ("vit", "stages", "has no stages: its stages are not declared; it has map, embedding, pooled"),
        ("mlp_small", "map", "has no map: its last map is not declared; it has embedding, pooled"),
        ("vit", "stage1.preact", "has no stage1.preact: its stages are not declared"),
        ("vit", "encoder.layers.encoder_layer_0.self_attention", "is a tuple, not a tensor"),
        ("googlenet", "aux1", "aux1 is not called in eval mode"),
        ("squeezenet1_1", "pooled", "has no pooled: it does not end with a linear layer"),
    ],
)
def test_a_tap_that_cannot_be_read_is_refused_in_one_line(name: str, tap: str, says: str) -> None:
    model = unchanged(name, 64)
    with pytest.raises(ModelError) as caught:
        Taps(model, [tap], name=name, image_size=64)
    assert says in str(caught.value)
    assert name in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


@pytest.mark.parametrize(("name", "overwritten"), [("resnet", "layer1.0.bn2"), ("densenet", "unpooled")])
def test_a_point_that_would_be_refused_is_not_listed(name: str, overwritten: str) -> None:
    found = {point.name for point in list_taps(unchanged(name, 64), 64, every=True)}
    assert len(found) > 40
    assert overwritten not in found


def test_what_a_function_overwrites_is_refused_and_what_it_made_can_be_read() -> None:
    with pytest.raises(ModelError, match="norm is overwritten in place"):
        Taps(Twice(), ["norm"], name="twice", image_size=2)
    assert Taps(Twice(), ["head:in"], name="twice", image_size=2).shapes == ((4,),)


class DropsInPlace(nn.Module):
    """A dropout that changes what it is given, in training alone."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.drop, self.head = nn.Linear(12, 4), nn.Dropout(0.5, inplace=True), nn.Linear(4, 3)

    def forward(self, images_BCHW: Tensor) -> Tensor:
        return self.head(self.drop(self.first(images_BCHW.flatten(1)).view(-1, 2, 2)).flatten(1))


def test_what_is_overwritten_in_training_alone_is_found_too_through_a_view_of_it() -> None:
    model = DropsInPlace()
    taps = Taps(model, ["first"], name="drops", image_size=2)
    assert not model.drop.inplace
    with taps.capture():
        model(images(2))
        assert torch.equal(taps.pop()[0], model.first(images(2).flatten(1)))


def test_a_compiled_model_is_refused() -> None:
    model = build("convnet_small", 8)
    model.compile(backend="eager")  # the default one takes seconds to import
    with pytest.raises(RuntimeError, match="before model"):
        Taps(model, ["stages"], name="convnet_small", image_size=8)


# The classifier


@pytest.mark.parametrize(
    ("name", "image_size", "path"),
    [
        ("resnet8", 32, "fc"),
        ("convnet_small", 8, "head"),
        ("mlp_small", 8, "head"),
        pytest.param("vgg11", 32, "classifier.6", marks=pytest.mark.slow),
        ("mobilenet_v3_small", 32, "classifier.3"),
        ("googlenet", 64, "fc"),
        pytest.param("inception_v3", 128, "fc", marks=pytest.mark.slow),
        ("vit", 32, "heads.head"),
        ("swin", 32, "head"),
        ("convnext", 32, "classifier.2"),
    ],
)
def test_the_classifier_is_the_final_linear_layer(name: str, image_size: int, path: str) -> None:
    model = unchanged(name, image_size)
    assert classifier(model) is model.get_submodule(path)
    names = TapNames(model, image_size, name=name)
    pooled, logits = names.shape("pooled"), names.shape(path)
    assert pooled == (classifier(model).in_features,)
    assert logits == (10,)


def test_timm_names_its_classifiers_itself() -> None:
    pytest.importorskip("timm")
    model = build("timm/convnext_atto", 32)
    assert classifier(model) is model.get_submodule("head.fc")


def test_a_model_that_ends_otherwise_has_no_classifier() -> None:
    with pytest.raises(ModelError, match="SqueezeNet ends with Conv2d, not with a linear layer"):
        classifier(unchanged("squeezenet1_1", 64))


# The last map, and the features of an image

TINY = {"embed_dim": 32, "depth": 2, "num_heads": 2}
"""A vision transformer of timm's in small."""
READ_AS = {
    "vit_small_patch14_dinov2": (28, TINY, "class token"),
    "vit_small_patch14_reg4_dinov2": (28, TINY, "class token"),
    "vit_small_patch16_dinov3": (32, TINY, "class token"),
    "deit_tiny_distilled_patch16_224": (32, TINY, "class token"),
    "vit_base_patch16_clip_224": (32, TINY, "class token"),
    "vit_base_patch16_siglip_224": (32, TINY, "attn_pool"),
    "vit_pe_core_base_patch16_224": (32, TINY | {"attn_pool_num_heads": 2, "ref_feat_shape": (2, 2)}, "attn_pool"),
    "beit_base_patch16_224": (32, TINY, "fc_norm"),
    "convnext_atto": (64, {}, "mean"),
    "resnet18": (64, {}, "mean"),
    "efficientnet_lite0": (64, {}, "mean"),
    "mobilenetv4_conv_small": (64, {}, "mean"),
    "swin_tiny_patch4_window7_224": (64, {"embed_dim": 24, "depths": (1, 1, 1, 1)}, "mean"),
    "levit_128s": (64, {}, "mean"),
}
"""timm's name → image size, options, and what of its last values is `embedding`."""


def popped(model: nn.Module, taps: list[str], image_size: int) -> list[Tensor]:
    tapped = Taps(model, taps, name=type(model).__name__, image_size=image_size)
    with tapped.capture():
        model(images(image_size))
        found = tapped.pop()
    assert tuple(tuple(tensor.shape[1:]) for tensor in found) == tapped.shapes
    return list(found)


@pytest.mark.parametrize("name", READ_AS)
def test_map_and_embedding_are_the_last_features_as_timm_itself_returns_them(name: str) -> None:
    timm = pytest.importorskip("timm")
    image_size, options, what = READ_AS[name]
    sized = {"img_size": image_size} if what != "mean" or name.startswith(("swin", "levit")) else {}
    with seeded(name):
        model = timm.create_model(name, num_classes=0, **sized, **options).eval()
    model.requires_grad_(False)
    map_BCHW, embedding_BD, pooled_BD = popped(model, ["map", "embedding", "pooled"], image_size)
    last = model.forward_features(images(image_size))
    if last.ndim == 4:  # of a CNN, whose intermediates may end before its last convolution
        expected = last.movedim(-1, 1) if name.startswith("swin") else last
    else:
        expected = model.forward_intermediates(images(image_size), norm=True, output_fmt="NCHW", intermediates_only=True)[-1]
    torch.testing.assert_close(map_BCHW, expected, rtol=1e-5, atol=1e-5)
    by_hand = {
        "class token": lambda: last[:, 0],
        "attn_pool": lambda: model.attn_pool(last),
        "fc_norm": lambda: model.fc_norm(last[:, 1:].mean(1)),
        "mean": lambda: expected.mean((2, 3)),
    }
    torch.testing.assert_close(embedding_BD, by_hand[what](), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(pooled_BD, model(images(image_size)))


@pytest.mark.parametrize(
    ("name", "image_size", "last"),
    [("resnet", 64, "layer4"), ("swin", 64, "norm"), ("mobilenet_v3_small", 64, "features"), ("vit", 64, "encoder")],
)
def test_map_and_embedding_of_torchvisions_models_are_those_of_their_own_modules(name: str, image_size: int, last: str) -> None:
    model = build(name, image_size).eval()
    map_BCHW, embedding_BD, value = popped(model, ["map", "embedding", last], image_size)
    if name == "vit":
        assert torch.equal(embedding_BD, value[:, 0])
        assert torch.equal(map_BCHW, value[:, 1:].transpose(1, 2).reshape(4, -1, 2, 2))
    else:
        assert torch.equal(map_BCHW, value.movedim(-1, 1) if name == "swin" else value)
        torch.testing.assert_close(embedding_BD, map_BCHW.mean((2, 3)))


def test_a_list_of_taps_says_what_the_embedding_is() -> None:
    found = {name: {point.name: point for point in list_taps(unchanged(name, 64), 64)} for name in ("vit", "resnet", "mlp_small")}
    assert found["vit"]["embedding"].aliases == ("class token of encoder",)
    assert found["vit"]["map"].shape == (32 // 2, 2, 2)
    assert found["resnet"]["embedding"].aliases == ("mean of layer4",)
    assert "map" in found["resnet"]["stage4"].aliases
    assert found["mlp_small"]["embedding"].aliases[0] == "pooled"


def test_gradients_of_map_and_embedding_reach_a_student_that_takes_pixels_of_any_size() -> None:
    for name in ("vit", "swin", "convnet_small"):
        model = build(name, 64)
        take_pixels(model, ModelInput(64, (0.5, 0.5, 0.5), (0.25, 0.25, 0.25), "bilinear"))
        taps = Taps(model, ["map", "embedding"], name=name, image_size=64)
        with taps.capture():
            model(images(80))
            map_BCHW, embedding_BD = taps.pop()
        assert tuple(map_BCHW.shape[1:]) == taps.shapes[0]
        (map_BCHW.square().sum() + embedding_BD.square().sum()).backward()
        first = next(parameter for parameter in model.parameters())
        assert first.grad is not None
        assert first.grad.abs().sum() > 0


# Around the model


def sum_of_taps_gradients(group: Group, num_images: int) -> list[Tensor]:
    model = build("convnet_small", 8, dtype=torch.float64).eval()  # no statistics of a part of the batch
    taps = Taps(model, ["stage1.preact", "embedding", "map"], name="convnet_small", image_size=8)
    wrapped = DistributedDataParallel(model) if group.world_size > 1 else model
    part = images(8, num=num_images, dtype=torch.float64).tensor_split(group.world_size)[group.rank]
    with taps.capture():
        logits_BK = wrapped(part)
        before, embedding_BD, map_BCHW = taps.pop()
    loss = logits_BK.square().sum() + before.pow(3).sum() + embedding_BD.square().sum() + map_BCHW.pow(3).sum()
    (loss * group.world_size).backward()
    return [p.grad for p in model.parameters() if p.grad is not None]


def test_taps_read_through_ddp_and_their_gradients_are_summed_over_ranks(ranks: RankPool) -> None:
    two = ranks.run(2, sum_of_taps_gradients, 5)
    one = sum_of_taps_gradients(Group(), 5)
    for rank in two:
        for ours, alone in zip(rank, one, strict=True):
            torch.testing.assert_close(ours, alone, rtol=1e-9, atol=1e-12)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("c++") is None and shutil.which("g++") is None, reason="no compiler")
def test_a_compiled_model_gives_the_same_features_and_gradients_in_one_graph() -> None:
    found = []
    for compiled in (False, True):
        model = build("convnet_small", 8, dtype=torch.float64)
        taps = Taps(model, ["stages", "stage1.preact", "pooled"], name="convnet_small", image_size=8)
        if compiled:
            model.compile(fullgraph=True)
        for _ in range(2):
            model.zero_grad()
            with taps.capture():
                logits_BK = model(images(8, dtype=torch.float64))
                features = taps.pop()
            (logits_BK.square().sum() + sum(feature.square().sum() for feature in features)).backward()
        found.append([logits_BK, *features, *(p.grad for p in model.parameters() if p.grad is not None)])
        model(images(8, dtype=torch.float64))
        with pytest.raises(RuntimeError, match="captured no forward"):
            taps.pop()
    for eager, ours in zip(*found, strict=True):
        torch.testing.assert_close(ours, eager, rtol=1e-9, atol=1e-12)


def test_stages_are_tensors_that_the_backward_keeps_anyway() -> None:
    model = build("resnet", 32)
    taps = Taps(model, ["stem", "stages", "pooled"], name="resnet", image_size=32)
    saved: set[int] = set()

    def pack(tensor: Tensor) -> Tensor:
        saved.add(tensor.untyped_storage().data_ptr())
        return tensor

    with taps.capture(), torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        logits_BK = model(images(32))
        captured = taps.pop()
        assert logits_BK.requires_grad
        assert {tensor.untyped_storage().data_ptr() for tensor in captured} <= saved


@pytest.mark.gpu
def test_a_model_on_a_gpu_is_looked_at_on_the_cpu_and_read_on_the_gpu() -> None:
    model = build("resnet18", 32).cuda()
    taps = Taps(model, ["stages.preact"], name="resnet18", image_size=32)
    with taps.capture():
        model(images(32).cuda())
        assert all(tensor.is_cuda for tensor in taps.pop())
