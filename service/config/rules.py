"""Rules between the keys of an experiment: those that every job must keep (`trainables.rules`), and those of the driver alone.

A rule returns what is wrong and what to write instead, in one line; None: nothing is wrong. Rules about methods, which may have
to load one, are in `service.config.method_rules`.
"""

from collections.abc import Callable

from service.config.schema import Experiment
from trainables.rules import Problem, first_problem, warmup_leaves_an_epoch


def assistants_have_a_teacher(experiment: Experiment) -> Problem:
    if experiment.teacher is not None or not experiment.assistants:
        return None
    return "assistants: there is no teacher whom they could assist: write teacher.model"


def warmup_leaves_an_epoch_of_each_stage(experiment: Experiment) -> Problem:
    lengths = {"teacher.epochs": experiment.teacher.epochs if experiment.teacher else None}
    lengths |= {f"assistants[{n}].epochs": assistant.epochs for n, assistant in enumerate(experiment.assistants)}
    known = {key: epochs for key, epochs in lengths.items() if epochs is not None}
    problems = (warmup_leaves_an_epoch(experiment.optim, epochs, key) for key, epochs in known.items())
    return next((problem for problem in problems if problem is not None), None)


def asha_compares_evaluated_epochs(experiment: Experiment) -> Problem:
    grace, every = experiment.sweep.grace_epochs, experiment.train.evaluate_every
    if experiment.sweep.policy != "asha" or grace % every == 0:
        return None
    return (
        f"sweep.grace_epochs {grace}: asha compares trials after so many epochs first, and train.evaluate_every {every} "
        f"leaves that one without an accuracy: write {-(-grace // every) * every}, or train.evaluate_every 1"
    )


RULES: tuple[Callable[[Experiment], Problem], ...] = (
    first_problem,
    assistants_have_a_teacher,
    warmup_leaves_an_epoch_of_each_stage,
    asha_compares_evaluated_epochs,
)
