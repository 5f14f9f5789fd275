"""CPU transforms of images: the validation view, the training augmentations, and their random numbers.

Every random number is a hash of (seed, epoch, sample, repeat, number), so that an image does not depend on the batch, thread,
rank or restart. Shapes: B samples, U random numbers per sample.
"""

import hashlib
import math

import cv2
import numpy as np
from numpy.typing import NDArray
from PIL import Image

from trainables.config import DataConfig
from trainables.data.decode import Sample, StoredImage, with_shorter_side
from trainables.data.jpeg import Box, Decoded, Region, read_header
from trainables.data.order import GOLDEN, Split, mix64
from trainables.data.turbojpeg import open_decoder

_TRIES = 10
_LOG_RATIO = (math.log(3 / 4), math.log(4 / 3))
_PAD = 4
_LINEAR_BELOW = 2.0
_MAX_DEVICE_PIXELS = 2**24  # larger images are not decoded on the device: they would take too much of its memory
AUGMENTS = {"none": 0, "crop_flip": 3 + 2 * _TRIES, "pad_crop_flip": 3}
"""The values of `data.augment`, each with U, the random numbers that it uses per sample."""

# the loader's threads share the cores; OpenCV would start more threads in each call
cv2.setNumThreads(0)


def uniforms(seed: int, epoch: int, views_B: NDArray[np.int64], count: int, name: str = "") -> NDArray[np.float64]:
    """Return random numbers (B, `count`) in [0, 1); row b is a pure function of (seed, epoch, views_B[b], `name`).

    Each row is a SplitMix64 stream (Steele, Lea, Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014;
    finalizer constants of Stafford's mix 13) whose start is hashed from seed, epoch and view. Numbers have 53 bits.
    """
    starts_B = mix64(np.uint64(epoch_start(seed, epoch)) + views_B.astype(np.uint64))
    steps_U = np.arange(1, count + 1, dtype=np.uint64) * np.uint64(GOLDEN) + np.uint64(stream_start(name))
    return (mix64(starts_B[:, None] + steps_U) >> np.uint64(11)).astype(np.float64) * 2.0**-53


def epoch_start(seed: int, epoch: int) -> int:
    """Hash seed and epoch; callers add a view (`trainables.data.order.REPEAT`) to the result."""
    return int(mix64(mix64(np.array([seed], dtype=np.uint64)) + np.uint64(epoch))[0])


def stream_start(name: str) -> int:
    """Return the offset of the numbers for `name` in a sample's stream of 2^64; crop and flip have no name and begin at 0."""
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest()) if name else 0


def default_val_resize(image_size: int) -> int:
    """Return the default shorter side before the center crop: 256 for 224 px, as in the published ImageNet recipes."""
    return round(image_size * 256 / 224)


def validation_view(rgb_HWC: NDArray[np.uint8], image_size: int, val_resize: int | None) -> NDArray[np.uint8]:
    """Resize the shorter side to `val_resize` (bilinear, antialiased), then crop the central square of `image_size` pixels.

    The pixels equal those of torchvision's Resize and CenterCrop on a PIL image. Without a `val_resize`, an image that already
    has the target size is returned as is. `val_resize` must not be below `image_size`.

    Raises UnreadableImageError as `with_shorter_side` does.
    """
    if val_resize is None and rgb_HWC.shape[:2] == (image_size, image_size):
        return rgb_HWC
    image = Image.fromarray(rgb_HWC)
    resized = with_shorter_side(image, default_val_resize(image_size) if val_resize is None else val_resize)
    left, top = round((resized.width - image_size) / 2), round((resized.height - image_size) / 2)
    return np.asarray(resized.crop((left, top, left + image_size, top + image_size)))


def random_resized_crop_box(uniforms_U: NDArray[np.float64], width: int, height: int, min_area: float = 0.08) -> Box:
    """Return a random box (left, top, right, bottom) with `min_area` to 1 of an image's area and aspect ratio 3/4 to 4/3.

    This is torchvision's RandomResizedCrop.get_params: ten tries, then the largest central box with an allowed ratio. It uses 22
    random numbers: the position, then the area and ratio of each try.
    """
    x_at, y_at, *tries = uniforms_U.tolist()
    for area_at, ratio_at in zip(tries[0::2], tries[1::2], strict=True):
        area = width * height * _between((min_area, 1.0), area_at)
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


class Augment:
    """Decode and augment the stored samples of one split. Thread-safe.

    With `data.decoder: gpu`, it only chooses the crops of training JPEGs; the device does the rest.
    """

    def __init__(self, data: DataConfig, split: Split) -> None:
        training = split == "train"
        self._name = data.augment if training else "none"
        self._image_size, self._val_resize, self._min_area = data.image_size, data.val_resize, data.min_crop_area
        # validation results are compared with published ones
        self._exact = not training or data.fidelity == "exact"
        self._decoder = open_decoder()
        self.on_device = training and data.decodes_on_device
        """Whether `region` may leave samples to the device."""
        self.decoder = "gpu" if self.on_device else "turbojpeg" if self._decoder else "pil"
        """What decodes JPEG: turbojpeg, pil or gpu."""
        self.num_uniforms = AUGMENTS[self._name]

    def shows_unchanged(self, size: int | None) -> bool:
        """Whether `render` copies stored images of this height and width unchanged; `size` is None if sizes differ."""
        return self._name != "crop_flip" and self._val_resize is None and self._image_size == size

    def region(self, row: int, sample: Sample, uniforms_U: NDArray[np.float64]) -> Region | None:
        """Return what the device is to decode for `row` of a batch; None if `render` must: no ordinary JPEG, or too large."""
        header = None if isinstance(sample, np.ndarray) else read_header(sample)
        if (
            header is None
            or isinstance(sample, np.ndarray)
            or not header.ycbcr
            or header.width * header.height > _MAX_DEVICE_PIXELS
        ):
            return None
        return Region(row, sample, header, *crop_and_flip(uniforms_U, header.width, header.height, self._min_area))

    def render(self, sample: Sample, uniforms_U: NDArray[np.float64], out_HWC: NDArray[np.uint8]) -> None:
        """Decode the part of `sample` chosen by random numbers in [0, 1) into `out_HWC` (contiguous); call `finish` next.

        Raises UnreadableImageError if the sample is not a complete image; `out_HWC` is then undefined.
        """
        stored = StoredImage(sample, self._decoder)
        if self._name == "crop_flip":
            crop = crop_and_flip(uniforms_U, stored.width, stored.height, self._min_area)
            render_crop(stored, *crop, out_HWC, exact=self._exact)
        else:
            out_HWC[:] = validation_view(stored.whole(), self._image_size, self._val_resize)

    def finish(self, uniforms_BU: NDArray[np.float64], images_BHWC: NDArray[np.uint8]) -> None:
        """Finish a batch that `render` has filled, in place, with the same random numbers."""
        if self._name == "pad_crop_flip":
            _pad_crop_flip(uniforms_BU, images_BHWC)


def crop_and_flip(uniforms_U: NDArray[np.float64], width: int, height: int, min_area: float) -> tuple[Box, bool]:
    """Return the box that `crop_flip` takes from an image of this size, and whether to mirror it (with probability 0.5)."""
    return random_resized_crop_box(uniforms_U[1:], width, height, min_area), bool(uniforms_U[0] < 0.5)


def render_crop(stored: StoredImage, box: Box, flip: bool, out_HWC: NDArray[np.uint8], *, exact: bool) -> None:
    """Fill `out_HWC` (contiguous) with a box of the image, resized (bilinear) and, with `flip`, mirrored.

    `exact` antialiases as torch does. Otherwise it saves work where the difference is hardly visible: the image is decoded 2, 4
    or 8 times smaller if that leaves a pixel per output pixel, and a remaining scale below 2 is not antialiased. On 250 ImageNet
    files at 224 px this takes 0.90 ms of CPU (mean PSNR 45 dB); antialiasing from a scale of 1.4 on, 0.93 ms (52 dB); `exact`,
    0.99 ms (67 dB). Raises UnreadableImageError as StoredImage does.
    """
    target_HWC = np.empty_like(out_HWC) if flip else out_HWC
    size = len(out_HWC)
    scale = math.sqrt((box[2] - box[0]) * (box[3] - box[1])) / size  # pixels of the box per output pixel, in one dimension
    shrink = 1
    while not exact and shrink < 8 and scale >= 2 * shrink:
        shrink *= 2
    decoded = stored.decode(box, shrink)
    # the decoder may have shrunk less than asked, or not at all
    antialiased = exact or scale >= _LINEAR_BELOW * decoded.shrink
    if decoded.shrink > 1:
        _resize_shrunk(decoded, box, target_HWC, antialiased=antialiased)
    elif antialiased:
        resize_exact(decoded.part(box), target_HWC)
    else:
        cv2.resize(decoded.part(box), (size, size), dst=target_HWC, interpolation=cv2.INTER_LINEAR)
    if flip:
        cv2.flip(target_HWC, 1, dst=out_HWC)


def _resize_shrunk(decoded: Decoded, box: Box, out_HWC: NDArray[np.uint8], *, antialiased: bool) -> None:
    """Fill `out_HWC` with a box in coordinates of the whole image, whose edges may fall between decoded pixels."""
    size, (height, width) = len(out_HWC), decoded.rgb_HWC.shape[:2]
    left, right = (edge / decoded.shrink - decoded.left for edge in box[::2])
    top, bottom = (edge / decoded.shrink - decoded.top for edge in box[1::2])
    right, bottom = min(right, width), min(bottom, height)
    if antialiased:
        edges = left, top, right, bottom
        out_HWC[:] = np.asarray(Image.fromarray(decoded.rgb_HWC).resize((size, size), Image.Resampling.BILINEAR, edges))
        return
    across, down = (right - left) / size, (bottom - top) / size
    # `cv2.resize` takes whole pixels only; OpenCV's coordinates refer to pixel centers
    inverse = np.array([[across, 0, left + (across - 1) / 2], [0, down, top + (down - 1) / 2]])
    flags = cv2.INTER_LINEAR | cv2.WARP_INVERSE_MAP
    cv2.warpAffine(decoded.rgb_HWC, inverse, (size, size), dst=out_HWC, flags=flags, borderMode=cv2.BORDER_REPLICATE)


def resize_exact(rgb_HWC: NDArray[np.uint8], out_HWC: NDArray[np.uint8]) -> None:
    """Resize into `out_HWC` (contiguous) with torch's antialiased bilinear filter: PIL's up to rounding, in 1/4 of the time."""
    import torch  # here: it costs a loader process seconds and 300 MiB, and only this function needs it

    if not rgb_HWC.flags.writeable:
        rgb_HWC = rgb_HWC.copy()  # torch warns about read-only memory
    image_1CHW, out_1CHW = (torch.from_numpy(pixels_HWC).permute(2, 0, 1)[None] for pixels_HWC in (rgb_HWC, out_HWC))
    # `interpolate` calls the same op but returns planes; copying them into the batch would take as long as the resize
    torch.ops.aten._upsample_bilinear2d_aa.out(image_1CHW, out_HWC.shape[:2], False, None, None, out=out_1CHW)


def padded_corners(uniforms_BU: NDArray[np.float64]) -> NDArray[np.int64]:
    """(left, top) of the part of each image that `pad_crop_flip` shows, from -4 to 4: the image's own corner is at 0."""
    corners_B2: NDArray[np.int64] = (uniforms_BU[:, 1:] * (2 * _PAD + 1)).astype(np.int64) - _PAD
    return corners_B2


def _pad_crop_flip(uniforms_BU: NDArray[np.float64], images_BHWC: NDArray[np.uint8]) -> None:
    """Pad by 4 black pixels, take a random crop of the original size, and flip with probability 0.5, as for CIFAR."""
    num_images, size = images_BHWC.shape[:2]
    padded_BHWC = np.zeros((num_images, size + 2 * _PAD, size + 2 * _PAD, 3), dtype=np.uint8)
    padded_BHWC[:, _PAD:-_PAD, _PAD:-_PAD] = images_BHWC
    flips_B, corners_B2 = uniforms_BU[:, 0] < 0.5, padded_corners(uniforms_BU) + _PAD
    draws = zip(flips_B.tolist(), corners_B2.tolist(), strict=True)
    for padded_HWC, image_HWC, (flip, (left, top)) in zip(padded_BHWC, images_BHWC, draws, strict=True):
        part_HWC = padded_HWC[top : top + size, left : left + size]
        if flip:
            cv2.flip(part_HWC, 1, dst=image_HWC)
        else:
            image_HWC[:] = part_HWC
