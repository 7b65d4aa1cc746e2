"""A job's folder: its description without secrets, and how a supervisor notes a death."""

import os
import signal
import stat

import msgspec
import pytest

from boltmesh.errors import TelemetryError
from boltmesh.process import ProcessId, start_ticks
from boltmesh.telemetry import job
from boltmesh.telemetry.job import JobInfo, record_end, write_job
from boltmesh.telemetry.redaction import (
    holds_secret,
    is_secret_name,
    redact_command,
    redact_mapping,
    redact_text,
)


def make_info(**fields):
    values = {"strategy": "DDPStrategy", "mesh": {"data": 2}, "world_size": 2, "id": "some-id"}
    return JobInfo.create(**{**values, **fields})


@pytest.mark.parametrize(
    ("command", "shown"),
    [
        (["--token=abc"], ["--token=[redacted]"]),
        (["--api-key", "abc", "x"], ["--api-key", "[redacted]", "x"]),
        (["--password", "--verbose"], ["--password", "--verbose"]),
        (["HF_TOKEN=abc"], ["HF_TOKEN=[redacted]"]),
        (["data.init_args.authToken=abc"], ["data.init_args.authToken=[redacted]"]),
        (["wandb.key=abc"], ["wandb.key=[redacted]"]),
        (["https://me:pw@host/x"], ["https://[redacted]@host/x"]),
        (["--url=https://me:pw@host/x"], ["--url=https://[redacted]@host/x"]),
        (["--url=https://me:p@w@host/x"], ["--url=https://[redacted]@host/x"]),
        (["see", "1password: abc"], ["see", "1password: [redacted]"]),
        (["KeyError: 'width'"],) * 2,
        (["hf_abcdefghijkl"], ["[redacted]"]),
        (["--note=see ghp_abcdefghijkl"], ["--note=see [redacted]"]),
        (["--url=https://h/x?token=abc&page=2"], ["--url=https://h/x?token=[redacted]&page=2"]),
        (
            ["s3://b/k?X-Amz-Signature=0af1&X-Amz-Date=1"],
            ["s3://b/k?X-Amz-Signature=[redacted]&X-Amz-Date=1"],
        ),
        (["-H", "Authorization: Bearer abc.def-1"], ["-H", "Authorization: [redacted]"]),
        (["curl 'X: Bearer abcdef-1'"], ["curl 'X: Bearer [redacted]'"]),
        (["PGPASSWORD=abc"], ["PGPASSWORD=[redacted]"]),
        (["AKIAIOSFODNN7EXAMPLE"], ["[redacted]"]),
        (["wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY"], ["[redacted]"]),
        (["--stripe", "sk_live_abcdefgh12"], ["--stripe", "[redacted]"]),
        (
            ["trainer.logger=[{class_path: a.B, init_args: {api_key: abc, step: 3}}]"],
            ["trainer.logger=[{class_path: a.B, init_args: {api_key: [redacted], step: 3}}]"],
        ),
        (["160eecc160eecc160eecc160eecc160eecc160ee"],) * 2,
        (["--max_tokens=4", "tokenizer=gpt2", "keyboard=us"],) * 2,
        (["fit", "ddp", "trainer.max_steps=10"],) * 2,
        (["model.num_key_value_heads=2", "{pad_token_id: 0, key_dim: 64}"],) * 2,
        (
            ["aws_access_key_id=abc", "--key=12"],
            ["aws_access_key_id=[redacted]", "--key=[redacted]"],
        ),
    ],
)
def test_a_command_is_shown_without_its_secrets(command, shown):
    assert redact_command(command) == shown


def test_secret_names_are_whole_words():
    assert is_secret_name("model.apiKey")
    assert is_secret_name("AWS_SECRET_ACCESS_KEY")
    assert not is_secret_name("max_tokens")
    assert not is_secret_name("num_keys")


def test_nested_hyperparameters_hold_no_secret():
    given = {"logger": {"wandb": [{"api_key": "s3cret", "width": 3}]}, "lr": 0.1, "key": None}
    assert "s3cret" not in str(redact_mapping(given))
    assert redact_mapping(given)["logger"] == "{'wandb': [{'api_key': '[redacted]', 'width': 3}]}"
    assert holds_secret(given)
    assert not holds_secret({"lr": 0.1, "data": {"api_key": None, "path": "runs/a"}})
    sizes = {"num_key_value_heads": 2, "bos_token_id": -1, "dims": {"key_size": 64}}
    assert redact_mapping(sizes)["num_key_value_heads"] == "2"
    assert "redacted" not in str(redact_mapping(sizes))
    assert not holds_secret(sizes)
    assert holds_secret({"access_key_id": "abc"})
    endless: dict[str, object] = {}
    endless["again"] = endless
    assert not holds_secret(endless)


@pytest.mark.parametrize("part", ["a", "a.", "a-", "://a", "eyJaaaaaaaa-", "key=", "A1b", "key='"])
def test_long_texts_take_time_in_proportion_to_their_length(part):
    # A pattern that tries each start takes minutes.
    redact_mapping({"sequence": (part * 200_000)[:200_000]})


def test_names_that_are_no_utf_8_are_written(tmp_path, monkeypatch):
    monkeypatch.setattr("sys.argv", ["train.py", "a\udcff.yaml"])
    info = make_info(hyperparameters={"path": "b\udcff"})
    write_job(info, tmp_path)
    assert info.command == ("train.py", "a\\udcff.yaml")
    assert info.hyperparameters == {"path": "b\\udcff"}


def test_a_json_web_token_is_recognised_by_its_shape():
    assert redact_text("x eyJhbGciOiJI.eyJzdWIiOiIx.abc y") == "x [redacted] y"


def test_what_a_job_says_of_itself_holds_no_secret(tmp_path, monkeypatch):
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    monkeypatch.setenv("NCCL_SECRET_TOKEN", "s3cret")
    monkeypatch.setenv("HOME_MADE", "s3cret")
    monkeypatch.setattr("sys.argv", ["/usr/bin/train.py", "--token", "s3cret"])
    info = make_info(hyperparameters={"lr": 0.1, "api_key": "s3cret"})
    assert "s3cret" not in msgspec.json.encode(info).decode()
    assert info.command == ("train.py", "--token", "[redacted]")
    assert info.name == "train"
    assert info.environment["NCCL_DEBUG"] == "INFO"
    assert info.hyperparameters == {"lr": "0.1", "api_key": "[redacted]"}


def test_a_job_comes_back_as_it_was_written(tmp_path):
    info = make_info(max_steps=-1)
    job.write_job(info, tmp_path)
    assert job.read_job(tmp_path) == info
    assert info.max_steps is None
    assert stat.S_IMODE((tmp_path / "job.json").stat().st_mode) == 0o600
    assert [path.name for path in tmp_path.iterdir()] == ["job.json"]


@pytest.mark.parametrize("content", [b"", b"{", b'{"id": 3}', b"\xff\xfe"])
def test_a_damaged_description_is_one_clear_error(tmp_path, content):
    path = tmp_path / "job.json"
    path.write_bytes(content)
    path.chmod(0o600)
    with pytest.raises(TelemetryError, match=r"job\.json cannot be read: it is damaged"):
        job.read_job(tmp_path)


def test_a_linked_description_is_not_followed(tmp_path):
    (tmp_path / "elsewhere").write_bytes(msgspec.json.encode(make_info()))
    (tmp_path / "job.json").symlink_to("elsewhere")
    with pytest.raises(TelemetryError, match=r"job\.json cannot be read"):
        job.read_job(tmp_path)


@pytest.mark.parametrize("job_id", ["", "../up", ".hidden", "a b", "a" * 65, "a/b"])
def test_an_id_that_cannot_name_a_folder_is_refused(job_id):
    with pytest.raises(TelemetryError, match="BOLTMESH_JOB_ID"):
        job.check_job_id(job_id)


def test_the_id_of_the_environment_is_taken(monkeypatch):
    monkeypatch.setenv("BOLTMESH_JOB_ID", "given")
    assert make_info(id=None).id == "given"
    monkeypatch.delenv("BOLTMESH_JOB_ID")
    assert make_info(id=None).id != make_info(id=None).id


def test_the_run_directory_is_chosen_by_the_environment_else_by_the_user(monkeypatch, tmp_path):
    monkeypatch.setenv("BOLTMESH_RUN_DIR", str(tmp_path))
    assert job.run_dir() == tmp_path
    monkeypatch.delenv("BOLTMESH_RUN_DIR")
    assert job.run_dir().name == f"boltmesh-{os.getuid()}"


def test_a_folder_is_made_private(tmp_path):
    before = os.umask(0)
    try:
        job.make_private_folder(tmp_path / "run")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "run").stat().st_mode) == 0o700
    job.make_private_folder(tmp_path / "run")


def test_a_folder_that_others_can_fill_is_refused(tmp_path, monkeypatch):
    folder = tmp_path / "run"
    folder.mkdir()
    folder.chmod(0o777)
    with pytest.raises(TelemetryError, match="chmod 700"):
        job.make_private_folder(folder)
    folder.chmod(0o700)
    (tmp_path / "link").symlink_to(folder)
    with pytest.raises(TelemetryError, match="not a folder"):
        job.make_private_folder(tmp_path / "link")
    monkeypatch.setattr(os, "geteuid", lambda: 4711)
    with pytest.raises(TelemetryError, match="belongs to user"):
        job.make_private_folder(folder)


def test_the_first_death_that_is_noted_stays(tmp_path):
    job.write_job(make_info(), tmp_path)
    record_end(tmp_path, rank=1, exit_code=-9)
    record_end(tmp_path, rank=0, exit_code=1)
    end = job.read_end(tmp_path)
    assert end is not None
    assert (end.rank, end.signal, end.exit_code) == (1, signal.SIGKILL, None)


def test_the_death_of_an_earlier_run_under_the_same_id_is_replaced(tmp_path):
    job.write_job(make_info(), tmp_path)
    record_end(tmp_path, rank=1, exit_code=1)
    job.write_job(make_info(), tmp_path)  # starts later
    record_end(tmp_path, rank=0, exit_code=-15)
    end = job.read_end(tmp_path)
    assert end is not None
    assert (end.rank, end.signal, end.exit_code) == (0, 15, None)


def test_noting_a_death_never_raises(tmp_path):
    record_end(tmp_path / "absent", rank=0, exit_code=1)
    assert job.read_end(tmp_path / "absent") is None


def test_a_process_is_known_by_its_start():
    assert start_ticks(os.getpid())
    assert start_ticks(2**30) is None


def test_a_job_knows_who_starts_it_again(monkeypatch):
    assert make_info().restarted_by is None
    monkeypatch.setenv("BOLTMESH_RESTARTED_BY", str(os.getpid()))
    info = make_info()
    assert info.restarted_by == ProcessId.own()
    assert msgspec.json.decode(msgspec.json.encode(info), type=JobInfo) == info
