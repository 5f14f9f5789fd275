"""Exports a student without a classifier as `backbone.safetensors`, which the student's library can load."""

from pathlib import Path

from safetensors.numpy import save_file

from service.runs.stored.stored_runs import display_name, local_checkpoint, shell_name
from trainables.models.checkpoint_header import read_checkpoint_header, read_model_tensors
from trainables.models.model_input import ModelInput
from trainables.models.names import check_model_name
from trainables.rundir import RunDir, replacing

FILE = "backbone.safetensors"
LOADED = {
    "timm": "timm.create_model({name!r}, num_classes=0).load_state_dict(safetensors.torch.load_file({path!r}))",
    "torchvision": "torchvision.models.get_model({name!r}).load_state_dict(safetensors.torch.load_file({path!r}), strict=False)",
    "transformers": "transformers.AutoModel.from_config(getattr(c := transformers.AutoConfig.from_pretrained({source!r}), "
    "'vision_config', c)).load_state_dict(safetensors.torch.load_file({path!r}), strict=False)",
}
"""Library → code that loads the file, which lacks a torchvision model's classifier and the pooler of transformers' ViT."""


def write_backbone(run_dir: RunDir, best: Path | None) -> list[str]:
    """Write a student's best checkpoint with its library's parameter names. Returns lines that say how to use it.

    Returns [] if the student has a classifier or was not trained. Raises CheckpointError, StorageError.
    """
    best = None if best is None else local_checkpoint(best)
    header = None if best is None else read_checkpoint_header(best)
    if best is None or header is None or header.num_classes:
        return []
    path = run_dir.root / FILE
    with replacing(path) as temporary:
        save_file(read_model_tensors(best), temporary)
    shown, found = display_name(path), check_model_name(header.model)
    load = LOADED.get(found.library, "write student.weights: {path}, or teacher.weights: {path}")
    return [
        f"{shown}: {header.model} without a classifier, under its library's names",
        f"  load it: {load.format(name=found.name, source=found.name.partition(':')[2].partition('@')[0], path=shown)}",
        f"  its features: distill embed {display_name(run_dir.root)} --data FOLDER --to FILE.npy (its tap `embedding`; layers "
        "after it are not trained)",
        f"  it takes pixels in [0, 1] at {ModelInput(header.image_size, header.mean, header.std)}",
        f"  measure it: distill evaluate {shell_name(run_dir.root)} --probe knn --data FOLDER",
    ]
