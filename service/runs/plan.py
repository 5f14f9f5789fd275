"""What an experiment's stages run on, once every `auto` is resolved on a cluster."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from service.cluster import resources as clusters
from service.cluster.resources import Cluster
from service.config.experiment import Experiment
from service.runs.trial import Assignment, need
from trainables.config import TeacherConfig
from trainables.errors import ClusterError
from trainables.methods import file_of, option_key
from trainables.rundir import RunDir, expanded


@dataclass(frozen=True)
class Plan:
    """What the stages of one experiment run on, resolved on a cluster."""

    experiment: Experiment
    use_gpu: bool
    loader_workers: int

    @classmethod
    def on(cls, experiment: Experiment, cluster: Cluster) -> Plan:
        """Resolve every `auto`."""
        scale, wanted = experiment.scale, experiment.data.loader_workers
        if wanted == "auto":
            wanted = clusters.auto_loader_workers(cluster, scale.num_workers, scale.cpus_per_worker)
        return cls(experiment, clusters.use_gpu(scale.use_gpu, cluster), wanted)

    def assign(
        self, stage: str, run_dir: RunDir, labels: dict[str, str], weights: str | None = None, teachers: tuple[str, ...] = ()
    ) -> Assignment:
        """One stage's order to the workers. `teachers` are the names of the actors that answer for its teacher."""
        config = self.experiment.stage(stage, run_dir.stage(stage).root, labels, weights)
        data = config.data.model_copy(update={"loader_workers": self.loader_workers, "path": absolute(config.data.path)})
        auto = self.experiment.data.loader_workers == "auto"
        distill = config.distill and config.distill.model_copy(update={"method": tuple(map(located, config.distill.method))})
        changed = {"data": data, "teacher": _found(config.teacher), "distill": distill, "loader_auto": auto, "teachers": teachers}
        return Assignment(
            config.model_copy(update=changed),
            self.use_gpu,
            self.loader_workers,
            run_dir.tune,
        )

    def need(self) -> clusters.Need:
        """What one stage reserves."""
        return need(self.experiment.stage("student", Path("/"), {}), self.loader_workers, self.use_gpu)

    def refusal(self, cluster: Cluster) -> str | None:
        """Why the empty cluster could never carry this out, and what to change; None where it can."""
        if self.experiment.data.decodes_on_device and not self.use_gpu:
            return f"data.decoder: {self.experiment.data.decoder} works on GPUs only, and there are none: write auto"
        if refusal := cluster.refusal(self.need()):
            instead = (
                "set scale.use_gpu to false"
                if self.use_gpu and not cluster.gpus
                else "lower scale.num_workers or data.loader_workers" + (", or teacher.service" if self.need().service else "")
            )
            return f"{refusal}: {instead}"
        return None

    def check(self, cluster: Cluster) -> None:
        """Refuse what the cluster could never hold: it would wait for ever, silently.

        Raises:
            ClusterError: see `refusal`.
        """
        if refusal := self.refusal(cluster):
            raise ClusterError(refusal)

    def describe(self, cluster: Cluster) -> str:
        """One line on what runs on what; it names every `auto`."""
        scale = self.experiment.scale
        kind = "GPU" if self.use_gpu else "CPU"
        auto = " (auto)" if self.experiment.data.loader_workers == "auto" else ""
        line = (
            f"{scale.num_workers} {kind} worker{'s' if scale.num_workers > 1 else ''} × "
            f"{self.loader_workers} loader workers{auto}, global batch {self.experiment.data.global_batch_size}, "
            f"on {len(cluster.nodes)} node{'s' if len(cluster.nodes) > 1 else ''}"
        )
        if actors := self.need().service:
            line += f", and {actors.num_workers} for the teacher"
        if self.loader_workers == 0:
            line += "; 0 loader workers: every step waits for its images to be decoded"
        if cluster.oversubscribed(self.need()):
            line += f"; oversubscribed: {self.need().total_cpus} CPUs reserved on {cluster.real_cpus} cores"
        return line


def _found(teacher: TeacherConfig | None) -> TeacherConfig | None:
    """A teacher whose cache and further teachers are named as workers find them."""
    if teacher is None:
        return None
    others = tuple(other.model_copy(update={"weights": absolute(other.weights)}) for other in teacher.others)
    cache = teacher.cache and str(expanded(teacher.cache).absolute())
    return teacher.model_copy(update={"others": others, "cache": cache})


def absolute(data_path: str) -> str:
    """A data path that workers, which run elsewhere, understand; the names of built-in sources stay."""
    path = expanded(data_path)
    return str(path.absolute()) if path.exists() else data_path


def located(method: str) -> str:
    """A method's name; where it is a file's, by the file's absolute path."""
    file = file_of(method)
    return method if file is None else f"{file.absolute()}:{option_key(method)}"
