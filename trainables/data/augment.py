"""How an image becomes what the models see: validation's view, training's augmentations, and their random numbers.

Every random number is a hash of (seed, epoch, sample, which one), so no batch, thread, rank or restart changes an image.
Shapes: B samples, U random numbers a sample.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import cv2
import numpy as np
from numpy.typing import NDArray
from PIL import Image

from trainables.data.decode import DecodePlan, StoredImage, with_shorter_side
from trainables.data.decoders.interface import Box, Decoded
from trainables.data.order import GOLDEN, mix64

_TRIES = 10
_AREA = (0.08, 1.0)
_LOG_RATIO = (math.log(3 / 4), math.log(4 / 3))
_PAD = 4
_LINEAR_BELOW = 2.0

# a loader's threads share the cores between them; OpenCV would start threads of its own in each call
cv2.setNumThreads(0)


def uniforms(seed: int, epoch: int, indices_B: NDArray[np.int64], count: int) -> NDArray[np.float64]:
    """Random numbers (B, `count`) in [0, 1), row b a pure function of (seed, epoch, indices_B[b]).

    Each row is a SplitMix64 stream (Steele, Lea, Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014;
    finalizer constants of Stafford's mix 13) whose start is itself hashed from seed, epoch and index; 53 bits a number.
    """
    epoch_start = mix64(mix64(np.array([seed], dtype=np.uint64)) + np.uint64(epoch))
    starts_B = mix64(epoch_start + indices_B.astype(np.uint64))
    steps_U = np.arange(1, count + 1, dtype=np.uint64) * np.uint64(GOLDEN)
    return (mix64(starts_B[:, None] + steps_U) >> np.uint64(11)).astype(np.float64) * 2.0**-53


def default_val_resize(image_size: int) -> int:
    """The shorter side before the centre crop where none is given: 256 for 224 px, as in the published ImageNet recipes."""
    return round(image_size * 256 / 224)


def validation_view(image: Image.Image, image_size: int, val_resize: int | None) -> Image.Image:
    """Shorter side to `val_resize` (bilinear, antialiased), then the central square of `image_size` pixels.

    The same pixels as torchvision's Resize and CenterCrop on a PIL image. An image that already has the size that the
    models see is left as it is, unless `val_resize` asks for a resize. `val_resize` must not be below `image_size`.

    Raises UnreadableImageError as `with_shorter_side` does.
    """
    if val_resize is None and image.size == (image_size, image_size):
        return image
    resized = with_shorter_side(image, default_val_resize(image_size) if val_resize is None else val_resize)
    left = round((resized.width - image_size) / 2)
    top = round((resized.height - image_size) / 2)
    return resized.crop((left, top, left + image_size, top + image_size))


def random_resized_crop_box(uniforms_U: NDArray[np.float64], width: int, height: int) -> Box:
    """(left, top, right, bottom) of a random part of an image: area 0.08 to 1 of it, aspect ratio 3/4 to 4/3.

    torchvision's RandomResizedCrop.get_params: ten tries, then the largest central part of an allowed ratio. Takes 22
    random numbers: the position in the image, then area and ratio of each try.
    """
    x_at, y_at, *tries = uniforms_U.tolist()
    for area_at, ratio_at in zip(tries[0::2], tries[1::2], strict=True):
        area = width * height * _between(_AREA, area_at)
        ratio = math.exp(_between(_LOG_RATIO, ratio_at))
        crop_width, crop_height = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < crop_width <= width and 0 < crop_height <= height:
            left, top = int(x_at * (width - crop_width + 1)), int(y_at * (height - crop_height + 1))
            return left, top, left + crop_width, top + crop_height
    narrowest, widest = 3 / 4, 4 / 3
    crop_width, crop_height = width, height
    if width / height < narrowest:
        crop_height = round(width / narrowest)
    elif width / height > widest:
        crop_width = round(height * widest)
    left, top = (width - crop_width) // 2, (height - crop_height) // 2
    return left, top, left + crop_width, top + crop_height


def _between(limits: tuple[float, float], at: float) -> float:
    return limits[0] + (limits[1] - limits[0]) * at


class ResizeOptions(NamedTuple):
    """How an augmentation resizes. The size of the pixels that it fills is the size that the models see."""

    val_resize: int | None
    exact: bool


class Planned(NamedTuple):
    """What is to be shown of a stored image, and all that can be known before it is decoded."""

    decode_plan: DecodePlan
    box: Box
    flip: bool


def _plan_whole(stored: StoredImage, uniforms_U: NDArray[np.float64], size: int, options: ResizeOptions) -> Planned:
    box = 0, 0, stored.width, stored.height
    return Planned(stored.plan(box), box, flip=False)


def _show_whole(planned: Planned, out_HWC: NDArray[np.uint8], options: ResizeOptions) -> None:
    """Validation's view."""
    size = len(out_HWC)
    rgb_HWC = planned.decode_plan.decode().part(planned.box)
    if options.val_resize is None and rgb_HWC.shape == out_HWC.shape:
        out_HWC[:] = rgb_HWC
    else:
        out_HWC[:] = np.asarray(validation_view(Image.fromarray(rgb_HWC), size, options.val_resize))


def _plan_crop(stored: StoredImage, uniforms_U: NDArray[np.float64], size: int, options: ResizeOptions) -> Planned:
    """RandomResizedCrop (bilinear, antialiased) and a horizontal flip of every second image, as for ImageNet."""
    box, flip = crop_and_flip(uniforms_U, stored.width, stored.height)
    return Planned(stored.plan(box, 1 if options.exact else _shrink(box, size)), box, flip)


def crop_and_flip(uniforms_U: NDArray[np.float64], width: int, height: int) -> tuple[Box, bool]:
    """What `crop_flip` shows of an image of this size: which part, and whether mirrored."""
    return random_resized_crop_box(uniforms_U[1:], width, height), bool(uniforms_U[0] < 0.5)


def show_crop(planned: Planned, out_HWC: NDArray[np.uint8], options: ResizeOptions) -> None:
    """Fill `out_HWC` (contiguous) with the pixels of a box, resized and perhaps mirrored.

    Raises UnreadableImageError as the stored image does.
    """
    plan, box, flip = planned
    target_HWC = np.empty_like(out_HWC) if flip else out_HWC
    if options.exact:
        resize_exact(plan.decode().part(box), target_HWC)
    else:
        _resize_fast(plan.decode(), box, target_HWC)
    if flip:
        cv2.flip(target_HWC, 1, dst=out_HWC)


def _scale(box: Box, size: int) -> float:
    """How many pixels of the box there are for each that is shown, in one direction."""
    return math.sqrt((box[2] - box[0]) * (box[3] - box[1])) / size


def _shrink(box: Box, size: int) -> int:
    """How much smaller `fast` decodes an image: by 2, 4 or 8 where a pixel is left for each that is shown."""
    scale, shrink = _scale(box, size), 1
    while shrink < 8 and scale >= 2 * shrink:
        shrink *= 2
    return shrink


def _resize_fast(decoded: Decoded, box: Box, out_HWC: NDArray[np.uint8]) -> None:
    """Fill `out_HWC` with the box, with less work than `resize_exact` where that is hardly visible.

    What is shrunk by less than 2 is interpolated without antialiasing. docs/data.md has what other limits cost and gain.
    """
    size = len(out_HWC)
    # a decoder may not be able to shrink, or not that far
    antialiased = _scale(box, size) >= _LINEAR_BELOW * decoded.shrink
    if decoded.shrink > 1:
        height, width = decoded.rgb_HWC.shape[:2]
        left, right = (edge / decoded.shrink - decoded.left for edge in box[::2])
        top, bottom = (edge / decoded.shrink - decoded.top for edge in box[1::2])
        edges = left, top, min(right, width), min(bottom, height)  # between pixels
        if antialiased:
            out_HWC[:] = np.asarray(Image.fromarray(decoded.rgb_HWC).resize((size, size), Image.Resampling.BILINEAR, edges))
        else:
            _resize_linear(decoded.rgb_HWC, edges, out_HWC)
    elif antialiased:
        resize_exact(decoded.part(box), out_HWC)
    else:
        cv2.resize(decoded.part(box), (size, size), dst=out_HWC, interpolation=cv2.INTER_LINEAR)


def _resize_linear(rgb_HWC: NDArray[np.uint8], edges: tuple[float, float, float, float], out_HWC: NDArray[np.uint8]) -> None:
    """Fill `out_HWC` with what lies between (left, top, right, bottom), not antialiased; `cv2.resize` knows whole pixels only."""
    size, (left, top, right, bottom) = len(out_HWC), edges
    across, down = (right - left) / size, (bottom - top) / size
    # OpenCV's coordinates are those of the pixels' centres
    back = np.array([[across, 0, left + (across - 1) / 2], [0, down, top + (down - 1) / 2]])
    how = cv2.INTER_LINEAR | cv2.WARP_INVERSE_MAP
    cv2.warpAffine(rgb_HWC, back, (size, size), dst=out_HWC, flags=how, borderMode=cv2.BORDER_REPLICATE)


def resize_exact(rgb_HWC: NDArray[np.uint8], out_HWC: NDArray[np.uint8]) -> None:
    """Fill `out_HWC` (contiguous) by torch's antialiased bilinear resize: PIL's within a rounding, in a quarter of the time."""
    import torch  # here: a loader process, to which it would cost seconds and 300 MiB, needs it for this alone

    if not rgb_HWC.flags.writeable:
        rgb_HWC = rgb_HWC.copy()  # torch warns of memory that is read-only
    image_1CHW, out_1CHW = (torch.from_numpy(pixels_HWC).permute(2, 0, 1)[None] for pixels_HWC in (rgb_HWC, out_HWC))
    # `interpolate` calls the same, but gives planes, whose copying into the batch would take as long as the resize
    torch.ops.aten._upsample_bilinear2d_aa.out(image_1CHW, out_HWC.shape[:2], False, None, None, out=out_1CHW)


def _pad_crop_flip(uniforms_BU: NDArray[np.float64], images_BHWC: NDArray[np.uint8]) -> None:
    """A black border of 4 pixels, a random part as large as the image, and a flip, as for CIFAR."""
    num_images, size = images_BHWC.shape[:2]
    padded_BHWC = np.zeros((num_images, size + 2 * _PAD, size + 2 * _PAD, 3), dtype=np.uint8)
    padded_BHWC[:, _PAD:-_PAD, _PAD:-_PAD] = images_BHWC
    flips_B, corners_B2 = uniforms_BU[:, 0] < 0.5, (uniforms_BU[:, 1:] * (2 * _PAD + 1)).astype(np.int64)
    draws = zip(flips_B.tolist(), corners_B2.tolist(), strict=True)
    for padded_HWC, image_HWC, (flip, (left, top)) in zip(padded_BHWC, images_BHWC, draws, strict=True):
        part_HWC = padded_HWC[top : top + size, left : left + size]
        if flip:
            cv2.flip(part_HWC, 1, dst=image_HWC)
        else:
            image_HWC[:] = part_HWC


class Augment(NamedTuple):
    """How many random numbers U it takes a sample, and what is done with them.

    plan(stored, uniforms_U, size, options) chooses what of an image is shown on size × size pixels; show(planned, out_HWC,
    options) decodes that and fills `out_HWC`; in_place(uniforms_BU, images_BHWC), where there is one, then changes a whole batch.
    """

    num_uniforms: int
    plan: Callable[[StoredImage, NDArray[np.float64], int, ResizeOptions], Planned]
    show: Callable[[Planned, NDArray[np.uint8], ResizeOptions], None]
    in_place: Callable[[NDArray[np.float64], NDArray[np.uint8]], None] | None = None


AUGMENTS: dict[str, Augment] = {
    "none": Augment(0, _plan_whole, _show_whole),
    "crop_flip": Augment(3 + 2 * _TRIES, _plan_crop, show_crop),
    "pad_crop_flip": Augment(3, _plan_whole, _show_whole, _pad_crop_flip),
}
