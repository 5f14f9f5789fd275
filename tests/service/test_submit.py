"""What a submitted command is on the cluster, where this machine's working directory is not."""

import re
from pathlib import Path

import click
import pytest

from service import cli
from service.commands.submit import job_of, package
from service.config.experiment import load
from service.runs.run_directory import new_run_dir
from trainables.errors import ExperimentError

METHOD = """
from trainables.methods.contract import Method


class Plain(Method):
    terms = ("plain_loss",)

    def forward(self, student, teacher, batch):
        return {"plain_loss": (student.logits_BK - teacher.logits_BK).square().mean(1)}
"""


def packaged(words: list[str], folder: Path) -> list[str]:
    return package(click.Context(cli.cli), words, folder)[0]


def test_paths_of_pack_and_data_are_absolute_whether_they_exist_or_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "images").mkdir()
    (tmp_path / "90").mkdir()
    assert packaged(["pack", "images", "new/packed", "--quality", "90", "--check"], tmp_path) == [
        "pack",
        f"{tmp_path}/images",
        f"{tmp_path}/new/packed",
        "--quality",
        "90",
        "--check",
    ]
    assert packaged(["pack", "images", "new", "--no-labels"], tmp_path)[-1] == "--no-labels"
    assert packaged(["data", "--sheet", "sheet.png", "packed"], tmp_path) == [
        "data",
        f"{tmp_path}/packed",
        "--sheet",
        f"{tmp_path}/sheet.png",
    ]


@pytest.mark.parametrize(
    "words",
    [
        "train digits --out s3://bucket/runs/one",
        "train s3://bucket/runs/one/experiment.yaml",
        "sweep digits --runs s3://bucket/runs",
        "resume s3://bucket/runs/one",
        "report s3://bucket/runs/one",
        "compare s3://bucket/runs/one s3://bucket/runs/two",
        "doctor s3://bucket/runs/one",
        "show s3://bucket/runs/one",
        "sync s3://bucket/runs/one",
        "evaluate s3://bucket/runs/one/student --data digits --runs s3://bucket/runs",
        "clean --older-than 30d --runs s3://bucket/runs",
    ],
)
def test_the_uri_of_a_run_is_the_same_on_the_cluster(words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAYDISTILL_COPIES", str(tmp_path))
    assert packaged(words.split(), tmp_path) == words.split()


@pytest.mark.parametrize("words", [[], ["dance"], ["submit"]])
def test_what_is_no_command_of_ours_is_refused_with_those_that_are(words: list[str], tmp_path: Path) -> None:
    with pytest.raises(
        ExperimentError, match=r"give one of bench-model, cache, check-method, clean, .*, taps, train, ui and its arguments"
    ):
        packaged(words, tmp_path)


def test_every_other_command_can_be_submitted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("swept").mkdir()
    Path("swept/best.safetensors").touch()
    commands = {
        "clean --older-than 30d --dry-run": "clean --older-than 30d --dry-run",
        "methods": "methods",
        "recipes": "recipes",
        "show --keys optim": "show optim --keys",
        "taps resnet8 --all --image-size=32": "taps resnet8 --image-size 32 --all",
        "check-method /there/margin.py:Margin --option a=1": "check-method /there/margin.py:Margin --option a=1",
        "compare swept /shared/run --html=page.html": f"compare {tmp_path}/swept /shared/run --html {tmp_path}/page.html",
        "doctor swept": f"doctor {tmp_path}/swept",
        "doctor digits --set seed=1": "doctor digits --set seed=1",
        "evaluate swept/best.safetensors --data swept": f"evaluate {tmp_path}/swept/best.safetensors --data {tmp_path}/swept",
        "embed swept --data swept --to x.npy": f"embed {tmp_path}/swept --data {tmp_path}/swept --to {tmp_path}/x.npy",
        "embed vgg11 --data digits --to /x.npy --weights DEFAULT": "embed vgg11 --data digits --to /x.npy --weights DEFAULT",
        "export swept --to onnx --out x": f"export {tmp_path}/swept --to onnx --out {tmp_path}/x",
        "bench-model resnet18 --batch 1": "bench-model resnet18 --batch 1",
        "reproduce cifar100 --dry-run --teachers swept": f"reproduce cifar100 --teachers {tmp_path}/swept --dry-run",
        "ui --port 5001": "ui --port 5001",
    }
    for words, expected in commands.items():
        assert packaged(words.split(), tmp_path) == expected.split()


def test_arguments_that_a_command_does_not_have_are_refused_here(tmp_path: Path) -> None:
    for words in (["train", "digits", "--ouput", "x"], ["train"]):
        with pytest.raises(click.UsageError):
            packaged(words, tmp_path)


def test_an_experiment_that_an_override_completes_is_submitted(tmp_path: Path) -> None:
    file, there = tmp_path / "bare.yaml", tmp_path / "package"
    file.write_text("{distill: {method: none}, data: {path: digits, image_size: 8}}")
    there.mkdir()
    words = ["train", str(file), "--set", "student.model=convnet_small"]
    assert packaged(words, there) == ["train", "bare.yaml", *words[2:]]
    assert load(str(there / "bare.yaml")).experiment.student.model == "convnet_small"


def test_relative_paths_begin_in_the_users_directory_in_the_file_and_in_overrides(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("images", "others", "digits"):  # the last one is not meant by the built-in source of this name
        Path(name).mkdir()
    Path("teacher.safetensors").touch()
    Path("own.yaml").write_text("{base: digits, teacher: {cache: logits}, data: {path: images}}")
    there = tmp_path / "package"
    there.mkdir()
    words = ["sweep", "own.yaml", "--set", "data.path=others", "--set", "teacher.cache=new"]
    path, cache = ["--set", f'data.path="{tmp_path}/others"'], ["--set", f'teacher.cache="{tmp_path}/new"']
    assert packaged(words, there) == [*words[:4], *path, *words[4:], *cache]
    last = packaged(["train", "digits", "--set", "data.path=images", "--set", "data.path=digits"], there)[-2:]
    assert last == ["--set", "data.path=digits"]  # the later one of two is the last one there too
    assert load(str(there / "own.yaml")).experiment.data.path == f"{tmp_path}/others"
    assert packaged(["train", "digits"], there) == ["train", "digits"]
    assert packaged(["train", "digits", "--set", "data={path: images}"], there)[-1] == f'data.path="{tmp_path}/images"'
    others = 'teachers=[{"model": "convnet_large", "weights": "teacher.safetensors"}]'
    full = others.replace("teacher.safe", f"{tmp_path}/teacher.safe")
    weights = "teacher.weights=teacher.safetensors"
    assert packaged(["train", "digits", "--set", weights], there)[2:] == [
        *("--set", weights, "--set", f'teacher.weights="{tmp_path}/teacher.safetensors"')
    ]
    several = ["train", "digits", "--set", "teacher=null", "--set", others]
    assert packaged(several, there) == [*several, "--set", full]


def test_relative_paths_among_the_values_of_a_sweep_begin_in_the_users_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("a", "b", "package"):
        Path(name).mkdir()
    paths = [f"{tmp_path}/a", f"{tmp_path}/b"]
    Path("space.yaml").write_text("{base: digits, sweep: {space: {data.path: [a, b], optim.lr: [0.1]}}}")
    assert packaged(["sweep", "space.yaml"], tmp_path / "package") == ["sweep", "space.yaml"]
    assert load(str(tmp_path / "package" / "space.yaml")).experiment.sweep.space == {"data.path": paths, "optim.lr": [0.1]}
    points = "{space: {}, policy: grid, points: [{data.path: a}, {data.path: b, optim.lr: 0.1}]}"
    Path("points.yaml").write_text(f"{{base: digits, sweep: {points}}}")
    packaged(["sweep", "points.yaml"], tmp_path / "package")
    sent = load(str(tmp_path / "package" / "points.yaml")).experiment.sweep.points
    assert sent == ({"data.path": paths[0]}, {"data.path": paths[1], "optim.lr": 0.1})
    words = ["sweep", "digits", "--set", "sweep.space.data.path=[a, digits]"]
    assert packaged(words, tmp_path / "package")[4:] == ["--set", f'sweep.space.data.path=["{paths[0]}", "digits"]']


def test_the_file_of_a_method_travels_with_the_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "package"
    Path("torch.py").write_text(METHOD)  # a name that must not hide a module there
    Path("own.yaml").write_text("{base: digits, distill: {method: 'torch.py:Plain'}}")
    (name,) = set(packaged(["check-method", "torch.py:Plain"], folder)[1:])
    file, _, label = name.partition(":")
    assert label == "Plain"
    assert Path(file).parent.name == "methods"
    assert (folder / file).read_text() == METHOD
    packaged(["train", "own.yaml"], folder)
    assert packaged(["train", "digits", "--set", "distill.method=torch.py:Plain"], folder)[-1] == f'distill.method="{name}"'
    monkeypatch.chdir(folder)  # as the job does
    Path("../torch.py").unlink()
    assert load("own.yaml").experiment.distill.method == (f"{folder}/{name}",)


def test_the_file_of_a_model_travels_with_the_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "package"
    Path("net.py").write_text("raise ValueError('not run')")
    models = "student: {model: 'net.py:Net'}, teacher: {model: 'net.py:Net', args: {width: 6}}"
    Path("own.yaml").write_text(f"{{base: digits, {models}}}")
    name = packaged(["taps", "net.py:Net(width=6)"], folder)[-1]
    assert name.endswith(".py:Net(width=6)")
    assert (folder / name.partition(":")[0]).is_file()
    packaged(["train", "own.yaml"], folder)
    monkeypatch.chdir(folder)
    Path("../net.py").unlink()
    experiment = load("own.yaml").experiment
    assert experiment.teacher is not None
    assert experiment.teacher.model == f"{folder}/{name}"
    assert experiment.student.model == f"{folder}/{name.partition('(')[0]}"


def test_a_wrong_override_is_refused_before_anything_is_submitted(tmp_path: Path) -> None:
    for wrong in (["--set", "optim.lr=x"], ["--set=optim.lr=x"]):
        with pytest.raises(ExperimentError, match=r"--set: optim\.lr: must be a number"):
            packaged(["train", "digits", "--set", "seed=1", *wrong], tmp_path)


OWN = "/cluster/own.py:Own"


@pytest.mark.parametrize(
    "overrides",
    [
        (f"distill.method={OWN}", "optim.lr=0.1"),
        (f"distill.method={OWN}", "optim.losses.Own/judge.lr=0.1"),
        (f'distill={{"method": "{OWN}"}}', "distill.options.Own.weight=2"),
        ("teacher.cache=/tmp/x", "distill.method=kd"),
        ("teacher=null", "distill.method=none"),
    ],
)
def test_overrides_that_are_right_together_are_submitted(overrides: tuple[str, ...], tmp_path: Path) -> None:
    own = tmp_path / "crd.yaml"
    own.write_text("{name: crd, base: digits, distill: {method: crd}}")
    (tmp_path / "package").mkdir()
    sets = [word for text in overrides for word in ("--set", text)]
    assert packaged(["train", str(own), *sets], tmp_path / "package") == ["train", "crd.yaml", *sets]


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ((f"distill.method={OWN}", "optim.lr=x"), r"--set: optim\.lr: must be a number"),
        ((f"distill.method={OWN}", "distill.methods=kd"), r"--set: distill\.methods: no such key"),
        ((f"distill.method={OWN}", "student.model=resnet2"), r"--set: student\.model: "),
        (("distill.method=crb",), "did you mean crd"),
        (("distill.options.kd.temprature=2",), r"distill\.options\.kd\.temprature: no such key"),
        (("distill.method=crd", "teacher=null"), "crd needs a teacher"),
    ],
)
def test_a_wrong_override_is_refused_also_with_a_method_file_of_the_cluster(
    overrides: tuple[str, ...], words: str, tmp_path: Path
) -> None:
    with pytest.raises(ExperimentError, match=words):
        packaged(["train", "digits", *(word for text in overrides for word in ("--set", text))], tmp_path)


def test_an_experiment_without_a_method_is_submitted_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    data = "data: {path: digits, image_size: 8}"
    Path("labels.yaml").write_text(f"{{name: labels, student: {{model: convnet_small}}, {data}, distill: {{method: none}}}}")
    there = tmp_path / "package"
    there.mkdir()
    assert packaged(["train", "labels.yaml"], there) == ["train", "labels.yaml"]
    sent = load(str(there / "labels.yaml")).experiment
    assert not sent.distill.method
    assert sent.name == "labels"


@pytest.mark.parametrize(
    ("words", "known"),
    [
        (
            "sweep digits --set name=flowers --runs s3://bucket/runs",
            {
                "job_name": "flowers",
                "command": "sweep",
                "experiment": "flowers",
                "run": "NAME",
                "folder": "s3://bucket/runs/NAME",
                "page": "s3://bucket/runs/NAME/report.html",
            },
        ),
        ("train digits", {"job_name": "digits", "command": "train", "experiment": "digits", "run": "NAME"}),
        (
            "train digits --out /shared/runs/one",
            {
                "job_name": "digits",
                "command": "train",
                "experiment": "digits",
                "run": "one",
                "folder": "/shared/runs/one",
                "page": "/shared/runs/one/report.html",
            },
        ),
        (
            "resume /shared/runs/one",
            {
                "job_name": "resume",
                "command": "resume",
                "run": "one",
                "folder": "/shared/runs/one",
                "page": "/shared/runs/one/report.html",
            },
        ),
        ("methods", {"job_name": "methods", "command": "methods"}),
    ],
)
def test_a_job_is_named_as_its_run_and_says_what_and_where_it_is(
    words: str, known: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAYDISTILL_COPIES", str(tmp_path / "copies"))
    arguments, experiment = package(click.Context(cli.cli), words.split(), tmp_path)
    job = job_of(arguments, experiment)
    assert re.fullmatch(known["job_name"] + r"-\d{8}-\d{6}-[0-9a-f]{6}", job.name)
    assert job.name != job_of(arguments, experiment).name
    assert job.metadata == {key: value.replace("NAME", job.name) for key, value in known.items()}
    for name, value in job.env_vars.items():
        monkeypatch.setenv(name, value)
    run_dir = new_run_dir(tmp_path / "runs", "other", None)  # as in the job
    assert (run_dir.root.name == job.name) == (known.get("run") == "NAME")
