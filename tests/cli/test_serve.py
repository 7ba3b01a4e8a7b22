"""The options of `flops serve`."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from flops.cli.main import main
from flops.cli.serve import Serve
from tests.support.serving import Server


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--port", "70000"], "at most 65535"),
        (["--max-rows", "0"], "--max-rows must be at least 1"),
        (["--rate", "nan"], "--rate must be at least 0"),
        (["--threads", "0"], "--threads must be at least 1"),
        (["--api-key-env", "FLOPS_NOT_SET"], "FLOPS_NOT_SET is not set or empty"),
        (["--classes", ","], "--classes has no names"),
        (["--model", "no-such-model"], "no-such-model"),
        (["--ledger", "/proc/no/ledger.sqlite"], "cannot be opened"),
    ],
)
def test_what_is_wrong_is_said_before_anything_is_served(options, message, tmp_path) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["serve", "--ledger", str(tmp_path / "ledger.sqlite"), *options])
    assert message in str(caught.value)


def test_a_port_that_is_taken(tmp_path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = str(other.getsockname()[1])
        with pytest.raises(SystemExit, match="cannot listen"):
            main(["serve", "--port", port, "--ledger", str(tmp_path / "ledger.sqlite")])


def test_classes_from_a_list_or_a_file(tmp_path) -> None:
    names = tmp_path / "classes.txt"
    names.write_text("shirt\n\nankle boot\n")
    assert Serve(classes=str(names)).class_names() == ("shirt", "ankle boot")
    assert Serve(classes="shirt, ankle boot,").class_names() == ("shirt", "ankle boot")


def test_classes_that_are_no_text_are_said_in_a_sentence(tmp_path) -> None:
    (tmp_path / "classes.txt").write_bytes(b"shirt\nb\xffg\n")
    for classes in (str(tmp_path / "classes.txt"), os.fsdecode(b"shirt,b\xffg")):
        with pytest.raises(
            SystemExit, match=r"flops: --classes .*: the names are not UTF-8"
        ) as said:
            main(["serve", "--port", "0", "--classes", classes])
        str(said.value).encode("utf-8")


def test_other_classes_other_limits_and_a_loud_warning(tmp_path) -> None:
    options = ("--classes", "shirt,bag,sneaker", "--max-rows", "7", "--host", "0.0.0.0")
    with Server(tmp_path, *options) as server:
        server.url = server.url.replace("0.0.0.0", "127.0.0.1")
        with server.client() as client:
            about = client.info()
        assert about["classes"] == ["shirt", "bag", "sneaker"]
        assert about["limits"]["rows"] == 7
    assert "WITHOUT A KEY" in (tmp_path / "stderr").read_text()


def test_by_default_it_says_where_it_is_on_this_machine_only(tmp_path) -> None:
    command = [sys.executable, "-m", "flops", "serve", "--port", "0"]
    environment = {"XDG_STATE_HOME": str(tmp_path), "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | environment,
    ) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        process.send_signal(signal.SIGINT)
        errors = process.communicate(timeout=60)[1]
    assert line.startswith("serving tiny-clip at http://127.0.0.1:")
    assert "Traceback" not in errors
    assert [path.suffix for path in Path(tmp_path, "flops").glob("*.sqlite")] == [".sqlite"]
