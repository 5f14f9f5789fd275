"""The command: quick to start; every mistake that can be known before Ray starts ends in at most six lines and exit code 2."""

import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import click
import pytest
import yaml

from service import cli
from service.commands.options import is_run_folder
from service.config.experiment import load
from service.runs.run_directory import begin_run
from tests.run_log import change, write_log
from tests.service.commands import run
from tests.trainables.data.image_folder import write_images
from tests.trainables.data.photos import encoded, photo
from tests.trainables.jobs import write_teacher
from tests.trainables.methods import own_methods
from trainables.config import DataConfig
from trainables.data.identity import data_identity
from trainables.data.source import open_source
from trainables.distributed.rank_pool import RankPool
from trainables.errors import ExperimentError
from trainables.rundir import RunDir

Refuse = Callable[..., str]
PYTHON = [sys.executable, "-c"]
HEAVY = {"torch", "torchvision", "ray", "mlflow", "pandas", "sklearn", "timm"}


@pytest.fixture(autouse=True)
def own_signals() -> Iterator[None]:
    """`main` takes SIGTERM for itself."""
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


def exit_code(*arguments: str | Path) -> int:
    with pytest.raises(SystemExit) as left:
        cli.main([str(argument) for argument in arguments])
    assert isinstance(left.value.code, int)
    return left.value.code


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    return tmp_path / "runs"


@pytest.fixture
def refuse(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, runs: Path) -> Refuse:
    """refuse("train", "digits", …) carries the command out here, and returns the one line that it was refused with."""
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setenv("RAYDISTILL_RUNS", str(runs))

    def run(*arguments: str | Path) -> str:
        assert exit_code(*arguments) == 2
        shown = capsys.readouterr()
        assert shown.out == ""
        [error] = [line for line in shown.err.splitlines() if not line.startswith("note: ")]
        assert error.startswith("error: ")
        assert not runs.exists()  # nothing was begun
        return error.removeprefix("error: ")

    return run


def sets(*overrides: str) -> list[str]:
    return [word for override in overrides for word in ("--set", override)]


def cpu_seconds(code: str) -> float:
    """Processor time of a Python process that runs `code`, which other jobs on this machine do not add to."""
    pid = os.posix_spawn(
        sys.executable,
        [*PYTHON, code],
        os.environ,
        file_actions=[(os.POSIX_SPAWN_OPEN, fd, os.devnull, os.O_RDWR, 0) for fd in (0, 1, 2)],
    )
    _, _, usage = os.wait4(pid, 0)
    return usage.ru_utime + usage.ru_stime


# Quick to start


@pytest.mark.parametrize("arguments", [["--help"], ["train", "digits", *sets("batch_size=3")], ["train", "nothing"], ["recipes"]])
@pytest.mark.slow
def test_help_and_a_refused_experiment_take_less_than_a_second_and_a_half(arguments: list[str]) -> None:
    code = f"from service.cli import main; main({arguments!r})"
    assert min(cpu_seconds(code) for _ in range(3)) < 1.5


@pytest.mark.parametrize("arguments", [None, ["train", "digits", *sets("batch_size=3")], ["show", "cifar10"]])
def test_nothing_heavy_is_imported_until_a_command_needs_it(arguments: list[str] | None) -> None:
    code = f"""
import sys
import service.cli
try:
    {arguments} is None or service.cli.main({arguments})
except SystemExit:
    pass
print(*sorted({{name.split(".")[0] for name in sys.modules}} & {HEAVY}))
"""
    done = subprocess.run([*PYTHON, code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == ""


def test_python_m_service_is_the_same_command() -> None:
    shown = [
        subprocess.run([*start, "recipes"], capture_output=True, text=True, check=True).stdout
        for start in ([sys.executable, "-m", "service"], [*PYTHON, "from service.cli import main; main()"])
    ]
    assert shown[0] == shown[1]
    assert "imagenet_r34_r18" in shown[0]


@pytest.mark.parametrize("name", list(cli.COMMANDS))
def test_the_line_of_a_command_in_the_list_is_the_beginning_of_its_help(name: str) -> None:
    command = cli.cli.get_command(click.Context(cli.cli), name)
    assert command is not None
    assert command.name == name
    assert (command.help or "").startswith(cli.COMMANDS[name][1].rstrip("."))


def test_the_list_of_commands_imports_none_of_them() -> None:
    code = """
import sys
import service.cli
try:
    service.cli.main(["--help"])
except SystemExit:
    pass
print(*sorted(name for name in sys.modules if name.startswith(("service.commands", "service.config", "pydantic"))))
"""
    done = subprocess.run([*PYTHON, code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == ""
    assert "  train         Train the teacher if it has no weights, then distil the student." in done.stdout.replace(
        "\n                ", " "
    )


# What a command line itself can get wrong


def test_a_port_that_another_server_has_is_refused_instead_of_showing_its_records(refuse: Refuse) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        refused = refuse("ui", "--port", port)
    assert refused == f"127.0.0.1:{port} cannot be listened on (Address already in use): give another --port, or --host"


def test_a_host_without_an_address_is_named_once(refuse: Refuse) -> None:
    refused = refuse("ui", "--host", "nosuch.invalid", "--port", "5999")
    assert refused.startswith("nosuch.invalid:5999 cannot be listened on (")
    assert refused.endswith("): give another --port, or --host")
    assert refused.count("nosuch.invalid") == 1


@pytest.mark.parametrize("command", ["show", "submit train", "train"])
def test_an_address_of_records_that_is_none_is_refused_by_each_command(command: str, refuse: Refuse) -> None:
    refused = refuse(*command.split(), "digits", *sets("tracking.uri=http://"))
    assert refused.startswith("--set: tracking.uri: 'http://' is not a store: write http://HOST:PORT for a server")


@pytest.mark.parametrize("key", ["teacher.cache", "teacher.weights", "data.path"])
def test_a_home_of_nobody_is_refused(key: str, refuse: Refuse) -> None:
    assert "this machine has no home folder ~nosuchuser" in refuse("train", "digits", *sets(f"{key}=~nosuchuser/x"))


def test_a_folder_of_logits_whose_name_no_disk_can_have_is_refused(refuse: Refuse) -> None:
    assert "teacher.cache: must be a folder: a path cannot contain the character NUL" in refuse(
        "show", "digits", *sets('teacher.cache="/tmp/a\\0b"')
    )


def test_a_method_that_ends_the_process_when_it_is_loaded_is_an_error(tmp_path: Path, refuse: Refuse) -> None:
    (tmp_path / "ends.py").write_text("import sys\nsys.exit(0)\n")
    refused = refuse("train", "digits", *sets(f"distill.method={tmp_path}/ends.py:Method"))
    assert "cannot be loaded (SystemExit: 0)" in refused


def test_code_that_ends_the_process_later_is_an_error_too(refuse: Refuse, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("service.commands.runs.start_run", lambda *_, **__: sys.exit(0))
    assert refuse("train", "digits") == "code that this command has loaded called sys.exit(0)"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "Usage"),
        (["trian", "digits"], "No such command 'trian'"),
        (["train", "digits", "--set"], "Option '--set' requires an argument"),
        (["train", "digits", "--bogus"], "No such option"),
        (["evaluate", "x.safetensors"], "Missing option '--data'"),
        (["resume"], "Missing argument 'DIRECTORY'"),
        (["ui", "--port", "many"], "'many' is not a valid integer"),
        # No option is ignored without a word.
        (["evaluate", "x", "--data", "digits", "--tap", "pooled"], "--tap needs --probe: add --probe, or leave --tap out"),
        (["embed", "x", "--data", "digits", "--to", "x.npy", "--weights-key", "a"], "--weights-key needs --weights"),
        (["evaluate", "x", "--data", "digits", "--weights-key", "a"], "--weights-key needs --model"),
        (["pack", "here", "there", "--quality", "90"], "--quality needs --max-side"),
        (
            ["clean", "--older-than", "1d", "--unfinished", "--checkpoints"],
            "--unfinished excludes --checkpoints: give one of them",
        ),
        (["data", "here", "--processes", "2"], "--processes needs --verify"),
        (["show", "--keys", "optim", "--set", "seed=1"], "--keys excludes --set"),
        (["train", "digits", "--continue"], "--continue needs --out: add --out, or leave --continue out"),
        (["train", "digits", "--accept-new-data"], "--accept-new-data needs --continue"),
        # A shell makes these of a variable that is not set; as paths they would be this directory.
        (["train", "digits", "--out", ""], """--out is empty: write a path, such as "." for this directory"""),
        (["clean", "--older-than", "1d", "--runs", ""], "--runs is empty"),
        (["pack", "", "there"], "SOURCE is empty"),
        (["evaluate", "", "--data", "digits"], "CHECKPOINT is empty"),
        (["doctor", "/", "--runs", "here"], "--runs: is for the timing run of a recipe"),
    ],
)
def test_a_wrong_command_line_is_exit_code_2(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str], refuse: Refuse
) -> None:
    assert exit_code(*arguments) == 2
    shown = capsys.readouterr().err
    assert words in shown
    if arguments:
        assert len(shown.splitlines()) <= 6


def test_a_root_that_is_not_that_of_a_run_in_an_object_store_is_refused(
    refuse: Refuse, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAYDISTILL_COPIES", str(tmp_path / "copies"))
    refused = refuse("train", "digits", "--out", "s3://b/runs/one", "--runs", tmp_path)
    assert refused == "--runs: the root of s3://b/runs/one is s3://b/runs: leave it out"


def test_a_recipe_next_to_a_folder_of_its_name_is_the_recipe_unless_the_folder_has_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert not is_run_folder("cifar10")
    Path("cifar10").mkdir()
    assert not is_run_folder("cifar10")
    assert is_run_folder("./cifar10")
    for name in ("experiment.yaml", "events.jsonl"):
        Path("cifar10", name).touch()
    with pytest.raises(ExperimentError, match=r"^cifar10 is a recipe and the folder of a run: write \./cifar10 for the run"):
        is_run_folder("cifar10")


@pytest.mark.parametrize("command", ["train", "sweep", "show"])
def test_a_wrong_experiment_is_refused_by_every_command_that_takes_one(command: str, refuse: Refuse) -> None:
    assert refuse(command, "digits", *sets("optim.lr")).startswith("--set optim.lr: write --set key=value")
    split = refuse(command, "digits", "--set", "data.mean=[0.1,", "0.2]")  # as a shell splits it
    assert split.endswith("what has spaces needs quotes: --set 'data.mean=…'")
    assert "did you mean digits?" in refuse(command, "digit")
    assert refuse(command, "digits", *sets("distill.options.kd.temperature=0")).endswith("must be above 0, not 0")


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["cache", "digits", "--runs", "s3://b/runs"], "--runs s3://b/runs: `distill cache` takes"),
        (["reproduce", "cifar100", "--out", "s3://b/out", "--dry-run"], "--out s3://b/out: `distill reproduce` takes"),
        (["pack", "here", "s3://key:secret@b/set"], "DEST s3://***@b/set: `distill pack` takes"),
        (["pack", "s3://b/set", "here"], "SOURCE s3://b/set: `distill pack` takes"),
        (["data", "s3://b/set"], "DIRECTORY s3://b/set: `distill data` takes"),
        (["report", "run", "--html", "s3://b/x.html"], "--html s3://b/x.html: `distill report` takes"),
    ],
)
def test_a_path_that_may_be_no_uri_refuses_one(
    arguments: list[str], line: str, refuse: Refuse, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert refuse(*arguments) == f"{line} no URI here: give a path on this machine"
    assert not list(tmp_path.iterdir())


# Data


def write_photos(folder: Path, **splits: dict[str, list[bytes]]) -> Path:
    for split, classes in splits.items():
        for name, images in classes.items():
            (folder / split / name).mkdir(parents=True)
            for number, content in enumerate(images):
                (folder / split / name / f"{number}.jpg").write_bytes(content)
    return folder


GOOD = encoded(photo(1), "JPEG")


def test_missing_empty_and_non_image_data_are_refused(refuse: Refuse, tmp_path: Path) -> None:
    def shown(path: Path) -> str:
        return refuse("train", "digits", *sets(f"data.path={path}"))

    assert "does not exist; write digits, synthetic, or a folder with train/CLASS/*" in shown(tmp_path / "none")
    (tmp_path / "file").write_text("x")
    assert "is a file" in shown(tmp_path / "file")
    (tmp_path / "empty").mkdir()
    assert "has no folder train" in shown(tmp_path / "empty")
    (tmp_path / "classless" / "train").mkdir(parents=True)
    assert "has no class folders" in shown(tmp_path / "classless")
    write_photos(tmp_path / "imageless", train={"cat": []}, val={"cat": []})
    (tmp_path / "imageless/train/cat/notes.txt").write_text("no image")
    assert "holds no images" in shown(tmp_path / "imageless")
    assert "has no validation folder" in shown(write_photos(tmp_path / "valless", train={"cat": [GOOD], "ant": [GOOD]}))
    extra = write_photos(tmp_path / "extra", train={"cat": [GOOD], "ant": [GOOD]}, val={"dog": [GOOD]})
    assert "has classes that train has not: dog" in shown(extra)
    single = write_photos(tmp_path / "single", train={"cat": [GOOD]}, val={"cat": [GOOD]})
    assert shown(single) == f"data.path: {single} has one class only, cat; a classifier needs images of two or more"


def test_a_folder_in_which_no_image_can_be_read_is_refused_before_ray_starts(refuse: Refuse, tmp_path: Path) -> None:
    bad = write_photos(tmp_path / "bad", train={"cat": [b"text", GOOD[:200]], "dog": [b""]}, val={"cat": [GOOD]})
    shown = refuse("train", "digits", *sets(f"data.path={bad}"))
    assert "none of 3 sampled images can be decoded, such as train/cat/0.jpg (not an image)" in shown


def test_a_batch_larger_than_the_data_is_refused(refuse: Refuse) -> None:
    assert "write at most 1442, or data.last_batch=short" in refuse("train", "digits", *sets("data.global_batch_size=2048"))


# Cluster


def test_more_than_this_machine_could_ever_hold_is_refused_before_ray_starts(refuse: Refuse) -> None:
    shown = refuse("train", "digits", *sets("data.global_batch_size=1024", "scale.num_workers=512"))
    assert shown.startswith("512 workers of 2 CPUs each do not fit")
    assert shown.endswith("lower scale.num_workers or data.loader_workers")
    assert "1 worker needs 5001 CPUs; the largest node has" in refuse("train", "digits", *sets("data.loader_workers=5000"))


def test_a_gpu_where_there_is_none_is_refused(refuse: Refuse, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert refuse("train", "digits", *sets("scale.use_gpu=true")).endswith("set scale.use_gpu to false")
    shown = refuse("train", "digits", *sets("data.decoder=gpu", "data.augment=crop_flip"))
    assert shown == "data.decoder: gpu works on GPUs only, and there are none: write auto"


@pytest.mark.parametrize(
    ("address", "words"),
    [
        ("127.0.0.1:9", "no Ray at 127.0.0.1:9"),
        ("ray://127.0.0.1:9", "no Ray at ray://127.0.0.1:9"),
        ("http://127.0.0.1:8265", "an http address is for `distill submit`"),
        ("nonsense", "RAY_ADDRESS is nonsense: write HOST:PORT"),
    ],
)
def test_an_address_without_ray_is_refused_at_once(
    address: str, words: str, refuse: Refuse, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", address)
    assert words in refuse("train", "digits")


def test_a_job_without_a_dashboard_or_a_command_is_refused(refuse: Refuse, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "give one of bench-model, cache, check-method" in refuse("submit")
    assert "give one of bench-model, cache, check-method" in refuse("submit", "dance")
    assert "did you mean digits?" in refuse("submit", "train", "digit")
    monkeypatch.setenv("RAY_API_SERVER_ADDRESS", "http://127.0.0.1:9")
    assert refuse("submit", "train", "digits").startswith("cannot submit a job to http://127.0.0.1:9")


def test_a_store_that_mlflow_cannot_write_to_is_refused(refuse: Refuse) -> None:
    assert "tracking.uri: 'my-server' is not a store: write http://HOST:PORT for a server" in refuse(
        "train", "digits", *sets("tracking.uri=my-server")
    )


@pytest.mark.parametrize(
    ("uri", "words"),
    [
        ("http://", "tracking.uri: 'http://' is not a store: write http://HOST:PORT for a server"),
        ("https://:5000", "write http://HOST:PORT for a server"),
        ("http://[::1", "write http://HOST:PORT for a server"),
        ("http://host:99999999", "write http://HOST:PORT for a server"),
        ("http://host:port", "write http://HOST:PORT for a server"),
        ("sqlite://", "sqlite:////ABSOLUTE/PATH/mlflow.db for a file"),
        ("sqlite:///", "sqlite:////ABSOLUTE/PATH/mlflow.db for a file"),
        ("sqlite:///{0}/none/mlflow.db", "tracking.uri: there is no folder {0}/none: create it, or choose another"),
        ("sqlite:///{0}", "tracking.uri: {0} is not a file: write the path of one"),
        ("sqlite:///{0}/text", "tracking.uri: {0}/text is not an SQLite database: choose another file"),
        ("sqlite:///{0}/text/mlflow.db", "tracking.uri: {0}/text is not a folder: choose another"),
        ("sqlite:///{0}/pipe", "tracking.uri: {0}/pipe is not a file: write the path of one"),
        ('"sqlite:///{0}/a\\0b"', "write http://HOST:PORT for a server"),
    ],
)
def test_a_store_that_cannot_be_opened_is_refused(uri: str, words: str, refuse: Refuse, tmp_path: Path) -> None:
    (tmp_path / "text").write_text("not a database, though it is long enough")
    os.mkfifo(tmp_path / "pipe")
    assert words.format(tmp_path) in refuse("train", "digits", *sets(f"tracking.uri={uri.format(tmp_path)}"))


@pytest.mark.parametrize("port", ["0", "-1", "65536", "99999999"])
def test_a_port_that_no_machine_has_is_refused(port: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code("ui", "--port", port) == 2
    shown = capsys.readouterr().err
    assert f"{port} is not in the range 1<=x<=65535" in shown
    assert len(shown.splitlines()) <= 6


def test_a_folder_for_logits_that_cannot_be_written_is_refused_before_a_teacher_is_trained(
    refuse: Refuse, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("x")
    for cache in (tmp_path / "file", tmp_path / "file/logits/deep"):
        message = f"teacher.cache: {cache} cannot be written: {tmp_path}/file is not a folder; name another folder"
        assert refuse("train", "digits", *sets(f"teacher.cache={cache}")) == message
        accuracy = sets("sweep.steps=null", "sweep.metric=top1_pct", f"teacher.cache={cache}")
        assert refuse("sweep", "digits", *accuracy) == message


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["train", ""], "'': neither a recipe nor a file"),
        (["evaluate", "nothing", "--data", "digits"], "no checkpoint at nothing: give a .safetensors file"),
        (["evaluate", "{0}/text", "--data", "digits"], "{0}/text is not a complete safetensors file"),
        (["methods", "{0}/raises.py:M"], "raises.py:M cannot be loaded (ValueError: two lines)"),
        (["ui", "--runs", "{0}/text/runs"], "--runs {0}/text/runs cannot be written: {0}/text is not a folder"),
        (["train", "digits", "--set", "data.path=http://127.0.0.1:9/x"], "there is no such file, or no server answers"),
    ],
)
def test_what_ordinary_users_mistake_is_one_line(arguments: list[str], words: str, refuse: Refuse, tmp_path: Path) -> None:
    (tmp_path / "text").write_text("text")
    (tmp_path / "raises.py").write_text("raise ValueError('two\\nlines')\n")
    assert words.format(tmp_path) in refuse(*(argument.format(tmp_path) for argument in arguments))


@pytest.mark.parametrize("option", [("--image-size", "99999999"), ("--num-classes", "999999999999")])
def test_models_of_sizes_that_nobody_has_are_refused(option: tuple[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code("taps", "resnet8", *option) == 2
    assert f"{option[1]} is not in the range" in capsys.readouterr().err


def test_what_a_command_line_quotes_is_bounded(capsys: pytest.CaptureFixture[str]) -> None:
    long = "k" * 100_000
    for arguments in (["train", "digits", f"--{long}"], [long], ["ui", "--port", long], ["train", long], ["report", long]):
        assert exit_code(*arguments) == 2
        shown = capsys.readouterr().err
        assert len(shown) < 1500, shown[:100]
        assert len(shown.splitlines()) <= 6


# Models, weights and checkpoints


def test_a_model_that_does_not_fit_the_images_is_refused(refuse: Refuse) -> None:
    shown = refuse("train", "digits", *sets("student.model=squeezenet1_1"))
    assert shown.startswith("model squeezenet1_1 does not accept images of 8×8")
    assert "set data.image_size to 32" in shown
    assert shown.count("8×8") == 1


def test_the_taps_of_a_model_that_is_none_or_does_not_fit_are_refused(refuse: Refuse) -> None:
    assert "did you mean resnet18?" in refuse("taps", "resnet_18")
    assert "model squeezenet1_1 does not accept images of 8×8" in refuse("taps", "squeezenet1_1", "--image-size", "8")


def test_the_taps_of_a_model_are_a_table_of_names_and_shapes(capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code("taps", "resnet8") == 0
    rows = table_rows(capsys.readouterr().out)
    assert rows["stem"][-1] == "16×32×32"
    assert "layer3" in rows["stage3"][0].split(", ")
    assert rows["stage3"][1] == "64×8×8"
    assert rows["pooled"] == ["flatten", "64"]
    assert "fc" not in rows
    assert exit_code("taps", "convnet_small", "--image-size", "8", "--num-classes", "7", "--all") == 0
    rows = table_rows(capsys.readouterr().out)
    assert rows["stage1.preact"] == ["features.1", "8×8×8"]
    assert rows["head"] == ["", "7"]


def table_rows(shown: str) -> dict[str, list[str]]:
    """The cells of a printed table, by the first of each row."""
    cells = [[cell.strip() for cell in line.strip("│").split("│")] for line in shown.splitlines() if line.startswith("│")]
    return {first: rest for first, *rest in cells}


def test_a_timm_model_without_timm_says_what_to_install(tmp_path: Path) -> None:
    code = """
from importlib.machinery import PathFinder
find = PathFinder.find_spec
PathFinder.find_spec = classmethod(lambda cls, name, *rest: None if name == "timm" else find(name, *rest))
from service.cli import main
main(["train", "digits", "--set", "student.model=timm/resnet18"])
"""
    done = subprocess.run([*PYTHON, code], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith("error: --set: student.model: model 'timm/resnet18' needs timm")
    assert "pip install raydistill[timm]" in done.stderr
    assert done.stderr.count("\n") == 1


def test_weights_that_are_missing_damaged_or_of_another_model_are_refused(refuse: Refuse, tmp_path: Path) -> None:
    def shown(weights: Path | str) -> str:
        return refuse("train", "digits", *sets("teacher={model: mlp_large, finetune: false}", f"teacher.weights={weights}"))

    whole = Path(write_teacher(tmp_path / "whole.safetensors"))
    assert f"there is no file {tmp_path / 'none.pt'}" in shown(tmp_path / "none.pt")
    assert "no published weights" in shown("IMAGENET1K_V1")
    other = write_teacher(tmp_path / "other.safetensors", model="convnet_large")
    assert f"{other} is a convnet_large, not a mlp_large: write convnet_large as the model" in shown(other)
    fewer = write_teacher(tmp_path / "fewer.safetensors", num_classes=7)
    assert "has 7 classes, none of them '7', and the data has 10" in shown(fewer)
    for length in (0, 5, 100, whole.stat().st_size - 1):
        cut = tmp_path / "cut.safetensors"
        cut.write_bytes(whole.read_bytes()[:length])
        assert f"{cut} is not a complete safetensors file" in shown(cut)
    (tmp_path / "text.pt").write_text("no weights")
    assert f"{tmp_path / 'text.pt'} is not loaded" in shown(tmp_path / "text.pt")
    (tmp_path / "run").mkdir()
    assert "give a finished run's or stage's directory" in shown(tmp_path / "run")


def test_an_evaluation_that_cannot_be_carried_out_is_refused(refuse: Refuse, tmp_path: Path) -> None:
    whole = Path(write_teacher(tmp_path / "whole.safetensors"))
    assert "no checkpoint at nothing" in refuse("evaluate", "nothing", "--data", "digits")
    assert "there is no file" in refuse("evaluate", tmp_path / "none.safetensors", "--data", "digits")
    assert "does not exist" in refuse("evaluate", whole, "--data", tmp_path / "none")
    photos = write_photos(tmp_path / "photos", train={"cat": [GOOD], "dog": [GOOD]}, val={"cat": [GOOD], "dog": [GOOD]})
    assert "has 10 classes, none of them 'cat', and the data has 2" in refuse("evaluate", whole, "--data", photos)
    names = write_photos(tmp_path / "names", train={f"c{i}": [GOOD] for i in range(10)}, val={f"c{i}": [GOOD] for i in range(10)})
    assert "has 10 classes, none of them 'c0', and the data has 10" in refuse("evaluate", whole, "--data", names)
    cut = tmp_path / "cut.safetensors"
    cut.write_bytes(whole.read_bytes()[:-9])
    assert "is not a complete safetensors file" in refuse("evaluate", cut, "--data", "digits")
    for override, words in (
        ("data.batch_size=3", "data.batch_size: no such key; did you mean data.global_batch_size, of all workers together?"),
        ("scale.num_workers=0", "scale.num_workers: must be at least 1, not 0"),
        ("optim.lr=3", "an evaluation has the keys data.*, scale.* and precision"),
        ("data", "write --set key=value"),
        ("data.global_batch_size=[", "what has spaces needs quotes"),
        ("scale.num_workers=500", "500 workers of 2 CPUs each do not fit"),
    ):
        shown = refuse("evaluate", whole, "--data", "digits", *sets(override))
        assert words in shown


# Sweeps


def test_a_sweep_without_a_point_that_could_run_is_refused(refuse: Refuse) -> None:
    assert "nothing to search: give at least one key" in refuse("sweep", "digits", *sets("sweep.space={}"))
    shown = refuse("sweep", "digits", *sets("sweep.space={data.global_batch_size: [63, 65]}", "scale.num_workers=2"))
    assert "none of its 2 points can run; the first: data.global_batch_size 63 is not divisible by scale.num_workers 2" in shown
    shown = refuse("sweep", "digits", *sets("sweep.space={student.model: [nothing]}"))
    assert "sweep.space.student.model[0]: there is no model 'nothing'" in shown
    shown = refuse("sweep", "digits", *sets("sweep.space={scale.num_workers: [512]}", "data.global_batch_size=512"))
    assert "512 workers of 2 CPUs each do not fit" in shown


def test_a_sweep_by_accuracies_that_has_none_is_refused(refuse: Refuse) -> None:
    assert "write sweep.steps: null" in refuse(
        "sweep", "digits", *sets("sweep.policy=asha", "sweep.metric=top1_pct", "sweep.steps=9")
    )
    assert "write sweep.metric: top1_pct" in refuse("sweep", "digits", *sets("sweep.policy=asha"))


# Places


def test_a_place_that_cannot_be_written_is_refused(refuse: Refuse, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("x")
    for option in ("--out", "--runs"):
        for path in (file, file / "below"):
            shown = refuse("train", "digits", option, path)
            assert shown.startswith(f"{option} {path} cannot be written: {file} is not a folder")
    assert "is not a folder" in refuse("evaluate", write_teacher(tmp_path / "t.safetensors"), "--data", "digits", "--runs", file)


@pytest.mark.skipif(sys.platform != "linux", reason="/proc is where nobody may create a folder")
def test_a_folder_that_cannot_be_created_is_refused(refuse: Refuse) -> None:
    assert "/proc/none/run cannot be written" in refuse("train", "digits", "--out", "/proc/none/run")


def begun(folder: Path, **changes: object) -> Path:
    """A run directory that was interrupted in its first stage."""
    folder.mkdir()
    (folder / "experiment.yaml").write_text(yaml.safe_dump({"base": "digits"}))
    state = {"kind": "train", "name": "digits", "status": "interrupted", "runs_root": str(folder.parent / "runs"), **changes}
    write_log(RunDir(folder), state)
    return folder


def test_a_folder_that_holds_a_run_is_not_written_over(refuse: Refuse, tmp_path: Path) -> None:
    run = begun(tmp_path / "run")
    before = (run / "events.jsonl").read_bytes()
    assert f"already holds a run: continue it with `distill resume {run}`" in refuse("train", "digits", "--out", run)
    assert (run / "events.jsonl").read_bytes() == before


def test_a_folder_whose_run_died_before_it_could_be_resumed_is_refused_with_how_to_begin_anew(
    refuse: Refuse, tmp_path: Path
) -> None:
    run = begun(tmp_path / "run")
    (run / "events.jsonl").unlink()
    assert "holds no run" in refuse("resume", run)
    assert "died while starting: add --continue to start it again" in refuse("train", "digits", "--out", run)


def test_a_job_that_is_started_again_continues_its_run_and_no_other(
    refuse: Refuse, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = begun(tmp_path / "run", status="complete")
    (run / "experiment.yaml").write_text(load("digits").to_yaml())
    assert exit_code("train", "digits", "--out", run, "--continue") == 0
    assert capsys.readouterr().out == f"{run} is complete; its tables: distill report {run}\n"
    assert "has a run with another optim.lr (0.05)" in refuse("train", "digits", "--out", run, "--continue", *sets("optim.lr=9"))
    assert f"{run} has a run with a train" in refuse("sweep", "digits", "--out", run, "--continue")


@pytest.mark.parametrize("command", ["resume", "report", "sync"])
def test_a_folder_that_holds_no_run_cannot_be_gone_on_with(command: str, refuse: Refuse, tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "none", Path(__file__)):
        assert f"{path} holds no run" in refuse(command, path)
    for name, state in (("empty", {}), ("poor", {"kind": "train"}), ("wrong kind", {"kind": "tr"})):
        run = begun(tmp_path / name)
        write_log(RunDir(run), state)
        assert "events.jsonl is damaged" in refuse(command, run)
    run = begun(tmp_path / "older")
    (run / "events.jsonl").write_text('{"kind": "log", "version": 0}\n')
    assert f"{run}/events.jsonl has format 0, and this version reads 1: start a new run" in refuse(command, run)
    run = begun(tmp_path / "wrong")
    (run / "experiment.yaml").write_text("base: digits\noptim: {lr: -1}\n")
    assert "optim.lr: must be above 0, not -1" in refuse(command, run)


def test_a_run_is_not_resumed_from_a_checkpoint_that_was_cut_off(refuse: Refuse, tmp_path: Path) -> None:
    run = begun(tmp_path / "run")
    last = run / "teacher" / "checkpoints" / "last.safetensors"
    write_teacher(last)
    last.write_bytes(last.read_bytes()[:-7])
    shown = refuse("resume", run)
    assert f"{last} is not a complete safetensors file" in shown
    assert shown.endswith(f": remove {run / 'teacher'} to begin that stage again")
    write_teacher(last.with_name("best.safetensors"))
    assert "copy best.safetensors over it to continue from there, or remove" in refuse("resume", run)


def on_images(folder: Path, *overrides: str) -> Path:
    """A run that was interrupted, on images of the classes a and b in a folder next to it, named by a relative path."""
    images, run_dir = write_images(folder / "images"), RunDir(folder / "run")
    resolved = load("digits", ["data.path=images", "data.global_batch_size=4", "tracking.enabled=false", *overrides])
    begin_run(resolved, "train", run_dir, folder)
    data = data_identity(*(open_source(DataConfig(path=str(images)), split) for split in ("train", "val")))
    change(run_dir, data=data.model_dump(mode="json"), status="interrupted")
    return run_dir.root


def test_a_run_whose_data_has_changed_is_refused_from_any_folder_before_ray_starts(
    refuse: Refuse, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    run = on_images(tmp_path, "distill.method=pskd", "teacher=null")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    write_images(tmp_path / "images", 5)
    changed = f"{run} was trained on other data: train had 8 images and has 10: restore the data, or choose another --out"
    assert changed in refuse("resume", run)
    assert "distill.method pskd remembers each training image of before" in refuse("resume", run, "--accept-new-data")
    write_images(tmp_path / "images", 4, "abd")
    assert "was trained on other classes: class d is new" in refuse("resume", run, "--accept-new-data")
    monkeypatch.chdir(tmp_path)
    same = ["digits", *sets("data.path=images", "data.global_batch_size=4", "tracking.enabled=false", "distill.method=pskd")]
    assert "class d is new" in refuse("train", *same, *sets("teacher=null"), "--out", run, "--continue", "--accept-new-data")


# check-method

CONTRACT = [
    "it returns the terms that it declares, per sample or per batch",
    "gradients reach the student and everything that the method trains",
    "2 and 3 workers give the same result as one, to 1e-09",
    "an interrupted job resumes exactly",
    "everything is finite in bf16",
    "a student that equals its teacher has finite gradients",
]


class Lent:
    """The test session's ranks, which the command may use and does not end."""

    def __init__(self, ranks: RankPool) -> None:
        self.run, self.closed = ranks.run, 0

    def close(self) -> None:
        self.closed += 1


def test_a_method_that_breaks_its_contract_is_reported_point_by_point_with_exit_code_2(
    ranks: RankPool, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    lent = Lent(ranks)
    monkeypatch.setattr("trainables.distributed.rank_pool.RankPool", lambda: lent)
    name = f"{own_methods.__file__}:LocalGram"
    assert exit_code("check-method", name, "--option", "weight=2") == 2
    shown = capsys.readouterr()
    lines = shown.out.splitlines()
    assert [line[8:].partition(": ")[0] for line in lines] == CONTRACT
    assert [line[:6] for line in lines] == ["    ok", "    ok", "failed", "    ok", "    ok", "    ok"]
    assert re.search(r": rank \d of 2 differs in \S+, by \S+ of its largest value$", lines[2])
    assert shown.err == f"error: {name} does not keep the contract of a method in 1 of the points above\n"
    assert lent.closed == 1


@pytest.mark.slow
def test_a_method_that_keeps_its_contract_as_documented_is_ok_in_every_point(capsys: pytest.CaptureFixture[str]) -> None:
    name = f"{own_methods.__file__}:EitherGram"
    assert exit_code("check-method", name, "--option", "over_all_workers=true", "--option", "weight=0.5") == 0
    shown = capsys.readouterr()
    assert shown.out.splitlines() == [f"    ok  {point}" for point in CONTRACT]
    assert shown.err == ""


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["kd", "--option", "temprature=2"], "--option: distill.options.kd.temprature: no such key; did you mean temperature?"),
        (["kd", "--option", "temperature=-2"], "--option: distill.options.kd.temperature: must be above 0, not -2"),
        (["dkdd"], "there is no method 'dkdd'; did you mean dkd?"),
        (["kd", "--student", "resnet9"], "there is no model 'resnet9'; did you mean resnet8"),
        (["kd", "--teacher", "wrn_16_3"], "there is no model 'wrn_16_3'; did you mean wrn_16_2"),
        (["kd", "--option", "temperature"], "--option temperature: write --option key=value"),
    ],
)
def test_a_method_a_model_or_an_option_that_there_is_not_is_refused(refuse: Refuse, arguments: list[str], says: str) -> None:
    assert says in refuse("check-method", *arguments)


def test_a_required_option_that_is_missing_is_named(refuse: Refuse, tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(
        "from trainables.config import MethodOptions\nfrom trainables.methods.contract import Method\n\n\n"
        "class Own(Method):\n    class Options(MethodOptions):\n        margin: float\n\n    terms = ('apart',)\n"
    )
    shown = refuse("check-method", f"{tmp_path}/own.py:Own")
    assert shown == "--option: distill.options.Own.margin: missing: write it"


# What no check foresaw


def test_a_current_folder_that_has_been_removed_is_named(refuse: Refuse, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    assert refuse("train", "digits", "--dry-run").startswith("the current folder has been removed: cd to one that exists")


def test_an_operating_systems_error_is_one_line_too(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device", "/some/where")

    monkeypatch.setattr(cli.cli, "main", full)
    assert exit_code("train", "digits") == 2
    shown = capsys.readouterr().err
    assert shown == "error: /some/where: No space left on device; fix that, then run `distill resume`\n"
    for command in ("data", "evaluate"):
        assert exit_code(command, "/some/where") == 2
        shown = capsys.readouterr().err
        assert shown == "error: /some/where: No space left on device; fix that, then repeat the command\n"


def test_a_mistake_of_ours_leaves_its_stack_trace_in_a_file(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("service.commands.experiments.recipes", lambda: 1 / 0)
    assert exit_code("recipes") == 1
    shown = capsys.readouterr().err
    assert shown.startswith("error: unexpected ZeroDivisionError; its stack trace is in ")
    assert shown.count("\n") == 1
    trace = Path(shown.split()[-1])
    assert "ZeroDivisionError: division by zero" in trace.read_text()
    trace.unlink()


def test_a_reader_that_leaves_early_is_no_error() -> None:
    command = f"{sys.executable} -m service show digits"
    done = subprocess.run(["sh", "-c", f"{command} | head -1"], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("name ")
    assert done.stderr == ""


FORKS = """
import multiprocessing, time
from service import cli

def forks(*_, **__):
    for _ in range(5):
        child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,))
        child.start()
        time.sleep(0.2)
        child.terminate()
        child.join()
        print(child.exitcode)

cli.cli.main = forks
cli.main([])
"""


@pytest.mark.processes
def test_sigterm_ends_a_forked_child() -> None:
    done = subprocess.run([sys.executable, "-c", FORKS], capture_output=True, text=True, check=True)
    assert done.stdout.split() == [str(-signal.SIGTERM)] * 5
    assert done.stderr == ""


@pytest.mark.parametrize(
    ("command", "says"),
    [
        ("train", "on: 1 CPU worker × "),
        ("train", "student: 12 epochs of 1,408 images: 264 steps of 64"),
        ("sweep", "trials: 8 by images_per_s, policy grid, at most 96 epochs in all"),
    ],
)
def test_a_dry_run_says_what_would_run_and_writes_nothing(
    command: str, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, _ = run(capsys, command, "digits", "--dry-run", "--runs", tmp_path / "runs")
    assert code == 0
    assert "data: 1,442 training and 355 validation images, 10 classes: 0, 1, 2 and 7 more" in out
    assert "stages: teacher (convnet_large), student (convnet_small)" in out
    assert says in out
    assert not (tmp_path / "runs").exists()
    assert "recipe: The 1,797 handwritten digits of scikit-learn" in out
    code, _, err = run(capsys, command, "digits", "--dry-run", "--set", "data.path=/nowhere", "--runs", tmp_path / "runs")
    assert code == 2
    assert "data.path: /nowhere does not exist" in err
