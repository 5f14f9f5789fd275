"""A student that predicts with a teacher's classifier, as SimKD trains it: Chen, Mei, Zhang, Wang, Feng and Chen 2022 (CVPR).

The model is named STUDENT+TEACHER: the student up to its last map, a projector to the shape of the teacher's, the mean over
positions, and the teacher's frozen final linear layer. A checkpoint has the classifier's weights, so the model is rebuilt from
its name, classes and image size without the teacher's weights.

Shapes: B batch, C channels, H W positions or pixels, D features of the teacher, K classes.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional

from trainables.errors import ModelError
from trainables.models.forward import dry_forward, seeded
from trainables.models.libraries import declared_taps
from trainables.models.libraries.interface import DeclaredTaps
from trainables.models.names import model_parts
from trainables.models.tap_names import classifier, modules_before
from trainables.models.taps import Taps


class ReusedClassifier(nn.Module):
    """Last map of `trunk` → `projector` → mean over positions → frozen `classifier`.

    The trunk's own classifier is removed. Its other modules after the last map still run but are frozen, as the output does not
    depend on them and they would get no gradient.
    """

    def __init__(self, trunk: nn.Module, teacher: nn.Module, *, name: str, image_size: int) -> None:
        """`name` is STUDENT+TEACHER. The trunk is changed in place; only shapes of `teacher` are used.

        Raises ModelError: one of them does not end with a linear layer, or the student has no map or the teacher no pooled map.
        """
        super().__init__()
        student_name, teacher_name = model_parts(name)
        teacher_taps = Taps(teacher, ("unpooled",), name=teacher_name, image_size=image_size)
        (self._teacher_CHW,) = teacher_taps.shapes
        teacher_taps.remove()
        student_classifier, tap = classifier(trunk), _last_map(trunk, student_name, image_size)
        before = modules_before(trunk, tap, name=student_name, image_size=image_size)
        self._taps = Taps(trunk, (tap,), name=student_name, image_size=image_size)
        for path, module in list(trunk.named_modules()):
            if module is student_classifier:
                trunk.set_submodule(path, nn.Identity())
            elif path not in before:
                for parameter in module.parameters(recurse=False):
                    parameter.requires_grad_(False)
        last = classifier(teacher)
        self.trunk = trunk
        self.projector = projector(self._taps.shapes[0][0], self._teacher_CHW[0])
        self.classifier = nn.Linear(last.in_features, last.out_features, bias=last.bias is not None).requires_grad_(False)

    def declared_taps(self) -> DeclaredTaps:
        """The trunk's stages."""
        trunk = declared_taps(self.trunk)
        stages, preacts = ([f"trunk.{path}" for path in paths] for paths in (trunk.stages, trunk.preacts))
        last_map = None if trunk.layout.channels_last else "projector"
        return DeclaredTaps(trunk.stem and f"trunk.{trunk.stem}", stages, last_map, trunk.layout, None, preacts, trunk.blocks)

    def forward(self, images_BCHW: Tensor) -> Tensor:
        """Logits (B, K)."""
        with self._taps.capture():
            self.trunk(images_BCHW)
            (map_BCHW,) = self._taps.pop()
        height, width = (min(sizes) for sizes in zip(map_BCHW.shape[2:], self._teacher_CHW[1:], strict=True))
        if map_BCHW.shape[2:] != (height, width):
            map_BCHW = functional.adaptive_avg_pool2d(map_BCHW, (height, width))
        projected_BDHW = self.projector(map_BCHW)
        logits_BK: Tensor = self.classifier(projected_BDHW.mean((2, 3)))
        return logits_BK

    def reuse(self, teacher: nn.Module, image_size: int) -> None:
        """Copy the classifier of `teacher`, the model that this one was built for.

        Raises ModelError: its classifier does not read the mean of its last map, or its image size differs from the student's.
        """
        taps = Taps(teacher, ("unpooled", "pooled"), name=type(teacher).__name__, image_size=image_size)
        with taps.capture():
            dry_forward(teacher, image_size, training=False)
            map_BDHW, pooled_BD = taps.pop()
        taps.remove()
        mean_BD = map_BDHW.mean((2, 3))
        if not mean_BD.is_meta and not torch.allclose(mean_BD, pooled_BD, rtol=1e-3, atol=1e-4):
            raise ModelError(
                f"the teacher, a {type(teacher).__name__}, does not classify the mean of its last map, so its classifier cannot "
                "be reused: choose another teacher, or another method than simkd"
            )
        if map_BDHW.shape[1:] != self._teacher_CHW:
            raise ModelError(
                f"the teacher's last map is {tuple(map_BDHW.shape[1:])}, but {self._teacher_CHW} at the student's image size: "
                f"set teacher.image_size to {image_size}, or choose another method than simkd"
            )
        self.classifier.load_state_dict(classifier(teacher).state_dict())


def projector(inputs: int, outputs: int) -> nn.Sequential:
    """Build 1×1, 3×3 and 1×1 convolutions with batch norm and ReLU, half as wide inside (factor 2 in the authors' code)."""
    layers: list[nn.Module] = []
    width = max(outputs // 2, 1)
    for before, after, kernel in ((inputs, width, 1), (width, width, 3), (width, outputs, 1)):
        convolution = nn.Conv2d(before, after, kernel, padding=kernel // 2, bias=False)
        layers += [convolution, nn.BatchNorm2d(after), nn.ReLU()]
    return nn.Sequential(*layers)


def _last_map(trunk: nn.Module, name: str, image_size: int) -> str:
    """Return the tap of the student's last map: the pooled one, or its last stage if hidden layers follow the pooling."""
    try:
        Taps(trunk, ("unpooled",), name=name, image_size=image_size).remove()
    except ModelError:
        return "stage-1"
    return "unpooled"


def build_reused(name: str, build: Callable[[str], nn.Module], *, image_size: int, seed: int) -> ReusedClassifier:
    """Build the model STUDENT+TEACHER; `build` makes each part from its name."""
    student, teacher = model_parts(name)
    trunk, reused = build(student), build(teacher)
    with seeded(f"{name}:{seed}"):
        return ReusedClassifier(trunk, reused, name=name, image_size=image_size)
