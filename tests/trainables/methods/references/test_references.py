"""The references themselves, against calculations by hand and PyTorch's layers."""

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from tests.trainables.methods.references import basic, features, logits, relations, training
from tests.trainables.methods.references.basic import Array, double
from tests.trainables.methods.references.features import Embed, Fusion, Layer


def normal(*shape: int, seed: int = 0) -> Array:
    return np.random.default_rng(seed).normal(size=shape)


def pixels(*values: float) -> Array:
    """One sample of one channel and one row."""
    return double(values)[None, None, None, :]


def eye(channels: int) -> Array:
    """The 1x1 convolution that changes nothing."""
    return np.eye(channels)[:, :, None, None]


# basic


@pytest.mark.parametrize(("stride", "padding", "kernel"), [(1, 0, 1), (1, 1, 3), (2, 1, 3), (1, 0, 2)])
def test_the_convolution_is_pytorchs(stride: int, padding: int, kernel: int) -> None:
    x, weight, bias = normal(2, 3, 6, 5), normal(4, 3, kernel, kernel, seed=1), normal(4, seed=2)
    theirs = F.conv2d(torch.tensor(x), torch.tensor(weight), torch.tensor(bias), stride, padding)
    np.testing.assert_allclose(basic.conv2d(x, weight, bias, stride, padding), theirs, atol=1e-12)


@pytest.mark.parametrize(("stride", "padding", "kernel"), [(2, 1, 4), (1, 1, 3)])
def test_the_transposed_convolution_is_pytorchs(stride: int, padding: int, kernel: int) -> None:
    x, weight, bias = normal(2, 3, 4, 5), normal(3, 4, kernel, kernel, seed=1), normal(4, seed=2)
    theirs = F.conv_transpose2d(torch.tensor(x), torch.tensor(weight), torch.tensor(bias), stride, padding)
    np.testing.assert_allclose(basic.conv_transpose2d(x, weight, bias, stride, padding), theirs, atol=1e-12)


def test_batch_norm_pooling_and_resizing_are_pytorchs() -> None:
    x, weight, bias = normal(3, 2, 5, 7), normal(2, seed=1), normal(2, seed=2)
    t = torch.tensor(x)
    theirs = F.batch_norm(t, None, None, torch.tensor(weight), torch.tensor(bias), training=True)
    np.testing.assert_allclose(basic.batch_norm(x, weight, bias), theirs, atol=1e-12)
    np.testing.assert_allclose(basic.adaptive_avg_pool2d(x, 3, 4), F.adaptive_avg_pool2d(t, (3, 4)), atol=1e-12)
    np.testing.assert_allclose(basic.nearest(x, 8, 3), F.interpolate(t, (8, 3), mode="nearest"), atol=1e-12)


def test_numerical_derivatives_are_right_to_ten_digits() -> None:
    x, y = normal(2, 3), normal(3, 2, seed=1)
    by_x, by_y = basic.derivatives(lambda a, b: float(np.sin(a @ b).sum()), [x, y])
    np.testing.assert_allclose(by_x, np.cos(x @ y) @ y.T, rtol=1e-10, atol=1e-10)
    np.testing.assert_allclose(by_y, x.T @ np.cos(x @ y), rtol=1e-10, atol=1e-10)


# logits


def test_kd_of_three_to_one_against_even_odds() -> None:
    loss = logits.kd(double([[0, 0]]), double([[2 * math.log(3), 0]]), temperature=2)
    assert loss[0] == pytest.approx(4 * (0.75 * math.log(1.5) + 0.25 * math.log(0.5)), abs=1e-14)


def test_kd_is_tckd_plus_the_teachers_doubt_times_nckd() -> None:
    student, teacher, labels = normal(4, 5), 3 * normal(4, 5, seed=1), np.array([0, 4, 2, 2])
    target, others = logits.dkd_parts(student, teacher, labels, temperature=4)
    doubt = [1 - basic.softmax(row / 4)[label] for row, label in zip(teacher, labels, strict=True)]
    np.testing.assert_allclose(target + doubt * others, logits.kd(student, teacher, 4), atol=1e-13)
    np.testing.assert_allclose(logits.dkd(student, teacher, labels, 2, 3, 4), 2 * target + 3 * others)


def test_dist_is_zero_for_affine_relations_two_for_opposite_ones_and_one_for_lone_columns() -> None:
    steps, wider, down = (np.log(double([row])) for row in ([0.2, 0.3, 0.5], [0.1, 0.25, 0.65], [0.5, 0.3, 0.2]))
    # Centred, over 30: (−4, −1, 5), (−7, −2.5, 9.5) and (5, −1, −4).
    assert logits.dist_inter(steps, wider)[0] == pytest.approx(1 - 78 / math.sqrt(42 * 145.5), abs=1e-6)
    assert logits.dist_inter(steps, down, temperature=1)[0] == pytest.approx(1 + 39 / 42, abs=1e-6)
    assert logits.dist_inter(steps, steps, temperature=2)[0] == pytest.approx(0, abs=1e-5)
    assert logits.dist_intra(steps, down, temperature=3) == 9


def test_dists_columns_of_two_samples_correlate_fully_or_oppositely() -> None:
    student = np.log(double([[0.2, 0.8], [0.6, 0.4]]))
    teacher = np.log(double([[0.3, 0.7], [0.1, 0.9]]))
    assert logits.dist_intra(student, teacher) == pytest.approx(2, abs=1e-6)
    assert logits.dist_intra(student, student) == pytest.approx(0, abs=1e-6)


def test_nkd_of_even_rests_is_the_log_of_their_number() -> None:
    student, teacher = np.log(double([[0.5, 0.25, 0.25]])), np.log(double([[0.2, 0.4, 0.4]]))
    loss = logits.nkd(student, teacher, np.array([0]), gamma=1.5, temperature=2)
    assert loss[0] == pytest.approx(0.2 * math.log(2) + 1.5 * 4 * math.log(2))


def test_standardised_rows_have_the_deviation_of_their_variant() -> None:
    row = double([[1, 3], [5, 5]])
    np.testing.assert_allclose(logits.standardise(row, "paper"), [[-1, 1], [0, 0]], atol=2e-7)
    np.testing.assert_allclose(logits.standardise(row), [[-math.sqrt(0.5), math.sqrt(0.5)], [0, 0]], atol=2e-7)


def test_ttm_softens_the_teacher_alone_and_wttm_weighs_by_its_smoothness() -> None:
    student, teacher = normal(3, 4), normal(3, 4, seed=1)
    np.testing.assert_allclose(logits.ttm(student, teacher, 1.0), logits.kd(student, teacher, 1.0), atol=1e-14)
    np.testing.assert_allclose(logits.ttm(student, teacher, 0.25), logits.kd(student, teacher / 4, 1.0), atol=1e-14)
    even = np.zeros((3, 4))
    np.testing.assert_allclose(logits.wttm(student, even, 0.5), 2 * logits.ttm(student, even, 0.5), atol=1e-14)


def test_mlkds_matrices_of_one_sample_and_its_masks_as_factors() -> None:
    student, teacher = np.log(double([[0.5, 0.5]])), np.log(double([[0.1, 0.9]]))
    instance, batch, category = logits.mlkd(student, teacher, temperatures=[1.0])
    assert instance[0] == pytest.approx(logits.kd(student, teacher, 1)[0])
    assert batch == pytest.approx((0.5 - 0.82) ** 2)
    assert category == pytest.approx(((0.25 - 0.01) ** 2 + 2 * (0.25 - 0.09) ** 2 + (0.25 - 0.81) ** 2) / 2)
    official = logits.mlkd(student, teacher, temperatures=[1.0], variant="official")
    assert (official[0][0], official[1]) == pytest.approx((instance[0], batch))  # the one sample is its own median
    assert official[2] == pytest.approx(category / 2)


# features


def test_fitnets_two_reductions_and_its_three_sizes() -> None:
    student, teacher = double([[[[1, -2], [3, 4]]]]), double([[[[1, 1], [1, 1]]]])
    regressor = Layer(eye(1))
    assert features.fitnet(student, teacher, regressor)[0] == (0 + 1 + 4 + 9) / 4  # −2 is cut off by the ReLU
    assert features.fitnet(student, teacher, regressor, "paper", with_relu=False)[0] == (0 + 9 + 4 + 9) / 2
    x = normal(2, 3, 4, 4)
    assert features.conv_regressor(x, (2, 2), Layer(normal(5, 3, 3, 3))).shape == (2, 5, 2, 2)
    assert features.conv_regressor(x, (8, 8), Layer(normal(3, 5, 4, 4))).shape == (2, 5, 8, 8)
    assert features.conv_regressor(x, (3, 3), Layer(normal(5, 3, 2, 2))).shape == (2, 5, 3, 3)
    assert features.conv_regressor(x, (4, 4), Layer(normal(5, 3, 3, 3))).shape == (2, 5, 4, 4)


def test_at_of_two_pixels() -> None:
    student, teacher = pixels(math.sqrt(3), 2), pixels(1, 0)  # attention (0.6, 0.8) and (1, 0)
    assert features.at([student], [teacher])[0] == pytest.approx((0.16 + 0.64) / 2)
    assert features.at([student, student], [teacher, student], variant="paper")[0] == pytest.approx(math.sqrt(0.8) / 2)
    assert features.at([0 * student], [teacher])[0] == 0.5


def test_ab_is_a_hinge_on_each_side_and_weighs_later_stages_more() -> None:
    student, teacher = pixels(-2, 0.5, 0.5, 2), pixels(-1, 0, 1, 1)
    assert features.ab([student], [teacher], [None], variant="paper")[0] == 2.25 + 0.25
    both = features.ab([student, student], [teacher, teacher], [None, None])
    assert both[0] == pytest.approx(2.5 * 1.5 * 3 / 1000)


def test_ft_of_factors_with_two_channels() -> None:
    student, teacher = double([[[[3]], [[4]]]]), double([[[[1]], [[0]]]])
    assert features.ft(student, teacher, "paper")[0] == pytest.approx(0.4 + 0.8)
    assert features.ft(student, teacher, "official")[0] == pytest.approx(0.6)
    assert features.ft(student, teacher)[0] == 0  # one pixel: both attention maps are 1


def test_ft_paraphrases_and_reconstructs_with_layers_that_change_nothing() -> None:
    x = np.abs(normal(2, 3, 4, 4))
    still = Layer(np.pad(eye(3), ((0, 0), (0, 0), (1, 1), (1, 1))))
    np.testing.assert_allclose(features.ft_reconstruction(x, [still, still], [still]), 0, atol=1e-30)
    np.testing.assert_allclose(features.ft_encode(-x, [still, still]), -0.01 * x)


def test_fsp_is_a_mean_product_over_pixels() -> None:
    lower, upper = pixels(1, 2), pixels(3, 5)
    assert features.fsp_matrix(lower, upper)[0, 0, 0] == (3 + 10) / 2
    two = np.concatenate([upper, 2 * upper], axis=1)
    zeros = [np.zeros_like(lower), np.zeros_like(two)]
    assert features.fsp([lower, two], zeros, "paper")[0] == 6.5**2 + 13**2
    assert features.fsp([lower, two], zeros)[0] == (6.5**2 + 13**2) / 2


def test_nst_of_orthogonal_channels_and_its_form_with_gram_matrices() -> None:
    assert features.nst([pixels(2, 0)], [pixels(0, 3)])[0] == 2
    assert features.nst([pixels(2, 0)], [pixels(0, 3)], kernel="gaussian")[0] == pytest.approx(2 - 2 * math.exp(-0.5))
    assert features.nst([pixels(2, 0)], [pixels(3, 4)], kernel="linear")[0] == pytest.approx(2 - 2 * 0.6)
    student, teacher = normal(1, 3, 2, 2), normal(1, 4, 2, 2, seed=1)
    s, t = double([basic.unit(c).ravel() for c in student[0]]), double([basic.unit(c).ravel() for c in teacher[0]])
    assert features.nst([student], [teacher])[0] == pytest.approx(((s.T @ s / 3 - t.T @ t / 4) ** 2).sum())


def test_vid_of_variance_one_is_half_the_square() -> None:
    raw = double([math.log(math.exp(1 - 1e-5) - 1)])
    arguments = ([pixels(1, 2)], [pixels(4, 0)], [(eye(1), eye(1), eye(1))], [raw])
    assert features.vid(*arguments)[0] == pytest.approx((9 + 4) / 2 / 2)
    assert features.vid(*arguments, variant="paper")[0] == pytest.approx((9 + 4) / 2)
    four = double([math.log(math.exp(4 - 1e-5) - 1)])
    assert features.vid(*arguments[:3], [four])[0] == pytest.approx((9 + 4) / 8 / 2 + math.log(4) / 2)


def of_rank_one(*direction: float) -> Array:
    """A map (1, C, 1, 3) whose rows over channels all point one way."""
    return double([[[[2 * d, -d, 3 * d]] for d in direction]])


def test_kdsvd_of_maps_of_rank_one_and_of_any_sign() -> None:
    teachers = [of_rank_one(1, 0), of_rank_one(0, 1)]
    students = [of_rank_one(1, 0), of_rank_one(0.6, 0.8)]
    apart, same = math.exp(-1 / 8), 1.0
    of_t = [apart, same, same, apart]  # (0 − 1)², (0 − 0)², (1 − 1)² hence same, (1 − 0)²
    of_s = [math.exp(-((b - a) ** 2) / 8) for b in (0.6, 0.8) for a in (1.0, 0.0)]
    expected = sum((x - y) ** 2 for x, y in zip(of_s, of_t, strict=True))
    assert features.kdsvd(students, teachers)[0] == pytest.approx(expected)
    assert features.kdsvd([-students[0], students[1]], [teachers[0], -teachers[1]])[0] == pytest.approx(expected)
    assert features.kdsvd(students, teachers, variant="paper")[0] == pytest.approx(expected / 2)
    assert features.kdsvd(teachers, teachers)[0] == pytest.approx(0, abs=1e-25)


def test_ofds_margin_is_the_mean_of_the_negative_half() -> None:
    margins = features.ofd_margin(double([1, -2, 1, 0, 0]), double([0, 0, 5, -3, 2]))
    np.testing.assert_allclose(margins, [-math.sqrt(2 / math.pi), -2 * math.sqrt(2 / math.pi), -3, -3, 0])


def test_ofd_lets_a_student_be_more_negative_than_the_teacher() -> None:
    student, teacher = pixels(-4, -0.5, 1, -1), pixels(-3, -3, -0.5, 2)
    # The teacher's values become −1, −1, −0.5, 2: skipped, (−1 + 0.5)², (−0.5 − 1)², (2 + 1)².
    value = 0 + 0.25 + 2.25 + 9
    one, margin = Layer(eye(1)), double([-1])
    assert features.ofd([student], [teacher], [one], [margin])[0] == value
    assert features.ofd([student] * 3, [teacher] * 3, [one] * 3, [margin] * 3)[0] == value * 1.75


def test_hcl_pools_to_the_levels_that_are_smaller() -> None:
    student, teacher = double([[[[1, 2], [3, 4]]]]), np.zeros((1, 1, 2, 2))
    assert features.hcl([student], [teacher])[0] == pytest.approx((30 / 4 + 0.5 * 2.5**2) / 1.5)
    assert features.hcl([student[:, :, :1, :1]], [teacher[:, :, :1, :1]])[0] == 1
    x = normal(1, 1, 8, 8)
    levels = [(basic.adaptive_avg_pool2d(x, n, n) ** 2).mean() for n in (8, 4, 2, 1)]
    assert features.hcl([x], [0 * x])[0] == pytest.approx(np.dot(levels, [1, 0.5, 0.25, 0.125]) / 1.875)


def test_reviewkd_mixes_the_deeper_map_into_the_shallower_one() -> None:
    centre = np.pad(eye(1), ((0, 0), (0, 0), (1, 1), (1, 1)))
    deep = Fusion(Layer(eye(1)), Layer(centre))
    shallow = Fusion(Layer(eye(1)), Layer(centre), np.zeros((2, 2, 1, 1)), double([0, math.log(3)]))
    students = [double([[[[1, 2], [3, 4]]]]), double([[[[8]]]])]
    fused = features.reviewkd_fuse(students, [shallow, deep], [(4, 4), (1, 1)])
    assert fused[1].tolist() == [[[[8]]]]
    expected = basic.nearest(students[0] / 2 + 8 * 0.75, 4, 4)
    np.testing.assert_allclose(fused[0], expected)
    losses = features.reviewkd(students, [expected, students[1] + 1], [shallow, deep])
    np.testing.assert_allclose(losses, [1.0])


def test_simkd_predicts_with_the_teachers_classifier() -> None:
    student, teacher = pixels(1, 3), pixels(2, 2)
    loss, predicted = features.simkd(student, teacher, [Layer(eye(1))] * 3, (double([[1], [10]]), double([0, 5])))
    assert loss[0] == 1
    assert predicted.tolist() == [[2, 25]]


def test_srrl_pools_after_its_connector_or_before() -> None:
    student, classifier = pixels(-1, 3), (double([[1], [2]]), double([0, 1]))
    arguments = (double([[2]]), double([[1, 1]]), Layer(eye(1)), classifier)
    matching, regression = features.srrl(student, *arguments)  # h = mean(0, 3) = 1.5
    assert (matching[0], regression[0]) == (0.25, (0.25 + 9) / 2)
    matching, regression = features.srrl(student.mean(axis=(2, 3)), *arguments, variant="simkd")  # h = relu(1) = 1
    assert (matching[0], regression[0]) == (1, (0 + 4) / 2)


def test_semckd_attends_evenly_without_knowledge_and_pads_a_small_batch() -> None:
    students, teachers = (
        [normal(2, 1, 2, 2), normal(2, 1, 1, 1, seed=1)],
        [normal(2, 1, 2, 2, seed=2), normal(2, 1, 1, 1, seed=3)],
    )
    nothing = Embed(np.zeros((4, 3)), np.zeros(4), np.zeros((2, 4)), double([1, 0]))
    known = Embed(normal(4, 3), normal(4, seed=1), normal(2, 4, seed=2), normal(2, seed=3))
    even = features.semckd_attention(students, teachers, [nothing, known], [nothing, nothing])
    np.testing.assert_allclose(even, 0.5)
    plain = [[[Layer(eye(1))]] * 2] * 2
    loss = features.semckd(students, teachers, [nothing] * 2, [nothing] * 2, plain)
    gaps = []
    for s in students:
        for t in teachers:
            small_s, small_t = basic.same_size(s, t)
            gaps.append(((small_s - small_t) ** 2).mean(axis=(1, 2, 3)))
    np.testing.assert_allclose(loss, np.sum(gaps, axis=0) / 2 / 2)


# relations


def test_sp_of_two_orthogonal_samples_and_two_equal_ones() -> None:
    student, teacher = double([[2, 0], [0, 5]]), double([[1, 0, 0], [1, 0, 0]])
    row = (1 - math.sqrt(0.5)) ** 2 + 0.5
    assert relations.sp(student, teacher) == pytest.approx(2 * row / 4)
    assert relations.sp(student[:1], teacher[:1]) == 0


def test_cc_of_two_orthogonal_samples_and_two_equal_ones() -> None:
    student, teacher = double([[2, 0], [0, 5]]), double([[1, 0, 0], [1, 0, 0]])
    step = math.exp(-0.8) * (0.8 + 0.32)
    assert relations.cc(student, teacher) == pytest.approx(2 * step**2 / 4)


def test_repdistillers_cc_multiplies_neighbours_gaps() -> None:
    same = (np.eye(2), np.zeros(2))
    student, teacher = double([[1, 0], [0, 2], [3, 3]]), np.zeros((3, 2))
    assert relations.cc_repdistiller(student, teacher, same, same) == (0 + 6) / 2
    assert relations.cc_repdistiller(student[:1], teacher[:1], same, same) == 0


def test_rkd_of_three_points_on_a_line_and_an_equilateral_triangle() -> None:
    line, triangle = double([[0, 0], [1, 0], [3, 0]]), double([[0, 0], [1, 0], [0.5, math.sqrt(0.75)]])
    assert relations.rkd_distance(line, triangle, "paper") == pytest.approx(4 * 0.125 / 6)
    assert relations.rkd_distance(line, triangle) == pytest.approx(4 * 0.125 / 9)
    total = 4 * 0.125 + 2 * 1.0  # at the ends cos 1 against ½, in the middle −1 against ½, beyond the Huber loss' knee
    assert relations.rkd_angle(line, triangle, "paper") == pytest.approx(total / 6)
    assert relations.rkd_angle(line, triangle) == pytest.approx(total / 27)
    assert relations.rkd(line, triangle) == pytest.approx(25 * 0.5 / 9 + 50 * total / 27)


def test_pkt_of_two_samples() -> None:
    student, teacher = double([[2, 0], [0, 5]]), double([[1, 0], [1, 0]])
    # Rows (2/3, 1/3) and (1/2, 1/2) with the diagonal; without it every row is one certainty.
    row = 0.5 * math.log(0.5 / (2 / 3)) + 0.5 * math.log(0.5 / (1 / 3))
    assert relations.pkt(student, teacher) == pytest.approx(2 * row / 4, rel=1e-5)
    assert relations.pkt(student, teacher, "paper") == 0
    three = normal(3, 4), normal(3, 4, seed=1)
    assert relations.pkt(*three, "paper") > 0


def test_irgs_edges_vertices_and_transformation() -> None:
    np.testing.assert_allclose(relations.irg_edges(double([[0], [1], [3]])) * 9, [[0, 1, 9], [1, 0, 4], [9, 4, 0]])
    lower, upper = normal(3, 1, 2, 2), np.zeros((3, 2, 1, 1))
    means = (lower.mean(axis=(1, 2, 3))) ** 2
    np.testing.assert_allclose(relations.irg_transformation(lower, upper), means / means.max())
    upper[:, 0], upper[:, 1] = 4, -4
    np.testing.assert_allclose(relations.irg_transformation(lower, upper), means / means.max())
    vertices, edges, transformation = relations.irg(
        double([[1, 2]] * 3), double([[1, 4]] * 3), [normal(3, 2)], [2 * normal(3, 2)], (lower, upper), (3 * lower, 3 * upper)
    )
    assert vertices == 2
    assert (edges, transformation) == pytest.approx((0, 0), abs=1e-15)


def test_crd_of_one_sample_by_hand_and_its_memory_afterwards() -> None:
    banks = double([[1, 0], [0, 1], [0.6, 0.8]]), double([[0, 1], [1, 0], [0.8, 0.6]])
    memory = relations.CrdMemory(*banks)
    student, teacher, rows = double([[1, 0]]), double([[0, 1]]), np.array([[2, 0, 1]])
    losses, after = relations.crd(student, teacher, rows, memory, temperature=1.0)
    of_student = [math.exp(x) for x in (0.8, 0, 1)]
    of_teacher = [math.exp(x) for x in (0.8, 0, 1)]
    assert after.student_z == pytest.approx(sum(of_student))  # the mean of three times three samples
    noise, expected = 2 / 3, 0.0
    for values in (of_student, of_teacher):
        first, *rest = (v / sum(values) for v in values)
        expected -= math.log(first / (first + noise + 1e-7)) + sum(math.log(noise / (v + noise + 1e-7)) for v in rest)
    assert losses[0] == pytest.approx(expected)
    np.testing.assert_allclose(after.student_ND, [[1, 0], [0, 1], basic.unit(double([0.8, 0.4]))])
    np.testing.assert_allclose(after.teacher_ND, [[0, 1], [1, 0], basic.unit(double([0.4, 0.8]))])
    _, later = relations.crd(teacher, student, rows, after, temperature=1.0)
    assert (later.student_z, later.teacher_z) == (after.student_z, after.teacher_z)


# training


def test_dot_without_a_difference_is_sgd_with_momentum_and_decay() -> None:
    state, parameter, buffer = training.DotState(normal(4)), normal(4), np.zeros(4)
    for step in range(3):
        task, distilled = normal(4, seed=2 * step + 1), normal(4, seed=2 * step + 2)
        buffer = 0.9 * buffer + task + distilled + 0.05 * parameter
        parameter = parameter - 0.1 * buffer
        state = training.dot_update(state, task, distilled, lr=0.1, delta=0.0, weight_decay=0.05)
    np.testing.assert_allclose(state.parameter, parameter, rtol=1e-13)


def test_dot_keeps_more_of_the_distillations_momentum() -> None:
    one = double([1])
    state = training.dot_update(training.DotState(double([0])), one, one, lr=1.0, momentum=0.5, delta=0.25)
    assert state.parameter[0] == -2
    state = training.dot_update(state, one, one, lr=1.0, momentum=0.5, delta=0.25)
    assert (state.task, state.kd, state.parameter) == (1.25, 1.75, -5)
    alone = training.DotState(double([2]))
    for _ in range(2):
        alone = training.dot_update(alone, None, one, lr=1.0, momentum=0.5, delta=0.25, weight_decay=0.5)
    assert (alone.task, alone.kd, alone.parameter) == (None, 2, -1)  # first 1, without decay, then 1 + 0.5·1 + 0.5·1


def test_mutual_learning_takes_the_mean_over_peers() -> None:
    first, second, third = normal(2, 3), normal(2, 3, seed=1), normal(2, 3, seed=2)
    both = training.mutual([first, second])
    np.testing.assert_allclose(both[0], logits.kd(first, second, 1))
    three = training.mutual([first, second, third])
    np.testing.assert_allclose(three[2], (logits.kd(third, first, 1) + logits.kd(third, second, 1)) / 2)


def test_mean_losses_and_mean_probabilities_have_one_gradient() -> None:
    student, teachers, weights = normal(2, 3), [normal(2, 3, seed=1), normal(2, 3, seed=2)], [0.25, 0.75]

    def gradient(variant: str) -> Array:
        return basic.derivative(lambda s: float(training.several_teachers(s, teachers, weights, 4, variant).sum()), student)

    np.testing.assert_allclose(gradient("losses"), gradient("probabilities"), atol=1e-9)
    one = [teachers[0], teachers[0]]
    for variant in ("probabilities", "logits", "losses"):
        np.testing.assert_allclose(training.several_teachers(student, one, weights, 4, variant), logits.kd(student, one[0], 4))


def test_ps_kd_goes_from_labels_to_the_last_epochs_word() -> None:
    student, before, labels = normal(2, 3), double([[0.5, 0.5, 0], [0, 0, 1]]), np.array([1, 2])
    task = training.cross_entropy(student, labels)
    np.testing.assert_allclose(training.ps_kd(student, before, labels, 0.0), task)
    other = training.cross_entropy(student, np.array([0, 2]))
    np.testing.assert_allclose(training.ps_kd(student, before, labels, 1.0), [(task[0] + other[0]) / 2, task[1]])
    assert [training.ps_kd_alpha(e, 4) for e in (1, 4)] == pytest.approx([0.2, 0.8])


# edges

PAIRS: dict[str, Callable[[Array, Array], object]] = {
    "sp": relations.sp,
    "cc": relations.cc,
    "rkd": relations.rkd,
    "rkd paper": lambda s, t: relations.rkd(s, t, "paper"),
    "pkt": relations.pkt,
    "pkt paper": lambda s, t: relations.pkt(s, t, "paper"),
    "irg": lambda s, t: ((relations.irg_edges(s) - relations.irg_edges(t)) ** 2).mean(),
    "kd": logits.kd,
    "dist inter": logits.dist_inter,
    "dist intra": logits.dist_intra,
    "standardised": lambda s, t: logits.kd(logits.standardise(s), logits.standardise(t)),
    "wttm": lambda s, t: logits.wttm(s, t, 1.0),
    "mlkd": lambda s, t: np.concatenate([np.ravel(part) for part in logits.mlkd(s, t)]),
}


@pytest.mark.parametrize("loss", PAIRS)
@pytest.mark.parametrize("inputs", ["zeros", "equal samples", "one sample", "the same on both sides"])
def test_nothing_is_infinite_at_the_edges(loss: str, inputs: str) -> None:
    student, teacher = normal(3, 4), normal(3, 4, seed=1)
    if inputs == "zeros":
        student, teacher = 0 * student, 0 * teacher
    elif inputs == "equal samples":
        student, teacher = student[[0, 0, 0]], teacher[[1, 1, 1]]
    elif inputs == "one sample":
        student, teacher = student[:1], teacher[:1]
    else:
        teacher = student
    value = PAIRS[loss](student, teacher)
    assert np.isfinite(value).all()
    if inputs == "the same on both sides":
        np.testing.assert_allclose(value, 0, atol=1e-5)


def test_features_losses_are_finite_for_zero_maps_and_zero_for_the_same() -> None:
    maps = [normal(2, 4, 4, 4), normal(2, 4, 2, 2, seed=1)]
    zeros = [0 * m for m in maps]
    for loss in (features.at, features.fsp, features.nst, features.kdsvd, features.hcl):
        assert np.isfinite(loss(zeros, zeros)).all()
        assert np.isfinite(loss(zeros, maps)).all()
        np.testing.assert_allclose(loss(maps, maps), 0, atol=1e-12)
