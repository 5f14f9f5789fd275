"""Read the targets of a reinforced data set, and the images that they belong to: needs pyarrow and torch, images torchvision."""

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import torch
from torch import Tensor


def read_arrow(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The columns of a file, and what its schema says of them."""
    with pa.memory_map(str(path)) as file:
        table = pa.ipc.open_file(file).read_all()
    columns = {}
    for field, column in zip(table.schema, table.columns, strict=True):
        values = column.chunk(0).flatten() if pa.types.is_fixed_size_list(field.type) else column.chunk(0)
        columns[field.name] = torch.tensor(values.to_numpy()).view(len(table), *json.loads(field.metadata[b"shape"]))
    return columns, json.loads(table.schema.metadata[b"raydistill"])


def read_targets(folder: Path | str, epoch: int) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """`sample` (N), `logits` (N, K) and features of one teacher in one epoch, and what is known of them."""
    blocks = [read_arrow(path) for path in sorted(Path(folder, f"epoch-{epoch:05}").glob("*-*.arrow"))]
    columns, about = {name: torch.cat([block[name] for block, _ in blocks]) for name in blocks[0][0]}, blocks[0][1]
    rows = [row for _, row in sorted({sample: row for row, sample in enumerate(columns["sample"].tolist())}.items())]
    columns = {name: values[rows] for name, values in columns.items()}
    if "logits" in columns:  # stored minus `top`; all that are not among `classes` are `rest`
        logits_NK = columns["logits"].float()
        if "classes" in columns:
            rest_NK = columns.pop("rest").float()[:, None].expand(-1, len(about["classes"]))
            logits_NK = rest_NK.scatter(1, columns.pop("classes").long(), logits_NK)
        columns["logits"] = logits_NK + columns.pop("top")[:, None]
    for name in [name for name in columns if name.startswith("feature ") and not name.endswith(" scale")]:
        if (scale_N := columns.pop(f"{name} scale", None)) is not None:  # e4m3, of which 448 is the largest number
            scale = (scale_N / 448).view(-1, *[1] * (columns[name].ndim - 1))
            columns[name] = columns[name].view(torch.float8_e4m3fn).float() * scale
        columns[name] = columns[name].float()
    return columns, about


class ReinforcedFolder(torch.utils.data.Dataset[tuple[Tensor, dict[str, Tensor]]]):
    """The images of a folder as one epoch's targets were computed of them: (3, H, W) in [0, 1], and their targets."""

    def __init__(self, images: Path | str, folder: Path | str, epoch: int) -> None:
        self.images, self.names = Path(images), Path(folder, "images.txt").read_text(encoding="utf-8").split("\n")[:-1]
        self.targets, self.about = read_targets(folder, epoch)
        self.drawn, described = read_arrow(Path(folder, f"epoch-{epoch:05}", "augmentation.arrow"))
        self.operations = described["operations"]

    def __len__(self) -> int:
        return len(self.targets["sample"])

    def __getitem__(self, row: int) -> tuple[Tensor, dict[str, Tensor]]:
        target = {name: values[row] for name, values in self.targets.items()}
        sample = int(target["sample"])
        image = self.augmented(sample)
        if "partner" in target:
            other, own_share = self.augmented(int(target["partner"])), self.drawn["own_share"][sample]
            left, top, right, bottom = self.drawn["pasted"][sample].tolist()
            image[:, top:bottom, left:right] = other[:, top:bottom, left:right]
            image = other * (1 - own_share) + image * own_share
        return image / 255, target

    def augmented(self, sample: int) -> Tensor:
        """An image before it is mixed: (3, H, W) from 0 to 255."""
        from PIL import Image
        from torchvision.transforms import InterpolationMode
        from torchvision.transforms.autoaugment import _apply_op
        from torchvision.transforms.v2 import functional as F

        drawn, settings = {name: values[sample].tolist() for name, values in self.drawn.items()}, self.about["images"]
        size, val_resize = settings["image_size"], settings["val_resize"]
        file = Image.open(self.images / self.names[sample]).convert("RGB")
        if settings["augment"] != "crop_flip" and (val_resize or file.size != (size, size)):  # the view of validation
            file = F.center_crop(F.resize(file, [val_resize or round(size * 256 / 224)]), [size, size])
        image = F.pil_to_tensor(file)
        if "crop" in drawn:
            left, top, right, bottom = drawn["crop"]
            image = F.resized_crop(image, top, left, bottom - top, right - left, [size, size], antialias=True)
            image = F.hflip(image) if drawn["flip"] else image
        for number in drawn.get("operations", []):
            name, magnitude = self.operations[number]
            if name == "SolarizeAdd":
                image = torch.where(image < 128, (image + int(magnitude)).clamp(max=255), image)
            else:
                image = _apply_op(image, name, magnitude, InterpolationMode.NEAREST, None)
        adjust = (F.adjust_brightness, F.adjust_contrast, F.adjust_saturation, F.adjust_hue)
        for step in drawn.get("jitter_order", []):
            if drawn["jitter"][step] != (1, 1, 1, 0)[step]:
                image = adjust[step](image, drawn["jitter"][step])
        pixels: Tensor = (F.rgb_to_grayscale(image, 3) if drawn.get("gray") else image).float()
        left, top, right, bottom = drawn.get("erased", (0, 0, 0, 0))
        pixels[:, top:bottom, left:right] = 255 * torch.tensor(settings["erased_to"] or (0, 0, 0)).view(3, 1, 1)
        return pixels
