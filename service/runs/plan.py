"""Plans what an experiment's stages run on, with every `auto` resolved for a cluster."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from service.cluster.resources import Cluster, Reservation, auto_loader_workers, is_local, local_capacity, use_gpu
from service.config.batch_size import AUTO
from service.config.dotted import put
from service.config.paths import absolute_paths
from service.config.schema import Experiment
from service.runs.stages.assignment import Assignment, reservation_of
from service.runs.stored.stored_runs import display_name, ray_storage, run_store
from trainables.config import DataIdentity, TrainConfig
from trainables.errors import ClusterError, ExperimentError
from trainables.rundir import RunDir


@dataclass(frozen=True)
class Plan:
    """The devices and loader workers of one experiment's stages on a cluster."""

    experiment: Experiment
    use_gpu: bool
    loader_workers: int
    accepted_data: DataIdentity | None = None
    """See `TrainConfig.accepted_data`."""

    @classmethod
    def on(cls, experiment: Experiment, cluster: Cluster, accepted_data: DataIdentity | None = None) -> Plan:
        """Resolve every `auto` for a cluster."""
        scale, loader_workers = experiment.scale, experiment.data.loader_workers
        has_gpu = use_gpu(scale.use_gpu, cluster)
        if loader_workers == "auto":
            loader_workers = auto_loader_workers(cluster, scale.num_workers, scale.cpus_per_worker, use_gpu=has_gpu)
        return cls(experiment, has_gpu, loader_workers, accepted_data)

    def assign(
        self,
        stage: str,
        run_dir: RunDir,
        labels: dict[str, str],
        weights: str | None = None,
        teachers: tuple[str, ...] = (),
        sweep_dir: RunDir | None = None,
    ) -> Assignment:
        """Return the assignment of a stage, with its init stage if it has one.

        `teachers` are the names of the actors that compute the teacher's logits. A trial passes its sweep's `sweep_dir`, so
        that all trials share one measurement of the teacher.

        Raises ExperimentError: an object store cannot hold checkpoints of several files, or be read by an evaluator.
        """
        tree = self.experiment.stage(stage, run_dir.stage(stage).root, labels, weights).model_dump()
        tree["data"]["loader_workers"] = self.loader_workers
        tree |= {"teacher_actors": teachers, "accepted_data": self.accepted_data}
        tree["run_store"], stages = run_store(run_dir.root), self.experiment.scale.pipeline_stages
        if tree["run_store"] is not None and self.experiment.train.max_steps is None:  # it has checkpoints there
            folder = "and this run is in an object store: give --out or --runs a folder that all nodes share, or write"
            if stages > 1:
                why = f"scale.pipeline_stages {stages}: a checkpoint has a file per stage"
                raise ExperimentError(f"{why}, {folder} scale.pipeline_stages 1")
            if self.experiment.eval.asynchronous:
                why = "eval.asynchronous: the evaluator reads checkpoints from a folder"
                raise ExperimentError(f"{why}, {folder} eval.asynchronous: false")
        if self.experiment.measures_teacher(stage):
            tree["teacher_records"] = display_name((sweep_dir or run_dir).root)
        put(tree, absolute_paths(tree), stage)
        from trainables.methods.init_stage import with_init_stage  # it imports torch

        assignment = None
        for config in with_init_stage(TrainConfig.model_validate(tree)):
            assignment = Assignment(config, self.use_gpu, self.loader_workers, ray_storage(run_dir), init=assignment)
        assert assignment is not None
        return assignment

    def reservation(self) -> Reservation:
        return reservation_of(self.experiment.stage("student", Path("/"), {}), self.loader_workers, self.use_gpu)

    def refusal(self, cluster: Cluster) -> str | None:
        """Return why this does not fit even on the empty cluster and what to change, or None if it fits."""
        if self.experiment.data.decodes_on_device and not self.use_gpu:
            return f"data.decoder: {self.experiment.data.decoder} works on GPUs only, and there are none: write auto"
        if refusal := cluster.refusal(self.reservation()):
            if self.use_gpu and not cluster.gpus:
                return f"{refusal}: set scale.use_gpu to false"
            service = ", or teacher.service" if self.reservation().service else ""
            return f"{refusal}: lower scale.num_workers or data.loader_workers{service}"
        return None

    def check(self, cluster: Cluster) -> None:
        """Raise ClusterError with the `refusal` if the plan does not fit on the cluster: it would wait forever."""
        if refusal := self.refusal(cluster):
            raise ClusterError(refusal)

    def describe(self, cluster: Cluster) -> str:
        """Describe in one line what runs where, marking every value that was `auto`."""
        scale = self.experiment.scale
        kind = "GPU" if self.use_gpu else "CPU"
        batch = self.experiment.data.global_batch_size
        timed = " (timed first)" if batch == AUTO else ""
        auto = " (auto)" if self.experiment.data.loader_workers == "auto" else ""
        stages = f" ({scale.num_replicas} × {scale.pipeline_stages} pipeline stages)" if scale.pipeline_stages > 1 else ""
        loaders = f"{self.loader_workers} loader worker{'s' * (self.loader_workers != 1)}{auto}"
        minimum = f"{scale.min_workers} to " if scale.min_workers is not None else ""
        line = (
            f"{minimum}{scale.num_workers} {kind} worker{'s' if scale.num_workers > 1 else ''}{stages} × "
            f"{loaders}, global batch {batch}{timed}, "
            f"on {len(cluster.nodes)} node{'s' if len(cluster.nodes) != 1 else ''}"
        )
        if cluster.autoscaled:
            line += ", plus nodes that an autoscaler starts"
        if actors := self.reservation().service:
            line += f", and {actors.num_workers} for the teacher"
        if self.loader_workers == 0:
            line += "; 0 loader workers: every step waits for its images to be decoded"
        if cluster.oversubscribed(self.reservation()):
            line += f"; oversubscribed: {self.reservation().total_cpus} CPUs reserved on {cluster.real_cpus} cores"
        return line


def max_local_cpus(*experiments: Experiment) -> int:
    """Return the CPUs that a local Ray must offer for the largest of these experiments, or 0 if RAY_ADDRESS is set."""
    if not is_local():
        return 0
    capacity = local_capacity()
    return max(Plan.on(experiment, capacity).reservation().total_cpus for experiment in experiments)
