"""The student as MLflow loads and serves it. This script is copied into the logged model ("models from code", no pickle).

The model also contains the checkpoint (safetensors) and the `trainables` package. Shapes: B batch, C channels, H W pixels,
K classes, D features.
"""

from pathlib import Path
from typing import Any

import mlflow
import numpy as np
from mlflow.pyfunc import PythonModel, PythonModelContext

IMAGES_PER_FORWARD = 256


class StudentModel(PythonModel):  # type: ignore[misc]
    """Maps uint8 images_BCHW of the training size to float32 probabilities_BK, or features_BD if the student has no classes.

    The model's metadata has the class names.
    """

    def load_context(self, context: PythonModelContext) -> None:
        """Build the checkpoint's model, on the GPU if there is one."""
        # Imported late, so that logging the model does not import torch.
        import torch

        from trainables.export.student import Network, read_student
        from trainables.user_code import file_of, use_copies

        files = {name: Path(file) for name, file in context.artifacts.items() if name != "checkpoint"}
        use_copies({str(file_of(name)): file for name, file in files.items()})
        student = read_student(Path(context.artifacts["checkpoint"]))
        self._has_classes = bool(student.classes)
        self._device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self._network = Network(student, preprocess=True).to(self._device).eval()

    def predict(self, context: PythonModelContext, model_input: np.ndarray, params: dict[str, Any] | None = None) -> np.ndarray:
        """Return float32 probabilities_BK or features_BD of uint8 images_BCHW."""
        import torch

        images_BCHW = torch.from_numpy(np.ascontiguousarray(model_input, dtype=np.uint8))
        parts = []
        with torch.inference_mode():
            for part_BCHW in torch.split(images_BCHW, IMAGES_PER_FORWARD):
                output = self._network(part_BCHW.to(self._device))
                parts.append((output.softmax(dim=1) if self._has_classes else output).cpu().numpy())
        return np.concatenate(parts)


mlflow.models.set_model(StudentModel())
