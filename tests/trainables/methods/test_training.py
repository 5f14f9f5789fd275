"""Ways of training against the plain references: mutual learning, and the student's own last epoch."""

import copy
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from tests.trainables.methods.against import (
    EDGES,
    Comparison,
    Inputs,
    Terms,
    assert_a_batch_may_be_empty,
    assert_as_the_reference,
    assert_gradients_are_the_references,
    assert_half_precision_is_near,
    at_edge,
)
from tests.trainables.methods.calls import make, samples, terms
from tests.trainables.methods.references.basic import Array, flat, linear, relu
from tests.trainables.methods.references.training import cross_entropy, mutual, ps_kd, ps_kd_alpha
from trainables.distributed.batch_norm import GlobalBatchNorm2d, convert
from trainables.distributed.group import Group
from trainables.distributed.rank_pool import RankPool
from trainables.errors import ExperimentError
from trainables.methods.contract import Method, ModelOutputs
from trainables.models.registry import build_model


def draw(*shape: int, seed: int = 0, scale: float = 3.0) -> Tensor:
    return scale * torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


# Both beside their references, also at the edges of what they may be given


def mutually(inputs: Inputs, temperature: float = 1.0) -> Terms:
    """The peer is a network of one hidden layer, and the images stand in the place of a teacher's feature."""

    def peer_BK(shifted: Inputs) -> Array:
        weights = [shifted.parameters[f"peer.{layer}.{kind}"] for layer in ("hidden.0", "head") for kind in ("weight", "bias")]
        return linear(relu(linear(flat(shifted.teacher[0]), *weights[:2])), *weights[2:])

    own, _ = mutual([inputs.student_BK, peer_BK(inputs.constant)], temperature)
    _, others = mutual([inputs.constant.student_BK, peer_BK(inputs)], temperature)
    return {"student_kl": own, "peer_ce": cross_entropy(peer_BK(inputs), inputs.labels_B), "peer_kl": others}


def by_itself(inputs: Inputs, alpha: float = 0.8) -> Terms:
    """In the fourth of ten epochs."""
    before_BK = REMEMBERED_MK[: len(inputs.labels_B)]
    return {"self_ce": ps_kd(inputs.student_BK, before_BK, inputs.labels_B, ps_kd_alpha(4, 10, alpha))}


REMEMBERED_MK = np.random.default_rng(3).dirichlet(np.ones(5), size=40)
IMAGES: dict[str, Any] = {"teacher_shapes": ((3, 8, 8),), "batch": lambda teacher: {"images_BCHW": teacher[1]}}
LATER: dict[str, Any] = {"memory": {"last_MK": REMEMBERED_MK}, "batch": lambda teacher: {"epoch": 3.5}}
METHODS = [
    Comparison("dml", mutually, {"peer": "mlp_small"}, **IMAGES),
    Comparison("dml", partial(mutually, temperature=3.0), {"peer": "mlp_small", "temperature": 3.0}, **IMAGES),
    Comparison("pskd", by_itself, **LATER),
    Comparison("pskd", partial(by_itself, alpha=1.0), {"alpha": 1.0}, **LATER),
]
every_method = pytest.mark.parametrize("case", METHODS, ids=str)


@pytest.mark.parametrize("edge", EDGES)
@every_method
def test_values_are_the_references_and_gradients_are_finite(case: Comparison, edge: str) -> None:
    assert_as_the_reference(*at_edge(case, edge))


@every_method
def test_gradients_are_those_of_the_reference(case: Comparison) -> None:
    assert_gradients_are_the_references(case)


@every_method
def test_answers_in_half_precision_give_nearly_the_same_and_huge_ones_stay_finite(case: Comparison) -> None:
    assert_half_precision_is_near(case)


@every_method
def test_a_batch_may_be_empty(case: Comparison) -> None:
    assert_a_batch_may_be_empty(case)


# Mutual learning


def mutual_learning(student: nn.Module | None = None, **options: object) -> Method:
    return make("dml", student=student, **{"peer": "mlp_small", **options})


def peer_of(method: Method) -> nn.Module:
    peer = method.get_submodule("peer")
    assert isinstance(peer, nn.Module)
    return peer


@pytest.mark.parametrize("temperature", [1.0, 3.0])
def test_both_learn_from_each_other_as_the_reference_says(temperature: float) -> None:
    method = mutual_learning(temperature=temperature)
    images_BCHW, labels_B = draw(6, 3, 8, 8, seed=1, scale=1.0), torch.tensor([0, 1, 2, 3, 4, 0])
    student_BK = draw(6, 5).requires_grad_()
    found = terms(method, student_BK, student_BK.detach(), labels_B, images_BCHW=images_BCHW)
    peer_BK = peer_of(method)(images_BCHW).detach().numpy()
    own, others = mutual([student_BK.detach().numpy(), peer_BK], temperature)
    np.testing.assert_allclose(found["student_kl"].detach(), own, rtol=1e-10)
    np.testing.assert_allclose(found["peer_kl"].detach(), others, rtol=1e-10)
    np.testing.assert_allclose(found["peer_ce"].detach(), cross_entropy(peer_BK, labels_B.numpy()), rtol=1e-10)


def test_each_takes_the_others_answer_as_a_constant() -> None:
    method = mutual_learning()
    student_BK = draw(4, 5).requires_grad_()
    peers = list(peer_of(method).parameters())
    found = terms(method, student_BK, student_BK.detach(), torch.tensor([0, 1, 2, 3]), images_BCHW=draw(4, 3, 8, 8, seed=1))
    of_student = torch.autograd.grad(found["student_kl"].sum(), [student_BK, *peers], allow_unused=True, retain_graph=True)
    assert of_student[0] is not None
    assert all(gradient is None for gradient in of_student[1:])
    of_peer = torch.autograd.grad((found["peer_ce"] + found["peer_kl"]).sum(), [student_BK, *peers], allow_unused=True)
    assert of_peer[0] is None
    assert all(gradient is not None for gradient in of_peer[1:])


def test_a_peer_that_says_the_same_has_nothing_to_teach() -> None:
    method = mutual_learning()
    images_BCHW = draw(3, 3, 8, 8, seed=1)
    same_BK = peer_of(method)(images_BCHW).detach().requires_grad_()
    found = terms(method, same_BK, same_BK.detach(), torch.tensor([0, 1, 2]), images_BCHW=images_BCHW)
    assert found["student_kl"].abs().max() < 1e-12
    (gradient,) = torch.autograd.grad(found["student_kl"].sum(), same_BK)
    assert gradient.abs().max() < 1e-12


@pytest.mark.parametrize("peer", ["mlp_small", "resnet8"])
def test_a_rank_without_samples_has_no_terms_and_gradients_of_zero(peer: str) -> None:
    method = mutual_learning(peer=peer)
    student_BK = torch.zeros(0, 5, dtype=torch.float64, requires_grad=True)
    found = terms(method, student_BK, student_BK.detach(), torch.zeros(0, dtype=torch.int64))
    assert {name: term.shape for name, term in found.items()} == dict.fromkeys(method.terms, (0,))
    gradients = torch.autograd.grad(sum(term.sum() for term in found.values()), list(method.parameters()))
    assert all(not gradient.any() for gradient in gradients)


def test_the_peers_batch_norms_look_at_all_workers_where_the_students_do() -> None:
    alone = build_model("resnet8", num_classes=5, image_size=8, seed=0)
    together = convert(copy.deepcopy(alone), Group())
    norms = [
        {type(module) for module in mutual_learning(student, peer="resnet8").modules() if "BatchNorm" in type(module).__name__}
        for student in (alone, together)
    ]
    assert norms == [{nn.BatchNorm2d}, {GlobalBatchNorm2d}]


def test_a_peer_that_does_not_exist_is_refused_in_one_line() -> None:
    with pytest.raises(
        ExperimentError, match=r"distill\.options\.dml\.peer: there is no model 'mlp_smal'; did you mean mlp_small\?"
    ):
        mutual_learning(peer="mlp_smal")


# The student's own last epoch

LABELS_M = torch.arange(12) % 5


def own_answers(**options: object) -> Method:
    return make("pskd", labels_M=LABELS_M, epochs=4, **options)


def test_each_epochs_target_holds_more_of_the_last_answer_as_the_reference_says() -> None:
    method = own_answers(alpha=0.6)
    remembered = np.eye(5)[LABELS_M.numpy()]
    for epoch in range(4):
        for number, part in enumerate(torch.randperm(12, generator=torch.Generator().manual_seed(epoch)).split(5)):
            logits_BK = draw(len(part), 5, seed=10 * epoch + number).requires_grad_()
            (loss_B,) = terms(
                method, logits_BK, logits_BK.detach(), LABELS_M[part], indices_B=part, epoch=epoch + number / 3
            ).values()
            alpha = ps_kd_alpha(epoch + 1, 4, 0.6)
            plain, before = logits_BK.detach().numpy(), remembered[part.numpy()]
            np.testing.assert_allclose(
                loss_B.detach(), ps_kd(plain, before, LABELS_M[part].numpy(), alpha), rtol=1e-12, atol=1e-14
            )
            softmax = np.exp(plain) / np.exp(plain).sum(1, keepdims=True)
            target = (1 - alpha) * np.eye(5)[LABELS_M[part].numpy()] + alpha * before
            (gradient,) = torch.autograd.grad(loss_B.sum(), logits_BK)
            np.testing.assert_allclose(gradient, softmax - target, rtol=1e-10, atol=1e-12)
            remembered[part.numpy()] = softmax
    np.testing.assert_allclose(method.get_buffer("last_MK"), remembered, rtol=1e-12)


def test_the_first_epoch_is_cross_entropy() -> None:
    logits_BK, labels_B = draw(5, 5), LABELS_M[:5]
    (loss_B,) = terms(own_answers(alpha=1.0), logits_BK, logits_BK, labels_B, epoch=0.99).values()
    np.testing.assert_allclose(loss_B, cross_entropy(logits_BK.numpy(), labels_B.numpy()), rtol=1e-12)


def test_nothing_is_remembered_outside_training() -> None:
    method = own_answers().eval()
    before = method.get_buffer("last_MK").clone()
    terms(method, draw(5, 5), draw(5, 5), LABELS_M[:5], epoch=2.0)
    assert torch.equal(method.get_buffer("last_MK"), before)


def test_huge_logits_and_no_samples_stay_finite() -> None:
    method = own_answers()
    for rows, scale in ((5, 1e4), (0, 1.0), (1, 0.0)):
        logits_BK = draw(rows, 5, scale=scale).requires_grad_()
        (loss_B,) = terms(method, logits_BK, logits_BK.detach(), LABELS_M[:rows], epoch=3.5).values()
        assert loss_B.shape == (rows,)
        assert loss_B.isfinite().all()
        (gradient,) = torch.autograd.grad(loss_B.sum(), logits_BK)
        assert gradient.isfinite().all()


def remembered_on(group: Group) -> tuple[Tensor, Tensor]:
    """What each of two ranks, one with 5 of 7 samples, remembers; and its losses in the next epoch."""
    method = make("pskd", labels_M=LABELS_M, epochs=4, group=group)
    own = slice(0, 5) if group.rank == 0 else slice(5, 7)
    part = torch.tensor([3, 0, 11, 7, 5, 2, 8])[own if group.world_size > 1 else slice(0, 7)]
    logits_NK = draw(12, 5, seed=4)
    losses = []
    for epoch in range(2):
        outputs = ModelOutputs(logits_NK[part] * (1 + epoch))
        inputs = samples(LABELS_M[part], indices_B=part, epoch=float(epoch), group=group)
        losses.append(method(outputs, outputs, inputs)["self_ce"])
    return method.get_buffer("last_MK").clone(), losses[1]


def test_all_ranks_remember_what_one_would(ranks: RankPool) -> None:
    (one,), several = ranks.run(1, remembered_on), ranks.run(2, remembered_on)
    for table, _ in several:
        assert torch.equal(table, one[0])
    assert torch.allclose(torch.cat([losses for _, losses in several]), one[1], rtol=1e-12, atol=0)
