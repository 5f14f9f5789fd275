"""No secret reaches a file, a log or the terminal."""

import json
import logging
import random
import string
import time
from pathlib import Path

import pytest

from service.runs.events import event, to_line
from trainables.redact import redact, redact_record
from trainables.rundir import write_json, write_text

SAFE = "".join(sorted(set(string.printable) - set(string.whitespace) - set('/?#&"<>')))
"""What a password may consist of where it stands in a URI unquoted; of a quoted one these are a part."""


def random_secret(chance: random.Random) -> str:
    return "".join(chance.choices(SAFE, k=chance.randint(8, 40)))


def texts_with(secret: str) -> list[str]:
    """Each form in which a secret can stand in a record."""
    return [
        f"cannot reach postgresql://me:{secret}@db:5432/mlflow, as me",
        f"s3://{secret}:{secret}@bucket/set",
        f"https://{secret}@host/api/2.0?x=1",
        f"GET https://host/file?X-Amz-Credential=a&X-Amz-Signature={secret}&part=2 failed",
        f"hdfs+custom://host/?access_key={secret}#part",
    ]


@pytest.mark.parametrize("seed", range(40))
def test_no_part_of_a_secret_is_left_in_any_kind_of_record(seed: int, tmp_path: Path) -> None:
    secret = random_secret(random.Random(seed))
    for text in texts_with(secret):
        write_json(tmp_path / "a.json", {"reason": [text]})
        line = to_line(event("notice", text=text))
        write_text(tmp_path / "c.txt", text)
        record = logging.LogRecord("raydistill", logging.INFO, "", 0, "%s: %d", (text, 1), None)
        assert redact_record(record)
        written = [
            json.loads((tmp_path / "a.json").read_text())["reason"][0],
            json.loads(line)["text"],
            (tmp_path / "c.txt").read_text(),
            record.getMessage(),
        ]
        assert [line for line in written if secret in line] == []
        assert all("***" in line for line in written)


@pytest.mark.parametrize("name", ["AWS_SECRET_ACCESS_KEY", "MLFLOW_TRACKING_PASSWORD", "RAY_AUTH_TOKEN", "WANDB_API_KEY"])
def test_what_the_environment_calls_a_secret_is_hidden_wherever_it_stands(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, "wJalrXUtnFEMI/K7MDENG")
    assert redact("refused: wJalrXUtnFEMI/K7MDENG is no key") == "refused: *** is no key"


@pytest.mark.parametrize(
    "text",
    [
        "s3://bucket/set?region=eu",
        "abfs://container@account.dfs.core.windows.net/set",
        "hdfs://user@namenode:8020/set",
        "sqlite:////a/b@c.db",
        "http://[",
        "http://host:5000/#/experiments?design=1",
        "token=3 of 5, key=value",
        '{"uri":"http://127.0.0.1:5000","mail":"a@b"}',
        "http://host:5000/#/compare?mail=a@b",
        "basic characteristics",
        "",
    ],
)
def test_what_has_no_secret_stays_as_it_is(text: str) -> None:
    assert redact(text) == text


@pytest.mark.parametrize(
    "text",
    [
        "postgresql://me:open/sesame#1@db/mlflow",
        "s3://KEY:open/sesame@bucket/set",
        "Authorization: Basic b3BlbnNlc2FtZQ==",
        "bearer opensesame0123456",
    ],
)
def test_a_secret_that_should_have_been_quoted_is_hidden_too(text: str) -> None:
    assert "sesame" not in redact(text)
    assert "b3Blbn" not in redact(text)


def test_what_is_read_again_keeps_the_values_of_variables(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PGPASSWORD", "postgres")
    write_json(tmp_path / "result.json", {"runs_root": "/home/postgres/runs"})
    assert json.loads((tmp_path / "result.json").read_text()) == {"runs_root": "/home/postgres/runs"}
    assert redact("refused: postgres") == "refused: ***"


@pytest.mark.parametrize("word", ["a" * 100_000 + "=", "&" + "token" * 20_000, "http://" * 10_000, "x://" + "a:" * 50_000])
def test_a_long_word_is_read_through_once(word: str) -> None:
    began_s = time.process_time()
    redact(f"{word} ://")
    assert time.process_time() - began_s < 2


def test_a_flag_of_the_environment_is_no_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false")
    monkeypatch.setenv("AZURE_TOKEN_FILE", "/var/run/secrets/token")
    assert redact("false: /var/run/secrets/token") == "false: /var/run/secrets/token"


def test_a_name_in_a_log_line_commands_no_terminal() -> None:
    record = logging.LogRecord("raydistill", logging.INFO, "", 0, "skipped %s", ("a\x1b[2J.png",), None)
    redact_record(record)
    assert record.getMessage() == r"skipped a\x1b[2J.png"
