import pytest
import torch
from torch import nn

from tests.trainables.models.small_families import NoDraws
from trainables.config import StudentConfig
from trainables.errors import ModelError
from trainables.models.forward import logits_and_aux
from trainables.models.libraries.ours import MODELS
from trainables.models.registry import build_model, check_forward, construct
from trainables.models.tap_names import classifier, without_classifier
from trainables.models.taps import Taps


def equal(one: nn.Module, other: nn.Module) -> bool:
    first_state, theirs = one.state_dict(), other.state_dict()
    return first_state.keys() == theirs.keys() and all(torch.equal(first_state[key], theirs[key]) for key in first_state)


DEEP = {
    "resnet44",
    "resnet56",
    "resnet110",
    "resnet32x4",
    "wrn_40_2",
    "resnet50_cifar",
    "vgg13_cifar",
    "vgg16_cifar",
    "vgg19_cifar",
}
"""Others of their families are quick."""


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.slow] if name in DEEP else []) for name in MODELS])
def test_every_model_of_ours_answers_for_8_and_32_pixels(name: str) -> None:
    for image_size in (8, 32):
        with NoDraws():
            build_model(name, num_classes=7, image_size=image_size, seed=0)


def test_a_forward_without_arithmetic_has_the_shape_of_a_real_one() -> None:
    model = build_model("convnet_small", num_classes=7, image_size=8, seed=0)
    with torch.no_grad():
        assert model(torch.zeros(2, 3, 8, 8)).shape == (2, 7)


@pytest.mark.parametrize(
    ("name", "image_size"), [("convnet_small", 8), ("mlp_small", 8), ("resnet8", 32), ("shufflenet_v2_x0_5", 32)]
)
def test_initial_parameters_depend_on_the_seed_alone(name: str, image_size: int) -> None:
    first = build_model(name, num_classes=5, image_size=image_size, seed=3)
    torch.rand(11)
    build_model("mlp_large", num_classes=5, image_size=8, seed=3)
    assert equal(first, build_model(name, num_classes=5, image_size=image_size, seed=3))
    assert not equal(first, build_model(name, num_classes=5, image_size=image_size, seed=4))


def test_building_a_model_moves_nobody_elses_randomness() -> None:
    before = torch.get_rng_state()
    build_model("convnet_small", num_classes=5, image_size=8, seed=3)
    assert torch.equal(before, torch.get_rng_state())


def test_building_a_model_leaves_batch_statistics_untouched_and_it_in_training_mode() -> None:
    model = build_model("convnet_small", num_classes=5, image_size=8, seed=0)
    assert model.training
    norms = [module for module in model.modules() if isinstance(module, nn.BatchNorm2d)]
    assert norms
    for norm in norms:
        assert norm.running_mean is not None
        assert norm.num_batches_tracked is not None
        assert norm.running_mean.count_nonzero() == 0
        assert norm.num_batches_tracked == 0


def test_torchvisions_models_get_a_head_of_the_right_size_and_position_tables_for_the_image_size() -> None:
    with NoDraws():
        resnet = build_model("resnet18", num_classes=13, image_size=32, seed=0)
        vit = construct("vit_b_32", num_classes=13, image_size=64, seed=0)
    assert resnet.get_submodule("fc").get_parameter("weight").shape == (13, 512)
    assert vit.get_parameter("encoder.pos_embedding").shape[1] == 1 + 4
    check_forward(vit, 64, 13)


def test_timms_models_get_a_head_of_the_right_size() -> None:
    pytest.importorskip("timm")
    model = build_model("timm/resnet10t", num_classes=13, image_size=32, seed=0)
    assert model.get_submodule("fc").get_parameter("weight").shape[0] == 13
    assert not equal(model, build_model("timm/resnet10t", num_classes=13, image_size=32, seed=1))
    vit = build_model("vit_tiny_patch16_224", num_classes=3, image_size=32, seed=0)
    assert vit.get_parameter("pos_embed").shape[1] == 1 + 4


@pytest.mark.parametrize(
    ("name", "image_size"),
    [
        *((name, 32) for name in ("convnet_small", "mlp_small", "wrn_16_1", "vgg8_cifar", "mobilenetv2_half_cifar")),
        *((name, 64) for name in ("resnet18", "mobilenet_v3_small", "shufflenet_v2_x0_5", "googlenet")),
        *((name, 64) for name in ("timm/resnet10t", "timm/convnext_atto", "timm/mobilenetv4_conv_small")),
    ],
)
def test_a_model_of_0_classes_returns_the_pooled_features_that_its_classifier_would_read(name: str, image_size: int) -> None:
    if name.startswith("timm/"):
        pytest.importorskip("timm")
    model = construct(name, num_classes=0, image_size=image_size, seed=3)
    assert model.num_classes == 0
    assert equal(model, construct(name, num_classes=0, image_size=image_size, seed=3))
    images = torch.randn(2, 3, image_size, image_size)
    for training in (True, False):
        features_BD = model.train(training)(images)
        assert tuple(features_BD.shape[:1]) == (2,)
        assert features_BD.ndim == 2
    taps = Taps(model, ["pooled"], name=name, image_size=image_size)
    with taps.capture():
        features_BD = model(images)
        assert torch.equal(taps.pop()[0], features_BD)
    with NoDraws():
        complete = construct(name, num_classes=5, image_size=image_size, seed=3)
    assert features_BD.shape[1] == classifier(complete).in_features
    complete.load_state_dict(model.state_dict(), strict=False)
    assert torch.equal(without_classifier(complete).eval()(images), features_BD)


def test_a_model_that_cannot_lose_its_classifier_or_has_none_is_refused_in_one_line() -> None:
    with NoDraws():
        with pytest.raises(ModelError, match="SqueezeNet ends with Conv2d, not with a linear layer: choose a model"):
            construct("squeezenet1_1", num_classes=0, image_size=64, seed=0)
        with pytest.raises(ModelError, match="MobileNetV3 has no classifier: give it classes"):
            classifier(construct("mobilenet_v3_small", num_classes=0, image_size=64, seed=0))


@pytest.mark.parametrize(
    "name",
    [
        "alexnet",
        pytest.param("densenet121", marks=pytest.mark.slow),
        pytest.param("efficientnet_b0", marks=pytest.mark.slow),
        "mnasnet0_5",
        "mobilenet_v2",
        "mobilenet_v3_small",
        pytest.param("regnet_y_400mf", marks=pytest.mark.slow),
        "shufflenet_v2_x0_5",
    ],
)
def test_families_of_torchvisions_go_by_their_names(name: str) -> None:
    with NoDraws():
        assert build_model(name, num_classes=3, image_size=64, seed=0).training


@pytest.mark.parametrize(
    "name",
    [
        "ghostnet_050",
        "lcnet_035",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("repvgg_a0", "visformer_tiny", "xcit_nano_12_p16_224")),
        "mobilevit_xxs",
    ],
)
def test_families_that_only_timm_has_go_by_their_names(name: str) -> None:
    pytest.importorskip("timm")
    assert build_model(name, num_classes=3, image_size=64, seed=0).training


@pytest.mark.parametrize(
    ("name", "image_size", "says"),
    [
        ("vgg11", 31, "does not accept images of 31×31"),
        ("inception_v3", 74, "does not accept images of 74×74"),
        pytest.param("inception_v3", 64, "set data.image_size to 299", marks=pytest.mark.slow),
        pytest.param("inception_v3", 75, "cannot be trained on images of 75×75", marks=pytest.mark.slow),
        ("squeezenet1_1", 8, "data.image_size to 32"),
        ("vit_b_32", 31, "cannot be built for images of 31×31"),
        ("convnet_large", 3, "data.image_size to 8"),
    ],
)
def test_an_image_size_that_a_model_cannot_take_is_refused_in_one_line(name: str, image_size: int, says: str) -> None:
    with NoDraws(), pytest.raises(ModelError) as caught:
        build_model(name, num_classes=10, image_size=image_size, seed=0)
    assert says in str(caught.value)
    assert name in str(caught.value)
    assert "data.image_size" in str(caught.value)
    assert "\n" not in str(caught.value)


class WithAuxiliaryConvolution(nn.Module):
    """As Inception in training: it needs larger images then."""

    def __init__(self) -> None:
        super().__init__()
        self.auxiliary, self.head = nn.Conv2d(3, 3, 20), nn.Linear(3, 10)

    def forward(self, images_BCHW: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.auxiliary(images_BCHW)
        logits_BK: torch.Tensor = self.head(images_BCHW.mean((2, 3)))
        return logits_BK


def test_an_image_size_that_is_too_small_for_training_alone_is_refused_with_the_next_that_will_do() -> None:
    check_forward(WithAuxiliaryConvolution(), 16, 10)
    with pytest.raises(ModelError, match=r"cannot be trained on images of 16×16 \(.*\): set data.image_size to 32"):
        check_forward(WithAuxiliaryConvolution(), 16, 10, training=True)


def test_inception_works_at_its_own_size_and_its_auxiliary_head_weighs_0_4() -> None:
    with NoDraws():
        model = construct("inception_v3", num_classes=6, image_size=299, seed=0).to("meta")
    images = torch.zeros(2, 3, 299, 299, device="meta")
    logits, aux = logits_and_aux(model(images))
    assert logits.shape == (2, 6)
    assert [(weight, tuple(head.shape)) for weight, head in aux] == [(0.4, (2, 6))]
    logits, aux = logits_and_aux(model.eval()(images))
    assert logits.shape == (2, 6)
    assert aux == ()


def test_googlenets_two_auxiliary_heads_weigh_0_3() -> None:
    with NoDraws():
        model = construct("googlenet", num_classes=6, image_size=64, seed=0)
    with torch.no_grad():
        logits, aux = logits_and_aux(model(torch.zeros(2, 3, 64, 64)))
    assert logits.shape == (2, 6)
    assert [(weight, tuple(head.shape)) for weight, head in aux] == [(0.3, (2, 6)), (0.3, (2, 6))]


def test_a_model_that_answers_with_something_else_is_refused() -> None:
    class Pair(nn.Linear):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:  # type: ignore[override]
            return x, x

    with pytest.raises(ModelError, match="not logits"):
        logits_and_aux([torch.zeros(2, 3)])
    with pytest.raises(ModelError, match="not logits"):
        check_forward(Pair(3, 3), 8, 10)
    with pytest.raises(ModelError, match=r"returns shape \(2, 9\) for a batch of 2, not \(2, 10\)"):
        check_forward(nn.Sequential(nn.Flatten(), nn.Linear(192, 9)), 8, 10)


def test_arguments_of_a_constructor_are_a_part_of_the_models_name() -> None:
    name = StudentConfig(model="convnet_small", args={"widths": [4, 8, 12]}).model
    assert name == "convnet_small(widths=[4, 8, 12])"
    model = build_model(name, num_classes=3, image_size=8, seed=0)
    assert model.state_dict()["head.weight"].shape == (3, 12)
    assert StudentConfig(model=name, args={"convs_per_stage": 2}).model == "convnet_small(widths=[4, 8, 12], convs_per_stage=2)"


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("resnet18(nope=1)", "unexpected keyword argument 'nope'): correct student.args or teacher.args"),
        ("resnet18(3)", "write NAME(key=value, …) with plain values"),
        ("resnet18(a=open('x'))", "write NAME(key=value, …) with plain values"),
        ("resnet81(a=1)", "there is no model 'resnet81'"),
    ],
)
def test_arguments_that_a_constructor_does_not_take_are_refused_in_one_line(name: str, says: str) -> None:
    with pytest.raises(ModelError) as refused:
        build_model(name, num_classes=3, image_size=32, seed=0)
    assert says in str(refused.value)
    assert "\n" not in str(refused.value)
