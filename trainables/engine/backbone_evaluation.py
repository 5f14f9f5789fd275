"""What the features of a student without a classifier are worth: how like the teacher's they are, and what k-NN makes of them.

Shapes: B batch, C channels, H W pixels, D and E features.
"""

import contextlib
import math
from collections.abc import Generator
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from trainables.config import TrainConfig
from trainables.data.loader.loader import Batch, Loader
from trainables.data.loader.loader_process import loader_process
from trainables.data.order import Split
from trainables.data.source import open_on_node, refuse_single_class
from trainables.device.device_batches import DeviceBatch, on_device
from trainables.device.tensor_format import pixels_of
from trainables.distributed.group import Group, all_reduce_sum, broadcast_buffers, gather_objects
from trainables.engine.passes import TrainState, run_student, run_teacher
from trainables.errors import DataError
from trainables.methods.tap_reader import TapReader
from trainables.metrics.heartbeat import Heartbeat
from trainables.probes.agreement import LinearCKA
from trainables.probes.features import gather_features
from trainables.probes.knn import knn
from trainables.probes.linear import linear_probe


class LabeledImages(NamedTuple):
    """The images of `eval.path`, both splits as validation shows them."""

    train: Loader
    val: Loader

    def close(self) -> None:
        self.train.close()
        self.val.close()


def open_labeled(config: TrainConfig, group: Group) -> LabeledImages | None:
    """None: there is no `eval.path`. Raises DataError: its images cannot be read, or have no labels."""
    if config.eval.path is None:
        return None
    own = {"path": config.eval.path, "labels": True, "more": (), "val_share": None, "stage": "none", "cache": "none"}
    data = config.data.model_copy(update=own)
    process = loader_process(data, world_size=group.world_size, device=group.device)

    def loader(split: Split) -> Loader:
        assert isinstance(data.loader_workers, int)
        source = open_on_node(data, split)
        refuse_single_class(source.classes, f"eval.path: {data.path}")
        return Loader(
            source,
            data,
            split="val",  # without augmentation
            seed=0,
            rank=group.rank,
            world_size=group.world_size,
            loader_workers=data.loader_workers,
            device=group.device,
            process=process,
        )

    return LabeledImages(loader("train"), loader("val"))


class BackboneEvaluation:
    """The evaluations of one job's student."""

    def __init__(self, config: TrainConfig, embedding: TapReader, labeled: LabeledImages | None) -> None:
        """`embedding` reads the student's tap of this name."""
        self._eval, self._embedding, self._labeled, self._pixels = config.eval, embedding, labeled, pixels_of(config)

    @torch.inference_mode()
    def __call__(
        self, state: TrainState, val_loader: Loader, group: Group, heartbeat: Heartbeat, *, epoch: int, is_last: bool
    ) -> dict[str, float]:
        """Of the validation images `num_images`, `cka` with the teacher's features and the methods' `loss`; of the images of
        `eval.path` `top1_pct` and `top5_pct` by k-NN, and in the last evaluation `linear_top1_pct` by a linear probe.

        There is no `cka` without a teacher's network on this rank alone, and no `loss` where a method compares the images of a
        batch. Every rank calls it. Raises DataError: not one image of `eval.path` could be read.
        """
        module = state.distillation_module
        module.eval()
        broadcast_buffers(module, state.group)
        found = self._agreement(state, heartbeat.over(val_loader.epoch(0)), group, epoch)
        if self._labeled is not None:
            embed = partial(self._embed, state)
            train, val = (gather_features(embed, loader, group, heartbeat) for loader in self._labeled)
            if not len(train.labels_N) or not len(val.labels_N):
                raise DataError(f"eval.path: {self._eval.path}: not one image of a split could be read")
            votes = knn(train, val, group, num_neighbors=self._eval.num_neighbors, beat=heartbeat.beat)
            found |= {name: votes[name] for name in ("top1_pct", "top5_pct")}
            if is_last:
                found["linear_top1_pct"] = linear_probe(train, val, group, beat=heartbeat.beat)["top1_pct"]
        module.train()
        return found

    def _embed(self, state: TrainState, batch: DeviceBatch) -> Tensor:
        """The student's embeddings (B, D)."""
        state.compilation.begin_step()
        with state.autocast(), state.compilation.batch(len(batch.images_BCHW)), self._embedding.capture():
            output = state.distillation_module.student(self._pixels(batch.images_BCHW))
            return self._read(output, len(batch.labels_B))

    def _agreement(self, state: TrainState, batches: Generator[Batch, None, None], group: Group, epoch: int) -> dict[str, float]:
        module, cka = state.distillation_module, None
        measures_loss = not any(method.requires.whole_batch for method in module.methods_by_name.values())
        sums = torch.zeros(2, dtype=torch.float64, device=group.device)  # images, loss
        with contextlib.closing(on_device(batches, group.device)) as device_batches:
            for batch in device_batches:
                if (rows := len(batch.labels_B)) == 0:
                    continue
                batch.wait()
                sums[0] += rows
                if state.teacher.is_collective:  # ranks have different numbers of batches
                    continue
                state.compilation.begin_step()
                part = batch._replace(images_BCHW=self._pixels(batch.images_BCHW))
                with state.compilation.batch(len(part.images_BCHW)):
                    teacher = run_teacher(state, part)
                    with self._embedding.capture():
                        if measures_loss:
                            outputs, losses = run_student(state, part.images_BCHW, part, teacher, epoch, module=module)
                            sums[1] += losses.named["loss"].double().sum()
                            output = outputs.logits_BK
                        else:
                            with state.autocast():
                                output = module.student(part.images_BCHW)
                        student_BD = self._read(output, rows)
                features = next((each.features for each in teacher.values() if each.features), ())
                if features:
                    teacher_BE = features[0].flatten(2).mean(2) if features[0].ndim > 2 else features[0]
                    cka = cka or LinearCKA(student_BD.shape[1], teacher_BE.shape[1], group.device)
                    cka.add(student_BD, teacher_BE)
        images, loss = all_reduce_sum(sums, group).tolist()
        found = {"num_images": images}
        if measures_loss and not state.teacher.is_collective:
            found["loss"] = loss / (images or math.nan)
        widths = next((widths for widths in gather_objects(cka and cka.widths, group) if widths), None)
        if widths is not None:
            found["cka"] = (cka or LinearCKA(widths[0], widths[1], group.device)).result(group)
        return found

    def _read(self, output: Tensor, num_rows: int) -> Tensor:
        (outputs,) = self._embedding.pop(output, num_rows).values()
        return outputs.features[0]
