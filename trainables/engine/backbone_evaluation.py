"""Evaluate the features of a student without a classifier: similarity to the teacher's features, k-NN and linear probes.

Shapes: B batch, C channels, H W pixels, D and E features.
"""

import contextlib
import math
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from trainables.config import TrainConfig
from trainables.data.loader.loader import Loader
from trainables.data.source import refuse_single_class
from trainables.device.device_batches import DeviceBatch, on_device
from trainables.device.tensor_format import pixels_of
from trainables.distributed.group import Group, all_reduce_sum, broadcast_buffers, gather_objects
from trainables.engine.features import SPLITS, val_loader
from trainables.engine.passes import TrainState, run_student, run_teacher
from trainables.errors import DataError
from trainables.methods.tap_reader import TapReader
from trainables.metrics.heartbeat import Heartbeat
from trainables.probes.agreement import LinearCKA
from trainables.probes.features import gather_features
from trainables.probes.knn import knn
from trainables.probes.linear import linear_probe


def open_labeled(config: TrainConfig, group: Group) -> tuple[Loader, ...]:
    """Open both splits of `eval.path` with validation preprocessing; () without that key.

    Raises DataError: the images cannot be read, or have no labels.
    """
    data = config.eval.labeled(config.data)
    if data is None:
        return ()
    loaders = tuple(val_loader(data, split, group) for split in SPLITS)
    for loader in loaders:
        refuse_single_class(loader.source.classes, f"eval.path: {data.path}")
    return loaders


class BackboneEvaluation:
    """Evaluates one job's student."""

    def __init__(self, config: TrainConfig, embedding: TapReader, labeled: tuple[Loader, ...]) -> None:
        """`embedding` reads the student's tap `embedding`; for `labeled` see `open_labeled`."""
        self._eval, self._embedding, self.labeled, self._pixels = config.eval, embedding, labeled, pixels_of(config)
        self._shares, self._target_pct = config.shares, config.train.until_top1_pct

    @torch.inference_mode()
    def __call__(
        self, state: TrainState, val_loader: Loader, group: Group, heartbeat: Heartbeat, *, epoch: int, is_last: bool
    ) -> dict[str, float]:
        """Evaluate the student. Every rank must call this.

        The validation images give `num_images`, `cka` with the teacher's features, `cosine` between the teacher's embeddings and
        those that a method's head projects, and the methods' `loss`. With several teachers, `cka` is the mean of `cka1`, …,
        weighted by their shares. The images of `eval.path` give `top1_pct` and `top5_pct` by k-NN. The last evaluation, or the
        one that reaches `train.until_top1_pct`, adds `linear_top1_pct` by a linear probe.

        There is no `cka` with a sharded teacher, and no `loss` if a method compares the images of a batch.

        Raises DataError: no image of `eval.path` could be read.
        """
        module = state.distillation_module
        module.eval()
        broadcast_buffers(module, state.group)
        found = self._agreement(state, val_loader, group, heartbeat, epoch)
        if self.labeled:
            embed = partial(self._embed, state)
            train, val = (gather_features(embed, loader, group, heartbeat) for loader in self.labeled)
            if not len(train.labels_N) or not len(val.labels_N):
                raise DataError(f"eval.path: {self._eval.path}: a split has no readable image")
            votes = knn(train, val, group, num_neighbors=self._eval.num_neighbors, beat=heartbeat.beat)
            found |= {name: votes[name] for name in ("top1_pct", "top5_pct")}
            if is_last or (self._target_pct is not None and votes["top1_pct"] >= self._target_pct):
                found["linear_top1_pct"] = linear_probe(train, val, group, beat=heartbeat.beat)["top1_pct"]
        module.train()
        return found

    def _embed(self, state: TrainState, batch: DeviceBatch) -> Tensor:
        """Return the student's embeddings (B, D)."""
        state.compilation.begin_step()
        with state.autocast(), state.compilation.batch(len(batch.images_BCHW)), self._embedding.capture():
            output = state.distillation_module.student(self._pixels(batch.images_BCHW))
            return self._read(output, len(batch.labels_B))

    def _agreement(
        self, state: TrainState, val_loader: Loader, group: Group, heartbeat: Heartbeat, epoch: int
    ) -> dict[str, float]:
        module, ckas = state.distillation_module, dict[int, LinearCKA]()
        projecting = {  # each teacher's first method, as for the CKA
            module.teachers.get(key, 0): key
            for key, method in reversed(module.methods_by_name.items())
            if method.projects_embedding
        }
        cosines = torch.zeros(len(projecting), dtype=torch.float64, device=group.device)
        measures_loss = not any(
            method.requires.whole_batch or method.requires.all_gather for method in module.methods_by_name.values()
        )
        sums = torch.zeros(2, dtype=torch.float64, device=group.device)  # images, loss
        validated = replace(state, teacher=state.teacher.for_validation(val_loader))
        batches = validated.teacher.prefetch(heartbeat.over(val_loader.epoch(0)), None)
        with contextlib.closing(on_device(batches, group.device)) as device_batches:
            for batch in device_batches:
                if (rows := len(batch.labels_B)) == 0:
                    continue
                batch.wait()
                sums[0] += rows
                if state.teacher.is_collective:  # not possible: ranks have different numbers of batches
                    continue
                state.compilation.begin_step()
                part = batch._replace(images_BCHW=self._pixels(batch.images_BCHW))
                with state.compilation.batch(len(part.images_BCHW)):
                    teacher = run_teacher(validated, part)
                    with self._embedding.capture():
                        if measures_loss:
                            outputs, losses = run_student(state, part.images_BCHW, part, teacher, epoch, module=module)
                            sums[1] += losses.named["loss"].double().sum()
                            output, student = outputs.logits_BK, outputs.student
                        else:
                            with state.autocast():
                                output, student = module.read(part.images_BCHW, rows)
                        student_BD = self._read(output, rows)
                for position, key in enumerate(projecting.values()):
                    projected_BD, target_BD = module.methods_by_name[key].project_embedding(student[key], teacher[key])
                    cosines[position] += torch.cosine_similarity(projected_BD.double(), target_BD.double()).sum()
                firsts = [(module.teachers.get(key, 0), each.features[0]) for key, each in teacher.items() if each.features]
                for number, feature in dict(reversed(firsts)).items():
                    teacher_BE = feature.flatten(2).mean(2) if feature.ndim > 2 else feature
                    if number not in ckas:
                        ckas[number] = LinearCKA(student_BD.shape[1], teacher_BE.shape[1], group.device)
                    ckas[number].add(student_BD, teacher_BE)
        validated.teacher.end_epoch()
        images, loss = all_reduce_sum(sums, group).tolist()
        found = {"num_images": images}
        if measures_loss and not state.teacher.is_collective:
            found["loss"] = loss / (images or math.nan)
        by_rank: list[dict[int, tuple[int, int]]] = gather_objects({n: cka.widths for n, cka in sorted(ckas.items())}, group)
        widths = next((each for each in by_rank if each), {})
        values = {n: (ckas.get(n) or LinearCKA(x, y, group.device)).result(group) for n, (x, y) in widths.items()}
        if values:
            found |= self._by_teacher("cka", values)
        if projecting and not state.teacher.is_collective:
            means = (all_reduce_sum(cosines, group) / (images or math.nan)).tolist()
            found |= self._by_teacher("cosine", dict(zip(projecting, means, strict=True)))
        return found

    def _by_teacher(self, name: str, values: dict[int, float]) -> dict[str, float]:
        """Name each teacher's number, and add their mean weighted by the shares."""
        if len(values) == 1:
            return {name: next(iter(values.values()))}
        by_teacher = {f"{name}{n + 1}": value for n, value in values.items()}
        return {name: sum(self._shares[n] * value for n, value in values.items()), **by_teacher}

    def _read(self, output: Tensor, num_rows: int) -> Tensor:
        (outputs,) = self._embedding.pop(output, num_rows).values()
        return outputs.features[0]
