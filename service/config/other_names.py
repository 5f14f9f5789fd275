"""Names that other projects have for what an experiment calls otherwise, or does not have."""

from trainables.rules import OF_CACHE

OTHER_NAMES: dict[str, str] = {
    **dict.fromkeys(("student.pretrained", "student.checkpoint"), "student.weights"),
    **dict.fromkeys(("assistants.pretrained", "assistants.weights"), "an assistant is trained here: leave it out"),
    "teachers.pretrained": "teachers.weights",
    "teacher.others": "write teachers, a list of all, in place of teacher",
    **dict.fromkeys(
        [f"teachers.{key}" for key in ("cache", *OF_CACHE, "service", "placement", "epochs")],
        "one teacher alone has it: leave it out, or write teacher, not teachers",
    ),
    **dict.fromkeys(("pretrained", "teacher_weights", "teacher.checkpoint"), "teacher.weights"),
    "teacher.type": "teacher.model",
    "student.type": "student.model",
    "teacher.service_devices": "an actor has one GPU: leave it out, or, where a teacher is too large, write "
    "teacher.placement: sharded in place of teacher.service",
    **dict.fromkeys(("opt", "optim.type", "optim.optimizer"), "optim.name"),
    "optimizer": "write the section optim: name, lr, momentum, weight_decay",
    **dict.fromkeys(("sched", "scheduler", "lr_scheduler", "lr_schedule"), "optim.schedule"),
    **dict.fromkeys(("decay_epochs", "lr_step_size", "lr_steps"), "optim.milestones"),
    **dict.fromkeys(("decay_rate", "lr_gamma"), "optim.gamma"),
    "trainer": "write optim.epochs, scale.num_workers and precision",
    "learning_rate": "optim.lr",
    "wd": "optim.weight_decay",
    **dict.fromkeys(("warmup", "lr_warmup_epochs"), "optim.warmup_epochs"),
    **dict.fromkeys(("num_warmup_steps", "lr_warmup_steps"), "optim.warmup_steps"),
    **dict.fromkeys(("warmup_lr", "lr_warmup_decay"), "the warm-up begins near 0: leave it out"),
    **dict.fromkeys(("min_lr", "lr_min"), "optim.min_lr_factor, the share of optim.lr that it falls to"),
    **dict.fromkeys(("smoothing", "label_smoothing"), "train.label_smoothing"),
    "bce_loss": "write train.task_loss: bce",
    "bce_target_thresh": "train.bce_threshold",
    **dict.fromkeys(("progressive_resizing", "data.progressive"), "train.progressive"),
    "grad_checkpointing": "train.gradient_checkpointing",
    **dict.fromkeys(("betas", "opt_betas"), "optim.args, such as {betas: [0.9, 0.999]}"),
    **dict.fromkeys(("eps", "opt_eps"), "optim.args, such as {eps: 1.0e-6}"),
    **dict.fromkeys(("opt_args", "opt_kwargs"), "optim.args"),
    **dict.fromkeys(("max_epochs", "num_epochs"), "optim.epochs"),
    **dict.fromkeys(("clip_grad", "gradient_clip_val", "max_grad_norm"), "optim.clip_grad_norm"),
    **dict.fromkeys(
        ("clip_mode", "gradient_clip_algorithm"), "write optim.clip_grad_norm, optim.clip_grad_value or optim.clip_grad_agc"
    ),
    "agc": "optim.clip_grad_agc",
    **dict.fromkeys(("accumulate_grad_batches", "grad_accum_steps", "gradient_accumulation_steps"), "optim.accumulate"),
    **dict.fromkeys(("model_ema", "ema", "ema_decay", "model_ema_decay"), "optim.ema_decay"),
    **dict.fromkeys(("drop_path", "drop_path_rate"), "student.args, such as {drop_path_rate: 0.1}"),
    **dict.fromkeys(("drop", "drop_rate", "dropout"), "student.args, such as {drop_rate: 0.1}"),
    **dict.fromkeys(
        ("num_classes", "nb_classes"),
        "classes are counted in the data: leave it out (data.synthetic_classes is for data.path synthetic)",
    ),
    **dict.fromkeys(
        ("batch_size", "samples_per_gpu", "train_batch_size", "per_device_train_batch_size"),
        "data.global_batch_size, of all workers together",
    ),
    "data.num_workers": "data.loader_workers",
    "num_workers": "write scale.num_workers, the number of GPUs, or data.loader_workers, the decode threads of each",
    "workers": "data.loader_workers",
    **dict.fromkeys(("img_size", "input_size", "crop_size", "resolution"), "data.image_size"),
    "crop_pct": "write data.val_resize, which is data.image_size divided by crop_pct",
    **dict.fromkeys(("aug_repeats", "repeated_aug"), "data.repeats"),
    **dict.fromkeys(
        ("aa", "auto_augment", "randaugment", "data.device_augment.randaugment"),
        "write data.device_augment.policy: {name: randaugment, num_ops: 2, magnitude: 9}, or for rand-m7-mstd0.5-inc1 "
        "{name: randaugment_timm, magnitude: 7, magnitude_std: 0.5}",
    ),
    **dict.fromkeys(("reprob", "random_erase"), "data.device_augment.random_erasing"),
    **dict.fromkeys(("data_path", "data.root", "data.dir", "data.train", "dataset"), "data.path"),
    **dict.fromkeys(("val_split", "validation_split", "val_ratio", "val_fraction", "val_size"), "data.val_share"),
    **dict.fromkeys(("unlabeled", "unlabelled", "data.unsupervised"), "write data.labels: false"),
    **dict.fromkeys(("train_dataloader", "val_dataloader"), "write the section data: path, global_batch_size, loader_workers"),
    **dict.fromkeys(("amp", "amp_dtype", "fp16", "bf16", "mixed_precision"), "precision, which is fp32, bf16, fp16 or auto"),
    **dict.fromkeys(("devices", "gpus", "num_gpus", "nproc_per_node", "world_size"), "scale.num_workers"),
    **dict.fromkeys(("accelerator", "device"), "scale.use_gpu"),
    **dict.fromkeys(("sync_bn", "sync_batchnorm"), "scale.sync_batch_norm"),
    "steps": "write train.max_steps for a timing run, sweep.steps for a timing sweep, or optim.epochs",
    "strategy": "workers train with DDP: leave it out",
    **dict.fromkeys(("log_interval", "log_every_n_steps"), "train.log_every"),
    "check_val_every_n_epoch": "train.evaluate_every",
    **dict.fromkeys(("out", "output", "output_dir", "save_dir", "work_dir"), "a run's folder is an option: --out DIR"),
    "resume": "a run is continued by a command: distill resume DIR",
    **dict.fromkeys(
        ("temperature", "tau"), "a method's temperature is one of its options, such as distill.options.kd.temperature"
    ),
    **dict.fromkeys(
        ("alpha", "distill.weight"),
        "distill.task_weight weighs the labels' loss, and a method's option weight its own, such as distill.options.kd.weight",
    ),
    "project": "tracking.experiment",
    "cuda_graphs": "train.compile, whose mode reduce-overhead launches models as CUDA graphs",
}
"""What timm, Lightning, torchvision's references, mmpretrain, LightlyTrain and transformers call it, in any section or by its
dotted key → our key, perhaps with a remark behind a comma, or a sentence about what to do instead."""
