import subprocess
import sys
from pathlib import Path

import pytest

from trainables.config.models import with_arguments
from trainables.errors import ModelError
from trainables.models.libraries.interface import registered
from trainables.models.libraries.ours import MODELS
from trainables.models.names import ModelName, check_model_name
from trainables.user_code import model_parts


def test_the_names_read_from_sources_are_those_that_torchvision_registers() -> None:
    import torchvision

    assert set(registered("torchvision")) == set(torchvision.models.list_models(module=torchvision.models))


def test_the_names_read_from_sources_are_those_that_timm_registers() -> None:
    timm = pytest.importorskip("timm")
    assert set(registered("timm")) == set(timm.list_models())


def test_no_name_of_ours_is_torchvisions() -> None:
    assert not set(MODELS) & set(registered("torchvision"))


def test_a_name_is_ours_before_torchvisions_before_timms() -> None:
    pytest.importorskip("timm")
    assert check_model_name("resnet20") == ModelName("ours", "resnet20")
    assert check_model_name("vgg13_cifar") == ModelName("ours", "vgg13_cifar")
    assert check_model_name("vgg13") == ModelName("torchvision", "vgg13")
    assert check_model_name("resnet18") == ModelName("torchvision", "resnet18")
    assert check_model_name("timm/resnet18") == ModelName("timm", "resnet18")
    assert check_model_name("efficientvit_b0") == check_model_name("timm/efficientvit_b0") == ModelName("timm", "efficientvit_b0")


def test_the_hyphens_of_papers_are_understood() -> None:
    assert check_model_name("wrn-40-2") == ModelName("ours", "wrn_40_2")
    assert check_model_name("resnet50-cifar") == ModelName("ours", "resnet50_cifar")


def test_arguments_are_of_a_model_alone_and_parentheses_may_be_of_its_folder(tmp_path: Path) -> None:
    pytest.importorskip("timm")
    both = "convnet_small(widths=[4, 8, 12])+convnet_large(widths=[8, 8, 8])"
    assert check_model_name(both) == ModelName("ours", both)
    folder = tmp_path / "download (1)"
    folder.mkdir()
    (folder / "config.json").write_text('{"architecture": "resnet10t"}')
    assert check_model_name(f"local-dir:{folder}") == ModelName("timm", f"local-dir:{folder}")
    name = with_arguments(f"local-dir:{folder}", {"drop_rate": 0.1})
    assert check_model_name(name) == ModelName("timm", f"local-dir:{folder}", "drop_rate=0.1")


def test_a_path_with_a_plus_that_exists_is_not_cut_there(tmp_path: Path) -> None:
    file, folder = tmp_path / "a+b" / "net.py", tmp_path / "a+b"
    folder.mkdir()
    file.touch()
    (folder / "config.json").write_text('{"architecture": "resnet10t"}')
    own, saved = f"{file}:Net", f"local-dir:{folder}"
    for name in (own, saved, f"{own}(width='1+1')"):
        assert model_parts(name) == (name,)
        assert model_parts(f"resnet8+{name}") == ("resnet8", name)
        assert model_parts(f"{name}+resnet8") == (name, "resnet8")
    assert model_parts(f"{own}+{saved}") == (own, saved)
    pytest.importorskip("timm")
    assert check_model_name(saved) == ModelName("timm", saved)
    with pytest.raises(ModelError, match=rf"{tmp_path}/c\+d"):
        check_model_name(f"local-dir:{tmp_path}/c+d")


@pytest.mark.parametrize(
    ("wrong", "right"),
    [
        ("resnt18", "did you mean resnet18?"),
        ("ResNet50", "did you mean resnet50 or resnet50_cifar?"),
        ("vgg8", "did you mean vgg8_cifar?"),
        ("ShuffleV1", "did you mean shufflenetv1_cifar?"),
        ("ShuffleNetV2", "did you mean shufflenetv2_cifar?"),
        ("MobileNetV2", "did you mean mobilenetv2_half_cifar?"),
        ("mobile_half", "did you mean mobilenetv2_half_cifar?"),
        ("convnet_smal", "did you mean convnet_small?"),
        ("faster_rcnn", "there is no model 'faster_rcnn'"),
        ("timm/resnet18d_", "did you mean timm/resnet18d?"),
        ("timm/resnet18.a1_in1k", "write model: timm/resnet18 and, for a teacher, weights: a1_in1k"),
        ("hf-hub:timm/resnet18.a1_in1k", "write model: timm/resnet18 and, for a teacher, weights: a1_in1k"),
        ("hf-hub:resnet18", "write hf-hub:OWNER/NAME"),
        ("local-dir:/nowhere", "/nowhere/config.json cannot be read"),
        ("microsoft/resnet-18", "write hf-hub:microsoft/resnet-18"),
        ("", "choose one of convnet_small"),
        ("qqqqqq", "choose one of convnet_small"),
    ],
)
def test_a_wrong_name_is_refused_with_what_to_write(wrong: str, right: str) -> None:
    pytest.importorskip("timm")
    with pytest.raises(ModelError) as caught:
        check_model_name(wrong)
    assert right in str(caught.value)
    assert "\n" not in str(caught.value)


def test_without_timm_its_names_say_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "timm", None)  # Python's own way to mark a package as not importable
    for name in ("timm/resnet18", "efficientvit_b0"):
        with pytest.raises(ModelError, match=r"pip install raydistill\[timm\]"):
            check_model_name(name)
    assert check_model_name("resnet34").library == "torchvision"


def test_checking_a_name_imports_no_torch() -> None:
    program = """
import sys
from trainables.errors import ModelError
from trainables.models.registry import check_model_name
try:
    check_model_name("resnt18")
except ModelError:
    print(sorted({"torch", "torchvision", "timm", "numpy"} & set(sys.modules)))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
