"""DALI on the CPU at its best settings: `python dali_loader.py FOLDER SECONDS`, where FOLDER/train/CLASS/* are JPEG files."""

import json
import sys
from collections.abc import Iterator

import numpy as np
from nvidia.dali import fn, pipeline_def, types
from window import BATCH, SIZE, THREADS, images_per_s


@pipeline_def(batch_size=BATCH, num_threads=THREADS, device_id=None, prefetch_queue_depth=2)
def crops(folder: str):
    encoded, _ = fn.readers.file(file_root=f"{folder}/train", random_shuffle=True, initial_fill=1024)
    images = fn.decoders.image_random_crop(
        encoded,
        device="cpu",
        output_type=types.RGB,
        random_area=[0.08, 1.0],
        random_aspect_ratio=[3 / 4, 4 / 3],
        use_fast_idct=True,
        jpeg_fancy_upsampling=False,
    )
    images = fn.resize(images, size=[SIZE, SIZE], interp_type=types.INTERP_LINEAR, antialias=False)
    return fn.flip(images, horizontal=fn.random.coin_flip())


def batches(folder: str) -> Iterator[int]:
    pipeline = crops(folder)
    pipeline.build()
    while True:
        (images,) = pipeline.run()
        images_BHWC = np.asarray(images.as_tensor())
        assert images_BHWC.shape == (BATCH, SIZE, SIZE, 3)
        assert images_BHWC.dtype == np.uint8
        yield len(images_BHWC)


if __name__ == "__main__":
    print(json.dumps({"images_per_s": images_per_s(batches(sys.argv[1]), float(sys.argv[2]))}))
