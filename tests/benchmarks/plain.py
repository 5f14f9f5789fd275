"""The peer of `loop` and `memory`: knowledge distillation as one writes it in a script of one's own, for `torchrun`.

Models and images are the product's, everything else is torch's and as torchvision's reference has it.
"""

import argparse
import json
import time
from itertools import count

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler
from torchvision import datasets, transforms

from tests.benchmarks.process import peak_rss_mib, pss_mib
from trainables.models.registry import build_model

MEAN, STD = torch.tensor([0.485, 0.456, 0.406]).view(3, 1, 1), torch.tensor([0.229, 0.224, 0.225]).view(3, 1, 1)


class Noise(Dataset[tuple[Tensor, int]]):
    """As `synthetic`: 64 images of noise, shown round and round."""

    def __init__(self, num_images: int, size: int, num_classes: int) -> None:
        self.images = torch.randint(0, 256, (64, 3, size, size), dtype=torch.uint8)
        self.num_images, self.num_classes = num_images, num_classes

    def __len__(self) -> int:
        return self.num_images

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.images[index % 64], index % self.num_classes


def photos(folder: str, size: int) -> Dataset[tuple[Tensor, int]]:
    """JPEG files, cropped and flipped as for CIFAR."""
    steps = [transforms.RandomCrop(size, padding=4), transforms.RandomHorizontalFlip(), transforms.PILToTensor()]
    return datasets.ImageFolder(f"{folder}/train", transforms.Compose(steps))


def kd_loss(student: Tensor, teacher: Tensor, labels: Tensor, T: float = 4.0) -> Tensor:
    soft = F.kl_div(F.log_softmax(student / T, 1), F.softmax(teacher / T, 1), reduction="batchmean") * T * T
    return 0.1 * F.cross_entropy(student, labels) + 0.9 * soft


def accuracy(output: Tensor, labels: Tensor) -> list[Tensor]:
    _, predicted = output.topk(5, 1)
    correct = predicted.t().eq(labels)
    return [correct[:k].flatten().sum() * (100.0 / len(labels)) for k in (1, 5)]


def main(args: argparse.Namespace) -> None:
    empty_mib = peak_rss_mib()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    data = photos(args.folder, args.size) if args.folder else Noise(args.images, args.size, args.classes)
    sampler: DistributedSampler[tuple[Tensor, int]] = DistributedSampler(data, drop_last=True)
    loader = DataLoader(data, args.batch // world_size, sampler=sampler, num_workers=1, persistent_workers=True, drop_last=True)
    teacher = build_model(args.teacher, num_classes=args.classes, image_size=args.size, seed=0).eval().requires_grad_(False)
    student: nn.Module = build_model(args.student, num_classes=args.classes, image_size=args.size, seed=0)
    if world_size > 1:
        student = DistributedDataParallel(student)
    optimizer = torch.optim.SGD(student.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)
    student.train()
    step, began, sums = 0, 0.0, [0.0, 0.0, 0.0]
    for epoch in count():
        sampler.set_epoch(epoch)
        for images, labels in loader:
            images = images.float().div_(255).sub_(MEAN).div_(STD)
            with torch.no_grad():
                teacher_logits = teacher(images)
            logits = student(images)
            loss = kd_loss(logits, teacher_logits, labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            acc1, acc5 = accuracy(logits.detach(), labels)
            for meter, value in enumerate((loss.item(), acc1.item(), acc5.item())):
                sums[meter] += value
            step += 1
            if step == args.warmup:
                began = time.perf_counter()
            if step % args.log_every == 0 and rank == 0:
                print(
                    f"Epoch: [{epoch}] step {step} loss {sums[0] / step:.4f} acc1 {sums[1] / step:.2f} acc5 {sums[2] / step:.2f}"
                )
            if step == args.warmup + args.steps:
                seconds = time.perf_counter() - began
                if rank == 0:
                    speed = {"images_per_s": args.steps * args.batch / seconds}
                    memory = {"peak_mib": peak_rss_mib(), "pss_mib": pss_mib(), "empty_mib": empty_mib}
                    print(json.dumps({**speed, **memory}))
                dist.destroy_process_group()
                return


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    for name in ("batch", "size", "classes", "images", "warmup", "steps", "log-every"):
        parser.add_argument(f"--{name}", type=int, required=True)
    for name in ("teacher", "student"):
        parser.add_argument(f"--{name}", required=True)
    parser.add_argument("--folder", help="JPEG files instead of noise")
    main(parser.parse_args())
