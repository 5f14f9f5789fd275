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
from trainables.models.forward import seeded
from trainables.models.libraries import library_of_class
from trainables.models.libraries.interface import DeclaredTaps
from trainables.models.tap_names import TapNames, classifier, modules_before
from trainables.models.taps import Taps
from trainables.user_code import model_parts


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
        self._teacher_CHW = TapNames(teacher, image_size, name=teacher_name).shape("unpooled")
        # The last map is the pooled one, or the last stage's if hidden layers follow the pooling.
        tap = "unpooled" if "unpooled" in TapNames(trunk, image_size, name=student_name).taps else "stage-1"
        student_classifier = classifier(trunk)
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
        trunk = library_of_class(self.trunk).taps(self.trunk)
        stages, preacts = ([f"trunk.{path}" for path in paths] for paths in (trunk.stages, trunk.preacts))
        last_map = None if trunk.layout.channels_last else "projector"
        return DeclaredTaps(trunk.stem and f"trunk.{trunk.stem}", stages, last_map, trunk.layout, None, preacts)

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
        names = TapNames(teacher, image_size, name=type(teacher).__name__)
        map_BDHW, pooled_BD = names.value("unpooled"), names.value("pooled")
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


def build_reused(name: str, build: Callable[[str], nn.Module], *, image_size: int, seed: int) -> ReusedClassifier:
    """Build the model STUDENT+TEACHER; `build` makes each part from its name."""
    student, teacher = model_parts(name)
    trunk, reused = build(student), build(teacher)
    with seeded(f"{name}:{seed}"):
        return ReusedClassifier(trunk, reused, name=name, image_size=image_size)
